"""The store, send and recv, and seven collectives: torchrun --nproc-per-node 2 collectives.py

Every rank prints JSON lines: what it held before and after. Rank r's numbers are whole multiples of
10**r, so that the digits of any sum say which ranks are in it.
"""
import argparse
import contextlib
import json
import os
import sys

import torch
import torch.distributed as dist


def say(**what):
    sys.stdout.write(json.dumps(what) + "\n")  # one write: lines of ranks do not mix


def send_recv(x, rank, n):
    """Each rank passes its tensor to the next one; rank 0 begins, the last only receives."""
    arrived = torch.zeros_like(x)
    if rank > 0:
        dist.recv(arrived, src=rank - 1)
    if rank < n - 1:
        dist.send(x, dst=rank + 1)
    return arrived


def broadcast(x, rank, n):
    dist.broadcast(x, src=0)
    return x


def scatter(x, rank, n):
    mine = torch.zeros_like(x[:1])
    dist.scatter(mine, list(x.chunk(n)) if rank == 0 else None, src=0)
    return mine


def gather(x, rank, n):
    parts = [torch.zeros_like(x) for _ in range(n)] if rank == 0 else None
    dist.gather(x, parts, dst=0)
    return torch.cat(parts) if rank == 0 else x[:0]


def reduce(x, rank, n):
    dist.reduce(x, dst=0, op=dist.ReduceOp.SUM)
    return x


def all_reduce(x, rank, n):
    dist.all_reduce(x, op=dist.ReduceOp.SUM)
    return x


def all_gather(x, rank, n):
    parts = [torch.zeros_like(x) for _ in range(n)]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def reduce_scatter(x, rank, n):
    mine = torch.zeros_like(x[:1])
    dist.reduce_scatter(mine, list(x.chunk(n)), op=dist.ReduceOp.SUM)
    return mine


def wire():
    """Bytes that this host has sent through its network card eth0; None where there is none."""
    try:
        lines = [line.split(":") for line in open("/proc/net/dev").read().splitlines()[2:]]
    except OSError:
        return None
    return {name.strip(): int(rest.split()[8]) for name, rest in lines}.get("eth0")


def connections(port):
    """How many TCP connections this process has to `port`, and how many elsewhere (Linux)."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is closed by now
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    remote = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for _, _, to, state, *more in map(str.split, open(table).read().splitlines()[1:]):
            if f"socket:[{more[5]}]" in mine and state == "01":  # established
                remote.append(int(to.split(":")[1], 16))
    return remote.count(port), len(remote) - remote.count(port)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--numbers", type=int, default=2_000_000,
                        help="size of the tensor whose way is looked at, 4 bytes each")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.exit(2, f"{parser.prog}: start it with: torchrun --nproc-per-node 2 {parser.prog}\n")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    n, port = int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    # a connection of one's own to the store that the ranks met at
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=False)

    def stored():
        return {key: len(store.get(key)) for key in store.list_keys() if "default_pg" in key}

    say(case="store", rank=rank, keys=sorted(stored()), bytes=sum(stored().values()))
    big = torch.ones(args.numbers, device=device)
    dist.barrier()
    before = wire(), sum(stored().values())
    dist.barrier()
    dist.all_reduce(big)
    dist.barrier()
    after = wire(), sum(stored().values())
    sent = None if before[0] is None else after[0] - before[0]
    say(case="big", rank=rank, wire=sent, store=after[1] - before[1], right=bool((big == n).all()))
    if sys.platform == "linux":
        to_store, elsewhere = connections(port)
        say(case="connections", rank=rank, to_store=to_store, elsewhere=elsewhere)

    for call in (send_recv, broadcast, scatter, gather, reduce, all_reduce, all_gather,
                 reduce_scatter):
        x = torch.arange(1, n + 1, device=device) * 10**rank  # rank 2 of 4: 100, 200, 300, 400
        old = x.tolist()
        if call in (gather, all_gather):
            x = x[rank : rank + 1].clone()  # one number each; rank 2: 300
            old = x.tolist()
        elif call is scatter and rank > 0:
            old = []  # only rank 0's are sent
        say(case=call.__name__, rank=rank, before=old, after=call(x, rank, n).tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
