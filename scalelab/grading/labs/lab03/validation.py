"""03.5: loss and accuracy over all samples."""

from __future__ import annotations

import math

from ...bench import Bench
from ...verdict import Wrong
from .parts import data, net


def _validate(rank, world_size, answer, size, batch_size):
    model = net().train()
    xs, ys = data(3, size)
    # Samples are not alike: a mean of means over unequal parts shows.
    ys[: size // 2] = 0
    seen = []
    model.register_forward_pre_hook(lambda m, a: seen.extend(float(v) for v in a[0][:, 0]))
    got = answer(model, xs, ys, batch_size)
    place = {float(v): i for i, v in enumerate(xs[:, 0])}
    pairs = None
    if isinstance(got, (tuple, list)) and len(got) == 2:
        try:
            pairs = [float(v) for v in got]
        except (TypeError, ValueError):
            pass
    return {"got": pairs, "raw": repr(got)[:80], "seen": [place.get(v, -1) for v in seen]}


def _validate_alone(rank, world_size, size):
    import torch
    from torch.nn.functional import cross_entropy

    model = net()
    xs, ys = data(3, size)
    ys[: size // 2] = 0
    with torch.no_grad():
        out = model(xs)
        accuracy = (out.argmax(1) == ys).double().mean().item()
        return [cross_entropy(out, ys).item(), accuracy]


def judge_validation(bench: Bench, answer) -> str:
    cases = [(2, 16, 4), (2, 13, 4), (3, 13, 4), (3, 2, 4)]
    for n, size, batch_size in cases:
        (want,) = bench.values(1, _validate_alone, size, group=False)
        values = bench.values(n, _validate, answer, size, batch_size, timeout=8)
        _judge_validation_once(values, want, n, size)
    return (f"{len(cases)} cases, also with fewer samples than ranks: loss and accuracy of all "
            "samples, each counted once, the same on every rank")  # fmt: skip


def _judge_validation_once(values, want, n, size) -> None:
    where = f"{size} samples on {n} ranks"
    for r, v in enumerate(values):
        if v["got"] is None:
            if any(w["got"] for w in values):
                raise Wrong(f"{where}: rank {r} returned {v['raw']}; every rank has to know the "
                            "result, not rank 0 alone")  # fmt: skip
            raise Wrong(f"{where}: got {v['raw']}; return (loss, accuracy), two numbers")
    read = sorted(i for v in values for i in v["seen"])
    if len(read) >= n * size and n > 1 and all(len(v["seen"]) >= size for v in values):
        raise Wrong(f"{where}: every rank goes through all {size} samples: {n} times the work. "
                    "Give each rank its part")  # fmt: skip
    if len(read) > len(set(read)):
        twice = len(read) - len(set(read))
        raise Wrong(f"{where}: {twice} sample(s) are counted twice. DistributedSampler pads, so "
                    "that all ranks have the same number; range(rank, size, world_size) does "
                    "not")  # fmt: skip
    if len(set(read)) < size:
        raise Wrong(f"{where}: {size - len(set(read))} sample(s) are never looked at: drop_last, "
                    "or a division that loses the rest?")  # fmt: skip
    for r, v in enumerate(values):
        if any(math.isnan(g) for g in v["got"]):
            raise Wrong(f"{where}: rank {r} got NaN: a rank may have no sample at all. Sum first, "
                        "and divide once, after the all-reduce")  # fmt: skip
    if any(abs(a - b) > 1e-9 for v in values for a, b in zip(v["got"], values[0]["got"])):
        got = [round(v["got"][0], 6) for v in values]
        raise Wrong(f"{where}: the ranks return different losses, {got}: all_reduce gives the sum "
                    "to every rank; reduce gives it to one")  # fmt: skip
    for name, got, right in zip(("loss", "accuracy"), values[0]["got"], want):
        if abs(got - right) > 1e-6:
            raise Wrong(f"{where}: the {name} is {got:.6f}, over all samples it is {right:.6f}. A "
                        "mean of means (of ranks, or of batches) is not the mean when they differ "
                        "in size: all-reduce sums and counts")  # fmt: skip
