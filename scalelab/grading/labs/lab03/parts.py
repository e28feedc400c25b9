"""The small model and data of exercises 03.3 to 03.5."""

from __future__ import annotations

ROWS, WIDTH = 6, 8


def warm() -> None:
    """Import once, before ranks are forked, what each rank's optimizer would: a second a rank."""
    import torch._dynamo  # noqa: F401


def net():
    import torch

    torch.manual_seed(0)
    parts = [torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)]
    return torch.nn.Sequential(*parts).double()


def data(seed, rows):
    import torch

    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=g).double(), torch.randint(3, [rows], generator=g)


def flat(model):
    import torch

    return torch.cat([p.detach().flatten() for p in model.parameters()])
