"""A small job that says how far it has come: torchrun --nnodes=2 … two_nodes.py"""
import argparse
import os
import socket
import sys
import time
from datetime import timedelta
from importlib import import_module, metadata
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    parser.add_argument("--timeout", type=float, default=60, help="s a collective may take")
    parser.add_argument("--data", type=Path, help="a directory whose files are shared out")
    parser.add_argument("--save", type=Path, help="a checkpoint: saved by rank 0, read by all")
    parser.add_argument("--epochs", type=int, default=0, help="show what each epoch begins with")
    parser.add_argument("--workers", type=int, default=0, help="processes that load the data")
    parser.add_argument("--package", help="a package that every rank uses")
    parser.add_argument("--steps", type=int, default=0, help="steps of 0.1 s")
    parser.add_argument("--crash-at", type=int, help="every rank is lost right after this step")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun")
    if not 0 < args.timeout < 1e6:
        parser.error(f"--timeout {args.timeout} must be a number of seconds above 0")
    return args


def say(*words):
    print(f"rank {os.environ['RANK']}:", *words, flush=True)


def total(number):
    """The sum of every rank's number."""
    tensor = torch.tensor([float(number)])
    dist.all_reduce(tensor)
    return int(tensor.item())


def join(args):
    say(f"started on {socket.gethostname()}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}, CPU {torch.backends.cpu.get_cpu_capability()}")
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    say(f"joined, {dist.get_world_size()} ranks")


def exchange():
    t0 = time.perf_counter()
    ranks = total(1)
    say(f"small all-reduce ok, {ranks} ranks, {1000 * (time.perf_counter() - t0):.1f} ms")
    dist.barrier()
    tensor = torch.ones(2_000_000)  # 8 MB
    t0 = time.perf_counter()
    dist.all_reduce(tensor)
    seconds, n = time.perf_counter() - t0, dist.get_world_size()
    busbw = 2 * (n - 1) / n * tensor.nbytes / seconds / 1e6
    say(f"large all-reduce ok, bus bandwidth {busbw:.1f} MB/s")


def read_data(directory):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    files = sorted(os.listdir(directory))
    mine = files[rank::world_size]
    for name in mine:
        (directory / name).read_bytes()
    say(f"sees {len(files)} files and reads {len(mine)}:", *mine)
    read = total(len(mine))
    say(f"all ranks together have read {read} files")


def save_and_read(path, step):
    if dist.get_rank() == 0:
        torch.save({"step": step}, path)
    dist.barrier()
    checkpoint = torch.load(path)
    say(f"checkpoint of step {checkpoint['step']} read from {path.name}")


def show_epochs(epochs, workers):
    dataset = TensorDataset(torch.arange(64), torch.zeros(64, 2**18))  # 1 MiB a sample
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=workers)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        first, _ = next(iter(loader))
        say(f"epoch {epoch} begins with samples", *first[:6].tolist())


def train(args):
    done = step = 0
    if args.save and args.save.exists():
        done = torch.load(args.save)["step"]
    say(f"begins at step {done}")
    dist.barrier()
    for step in range(done + 1, args.steps + 1):
        time.sleep(0.1)  # the work
        total(1)
        if args.save and dist.get_rank() == 0:
            torch.save({"step": step}, args.save.with_suffix(".new"))
            args.save.with_suffix(".new").replace(args.save)
        if step == args.crash_at:
            dist.barrier()
            say(f"lost at step {step}")
            os._exit(1)
    say(f"ended at step {step}")


@record
def main():
    args = parse_args()
    join(args)
    exchange()
    if args.package:
        say(f"{args.package} {metadata.version(args.package)}")
        say(import_module(args.package).greet(dist.get_rank()))
    if args.data:
        read_data(args.data)
    if args.epochs:
        show_epochs(args.epochs, args.workers)
    if args.steps:
        train(args)
    elif args.save:
        save_and_read(args.save, step=1)
    say("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
