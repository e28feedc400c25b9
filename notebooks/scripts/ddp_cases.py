"""What DDP does, case by case: torchrun --nproc-per-node 2 ddp_cases.py backward buckets no_sync"""
import argparse
import contextlib
import json
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: imported later, by DDP, it would keep the group for ever
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def make_model(device, layers=2, width=256, seed=0):
    torch.manual_seed(seed)
    body = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*body, nn.Linear(width, 10)).to(device)


def make_batch(device, seed, size=32, width=256):
    torch.manual_seed(seed)  # another one on each rank
    return torch.randn(size, width, device=device), torch.randint(10, [size], device=device)


def count_buckets(ddp_model):
    """A list that grows with every bucket DDP sends: its bytes, and the time."""
    sent = []

    def hook(group, bucket):
        sent.append((bucket.buffer().nbytes, time.perf_counter()))
        return allreduce_hook(group, bucket)  # what DDP does without a hook

    ddp_model.register_comm_hook(None, hook)
    return sent


def apart(tensor):
    """The largest difference between any two ranks' copies of a tensor."""
    high, low = tensor.detach().clone(), tensor.detach().clone()
    dist.all_reduce(high, dist.ReduceOp.MAX)
    dist.all_reduce(low, dist.ReduceOp.MIN)
    return (high - low).max().item()


def backward(rank, device):
    model = make_model(device, seed=rank)  # each rank starts from other weights
    weight, rows = model[0].weight, []
    weights_apart = [apart(weight)]
    ddp_model = DistributedDataParallel(model)
    weights_apart.append(apart(weight))
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    sent, (x, y) = count_buckets(ddp_model), make_batch(device, seed=rank)
    own = torch.autograd.grad(cross_entropy(model(x), y), weight)[0]
    rows.append(("without DDP", apart(own), len(sent)))
    loss = cross_entropy(ddp_model(x), y)
    rows.append(("after forward", None, len(sent)))
    loss.backward()
    rows.append(("after backward", apart(weight.grad), len(sent)))
    optimizer.step()
    rows.append(("after step", apart(weight.grad), len(sent)))
    return {"rows": rows, "weights_apart": [*weights_apart, apart(weight)]}


def buckets(rank, device):
    model, ready = make_model(device, layers=8), []
    ddp_model = DistributedDataParallel(model, bucket_cap_mb=0.6)
    sent, (x, y) = count_buckets(ddp_model), make_batch(device, seed=rank, size=512)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: ready.append(time.perf_counter()))
    for _ in range(3):  # in the first step DDP learns the order in which gradients come
        loss = cross_entropy(ddp_model(x), y)
        sent.clear(), ready.clear(), dist.barrier()
        began = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
    return {"gradients": sum(p.numel() for p in model.parameters()) * 4,
            "bytes": [size for size, _ in sent], "sent": [at - began for _, at in sent],
            "ready": [at - began for at in ready], "end": ended - began}


def no_sync(rank, device, micro_steps=4):
    found = {}
    for name in ("plain", "no_sync"):
        ddp_model = DistributedDataParallel(make_model(device))
        found["gradient"] = sum(p.numel() * 4 for p in ddp_model.parameters())
        sent = count_buckets(ddp_model)
        for i in range(micro_steps):
            x, y = make_batch(device, seed=10 * rank + i)
            quiet = name == "no_sync" and i < micro_steps - 1
            with ddp_model.no_sync() if quiet else contextlib.nullcontext():
                (cross_entropy(ddp_model(x), y) / micro_steps).backward()
        found[name] = sum(size for size, _ in sent)
        found[name + " gradient"] = ddp_model.module[0].weight.grad.double().sum().item()
    return found


def main(cases):
    """Run the cases named on the command line; every rank prints one JSON line for each."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("cases", nargs="+", choices=cases, metavar="CASE", help=", ".join(cases))
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.exit(2, f"start it with: torchrun --nproc-per-node 2 {parser.prog} CASE\n")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    for name in args.cases:
        print(json.dumps({"case": name, "rank": rank} | cases[name](rank, device)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main({"backward": backward, "buckets": buckets, "no_sync": no_sync})
