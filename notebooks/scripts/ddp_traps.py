"""What goes wrong with DDP: torchrun --nproc-per-node 2 ddp_traps.py unused uneven_join write"""
import contextlib
import faulthandler
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_cases import main, make_batch, make_model
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

FOLDER = Path(os.environ.get("SCALELAB_RUN_DIR", tempfile.gettempdir()))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        return self.first(x)  # the second head is never called


def unused(rank, device):
    found = {}
    for find in (False, True):
        model = TwoHeads().to(device)
        ddp_model = DistributedDataParallel(model, find_unused_parameters=find)
        try:
            for _ in range(2):
                ddp_model(torch.ones(4, 8, device=device)).sum().backward()
            found[str(find)] = "no error in two steps"
        except RuntimeError as error:
            found[str(find)] = str(error)
    return found


def uneven(rank, device, join=False):
    ddp_model = DistributedDataParallel(make_model(device))
    num_batches = 5 if rank == 0 else 3
    if not join:  # in 3 s each rank prints where it stands; rank 0 does later, and ends the job
        faulthandler.dump_traceback_later(5 if rank == 0 else 3, exit=rank == 0)
    with ddp_model.join() if join else contextlib.nullcontext():
        for i in range(num_batches):
            x, y = make_batch(device, seed=10 * rank + i)
            cross_entropy(ddp_model(x), y).backward()
    dist.barrier()  # all wait for all, say before a validation
    return {"batches": num_batches}


def uneven_join(rank, device):
    return uneven(rank, device, join=True)


def write(rank, device):
    for name in ("all_write.txt", "rank_0_writes.txt"):
        if rank == 0 or name == "all_write.txt":
            with open(FOLDER / name, "a") as file:
                file.write(f"checkpoint of step 100, saved by rank {rank}\n")
    dist.barrier()  # only now may the others read it
    names = ("all_write.txt", "rank_0_writes.txt")
    return {name: len((FOLDER / name).read_text().splitlines()) for name in names}


if __name__ == "__main__":
    main({"unused": unused, "uneven": uneven, "uneven_join": uneven_join, "write": write})
