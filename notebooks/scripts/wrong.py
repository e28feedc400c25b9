"""What goes wrong between ranks, each in seconds: torchrun --nproc-per-node 2 wrong.py deadlock"""
import argparse
import faulthandler
import json
import os
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = 3  # seconds; PyTorch's own default is 30 minutes


def deadlock(rank, n):
    """Everyone waits for the one before, and nobody has sent."""
    x, arrived = torch.tensor([rank]), torch.tensor([-1])
    dist.recv(arrived, src=(rank - 1) % n)
    dist.send(x, dst=(rank + 1) % n)
    return arrived.item()


def mended(rank, n):
    """The send is under way before anyone waits."""
    x, arrived = torch.tensor([rank]), torch.tensor([-1])
    sending = dist.isend(x, dst=(rank + 1) % n)
    dist.recv(arrived, src=(rank - 1) % n)
    sending.wait()
    return arrived.item()


def mismatch(rank, n):
    """Two steps that agree, then one in which the last rank takes another branch."""
    loss = torch.ones(3)
    for _ in range(2):
        dist.all_reduce(loss)
    if rank == n - 1:
        dist.broadcast(torch.ones(5), src=n - 1)
    else:
        dist.all_reduce(loss)


def swapped(rank, n):
    """Same calls, same shapes; the last rank has them in the other order."""
    loss, accuracy = torch.tensor([2.0]), torch.tensor([0.5])
    for x in (accuracy, loss) if rank == n - 1 else (loss, accuracy):
        dist.all_reduce(x)
    return [loss.item() / n, accuracy.item() / n]


def device(rank, n):
    """The global rank as the number of this rank's device: right on the first host only."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        return f"cuda:{torch.cuda.current_device()}"
    # without GPUs, a list of as many names as this host has ranks stands for them
    return [f"device {i} of this host" for i in range(int(os.environ["LOCAL_WORLD_SIZE"]))][rank]


def meet(rank, n):
    """Nothing but the sum of ones."""
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


CASES = {  # name: what to run, and who this process says it is
    "deadlock": (deadlock, lambda rank, n: (rank, n)),
    "mended": (mended, lambda rank, n: (rank, n)),
    "duplicate": (meet, lambda rank, n: (min(rank, n - 2), n)),  # the last two say the same rank
    "too-large": (meet, lambda rank, n: (rank, n + 1)),
    "too-small": (meet, lambda rank, n: (rank, n - 1)),
    "mismatch": (mismatch, lambda rank, n: (rank, n)),
    "swapped": (swapped, lambda rank, n: (rank, n)),
    "device": (device, lambda rank, n: (rank, n)),
}


def together(store, word):
    """Until every process has come here: nobody's patience runs while another still starts."""
    store.add(word, 1)
    while store.add(word, 0) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)


def attempt(name, store):
    """Run one case in a group of its own; print how it ended on this rank."""
    body, who = CASES[name]
    process, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rank, world_size = who(process, processes)
    said = {"case": name, "process": process, "rank": rank, "world_size": world_size}
    faulthandler.dump_traceback_later(PATIENCE - 1)  # a stack on stderr if still here
    try:
        dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank,
                                world_size=world_size, timeout=timedelta(seconds=PATIENCE))
        faulthandler.dump_traceback_later(PATIENCE - 1)
        said["result"] = body(rank, world_size)
    except Exception as error:
        said["error"] = f"{type(error).__name__}: {error}"
        said["line"] = [f.line for f in traceback.extract_tb(error.__traceback__)
                        if f.filename == __file__][-1]
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.write(json.dumps(said) + "\n")
    together(store, f"end {name}")  # a rank that leaves early would break the others' wait
    if dist.is_initialized():
        dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    parser.add_argument("cases", nargs="+", choices=CASES, help="run in this order")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --nproc-per-node 2 wrong.py deadlock")
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]),
                          is_master=False)
    for name in args.cases:
        together(store, f"begin {name}")
        attempt(name, store)


if __name__ == "__main__":
    main()
