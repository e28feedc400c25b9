"""Time a collective over a range of sizes, as nccl-tests does, on gloo or NCCL, and check the sums.

    torchrun --nproc-per-node 2 collective_ranks.py --op all-reduce --sizes 4096 1048576

Sizes are bytes; for all-gather and reduce-scatter they are those of the whole, n times a rank's
part. A row's time is the median over rounds, each of several operations one after another, and the
mean over ranks (of a broadcast and of send-recv, the last rank's); spread is the distance of the
quartiles over the median. wire_bytes is what one host sent through its network interface for one
operation, headers included, as the kernel counts.
"""
import argparse
import json
import os
import time
from statistics import median, quantiles

import torch
import torch.distributed as dist

FACTORS = {  # busbw over algbw
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0 if n > 1 else 0.0,
    "send-recv": lambda n: 1.0 if n > 1 else 0.0,
}
# torch 2.13 gave these two new names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
PIECE = 1 << 20  # numbers compared at once: a check must not need the memory of the whole
ROUND = 0.02  # seconds: a round is at least this long, so that the clock is no part of it
MIN_ROUNDS, MAX_ROUNDS = 5, 40


class Collective:
    """One operation on buffers of one size."""

    def __init__(self, op, nbytes, dtype, device, rank, n):
        self.op, self.rank, self.n = op, rank, n
        part = max(nbytes // dtype.itemsize // n, 1)  # numbers of one rank's part
        whole = part * n if op in ("all-gather", "reduce-scatter") else max(
            nbytes // dtype.itemsize, 1)
        self.nbytes = whole * dtype.itemsize
        make = {"dtype": dtype, "device": device}
        self.x = torch.zeros(part if op == "all-gather" else whole, **make)
        self.out = {"all-gather": lambda: torch.zeros(whole, **make),
                    "reduce-scatter": lambda: torch.zeros(part, **make),
                    "send-recv": lambda: torch.zeros(whole, **make)}.get(op, lambda: self.x)()

    def __call__(self):
        if self.op == "all-reduce":
            dist.all_reduce(self.x)
        elif self.op == "all-gather":
            all_gather(self.out, self.x)
        elif self.op == "reduce-scatter":
            reduce_scatter(self.out, self.x)
        elif self.op == "broadcast":
            dist.broadcast(self.x, src=0)
        elif self.n > 1:  # everyone sends to the next rank and receives from the one before
            coming = dist.irecv(self.out, src=(self.rank - 1) % self.n)
            going = dist.isend(self.x, dst=(self.rank + 1) % self.n)
            coming.wait()
            going.wait()
        if self.x.is_cuda:
            torch.cuda.synchronize()

    def wrong(self):
        """Run once on known numbers; how many of the results differ from what they must be."""
        self.x.copy_(self._numbers(self.rank, 0, self.x.numel()))
        self()
        bad = 0
        for start in range(0, self.out.numel(), PIECE):
            stop = min(start + PIECE, self.out.numel())
            found = self.out[start:stop]
            bad += int((found != self._expected(start, stop).to(found.dtype)).sum())
        self.x.zero_()  # sums of sums would soon overflow
        self.out.zero_()
        return bad

    def _expected(self, start, stop):
        if self.op == "all-reduce":
            return sum(self._numbers(r, start, stop) for r in range(self.n))
        if self.op == "reduce-scatter":
            offset = self.rank * self.out.numel()
            return sum(self._numbers(r, offset + start, offset + stop) for r in range(self.n))
        if self.op == "all-gather":
            at = torch.arange(start, stop, device=self.x.device)
            owner, index = at // self.x.numel(), at % self.x.numel()
            return self._pattern(owner, index)
        source = 0 if self.op == "broadcast" else (self.rank - 1) % self.n
        return self._numbers(source, start, stop)

    def _numbers(self, rank, start, stop):
        return self._pattern(rank, torch.arange(start, stop, device=self.x.device))

    def _pattern(self, rank, index):
        """Small whole numbers, so that every sum is exact in 16 bits too; another one for each
        rank, and no short period, so that a piece in the wrong place shows."""
        most = 5 if self.n * 4 <= 256 else 2
        return (index * 7 + (index >> 8) * 3 + rank * 11) % most


def placement():
    """(how many hosts there are, whether this rank is the first on its own). Counted by what they
    have in common, since a launcher's nodes may all be on one machine: kernel and network."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            here = (f.read(), os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        here = os.environ.get("GROUP_RANK", "0")
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, here)
    return len(set(found)), found.index(here) == dist.get_rank()


def sent(one_host):
    """(bytes, packets) that this host has sent so far: through its network interfaces, or, where
    all ranks are on one host, through loopback. None where the kernel does not say."""
    try:
        lines = [line.split(":") for line in open("/proc/net/dev").read().splitlines()[2:]]
    except OSError:
        return None
    fields = [rest.split() for name, rest in lines if (name.strip() == "lo") == one_host]
    return sum(int(f[8]) for f in fields), sum(int(f[9]) for f in fields)


def over_ranks(values, how, device):
    """A list of floats, each the "sum", "mean" or "max" over ranks: the same on all of them."""
    x = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(x, op=dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
    return (x / dist.get_world_size() if how == "mean" else x).tolist()


def measure(op, nbytes, args, device, rank, n):
    """One row."""
    hosts, first_of_host = placement()
    call = Collective(op, nbytes, getattr(torch, args.dtype), device, rank, n)
    wrong = call.wrong()  # also the first warm-up
    # The root of a broadcast is done before the others, and a sender whose receiver is far away
    # before one that waits for it; elsewhere nobody is.
    how = "max" if op in ("broadcast", "send-recv") else "mean"
    dist.barrier()
    began = time.perf_counter()
    call()
    once = over_ranks([time.perf_counter() - began], how, device)[0]
    if once < 0.5:  # a second warm-up, and a better guess
        began = time.perf_counter()
        call()
        once = over_ranks([time.perf_counter() - began], how, device)[0]
    per_round = max(1, min(500, round(ROUND / max(once, 1e-7))))
    seconds, spread, spent = [], 0.0, 0.0
    dist.barrier()
    before = sent(hosts == 1)
    while len(seconds) < MAX_ROUNDS:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(per_round):
            call()
        # The same on all ranks, so that all stop together.
        took = over_ranks([time.perf_counter() - began], how, device)[0]
        seconds.append(took / per_round)
        spent += took
        if len(seconds) >= (MIN_ROUNDS if spent < args.seconds else 3):
            low, middle, high = quantiles(seconds, n=4, method="inclusive")
            spread = (high - low) / middle
            if spread <= args.spread or spent > args.seconds:
                break
    dist.barrier()  # what a rank has sent last may be in its queue until others have it
    after = sent(hosts == 1) if before and first_of_host else None
    wire, packets = over_ranks(
        [b - a for a, b in zip(before, after)] if after else [0, 0], "sum", device)
    wrong = int(over_ranks([wrong], "sum", device)[0])
    took, calls = median(seconds), per_round * len(seconds) * hosts
    algbw = call.nbytes / took / 1e9
    return {"bytes": call.nbytes, "count": call.nbytes // call.x.dtype.itemsize,
            "time_us": took * 1e6, "algbw": algbw, "busbw": algbw * FACTORS[op](n),
            "wrong": wrong, "spread": spread, "rounds": len(seconds), "per_round": per_round,
            "wire_bytes": wire / calls if wire else None,
            "wire_packets": packets / calls if wire else None}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--op", choices=FACTORS, default="all-reduce")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096], help="bytes")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto")
    parser.add_argument("--spread", type=float, default=0.05, help="stop at this spread")
    parser.add_argument("--seconds", type=float, default=2.0, help="or after this time, a size")
    parser.add_argument("--metrics", default=os.environ.get("SCALELAB_METRICS"),
                        help="rank 0 writes its rows here, one JSON object a line")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.exit(2, f"{parser.prog}: start it with: torchrun --nproc-per-node 2 {parser.prog}\n")
    backend = args.backend
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    rank, n = dist.get_rank(), dist.get_world_size()
    metrics = open(args.metrics if args.metrics and rank == 0 else os.devnull, "a", buffering=1)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if rank == 0:
        print(f"# {args.op}, {n} ranks, {backend}, {where}, {args.dtype}\n#{'size (B)':>12}"
              f"{'time (us)':>12}{'algbw':>9}{'busbw':>9}{'#wrong':>8}{'spread':>8}"
              "   (GB/s of 1e9)", flush=True)
    for step, nbytes in enumerate(args.sizes, start=1):
        row = measure(args.op, nbytes, args, device, rank, n)
        metrics.write(json.dumps({"step": step, "rank": rank, "world_size": n, "op": args.op,
                                  "backend": backend, "device": where, **row}) + "\n")
        if rank == 0:
            print(f"{row['bytes']:>13}{row['time_us']:>12.1f}{row['algbw']:>9.4f}"
                  f"{row['busbw']:>9.4f}{row['wrong']:>8}{row['spread']:>8.1%}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
