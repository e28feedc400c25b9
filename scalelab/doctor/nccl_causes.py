"""What NCCL's messages mean: sign, cause and what to do."""

from __future__ import annotations

# (sign in an error, cause, what to do). The first that is found decides, so particular signs stand
# before general ones, and what a victim says stands last.
CAUSES: tuple[tuple[str, str, str], ...] = (
    (r"Duplicate GPU detected",
     "two ranks use the same GPU",
     "call torch.cuda.set_device(LOCAL_RANK) before the first collective, start no more ranks than "
     "GPUs, and check CUDA_VISIBLE_DEVICES"),
    (r"Mismatched NCCL version|version mismatch|(?:mismatch|different).*NCCL version",
     "ranks run different versions of NCCL",
     "use the same image or environment on every node: python -c 'import torch; "
     "print(torch.cuda.nccl.version())'"),
    (r"MaxSharedMem \d+ exceeds",
     "this NCCL asks for more shared memory than the GPU allows: it is older than the GPU",
     "upgrade NCCL (RTX 50 cards need 2.26.2 or later) and run again"),
    (r"no kernel image is available|invalid device function",
     "this NCCL or program was not built for the GPU", "install a build for this GPU and CUDA"),
    (r"driver version is insufficient|CUDA driver version",
     "the driver is older than the CUDA that NCCL was built with", "nvidia-smi; update the driver"),
    (r"[Rr]emote IB device is incompatible",
     "ports of different kinds meet: InfiniBand on one node, RoCE on another",
     "ibv_devinfo on every node; NCCL_IB_HCA with ports of one fabric on each"),
    (r"async fatal event",
     "a NIC reported a fatal error on a connection",
     "dmesg and firmware of that NIC; ACS and IOMMU settings for GPUDirect RDMA; "
     "NCCL_NET_GDR_LEVEL=LOC shows whether that is it"),
    (r"async event ?: (?:port error|link down|device fatal|local catastrophic)|port (?:error|down)",
     "a NIC's port went down",
     "ibstat and dmesg on that node: cable, transceiver or switch port; the errors of other ranks "
     "follow from it"),
    (r"attaching to shared memory segment.*No such file|Call to (?:shm_)?open failed ?: No such",
     "one rank cannot open the shared memory that another one made",
     "ranks of one node must share /dev/shm (one container, or --ipc=host), and nothing may clean "
     "it (systemd RemoveIPC=no); NCCL_SHM_DISABLE=1 or NCCL_CUMEM_HOST_ENABLE=0 to test"),
    (r"shmutils\.\w+:\d+ Cuda failure",
     "CUDA refused the shared memory that NCCL made",
     "NCCL_CUMEM_HOST_ENABLE=0 or NCCL_SHM_DISABLE=1 shows whether this is it; ulimit -l; newer "
     "NCCL"),
    (r"No space left on device|posix_fallocate|/dev/shm|shm_open|shared memory segment|"
     r"Error while (?:creating|attaching) (?:to )?shared memory|shmutils|Call to ftruncate",
     "shared memory (/dev/shm) is too small or cannot be opened",
     "df -h /dev/shm; docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium "
     "Memory at /dev/shm"),
    (r"Address family not supported|no (?:NCCL_SOCKET_IFNAME )?(?:socket )?interface found|"
     r"No interface found|"
     r"No usable listening interface|with family \d+ is neither|No socket interface|"
     r"interface .* not found",
     "NCCL finds no network interface with the given name, or none at all",
     "ip -br addr on every node; set NCCL_SOCKET_IFNAME to a name that exists on all of them, or "
     "unset it"),
    (r"ibv_modify_qp failed with (?:error )?(?:110|Connection timed out)",
     "the peer's NIC cannot be reached at the RDMA level (ibv_modify_qp timed out)",
     "ib_write_bw between the two NICs named (same GID index); on rail-only networks set "
     "NCCL_CROSS_NIC=0, on RoCE check routes between the subnets and NCCL_IB_GID_INDEX"),
    (r"ibv_modify_qp failed with (?:error )?(?:101|113|Network is unreachable|No route to host)",
     "there is no route from this NIC to the peer's (RoCE)",
     "give the RoCE interfaces addresses that reach each other, or choose the right ones with "
     "NCCL_IB_HCA; then ib_write_bw"),
    (r"ibv_modify_qp failed with (?:error )?(?:22|61|19|Invalid argument|No data|No such)",
     "the queue pair cannot be set up: wrong GID index, or ports of different kinds are mixed",
     "show_gids; set NCCL_IB_GID_INDEX (3 is usual for RoCE v2) and NCCL_IB_HCA to ports of one "
     "fabric"),
    (r"ibv_(?:reg_mr\w*|create_\w+|alloc_\w+) failed.*(?:12|Cannot allocate|memory)|"
     r"ibv_(?:reg_mr|create_\w+).*(?:Cannot allocate memory|ENOMEM)",
     "memory cannot be locked for RDMA: the limit on locked memory is too low",
     "ulimit -l must say unlimited (docker --ulimit memlock=-1; Slurm PropagateResourceLimits); "
     "nvidia_peermem loaded"),
    (r"ibv_reg_mr\w* failed|ibv_reg_dmabuf",
     "GPU memory cannot be registered with the NIC",
     "load nvidia_peermem or use DMA-BUF; NCCL_NET_GDR_LEVEL=LOC to try without GPUDirect RDMA"),
    (r"(?:error|status)[ =](?:IBV_WC_\w+\()?12\b",
     "InfiniBand or RoCE packets to a peer are not answered (error 12, retries exceeded)",
     "ib_write_bw between the two nodes on the same NICs; ibstat on both; all NICs listed must be "
     "of one fabric (NCCL_IB_HCA), in a cloud all machines of one placement group; RoCE: "
     "NCCL_IB_GID_INDEX and lossless settings"),
    (r"(?:error|status)[ =](?:IBV_WC_\w+\()?13\b",
     "the peer was not ready to receive (error 13, RNR retries exceeded)",
     "look for the rank that stalled or died; then PFC or lossless settings of the fabric"),
    (r"(?:error|status)[ =](?:IBV_WC_\w+\()?(?:4|10|9|11)\b.*(?:vendor err|opcode)",
     "the NIC refused access to memory (local or remote protection error)",
     "ACS and IOMMU off for GPUDirect RDMA; try NCCL_NET_GDR_LEVEL=LOC and newer firmware"),
    (r"(?:error|status)[ =](?:IBV_WC_\w+\()?5\b.*(?:vendor err|opcode)",
     "the connection to a peer was flushed: this rank is a victim of an earlier error",
     "look for the first error of the peer that is named"),
    (r"ibv_\w+ failed|ibv_\w+\(\) failed|ibv_\w+ .*error",
     "a call to the RDMA driver failed", "ulimit -l (must say unlimited); ibv_devinfo; dmesg"),
    (r"NET/OFI .*register memory",
     "memory cannot be registered with the network adapter (libfabric)",
     "ulimit -l must say unlimited; FI_EFA_USE_HUGE_PAGE=0; fewer process groups, newer plugin"),
    (r"Unresponsive receiver|handshake failed",
     "the peer does not answer over EFA",
     "the security group must allow all traffic from and to itself; both machines in one subnet; "
     "then look at the peer's log"),
    (r"NET/OFI .*(?:failed|error)|UNDELIVERABLE|libfabric.*(?:fail|error)",
     "libfabric could not set up or deliver on this fabric",
     "fi_info -p on each node; versions of libfabric and the plugin; FI_LOG_LEVEL=warn"),
    (r"peer access is not supported|peer mapping resources exhausted|P2P is disabled|"
     r"could not enable P2P|cudaIpcOpenMemHandle|IPC (?:mem )?handle|cuMemImport",
     "one GPU cannot open another one's memory (peer access)",
     "nvidia-smi topo -p2p r; same container or --ipc=host; NCCL_P2P_DISABLE=1 shows whether this "
     "is it; NCCL_CUMEM_ENABLE=0 on drivers that lack it"),
    (r"nvls\.\w+:\d+|NVLS|[Mm]ulticast|Fabric Manager|CUDA failure 802|system not yet initialized",
     "NVLS (multicast through the NVSwitch) cannot be set up",
     "NCCL_NVLS_ENABLE=0 shows whether this is it; systemctl status nvidia-fabricmanager (same "
     "version as the driver); nvidia-smi -q | grep -A 3 Fabric"),
    (r"libnvidia-ml|nvmlInit|nvmlDevice|nvmlwrap",
     "NCCL cannot use the driver's library NVML", "nvidia-smi inside the container; mount the "
     "driver's libraries (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"),
    (r"out of memory|Failed to CUDA (?:malloc|calloc)|Cuda failure 2\b",
     "a GPU has too little free memory for NCCL's buffers",
     "nvidia-smi; leave a GB free on each GPU, end leftovers"),
    (r"unspecified launch failure|illegal memory access|Cuda failure (?:700|719)|uncorrectable ECC|"
     r"Cuda failure (?:214|46)\b",
     "a GPU failed under the program (illegal access, ECC or a dead GPU)",
     "dmesg | grep -i xid on that node; CUDA_LAUNCH_BLOCKING=1 to find the kernel"),
    (r"Cuda failure|CUDA error|ncclUnhandledCudaError",
     "a CUDA call failed inside NCCL",
     "compute-sanitizer or CUDA_LAUNCH_BLOCKING=1; check that NCCL, CUDA and driver fit the GPU"),
    (r"connect to .*(?:127\.|::1)|peer (?:127\.|::1)",
     "a rank was told a loopback address",
     "set NCCL_SOCKET_IFNAME to the interface between the nodes"),
    (r"(?:onnect|socketStart|ocket).*(?:timed out|Connection timed out|ETIMEDOUT)|"
     r"Call to connect (?:failed|timeout|returned).*timed out",
     "connections between the nodes are dropped: a firewall, or no route (timed out)",
     "open all TCP ports between the nodes, or nc -vz the address and port named; then "
     "NCCL_SOCKET_IFNAME"),
    (r"No route to host|Network is unreachable",
     "there is no route between the nodes on the chosen interface",
     "ip route get the peer's address; set NCCL_SOCKET_IFNAME to the interface between the nodes"),
    (r"Connection refused",
     "nobody listens at the address this rank was given: the peer died, or the address is wrong",
     "check that the address in the log is the peer's (NCCL_SOCKET_IFNAME); look for an earlier "
     "error on the peer"),
    (r"Message truncated|instead of \d+|size mismatch|mismatch|wrong type \d|magic",
     "ranks disagree: they made different calls, or belong to different jobs",
     "TORCH_DISTRIBUTED_DEBUG=DETAIL; check that all ranks run the same code and versions"),
    (r"[Ii]nvalid argument|[Ii]nvalid (?:rank|usage|config)|ncclInvalid",
     "NCCL refused a call", "check ranks, world size, devices and the arguments of the call"),
    (r"Watchdog caught|timed out|[Tt]imeout",
     "a collective did not end in time: some rank did not take part, or its traffic stopped",
     "py-spy dump on the rank that is missing; TORCH_NCCL_DUMP_ON_TIMEOUT=1; compare each rank's "
     "last lines"),
    (r"Segmentation fault|signal 11|Bus error|Caught signal",
     "a process crashed", "find which rank; gdb or faulthandler; look at its first error"),
    (r"oom-kill|Out of memory: Kill|signal 9",
     "the system killed a process, usually for host memory", "dmesg | grep -i oom on that node"),
)  # fmt: skip
VICTIM = (
    r"Broken pipe|[Cc]onnection closed by remote peer|Connection reset by peer|"
    r"remote process exited|ncclRemoteError|Failed to execute operation|Proxy Call to rank|"
    r"socketProgress|socketPollConnect|closed by peer|commAbort|Abort(?:ed|ing)?\b"
)
