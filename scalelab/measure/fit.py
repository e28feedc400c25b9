"""alpha and beta from measured times, with their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from .cost import FORMS, count, number

SURE = 0.02  # no time is taken to be surer than this: the model itself is not


@dataclass(frozen=True)
class Fit:
    """seconds = latency * alpha + bandwidth * nbytes / beta, for the form and the ranks."""

    form: str
    world_size: int
    alpha: float  # seconds a message
    alpha_error: float  # one standard error, seconds
    beta: float  # bytes a second
    beta_error: float
    misfit: float  # median of |measured - fitted| / measured

    def seconds(self, nbytes: float) -> float:
        f = FORMS[self.form]
        n = self.world_size
        number("nbytes", nbytes, 0)
        return f.latency(n) * self.alpha + f.bandwidth(n) * nbytes / self.beta


def fit(points: Iterable[tuple[float, ...]], world_size: int, form: str = "ring") -> Fit:
    """Least squares over (bytes, seconds) or (bytes, seconds, error), each point relative to its
    own time: being off by 5 % counts alike at 4 KB and at 64 MB. Otherwise the large sizes drown
    alpha. A point whose time is less sure (error, a fraction of the time) counts for less.

    Raises ValueError where there is nothing to fit: fewer than two sizes, one rank, or times that
    do not grow with the size (then beta has no meaning). With two points there is nothing left over
    that would tell how far off they are, so the errors are those of their times: SURE at the least.
    """
    points = [
        (number("bytes", b, 0), float(t), *(number("error", x, 0) for x in rest))
        for b, t, *rest in points
    ]
    world_size = count("world_size", world_size)
    if world_size < 2:
        raise ValueError("one rank sends nothing: there is no alpha or beta")
    if form not in FORMS:
        raise ValueError(f"form {form!r}: use one of {', '.join(FORMS)}")
    if len({p[0] for p in points}) < 2:
        raise ValueError("a fit needs at least two sizes")
    if any(not math.isfinite(t) or t <= 0 for _, t, *_ in points):
        raise ValueError("times must be above 0")
    latency = FORMS[form].latency(world_size)
    bandwidth = FORMS[form].bandwidth(world_size)
    # t = latency * alpha + bandwidth * b / beta, divided by t: 1 = u * alpha + v / beta
    rows = [
        (latency / t, bandwidth * b / t, 1 / max([SURE, *error]) ** 2) for b, t, *error in points
    ]
    uu = sum(w * u * u for u, _, w in rows)
    uv = sum(w * u * v for u, v, w in rows)
    vv = sum(w * v * v for _, v, w in rows)
    su, sv = sum(w * u for u, _, w in rows), sum(w * v for _, v, w in rows)
    determinant = uu * vv - uv * uv
    if not determinant > 1e-12 * uu * vv:  # nor where it is NaN: numbers beyond all measure
        raise ValueError("the sizes are too close to tell alpha from beta")
    alpha = (su * vv - sv * uv) / determinant
    inverse_beta = (sv * uu - su * uv) / determinant
    if inverse_beta <= 0:
        raise ValueError("the times do not grow with the size: measure larger sizes")
    left, free = 1.0, len(points) - 2  # the weights' own errors, until the points say more
    if free:
        left = sum(w * (1 - u * alpha - v * inverse_beta) ** 2 for u, v, w in rows) / free
    beta = 1 / inverse_beta
    fitted = Fit(
        form, world_size, alpha, math.sqrt(left * vv / determinant),
        beta, beta * beta * math.sqrt(left * uu / determinant), 0.0,
    )  # fmt: skip
    misfit = median(abs(fitted.seconds(b) - t) / t for b, t, *_ in points)
    return Fit(**{**fitted.__dict__, "misfit": misfit})
