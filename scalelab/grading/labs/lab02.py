"""Lab 02: ranks and collectives."""

from __future__ import annotations

from .. import count
from ..bench import Bench, Rank, raise_if_broken
from ..exercise import Exercise
from ..verdict import Wrong


def _one(rank, world_size, answer, cases):
    return [answer(*case) for case in cases]


def judge_locate(bench: Bench, answer) -> str:
    layouts = [[1], [4], [1, 1], [2, 2], [8, 8, 8], [3, 1], [1, 2, 3]]
    cases = [(rank, layout) for layout in layouts for rank in range(sum(layout))]
    (found,) = bench.values(1, _one, answer, cases, group=False)
    for (rank, layout), got in zip(cases, found):
        node, local = 0, rank
        while local >= layout[node]:
            node, local = node + 1, local - layout[node]
        want = (node, local, sum(layout))
        if got == want:
            continue
        at = f"rank {rank} of {layout}"
        if got is None:
            raise Wrong(f"{at}: the function returned None; return (node, local_rank, world_size)")
        try:
            got_node, got_local, got_world = got
        except (TypeError, ValueError):
            raise Wrong(f"{at}: got {got!r}; return (node, local_rank, world_size)") from None
        if got_world != want[2]:
            hint = "world_size counts ranks over all nodes, not nodes"
        elif got_local == rank:
            hint = "local_rank starts from 0 again on every node; this is the global rank"
        elif len(set(layout)) > 1 and layout[0] and got_node == rank // layout[0]:
            hint = "rank // nproc_per_node holds only where every node has as many ranks"
        else:
            hint = "count node by node: its ranks are those after all the ranks before it"
        raise Wrong(f"{at}: got {got!r}, it is {want}: {hint}")
    return f"{len(cases)} ranks of {len(layouts)} layouts, uneven ones too"


def _ring(rank, world_size, answer, size):
    import torch

    mine = torch.arange(size, dtype=torch.float64) + 1000.0 * rank
    before = mine.clone()
    got = answer(mine)
    return {"got": mine if got is None else got, "before": before, "returned": got is not None}


def judge_ring(bench: Bench, answer) -> str:
    import torch

    for world_size in (2, 3, 4):
        for size in (12 * world_size, 12 * world_size + 1):
            found = bench.ranks(world_size, _ring, answer, size)
            raise_if_broken(found)
            total = torch.stack([f.value["before"] for f in found]).sum(0)
            _judge_ring_once(found, total, size, world_size)
    return "equal to the sum at 2, 3 and 4 ranks, with 2(n-1)/n of the tensor sent by each"


def _judge_ring_once(found: list[Rank], total, size: int, n: int) -> None:
    import torch

    where = f"{n} ranks, {size} numbers"
    used = {name for f in found for name in count.collectives(f.calls)} - {"barrier"}
    if used:
        raise Wrong(f"{where}: this calls {', '.join(sorted(used))}; write it from send and recv")
    for f in found:
        got = f.value["got"]
        if not isinstance(got, torch.Tensor) or got.shape != total.shape:
            shape = tuple(got.shape) if isinstance(got, torch.Tensor) else repr(got)[:60]
            raise Wrong(f"{where}: rank {f.rank} has {shape}, it should have {tuple(total.shape)}")
        if torch.equal(got, f.value["before"]):
            raise Wrong(f"{where}: rank {f.rank}'s tensor is as before: return the sum, or write it "
                        "into the tensor that was given")  # fmt: skip
        if torch.isnan(got).any():
            raise Wrong(f"{where}: rank {f.rank} has NaN in it")
        if torch.allclose(got, total / n):
            raise Wrong(f"{where}: rank {f.rank} has the mean; the task is the sum")
        if not torch.allclose(got, total):
            bad = (got != total).nonzero().flatten()
            raise Wrong(
                f"{where}: rank {f.rank} differs in {len(bad)} of {size} numbers, first in number "
                f"{int(bad[0])}: {float(got[bad[0]]):g}, the sum is {float(total[bad[0]]):g}. Which "
                "chunk does a rank own after the first n-1 rounds?"
            )
    item = 8
    ideal = 2 * (n - 1) / n * size * item
    for f in found:
        sent = count.sent(f.calls)
        if sent > ideal + 2 * n * item:
            raise Wrong(
                f"{where}: right sum, but rank {f.rank} sent {sent} bytes; a ring sends "
                f"2(n-1)/n of the tensor, {ideal:.0f} bytes. Send one chunk a round, not the whole"
            )


EXERCISES = [
    Exercise(
        id="02.1", title="where is this rank?", difficulty=1, minutes=5,
        target="every rank of any layout, uneven ones too",
        hints=(
            "How many ranks stand before the first rank of node 1? Of node 2?",
            "Walk over the nodes and take away each node's count while the rank is not below it.",
            "What is left of the rank when you stop is its local_rank.",
        ),
        judge=judge_locate,
    ),
    Exercise(
        id="02.2", title="a ring all-reduce", difficulty=4, minutes=30,
        target="the sum on every rank, at most 2(n-1)/n of the tensor's bytes sent by each",
        hints=(
            "Cut the tensor into n chunks (torch.chunk may give fewer: tensor_split does not).",
            "Reduce-scatter: in round k, send chunk (rank - k) % n to the right, receive chunk "
            "(rank - k - 1) % n from the left and add it. After n-1 rounds rank r owns chunk "
            "(r + 1) % n.",
            "All-gather: the same round and direction, but what arrives replaces the chunk. Let "
            "isend start before recv waits, or all wait for ever.",
        ),
        judge=judge_ring,
    ),
]  # fmt: skip
