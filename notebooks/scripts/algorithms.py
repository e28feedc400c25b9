"""Four all-reduces timed: a ring, a tree, a hierarchical one, all of send and recv, and gloo's own.

    torchrun --nproc-per-node 4 algorithms.py --sizes 4096 1048576 --per-group 2

Sizes are bytes. A group is what has a quick network of its own, such as a rack: ranks 0 and 1, then
2 and 3. A method is a plan, the list of one rank's sends and receives. All receives are posted when
it begins, so that no sender waits for its receiver to be ready.
"""
import argparse
import json
import os
import time
from statistics import median

import torch
import torch.distributed as dist

METHODS = ("gloo", "ring", "tree", "hierarchical")


def ring_reduce_scatter(x, ranks, me):
    n, at = len(ranks), ranks.index(me)
    right, left, chunks = ranks[(at + 1) % n], ranks[(at - 1) % n], x.tensor_split(n)
    for k in range(n - 1):
        yield "send", right, chunks[(at - k) % n]
        yield "add", left, chunks[(at - k - 1) % n]


def ring_all_gather(x, ranks, me):
    n, at = len(ranks), ranks.index(me)
    right, left, chunks = ranks[(at + 1) % n], ranks[(at - 1) % n], x.tensor_split(n)
    for k in range(n - 1):
        yield "send", right, chunks[(at + 1 - k) % n]
        yield "take", left, chunks[(at - k) % n]


def ring(x, ranks, me):
    yield from ring_reduce_scatter(x, ranks, me)
    yield from ring_all_gather(x, ranks, me)


def tree(x, ranks, me):
    n, at, step = len(ranks), ranks.index(me), 1
    while step < n:  # up: pairs, then pairs of pairs; the sum ends on the first rank
        if at % (2 * step) == step:
            yield "send", ranks[at - step], x
        elif at % (2 * step) == 0 and at + step < n:
            yield "add", ranks[at + step], x
        step *= 2
    while step > 1:  # down: the same way back
        step //= 2
        if at % (2 * step) == 0 and at + step < n:
            yield "send", ranks[at + step], x
        elif at % (2 * step) == step:
            yield "take", ranks[at - step], x


def hierarchical(x, ranks, me, per_group):
    at = ranks.index(me)
    first = at - at % per_group
    inside = ranks[first : first + per_group]
    across = ranks[at % per_group :: per_group]  # those with my place in each group
    yield from ring_reduce_scatter(x, inside, me)
    mine = x.tensor_split(per_group)[(at + 1) % per_group]
    yield from ring(mine, across, me)
    yield from ring_all_gather(x, inside, me)


class Plan:
    """A method's steps for one rank, with the buffers it needs."""

    def __init__(self, method, x, rank, n, per_group):
        self.method, self.x = method, x
        steps = []
        if method == "ring":
            steps = ring(x, list(range(n)), rank)
        elif method == "tree":
            steps = tree(x, list(range(n)), rank)
        elif method == "hierarchical":
            steps = hierarchical(x, list(range(n)), rank, per_group)
        self.steps = [(what, peer, part, torch.empty_like(part) if what == "add" else part)
                      for what, peer, part in steps]

    def __call__(self):
        if self.method == "gloo":
            dist.all_reduce(self.x)
            return
        coming = iter([dist.irecv(into, src=peer)
                       for what, peer, _, into in self.steps if what != "send"])
        going = []
        for what, peer, part, into in self.steps:
            if what == "send":
                going.append(dist.isend(part, dst=peer))
                continue
            next(coming).wait()
            if what == "add":
                part += into
        for handle in going:
            handle.wait()

    def sent(self, peers):
        """Bytes that this rank sends to these ranks."""
        return sum(part.numel() * part.element_size()
                   for what, peer, part, _ in self.steps if what == "send" and peer in peers)


def check(plan, rank, n):
    """(results that are wrong, largest distance from another order's sum of fractions)."""
    x = plan.x
    numbers = torch.arange(x.numel()) % 5
    x.copy_(numbers + rank)
    plan()
    wrong = int((x != numbers * n + n * (n - 1) / 2).sum())
    x.copy_(fractions(rank, x.numel()))
    plan()
    apart = float((x - sum(fractions(r, x.numel()) for r in range(n))).abs().max())
    x.zero_()  # sums of sums would overflow
    return wrong, apart


def fractions(rank, count):
    return torch.rand(count, generator=torch.Generator().manual_seed(rank))


def wire():
    """Bytes that this host has sent through eth0 so far; 0 where there is none."""
    try:
        lines = [line.split(":") for line in open("/proc/net/dev").read().splitlines()[2:]]
    except OSError:
        return 0
    return {name.strip(): int(rest.split()[8]) for name, rest in lines}.get("eth0", 0)


def timed(plan, calls):
    """(median seconds, bytes through the interface) of one call; calls follow one another, so all
    ranks keep step."""
    seconds = []
    dist.barrier()
    before = wire()
    for _ in range(calls):
        began = time.perf_counter()
        plan()
        seconds.append(time.perf_counter() - began)
    dist.barrier()  # what a rank has sent last may be in its queue until others have it
    return median(seconds), (wire() - before) / calls


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096], help="bytes")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--per-group", type=int, default=2, help="ranks with a quick network")
    parser.add_argument("--calls", type=int, default=5, help="timed, in a row")
    parser.add_argument("--metrics", default=os.environ.get("SCALELAB_METRICS"),
                        help="rank 0 writes one JSON object a line here")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.exit(2, f"start it with: torchrun --nproc-per-node 4 {parser.prog}\n")
    dist.init_process_group("gloo")  # tensors on the CPU: what is compared is the pattern
    rank, n = dist.get_rank(), dist.get_world_size()
    if n % args.per_group:
        parser.exit(2, f"{parser.prog}: {n} ranks are not groups of {args.per_group}\n")
    first = rank - rank % args.per_group
    elsewhere = set(range(n)) - set(range(first, first + args.per_group))
    metrics = open(args.metrics if args.metrics and rank == 0 else os.devnull, "a", buffering=1)
    step = 0
    for nbytes in args.sizes:
        for method in args.methods:
            plan = Plan(method, torch.zeros(max(nbytes // 4, 1)), rank, n, args.per_group)
            wrong, apart = check(plan, rank, n)
            seconds, on_wire = timed(plan, args.calls)
            mine = [seconds / n, on_wire / n, wrong, apart / n,
                    plan.sent(set(range(n))), plan.sent(elsewhere)]
            of_all = torch.tensor(mine, dtype=torch.float64)
            dist.all_reduce(of_all)
            seconds, on_wire, wrong, apart, sent, across = of_all.tolist()
            step += 1
            line = {"step": step, "rank": rank, "world_size": n, "method": method, "bytes": nbytes,
                    "seconds": seconds, "wire": on_wire, "wrong": int(wrong), "apart": apart,
                    "sent": int(sent), "across": int(across)}
            metrics.write(json.dumps(line) + "\n")
            if rank == 0:
                print(json.dumps(line), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
