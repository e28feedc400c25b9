"""01.3: one update from micro-batches, compared with the whole batch."""

from __future__ import annotations

from ...bench import Bench
from ...verdict import Wrong
from .memory import warm_up

LR = 0.1
UPDATES = 3
CASES = ((12, 4, "sgd"), (20, 8, "sgd"), (20, 8, "adamw"), (6, 8, "sgd"))


def _plain(model, optimizer, x, y, micro):
    """The reference: the large batch at once. Also the gradient of each micro-batch's own mean."""
    import torch

    parts = []
    for xs, ys in zip(x.split(micro), y.split(micro)):
        gradients = torch.autograd.grad(model(xs, ys), list(model.parameters()))
        parts.append(torch.cat([g.flatten() for g in gradients]))
    optimizer.zero_grad()
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    return loss, parts


def _accumulate(answer, size, micro, name, reference):
    """UPDATES updates of a small model by the answer, or by the plain large batch."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    events: list[tuple[str, int]] = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4))

        def forward(self, x, y):
            loss = F.cross_entropy(self.layers(x), y)
            events.append(("forward", len(x)))
            if loss.requires_grad:
                loss.register_hook(lambda g: events.append(("backward", 0)))
            return loss

    torch.manual_seed(0)
    model = Model().double()
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    optimizer = make(model.parameters(), lr=LR)
    real_step = optimizer.step

    def step(*args, **kwargs):
        events.append(("step", 0))
        return real_step(*args, **kwargs)

    optimizer.step = step
    updates = []
    for _ in range(UPDATES):
        # classes in order: the micro-batches differ, so that their weights matter
        x, y = torch.randn(size, 5).double() * 3, torch.arange(size) * 4 // size
        before, first = [p.detach().clone() for p in model.parameters()], len(events)
        parts: list = []
        if reference:
            returned, parts = _plain(model, optimizer, x, y, micro)
        else:
            returned = answer(model, optimizer, x, y, micro)
        moved = torch.cat([(p.detach() - q).flatten() for p, q in zip(model.parameters(), before)])
        updates.append({"moved": moved, "events": events[first:], "loss": _loss(returned),
                        "parts": parts})  # fmt: skip
    return updates


def _loss(value):
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return repr(value)[:60]


def _all(rank, world_size, answer, reference):
    return [_accumulate(answer, *case, reference) for case in CASES]


def judge_accumulate(bench: Bench, answer) -> str:
    warm_up()
    (found,) = bench.values(1, _all, answer, False, group=False)
    (wanted,) = bench.values(1, _all, None, True, group=False)
    for (size, micro, name), case, want in zip(CASES, found, wanted):
        where = f"batch {size} in micro-batches of {micro}, {name}"
        for number, (got, right) in enumerate(zip(case, want), 1):
            _judge_update(f"{where}, update {number}", size, micro, number, got, right)
    return ("parameters and loss as with the whole batch, to 1e-9, in even, uneven and single "
            "micro-batches, with SGD and AdamW")  # fmt: skip


def _judge_update(where, size, micro, number, got, right) -> None:
    events, moved = got["events"], got["moved"]
    forwards = [n for what, n in events if what == "forward"]
    steps = sum(what == "step" for what, _ in events)
    if not forwards:
        raise Wrong(f"{where}: the model was never called; call model(x, y) for each micro-batch")
    if max(forwards) > micro:
        raise Wrong(f"{where}: the model was given {max(forwards)} samples at once; only {micro} "
                    "fit on the device")  # fmt: skip
    if sum(forwards) != size:
        raise Wrong(f"{where}: the model saw {sum(forwards)} samples, the batch has {size}. Where "
                    "is the last, smaller micro-batch?")  # fmt: skip
    if steps != 1:
        why = ("optimizer.step() belongs after the loop: one batch, one update" if steps
               else "without optimizer.step() nothing is learnt")  # fmt: skip
        raise Wrong(f"{where}: optimizer.step() was called {steps} times: {why}")
    if not any(what == "backward" for what, _ in events):
        raise Wrong(f"{where}: backward() was never called")
    alive = most = 0
    for what, _ in events:
        alive += {"forward": 1, "backward": -1}.get(what, 0)
        most = max(most, alive)
    if most > 1:
        raise Wrong(f"{where}: the activations of {most} micro-batches were alive at once, so no "
                    "memory was saved: call backward() before the next forward")  # fmt: skip
    _judge_moved(where, size, micro, number, moved, right)
    _judge_loss(where, got["loss"], right["loss"])


def _judge_moved(where, size, micro, number, moved, reference) -> None:
    import torch

    right = reference["moved"]
    if moved.shape != right.shape or not torch.isfinite(moved).all():
        raise Wrong(f"{where}: the parameters are not finite numbers any more")
    if torch.allclose(moved, right, rtol=0, atol=1e-9):
        return
    if not moved.any():
        raise Wrong(f"{where}: no parameter moved: the gradients were gone when step() came. Where "
                    "does zero_grad() stand?")  # fmt: skip
    ratio = float(moved.norm() / right.norm())
    where = f"{where}: the update is {ratio:.3f} times as long as that of the whole batch"
    if number > 1:
        raise Wrong(f"{where}. Update 1 was right: gradients of the update before are still there. "
                    "zero_grad() once for each batch")  # fmt: skip
    parts = torch.stack(reference["parts"])
    count = len(parts)
    known = [
        (parts.sum(0), f"That is the sum of {count} means, not divided. The loss is a mean, so "
         "each micro-batch counts for its share of the batch only"),
        (parts.mean(0), f"That is the mean of {count} means, and they are not of equal size: the "
         f"last micro-batch has {size - (count - 1) * micro} samples, the others {micro}. Weigh "
         "each by its number of samples"),
        (parts[-1], "That is the gradient of the last micro-batch alone: zero_grad() in the loop "
         "threw the others away"),
        (parts[-1] / count, "That is the gradient of the last micro-batch alone: zero_grad() in "
         "the loop threw the others away"),
        (parts[-1] * (size - (count - 1) * micro) / size, "That is the gradient of the last "
         "micro-batch alone: zero_grad() in the loop threw the others away"),
        (parts[0], "That is the gradient of the first micro-batch alone"),
    ]  # fmt: skip
    for gradient, words in known:
        if torch.allclose(moved, -LR * gradient, rtol=0, atol=1e-9):
            raise Wrong(f"{where}. {words}")
    cosine = float(torch.dot(moved, right) / (moved.norm() * right.norm()))
    if cosine > 1 - 1e-9:
        raise Wrong(f"{where}, in the right direction. By what is each loss divided? {count} "
                    "micro-batches together must count for one batch")  # fmt: skip
    raise Wrong(f"{where}, and points elsewhere (cosine {cosine:.4f}). What is each micro-batch's "
                "share of the batch?")  # fmt: skip


def _judge_loss(where, got, right) -> None:
    if isinstance(got, str):
        raise Wrong(f"{where}: the update is right, but it returned {got}; return the mean loss of "
                    "the whole batch, a number")  # fmt: skip
    if abs(got - right) <= 1e-9:
        return
    raise Wrong(f"{where}: the update is right, but it returned the loss {got:.6f}; the mean over "
                f"the whole batch is {right:.6f}. Add up what you called backward() on, not the "
                "last one, nor the undivided ones")  # fmt: skip
