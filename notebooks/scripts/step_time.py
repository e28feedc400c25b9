"""Seconds of a DDP step and of its parts: torchrun --nproc-per-node 2 step_time.py --steps 8

For each depth and each number of micro-batches: forward, backward and update by themselves, with
no_sync, and the whole step with gradients all-reduced. A layer is one square matrix, so that all
layers take alike long and have alike many bytes.
"""
import argparse
import contextlib
import json
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: imported later, by DDP, it would keep the group for ever
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def clock(device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def one_step(ddp_model, optimizer, x, micro_batches, sync, device):
    """[forward, backward, update] in seconds; those of all micro-batches together."""
    forward = backward = 0.0
    for i in range(micro_batches):
        last = sync and i == micro_batches - 1
        with contextlib.nullcontext() if last else ddp_model.no_sync():
            t0 = clock(device)
            loss = ddp_model(x).square().mean() / micro_batches
            t1 = clock(device)
            loss.backward()
            t2 = clock(device)
        forward, backward = forward + t1 - t0, backward + t2 - t1
    optimizer.step()
    optimizer.zero_grad()
    return [forward, backward, clock(device) - t2]


def times(ddp_model, optimizer, x, micro_batches, sync, args, device):
    """Median over steps of the slowest rank's: [forward, backward, update, whole step]."""
    found = []
    for _ in range(args.steps + 2):
        dist.barrier()
        parts = one_step(ddp_model, optimizer, x, micro_batches, sync, device)
        found.append(torch.tensor([*parts, sum(parts)], dtype=torch.float64, device=device))
    seconds = torch.stack(found[2:])  # DDP sorts its buckets after the first
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)  # all wait for the slowest
    return seconds.median(0).values.tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--width", type=int, default=512, help="of a layer: width x width numbers")
    parser.add_argument("--layers", type=int, nargs="+", default=[4], help="depths to try")
    parser.add_argument("--batch-size", type=int, default=128, help="rows of one micro-batch")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--compute-only", action="store_true", help="leave the network alone")
    parser.add_argument("--metrics", default=os.environ.get("SCALELAB_METRICS"),
                        help="rank 0 writes one JSON object a line here")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.exit(2, f"start it with: torchrun --nproc-per-node 2 {parser.prog}\n")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    metrics = open(args.metrics if args.metrics and rank == 0 else os.devnull, "a", buffering=1)
    step = 0
    for layers in args.layers:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(args.width, args.width, bias=False)
                                for _ in range(layers))).to(device)
        ddp_model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x = torch.randn(args.batch_size, args.width, device=device)
        sizes = [p.numel() * p.element_size() for p in model.parameters()]
        alone = times(ddp_model, optimizer, x, 1, False, args, device)
        for micro_batches in args.micro_batches:
            whole = None
            if not args.compute_only:
                whole = times(ddp_model, optimizer, x, micro_batches, True, args, device)[3]
            step += 1
            line = {"step": step, "rank": rank, "world_size": dist.get_world_size(),
                    "layers": layers, "micro_batches": micro_batches, "parameter_bytes": sizes,
                    "forward": alone[0], "backward": alone[1], "update": alone[2],
                    "step_seconds": whole}
            metrics.write(json.dumps(line) + "\n")
            if rank == 0:
                print(json.dumps(line), flush=True)
    dist.barrier()
    del ddp_model  # the last holder of the group: now gloo's threads end before Python does
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
