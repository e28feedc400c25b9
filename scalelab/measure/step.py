"""The time of one DDP step, predicted from its parts.

A backward pass makes gradients from the last layer to the first. DDP gathers them in buckets and
all-reduces a bucket as soon as it is full, while backward goes on; the buckets' all-reduces follow
one another. So what a step pays for the network is what is left when backward is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .cost import count, number

MIB = 1 << 20


@dataclass(frozen=True)
class Step:
    """seconds: of the whole step. communication: of all its all-reduces. exposed: what of them is
    not hidden behind backward, and share its part of the step."""

    seconds: float
    communication: float
    exposed: float

    @property
    def share(self) -> float:
        return self.exposed / self.seconds if self.seconds else 0.0


def buckets(parameter_bytes: Iterable[int], cap: int | None = None) -> list[int]:
    """Bytes of DDP's buckets, in the order in which backward fills them, from the bytes of the
    parameters in the order in which the model registers them (and uses them).

    A bucket is closed once it holds `cap` bytes or more: what bucket_cap_mb says. Without one it is
    25 MiB, but 1 MiB for the first, so that the network starts early. Source:
    torch/nn/parallel/distributed.py and compute_bucket_assignment_by_size in its reducer.cpp.
    """
    first, cap = (MIB, 25 * MIB) if cap is None else (number("cap", cap, 0),) * 2
    found, filling, limit = [], 0, first
    for nbytes in reversed(list(parameter_bytes)):
        number("parameter_bytes", nbytes, 0)
        filling += nbytes
        if filling >= limit:
            found.append(filling)
            filling, limit = 0, cap
    return found + [filling] * bool(filling)


def predict(
    forward: float,
    backward: float,
    update: float,
    buckets: list[int],
    all_reduce: Callable[[float], float],
    micro_batches: int = 1,
) -> Step:
    """A step of `micro_batches` passes under no_sync but the last.

    forward, backward, update: seconds, measured without communication; all_reduce: seconds for so
    many bytes, such as Fit.seconds. A bucket is taken to be ready when backward has done the
    share of its work that the bucket, with those before it, has of all bytes. Raises ValueError for
    a time or a size below 0, or less than one micro-batch.
    """
    for what, value in (("forward", forward), ("backward", backward), ("update", update)):
        number(what, value, 0)
    count("micro_batches", micro_batches)
    buckets = [number("bucket", nbytes, 0) for nbytes in buckets]
    total, done, free, communication = sum(buckets), 0, 0.0, 0.0
    for nbytes in buckets:
        done += nbytes
        # A fitted alpha can lie a little below 0, and with it the time of a small bucket.
        took = max(number("all_reduce's time", all_reduce(nbytes)), 0.0)
        ready = backward * done / (total or 1)
        free = max(free, ready) + took  # when this bucket's all-reduce is over
        communication += took
    exposed = max(free - backward, 0.0)
    seconds = micro_batches * (forward + backward) + exposed + update
    return Step(seconds, communication, exposed)
