"""Outputs of nvidia-smi topo -m and nccl-tests, made up: hosts, figures and all."""

HEADER = """\
# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20 \
agg iters: 1 validation: 1 graph: 0
#
# Using devices
"""
COLUMNS = """\
#
#                                                              out-of-place              in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   \
algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  \
(GB/s)  (GB/s)
"""


def topo(gpus, link, nics=(), nic=None, cpus=None, numa=None) -> str:
    """`link(i, j)` and `nic(i, k)` give labels, `cpus(i)` and `numa(i)` affinities."""
    names = [f"GPU{i}" for i in range(gpus)] + list(nics)
    lines = ["\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for i in range(gpus):
        cells = [" X " if i == j else link(i, j) for j in range(gpus)]
        cells += [nic(i, k) for k in range(len(nics))]
        cells += [cpus(i) if cpus else "0-31", numa(i) if numa else "N/A", "", "N/A"]
        lines.append(f"GPU{i}\t" + "\t".join(cells))
    for k, name in enumerate(nics):
        cells = [nic(i, k) for i in range(gpus)]
        cells += [" X " if k == other else "SYS" for other in range(len(nics))]
        lines.append(f"{name}\t" + "\t".join(cells))
    return "\n".join(lines) + "\n\nLegend:\n\n  X    = Self\n  NV#  = bonded NVLinks\n"


def devices(ranks, per_node, name, address="[0000:{:02x}:00]") -> str:
    return "".join(
        f"#  Rank {r:2d} Group  0 Pid {4000 + r:6d} on     node-{'abcdefgh'[r // per_node]} "
        f"device {r % per_node:2d} {address.format(16 + r % per_node)} {name}\n"
        for r in range(ranks)
    )


def rows(rate, factor, smallest=8, largest=1 << 33, redop="sum", root=-1, wrong=("0", "0")) -> str:
    """Sizes doubled from smallest to largest; `rate` GB/s of busbw, 30 us of latency."""
    text, nbytes = "", smallest
    while nbytes <= largest:
        time = 30 + nbytes / (rate / (factor or 1) * 1e3)
        algbw = nbytes / time / 1e3
        half = "".join(f"  {time:7.2f}  {algbw:6.2f}  {algbw * factor:6.2f}  {w}" for w in wrong)
        text += f"{nbytes:12d}  {nbytes // 4:12d}  float  {redop:>6}  {root:4d}{half}\n"
        nbytes *= 2
    return text


def footer(average=50, bounds="0 OK") -> str:
    return f"# Out of bounds values : {bounds}\n# Avg bus bandwidth    : {average} \n#\n"


def run(ranks, per_node, name, rate, op="all_reduce", **kwargs) -> str:
    """A complete run of one test."""
    factor = {"all_reduce": 2 * (ranks - 1) / ranks, "sendrecv": 1, "broadcast": 1}.get(
        op, (ranks - 1) / ranks
    )
    if op in ("all_gather", "alltoall", "broadcast"):
        kwargs.setdefault("redop", "none")
    return (
        f"# Collective test starting: {op}_perf\n" + HEADER + devices(ranks, per_node, name)
        + COLUMNS + rows(rate, factor, **kwargs) + footer()
    )  # fmt: skip
