"""Speed on 1, 2 and 4 ranks of one job: torchrun --nproc-per-node 4 scaling.py"""
import argparse
import json
import os
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from train_one import GPT, clock

SIZES = argparse.Namespace(block_size=64, width=64, heads=4, layers=2)


def steps(ddp_model, batch_size, num_steps, device, sync):
    """Median seconds of a step's compute and communication, data left out."""
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
    return median(seconds[2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--batch-size", type=int, default=8, help="of one rank, weak scaling")
    parser.add_argument("--global-batch", type=int, default=32, help="of all, strong scaling")
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.exit(2, "start it with: torchrun --nproc-per-node 4 scaling.py\n")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    size = 1
    while size <= dist.get_world_size():
        group = dist.new_group(list(range(size)))  # the others wait at the barrier below
        if rank < size:
            model = GPT(64, SIZES).to(device)
            ddp_model = DistributedDataParallel(model, process_group=group)
            for kind, batch in (("strong", args.global_batch // size), ("weak", args.batch_size)):
                both = {sync: steps(ddp_model, batch, args.steps, device, sync)
                        for sync in (True, False)}
                found = {"kind": kind, "ranks": size, "global_batch": batch * size,
                         "step": both[True], "compute": both[False],
                         "tokens": batch * size * SIZES.block_size / both[True]}
                if rank == 0:
                    print(json.dumps(found), flush=True)
        dist.barrier()
        size *= 2
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
