"""01.2: bytes by part, predicted and counted."""

from __future__ import annotations

import math
from types import SimpleNamespace

from ...bench import Bench
from ...verdict import Wrong

OPTIMIZERS = ("sgd", "momentum", "adamw")
BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
PARTS = ("parameters", "gradients", "optimizer", "activations")
CONFIGS = [  # vocabulary, batch_size, block_size, layers, width, heads, dtype, optimizer
    (81, 8, 64, 2, 64, 4, "float32", "adamw"),
    (81, 2, 128, 3, 96, 4, "float32", "sgd"),
    (300, 4, 32, 1, 128, 2, "bfloat16", "adamw"),
    (50, 1, 256, 4, 64, 2, "bfloat16", "momentum"),
    (120, 16, 16, 2, 64, 2, "float64", "adamw"),
]
NAMES = ("vocabulary", "batch_size", "block_size", "layers", "width", "heads", "dtype", "optimizer")
TOLERANCE = 0.02


def build_gpt(vocabulary, args):
    """The model of notebooks/scripts/train_one.py; a test proves that they are the same."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv = nn.Linear(width, 3 * width, bias=False)
            self.project = nn.Linear(width, width)
            self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.project(mixed.transpose(1, 2).flatten(-2))
            return x + self.shrink(F.gelu(self.grow(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Embedding(vocabulary, args.width)
            self.position = nn.Embedding(args.block_size, args.width)
            blocks = (Block(args.width, args.heads) for _ in range(args.layers))
            self.blocks = nn.Sequential(*blocks)
            self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, vocabulary)

        def forward(self, x, y):
            hidden = self.blocks(self.token(x) + self.position.weight)
            return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())

    torch.manual_seed(0)
    return GPT()


def warm_up() -> None:
    """A first optimizer imports a second's worth of modules: once here, not in each rank."""
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    optimizer.zero_grad()
    optimizer.step()


