"""An all-reduce made from send and recv, as a ring and as a tree, bytes and rounds counted.

torchrun --nproc-per-node 4 ring_and_tree.py --sizes 1000 1000000      (numbers of 4 bytes each)
"""
import argparse
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

count = {"sent": 0, "rounds": 0}  # by this rank: bytes; rounds of the pattern
states = []  # the tensor after each round


def say(**what):
    sys.stdout.write(json.dumps(what) + "\n")


def send(x, to):
    count["sent"] += x.numel() * x.element_size()
    return dist.isend(x.contiguous(), dst=to)


def round_over(x):
    count["rounds"] += 1
    if x.numel() < 100:
        states.append(x.tolist())


def ring_reduce_scatter(x, rank, n):
    chunks = x.tensor_split(n)  # views: what is added to a chunk is added to x
    for k in range(n - 1):
        going, coming = chunks[(rank - k) % n], chunks[(rank - k - 1) % n]
        sending = send(going, to=(rank + 1) % n)
        arrived = torch.empty_like(coming)
        dist.recv(arrived, src=(rank - 1) % n)
        sending.wait()
        coming += arrived
        round_over(x)


def ring_all_gather(x, rank, n):
    chunks = x.tensor_split(n)
    for k in range(n - 1):
        going, coming = chunks[(rank + 1 - k) % n], chunks[(rank - k) % n]
        sending = send(going, to=(rank + 1) % n)
        dist.recv(coming, src=(rank - 1) % n)
        sending.wait()
        round_over(x)


def ring(x, rank, n):
    ring_reduce_scatter(x, rank, n)
    ring_all_gather(x, rank, n)


def tree(x, rank, n):
    step, arrived = 1, torch.empty_like(x)
    while step < n:  # up: pairs, then pairs of pairs; the sum ends on rank 0
        if rank % (2 * step) == step:
            send(x, to=rank - step).wait()
        elif rank % (2 * step) == 0 and rank + step < n:
            dist.recv(arrived, src=rank + step)
            x += arrived
        round_over(x)
        step *= 2
    while step > 1:  # down: the same way back
        step //= 2
        if rank % (2 * step) == 0 and rank + step < n:
            send(x, to=rank + step).wait()
        elif rank % (2 * step) == step:
            dist.recv(x, src=rank - step)
        round_over(x)


def wire():
    """Bytes that this host has sent through eth0 so far; None where there is none."""
    try:
        lines = [line.split(":") for line in open("/proc/net/dev").read().splitlines()[2:]]
    except OSError:
        return None
    return {name.strip(): int(rest.split()[8]) for name, rest in lines}.get("eth0")


def timed(method, size, rank, n, repeat):
    """Median seconds over `repeat` calls; each begins when all ranks are there."""
    seconds = []
    for _ in range(repeat):
        x = torch.ones(size)
        dist.barrier()
        t0 = time.perf_counter()
        method(x, rank, n)
        seconds.append(time.perf_counter() - t0)
        assert (x == n).all()
    return statistics.median(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000], help="numbers to sum")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.exit(2, f"{parser.prog}: start it with: torchrun --nproc-per-node 2 {parser.prog}\n")
    if min(args.sizes) < 1:
        parser.exit(2, f"{parser.prog}: --sizes must be whole numbers from 1 up\n")
    dist.init_process_group("gloo")  # tensors on the CPU: what is counted is the pattern
    rank, n = dist.get_rank(), dist.get_world_size()
    for method in (ring, tree):
        x = torch.arange(1, n + 1) * 10**rank  # the digits of a sum say which ranks are in it
        states[:] = [x.tolist()]
        count.update(sent=0, rounds=0)
        method(x, rank, n)
        say(case="states", method=method.__name__, states=states, rounds=count["rounds"])
    for size in args.sizes:
        for method in (ring, tree):
            timed(method, size, rank, n, repeat=1)  # the first use of a connection makes it
            count.update(sent=0)
            dist.barrier()
            before = wire()
            dist.barrier()
            timed(method, size, rank, n, repeat=1)
            dist.barrier()
            after = wire()
            sent, on_wire = count["sent"], None if before is None else after - before
            seconds = timed(method, size, rank, n, repeat=9 if size <= 10_000 else 3)
            say(case="cost", method=method.__name__, numbers=size, sent=sent, wire=on_wire,
                seconds=seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
