"""02.4: which rank called what, read from a real mismatch report."""

from __future__ import annotations

import random
import time

from ...bench import Bench, free_port
from ...verdict import Wrong
from .parts import call_each, what

OPERATIONS = {
    "ALLREDUCE": lambda dist, x, n: dist.all_reduce(x),
    "BROADCAST": lambda dist, x, n: dist.broadcast(x, src=0),
    "ALLGATHER": lambda dist, x, n: dist.all_gather([x.clone() for _ in range(n)], x),
    "REDUCE": lambda dist, x, n: dist.reduce(x, dst=0),
}


def _disagree(rank, world_size, port, plan):
    """A real mismatch on real ranks; the text of this rank's report."""
    import os
    import traceback
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=world_size, timeout=timedelta(seconds=8))  # fmt: skip
    text = ""
    for _ in range(plan["before"]):
        dist.all_reduce(torch.ones(2))
    operation, shape = plan["calls"][rank]
    try:
        OPERATIONS[operation](dist, torch.ones(shape), world_size)
    except RuntimeError:
        text = traceback.format_exc()
    time.sleep(0.2)  # a rank that leaves early would cut the others' reports short
    dist.destroy_process_group()
    return text


def _mismatches(bench: Bench) -> list[tuple[dict, list[str]]]:
    """Fresh reports: [(plan, texts in no order)]. Two digits of sequence number, more than one
    dimension, and more than two ranks are among them."""
    draw = random.Random()
    made = []
    for n, kind, before in ((2, "operation", 0), (4, "operation", draw.randint(12, 40)),
                            (3, "shape", draw.randint(3, 9))):  # fmt: skip
        usual, other = draw.sample(sorted(OPERATIONS), 2)
        shape = [draw.randint(2, 5), draw.randint(2, 5)]
        odd = draw.randrange(1, n)
        different = (other, shape) if kind == "operation" else (usual, [shape[0], shape[1] + 1])
        calls = {rank: different if rank == odd else (usual, shape) for rank in range(n)}
        plan = {"before": before, "calls": calls, "odd": odd}
        texts = bench.values(n, _disagree, free_port(), plan, group=False)
        if not all("Detected mismatch" in text for text in texts):
            raise RuntimeError("this PyTorch did not report a mismatch under DETAIL")
        while n > 2 and texts[0].count("Rank 0 is running") and texts == sorted(texts, key=_own):
            draw.shuffle(texts)  # logs are read in any order
        made.append((plan, texts))
    return made


def _own(text: str) -> int:
    return int(text.split("on ranks. Rank ")[1].split()[0])


def judge_report(bench: Bench, answer) -> str:
    made = _mismatches(bench)
    cases = [(list(texts),) for _, texts in made]
    (found,) = bench.values(1, call_each, answer, cases, group=False,
                            timeout=6)  # fmt: skip
    for (plan, texts), got in zip(made, found):
        _judge_report_once(plan, texts, got)
    return "three fresh mismatches read from their reports: operations, shapes, and who was where"


def _judge_report_once(plan: dict, texts: list[str], got) -> None:
    n, want = len(texts), {r: (op, list(shape)) for r, (op, shape) in plan["calls"].items()}
    where = f"reports of {n} ranks"
    try:
        number, calls = got
        calls = {int(r): (str(op), [int(s) for s in shape]) for r, (op, shape) in calls.items()}
    except (TypeError, ValueError, AttributeError, RuntimeError):
        raise Wrong(f"{where}: got {what(got)}; return (sequence number, {{rank: (operation, "
                    "shape)}), a shape as a list of whole numbers") from None  # fmt: skip
    if number != plan["before"]:
        if number == plan["before"] + 1:
            hint = "SequenceNumber counts from 0; return it as the report gives it"
        elif str(plan["before"]).startswith(str(number)):
            hint = "it may have more than one digit"
        else:
            hint = "it stands behind SequenceNumber="
        raise Wrong(f"{where}: sequence number {number!r}, the ranks parted at {plan['before']}: "
                    f"{hint}")  # fmt: skip
    if calls == want:
        return
    if missing := sorted(want.keys() - calls.keys()):
        raise Wrong(f"{where}: nothing about rank {missing[0]}: a report speaks of two ranks only, "
                    "so read all the reports")  # fmt: skip
    if extra := sorted(calls.keys() - want.keys()):
        raise Wrong(f"{where}: there is no rank {extra[0]}")
    for i, text in enumerate(texts):
        by_place = {k: want[_own(t)] for k, t in enumerate(texts)}
        if calls == by_place and by_place != want:
            raise Wrong(f"{where}: report {i} is not rank {i}'s: reports come in any order. "
                        f"It says itself whose it is: Rank {_own(text)} is running …")  # fmt: skip
    rank = next(r for r in want if calls[r] != want[r])
    at = f"{where}: rank {rank} called {want[rank][0]} with shape {want[rank][1]}, not " \
         f"{calls[rank][0]} with {calls[rank][1]}"  # fmt: skip
    if calls[rank][0] != want[rank][0] and calls[rank][0] in {op for op, _ in want.values()}:
        at += ": that is the other rank's call; the text behind 'but Rank' is about another rank"
    elif calls[rank][1] == want[rank][1][:1]:
        at += ": a shape has as many numbers as the tensor has dimensions"
    raise Wrong(at)