def _measure(rank, world_size, configs):
    """Bytes by part of a real step of each configuration."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    def nbytes(tensors):
        return sum(t.numel() * t.element_size() for t in tensors)

    found = []
    for config in configs:
        c = SimpleNamespace(**dict(zip(NAMES, config)))
        model = build_gpt(c.vocabulary, c).to(getattr(torch, c.dtype))
        make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD,
                "momentum": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)}  # fmt: skip
        optimizer = make[c.optimizer](model.parameters(), lr=1e-3)
        x, y = (torch.randint(c.vocabulary, (c.batch_size, c.block_size)) for _ in range(2))
        own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

        def keep(tensor, own=own, kept=kept):
            storage = tensor.untyped_storage()
            if tensor.is_floating_point() and storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(x, y)
        loss.backward()
        optimizer.step()
        state = [t for of in optimizer.state.values() for t in of.values() if t is not None]
        found.append({
            "parameters": nbytes(model.parameters()),
            "gradients": nbytes(p.grad for p in model.parameters()),
            "optimizer": nbytes(t for t in state if t.dim()),  # without the counts of steps
            "activations": sum(kept.values()),
        })  # fmt: skip
    return found


def _accounts(rank, world_size, answer, configs):
    found = []
    for config in configs:
        got = answer(**dict(zip(NAMES, config)))
        plain = isinstance(got, dict) and {str(k): _number(v) for k, v in got.items()}
        found.append(plain if isinstance(got, dict) else repr(got)[:80])
    return found


def _number(value):
    try:
        return float(value)
    except (TypeError, ValueError):
        return repr(value)[:40]


def judge_memory(bench: Bench, answer) -> str:
    warm_up()
    (got_all,) = bench.values(1, _accounts, answer, CONFIGS, group=False)
    (real_all,) = bench.values(1, _measure, CONFIGS, group=False)
    for part in PARTS:  # one part after the other: the first one wrong is named for all models
        for config, got, real in zip(CONFIGS, got_all, real_all):
            c = SimpleNamespace(**dict(zip(NAMES, config)))
            _judge_part(part, c, got, real)
    return (f"{len(CONFIGS)} models, {len(BYTES)} dtypes, {len(OPTIMIZERS)} optimizers: each part "
            f"within {TOLERANCE:.0%} of the bytes counted")  # fmt: skip


def _judge_part(part: str, c, got, real) -> None:
    where = (f"batch {c.batch_size}, block {c.block_size}, {c.layers} layers of width {c.width}, "
             f"{c.dtype}, {c.optimizer}")  # fmt: skip
    if not isinstance(got, dict) or set(got) != set(PARTS):
        keys = ", ".join(PARTS)
        raise Wrong(f"{where}: got {got!r}; return a dict of bytes with the keys {keys}")
    value, want = got[part], real[part]
    if isinstance(value, str) or not math.isfinite(value) or value < 0:
        raise Wrong(f"{where}: {part} is {value}; it must be a number of bytes")
    if abs(value - want) <= TOLERANCE * want:
        return
    why = _mistake(part, c, value, want)
    raise Wrong(f"{where}: {part} {value:,.0f} bytes, counted {want:,.0f}. {why}")


def _mistake(part: str, c, value: float, want: float) -> str:
    """The known way to this wrong number."""
    size, T = BYTES[c.dtype], c.batch_size * c.block_size
    block = c.layers * 16 * c.width
    head = 2 * c.width + c.vocabulary
    P = ((2 * c.vocabulary + c.block_size + 2) * c.width + c.vocabulary
         + c.layers * (12 * c.width**2 + 10 * c.width))  # fmt: skip
    scores = c.heads * c.block_size
    known: list[tuple[float, str]] = []
    if part in ("parameters", "gradients"):
        known = [
            (P, "That is the number of parameters: each takes several bytes"),
            (4 * P, f"That is 4 bytes a number; {c.dtype} has {size}"),
            (size * (P - c.vocabulary * c.width - c.vocabulary),
             "The head is missing: width x vocabulary, with a bias"),
            (size * (P - c.vocabulary * c.width), "Token embedding or head is missing: this model "
             "has both, vocabulary x width each, and does not share them"),
            (size * (P - c.block_size * c.width), "The position embedding is missing"),
            (size * 12 * c.layers * c.width**2, "That is 12 x width squared a layer: embeddings "
             "and head are parameters too"),
            (0, "Backward leaves a gradient of every parameter in .grad, of the same dtype"),
        ]  # fmt: skip
    elif part == "optimizer":
        numbers = {"sgd": 0, "momentum": 1, "adamw": 2}[c.optimizer]
        words = {"sgd": "plain SGD keeps nothing", "momentum": "momentum keeps one number a "
                 "parameter", "adamw": "AdamW keeps two numbers a parameter: the averages of the "
                 "gradient and of its square"}[c.optimizer]  # fmt: skip
        known = [(k * size * P, f"That is {k} number(s) a parameter; {words}") for k in range(4)
                 if k != numbers]  # fmt: skip
        words = "That is 4 bytes a number: the state has the dtype of the parameters"
        known += [(k * 4 * P, f"{words}, {c.dtype}, {size} bytes") for k in (1, 2)]
    else:
        right = T * (block + head)
        known = [
            (size * right / c.batch_size, "That is for one sequence: the batch is missing"),
            (size * right / c.block_size, "block_size is missing: activations are for each token"),
            (4 * right, f"That is 4 bytes a number; {c.dtype} has {size}"),
            (right, "That is a number of numbers, not of bytes"),
            (size * T * block, "The part after the blocks is missing: one more LayerNorm, and the "
             "probabilities of every token, vocabulary numbers each"),
            (size * T * (block + 2 * c.width), "The probabilities of every token are missing: "
             "vocabulary numbers each"),
            (size * T * (block + c.vocabulary), "The LayerNorm after the blocks is missing"),
            (size * T * (c.layers * c.width + head), "That is one number a layer, token and width: "
             "what checkpointing keeps. A block keeps what each of its operations takes in"),
            (size * T * (block / c.layers + head), "That is one block: each layer keeps its own"),
        ]  # fmt: skip
        for k in (1, 2, 3):
            known.append((size * T * (block + head + c.layers * k * scores),
                          "That has the attention scores in it, block_size x block_size a head: "
                          "the kernel here never keeps them"))  # fmt: skip
    near = [(abs(value - number), words) for number, words in known
            if abs(value - number) <= 0.015 * max(value, 1) and abs(number - want) > 1]  # fmt: skip
    if near:
        return min(near)[1]
    if part == "activations":
        return (f"That is {value / (size * T * c.layers * c.width):.1f} numbers a layer, token and "
                "width, in all. Count what each operation of Block.forward takes in")  # fmt: skip
    return f"That is {value / want:.2f} times as much as there is"
