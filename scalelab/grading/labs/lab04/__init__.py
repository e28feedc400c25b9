"""Lab 04: measuring the network."""

from __future__ import annotations

from ...exercise import Exercise
from .busbw import judge_busbw
from .claims import judge_claims
from .fit import judge_fit
from .placing import judge_placing
from .step import judge_step

EXERCISES = [
    Exercise(
        id="04.1", title="busbw from a timing", difficulty=1, minutes=10,
        target="algbw and busbw of five operations, 1 to 16 ranks, to 1e-6; equal to the bytes "
               "that real ranks send",
        hints=(
            "algbw is bytes / seconds / 1e9. busbw is algbw times what the busiest rank sends, as "
            "a share of the bytes. Count that for a ring of n.",
            "A reduce-scatter: n-1 rounds, one part of bytes/n each. An all-gather: the same. An "
            "all-reduce is the one and then the other. A broadcast: all bytes, once.",
            "The factors: all-reduce 2(n-1)/n, all-gather and reduce-scatter (n-1)/n, broadcast "
            "and send-recv 1.",
        ),
        judge=judge_busbw,
    ),
    Exercise(
        id="04.2", title="fit alpha and beta", difficulty=3, minutes=20,
        target="alpha within 10 %, beta within 5 %, from sweeps of 1 KiB to 64 MiB with 4 % of "
               "noise",
        hints=(
            "With x = size, the ring's time is a straight line: intercept 2(n-1) alpha, slope "
            "2(n-1)/n / beta. How much do the smallest sizes count in your fit?",
            "The noise is a share of each time, so the error that counts is the relative one: "
            "(model - t) / t. Divide each row of the least squares by its t.",
            "np.linalg.lstsq(rows, np.ones(len(t))), where a row is [2(n-1) / t, 2(n-1)/n * size / "
            "t], gives alpha and 1 / beta.",
        ),
        judge=judge_fit,
    ),
    Exercise(
        id="04.3", title="predict a step on a link not yet measured", difficulty=3, minutes=25,
        target="seconds of a DDP step within 15 %, on links from 100 mbit to NVLink, 1 to 8 ranks",
        hints=(
            "Only the last micro-batch all-reduces. Draw its backward as a line, mark where each "
            "bucket is ready, and draw the all-reduces on a second line below.",
            "A bucket starts when it is ready and the one before it has ended: start = max(ready, "
            "end). ready goes from 0 to backward with the bytes so far.",
            "step = (k-1)(forward + backward) + forward + max(backward, end of the last bucket) + "
            "update, end = start + 2(n-1) alpha + 2(n-1)/n bytes/beta.",
        ),
        judge=judge_step, seconds=180,
    ),
    Exercise(
        id="04.4", title="place jobs on a topology", difficulty=3, minutes=20,
        target="rings of 8 and of 4 and 4 GPUs with the best slowest hop, on three machines, "
               "however numbered",
        hints=(
            "A ring is as quick as its slowest hop, and it has as many hops as GPUs: the last one "
            "leads back to the first.",
            "Give each link a number for its speed. Then try all: itertools.permutations of the "
            "GPUs after the first, itertools.combinations for the first job of four.",
            "key = (speed of the slowest hop, minus how many hops are that slow): max(rings, "
            "key=key). For two jobs compare sorted([key(a), key(b)]).",
        ),
        judge=judge_placing,
    ),
    Exercise(
        id="04.5", title="find the wrong claim", difficulty=3, minutes=20,
        target="jobs of each report, and whether it supports its claim, right in all of 26",
        hints=(
            "A job prints its own list of ranks. What does it mean if Rank 0 is in a file twice?",
            "Go through the lines `#  Rank …` in order. Rank 0 begins a job; rank r belongs to a "
            "job that has r ranks so far, rather to one that has its host already.",
            "Supported: exactly one job, of the claimed ranks and different hosts; row[-5] and "
            "row[-1] (#wrong) are 0; the largest of row[-6] and row[-2] (busbw) reaches the claim.",
        ),
        judge=judge_claims,
    ),
]  # fmt: skip
