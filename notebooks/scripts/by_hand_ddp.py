"""Train a small character-level GPT on two ranks started by hand: python by_hand_ddp.py --rank 0"""
import argparse
import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: imported later, by DDP, it would keep the group for ever
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

ADDRESS, WORLD_SIZE = "tcp://127.0.0.1:29500", 2  # where the ranks meet, and how many
BOOKS = Path(__file__).resolve().parent.parent / "data" / "books.txt"
SIZES = {"steps": 100, "batch-size": 8, "block-size": 64, "layers": 2, "width": 64, "heads": 4}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # x: (batch, block_size, width)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(-2))
        return x + self.shrink(F.gelu(self.grow(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary, args):
        super().__init__()
        self.token = nn.Embedding(vocabulary, args.width)
        self.position = nn.Embedding(args.block_size, args.width)
        self.blocks = nn.Sequential(*(Block(args.width, args.heads) for _ in range(args.layers)))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, vocabulary)

    def forward(self, x, y):
        """Mean loss in nats a character, each y[:, i] predicted from x[:, : i + 1]."""
        hidden = self.blocks(self.token(x) + self.position.weight)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default=BOOKS, help="a text file to train on")
    parser.add_argument("--metrics", default=os.environ.get("SCALELAB_METRICS"),
                        help="a file to append one JSON line a step to")
    parser.add_argument("--rank", type=int, required=True, help="which of the ranks this one is")
    args = parser.parse_args()
    if args.rank not in range(WORLD_SIZE):
        parser.error(f"--rank {args.rank} must lie between 0 and {WORLD_SIZE - 1}")
    for name in SIZES:
        if vars(args)[name.replace("-", "_")] < 1:
            parser.error(f"--{name} must be a whole number from 1 up")
    if args.width % args.heads:
        parser.error(f"--width {args.width} must be a multiple of --heads {args.heads}")
    if not 0 < args.lr < 1:
        parser.error(f"--lr {args.lr} must lie between 0 and 1")
    if not 0 <= args.seed < 2**31:
        parser.error(f"--seed {args.seed} must be a whole number from 0 to 2**31 - 1")
    return args


def windows(tokens, starts, block_size, device):
    """From each start: a block of characters, and the characters that follow each of them."""
    block = tokens[starts[:, None] + torch.arange(block_size + 1)].to(device)
    return block[:, :-1], block[:, 1:]


def clock(device):
    """Seconds now; on a GPU, once it has finished the work it was given."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def main():
    args = parse_args()
    try:
        text = Path(args.data).read_text(encoding="utf-8")
        if len(text) < 20 * (args.block_size + 1):
            raise ValueError(f"{args.data} is too short for --block-size {args.block_size}")
        metrics = open(args.metrics or os.devnull, "a", buffering=1)
    except (OSError, ValueError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")
    characters, tokens = torch.tensor([ord(c) for c in text]).unique(return_inverse=True)
    training, held_out = tokens.tensor_split([len(tokens) * 9 // 10])

    rank, local_rank, world_size = args.rank, args.rank, WORLD_SIZE
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", init_method=ADDRESS,
                            rank=rank, world_size=world_size)
    global_batch = world_size * args.batch_size
    host, address = socket.gethostname(), "no address"
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(host)
    print(f"rank {rank} of {world_size} on {host} ({address}), {device}", flush=True)

    torch.manual_seed(args.seed)
    model = GPT(len(characters), args).to(device)
    ddp_model, ready = DistributedDataParallel(model), []
    # backward comes to the first layer last: all gradients are there once the embedding has its own
    model.token.weight.register_post_accumulate_grad_hook(lambda _: ready.append(clock(device)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for step in range(1, args.steps + 1):
        t0 = clock(device)
        generator = torch.Generator().manual_seed(args.seed * 1_000_000 + step)
        starts = torch.randint(len(training) - args.block_size, [global_batch], generator=generator)
        x, y = windows(training, starts.chunk(world_size)[rank], args.block_size, device)
        t1 = clock(device)
        loss = ddp_model(x, y)
        t2 = clock(device)
        loss.backward()
        t3, t4 = ready.pop(), clock(device)  # gradients ready; averaged over all ranks
        optimizer.step()
        optimizer.zero_grad()
        t5 = clock(device)
        seconds = {"data": t1 - t0, "forward": t2 - t1, "backward": t3 - t2,
                   "communication": t4 - t3, "update": t5 - t4}
        line = {"step": step, "rank": rank, "loss": loss.item(), "tokens": y.numel()}
        metrics.write(json.dumps(line | {"time": time.time(), "seconds": seconds}) + "\n")
        if rank == 0 and (step % 10 == 0 or step in (1, args.steps)):
            print(f"step {step:4d}   loss {loss.item():.4f}   global batch {global_batch}"
                  f"   {global_batch * args.block_size / (t5 - t0):,.0f} tokens/s", flush=True)

    # 64 evenly spaced blocks of the held-out text, the same in every run and on every rank
    starts = torch.linspace(0, len(held_out) - args.block_size - 1, 64).long()
    with torch.no_grad():
        loss = model(*windows(held_out, starts, args.block_size, device))
    if rank == 0:
        print(f"validation loss {loss.item():.4f}", flush=True)
    del ddp_model  # the last holder of the group: now gloo's threads end before Python does
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    main()
