"""Speed on 1, 2 and 4 ranks of one job: torchrun --nproc-per-node 4 scaling.py"""
import argparse
import json
import os
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: imported later, by DDP, it would keep the group for ever
from torch.nn.parallel import DistributedDataParallel
from train_one import GPT, clock

SIZES = argparse.Namespace(block_size=64, width=64, heads=4, layers=2)


def steps(ddp_model, batch_size, num_steps, device, sync):
    """Median seconds of a step, data left out; without `sync` each rank works for itself."""
    optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=1e-3)
    x, y = torch.randint(64, [2, batch_size, SIZES.block_size], device=device)
    seconds = []
    for _ in range(num_steps):
        began = clock(device)
        ddp_model.require_backward_grad_sync = sync  # what no_sync() sets
        ddp_model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(clock(device) - began)
    return median(seconds[2:])  # DDP sorts its buckets after the first


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--batch-size", type=int, default=8, help="of one rank, weak scaling")
    parser.add_argument("--global-batch", type=int, default=32, help="of all, strong scaling")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2, help="the fastest of these counts")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.exit(2, "start it with: torchrun --nproc-per-node 4 scaling.py\n")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    sizes = [n for n in (1, 2, 4, 8) if n <= dist.get_world_size()]
    groups = {n: dist.new_group(list(range(n))) for n in sizes}
    fastest = {}
    for _ in range(args.rounds):  # everything in turn: a slow moment hits no size more than others
        for n in sizes:
            dist.barrier()  # ranks beyond n wait at the next one
            if rank >= n:
                continue
            ddp_model = DistributedDataParallel(GPT(64, SIZES).to(device), process_group=groups[n])
            for kind, batch in (("strong", args.global_batch // n), ("weak", args.batch_size)):
                both = [steps(ddp_model, batch, args.steps, device, s) for s in (True, False)]
                before = fastest.get((kind, n), both)
                fastest[kind, n] = [min(pair) for pair in zip(both, before)]
    for (kind, n), (step, compute) in fastest.items() if rank == 0 else ():
        global_batch = args.global_batch if kind == "strong" else n * args.batch_size
        found = {"kind": kind, "ranks": n, "global_batch": global_batch, "step": step,
                 "compute": compute, "tokens": global_batch * SIZES.block_size / step}
        print(json.dumps(found), flush=True)
    dist.barrier()
    ddp_model = None  # the last holder of the group: now gloo's threads end before Python does
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
