"""What the exercises of lab 02 share."""

from __future__ import annotations


def what(value) -> str:
    """A wrong value, in a few words."""
    if hasattr(value, "shape"):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value)[:60]


def call_each(rank, world_size, answer, cases):
    return [answer(*case) for case in cases]
