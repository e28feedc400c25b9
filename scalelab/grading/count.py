"""Counts what an answer sends: every point-to-point and collective call of one rank.

The count is of the bytes that the caller hands to torch.distributed, rank by rank. It says what
the algorithm moves, whatever a backend makes of it (gloo's reduce_scatter moves an all-reduce).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor",
               "gather", "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all",
               "all_to_all_single", "all_gather_object", "broadcast_object_list",
               "gather_object", "scatter_object_list", "barrier",
               "all_gather_single", "reduce_scatter_single", "all_gather_coalesced")  # fmt: skip


def _bytes(value) -> int:
    if hasattr(value, "element_size"):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_bytes(v) for v in value)
    return 0


@contextlib.contextmanager
def calls() -> Iterator[list[tuple[str, int]]]:
    """Within it, each call of torch.distributed by this process is noted as (name, bytes).

    send and isend give the bytes sent, recv and irecv the bytes received, a collective those of
    its first tensor argument. A batch of P2POps counts as its isends and irecvs.
    """
    import torch.distributed as dist

    seen: list[tuple[str, int]] = []
    names = ("send", "isend", "recv", "irecv", *COLLECTIVES)
    places = [dist, dist.distributed_c10d]
    names = [name for name in names if hasattr(dist.distributed_c10d, name)]  # by version
    real = {name: getattr(dist.distributed_c10d, name) for name in names}
    inside = [0]  # a collective that is made of others counts once

    def noting(name, function):
        def call(*args, **kwargs):
            if not inside[0]:
                first = args[0] if args else next(iter(kwargs.values()), None)
                seen.append((name, _bytes(first)))
            inside[0] += 1
            try:
                return function(*args, **kwargs)
            finally:
                inside[0] -= 1

        call.__name__ = name
        return call

    # P2POp checks its operation against these very functions.
    wrapped = {name: noting(name, function) for name, function in real.items()}
    try:
        for place in places:
            for name, function in wrapped.items():
                if hasattr(place, name):
                    setattr(place, name, function)
        yield seen
    finally:
        for place in places:
            for name, function in real.items():
                if hasattr(place, name):
                    setattr(place, name, function)


def sent(seen: list[tuple[str, int]]) -> int:
    """Bytes that this rank handed to send and isend."""
    return sum(n for name, n in seen if name in ("send", "isend"))


def collectives(seen: list[tuple[str, int]]) -> list[str]:
    """Names of the collectives that this rank called, in order."""
    return [name for name, _ in seen if name in COLLECTIVES]
