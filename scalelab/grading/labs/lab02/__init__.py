"""Lab 02: ranks and collectives."""

from __future__ import annotations

import time
from math import nan as NAN

from ... import count
from ...bench import PEER_LOST, Bench, Rank, raise_if_broken
from ...exercise import Exercise
from ...follow import Notes, noted, rounds
from ...verdict import Wrong
from .mismatch import judge_report
from .parts import call_each, what


def judge_locate(bench: Bench, answer) -> str:
    layouts = [[4], [2, 2], [1], [1, 1], [8, 8, 8], [3, 1], [1, 2, 3]]
    cases = [(rank, layout) for layout in layouts for rank in range(sum(layout))]
    (found,) = bench.values(1, call_each, answer, cases, group=False, timeout=6)
    for (rank, layout), got in zip(cases, found):
        node, local = 0, rank
        while local >= layout[node]:
            node, local = node + 1, local - layout[node]
        want = (node, local, sum(layout))
        at = f"rank {rank} of {layout}"
        if got is None:
            raise Wrong(f"{at}: the function returned None; return (node, local_rank, world_size)")
        try:
            got_node, got_local, got_world = (int(number) for number in got)
        except (TypeError, ValueError, RuntimeError):
            raise Wrong(f"{at}: got {what(got)}; return (node, local_rank, world_size)") from None
        if (got_node, got_local, got_world) == want:
            continue
        if got_world != want[2]:
            hint = "world_size counts ranks over all nodes, not nodes"
        elif (got_node, got_local) in ((node + 1, local + 1), (node, local + 1), (node + 1, local)):
            hint = "nodes and ranks are counted from 0"
        elif got_local == rank and node > 0:
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
        for size in (12 * world_size, 12 * world_size + 1, world_size + 1):
            found = bench.ranks(world_size, _ring, answer, size, timeout=6)
            try:
                raise_if_broken(found)
            except Wrong as wrong:
                hint = ""
                if any(f.hung for f in found):
                    hint = "\nIf that is recv on every rank, nobody sends: isend first, then recv"
                elif "IndexError" in str(wrong):
                    hint = "\ntorch.chunk may give fewer chunks than asked; tensor_split gives n"
                raise Wrong(f"{size} numbers: {wrong}{hint}") from None
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
            raise Wrong(f"{where}: rank {f.rank} has {what(got)}; its shape is ({size},)")
        if torch.equal(got, f.value["before"]):
            raise Wrong(f"{where}: rank {f.rank}'s tensor is as before: return the sum, or "
                        "write it into the tensor that was given")  # fmt: skip
        if torch.isnan(got).any():
            raise Wrong(f"{where}: rank {f.rank} has NaN in it")
        if torch.allclose(got, total / n):
            raise Wrong(f"{where}: rank {f.rank} has the mean; the task is the sum")
        if not torch.allclose(got, total):
            chunks = [t.tensor_split(n) for t in (got, total, f.value["before"])]
            whole = sum(torch.allclose(c, want) for c, want, _ in zip(*chunks))
            untouched = sum(torch.equal(c, old) for c, _, old in zip(*chunks))
            if whole == 1 and untouched:
                raise Wrong(f"{where}: rank {f.rank} holds one chunk of the sum, not the others: "
                            "this is the reduce-scatter; the all-gather is missing")  # fmt: skip
            bad = (got != total).nonzero().flatten()
            raise Wrong(
                f"{where}: rank {f.rank} differs in {len(bad)} of {size} numbers, first in number "
                f"{int(bad[0])}: {float(got[bad[0]]):g}, the sum is {float(total[bad[0]]):g}. "
                "Which chunk does a rank own after the first n-1 rounds?"
            )
    item = 8
    ideal = 2 * (n - 1) / n * size * item
    sends = [count.sent(f.calls) for f in found]
    if n > 2 and max(sends) > ideal + 2 * n * item and min(sends) < ideal - 2 * n * item:
        raise Wrong(f"{where}: right sum, but the ranks sent {sends} bytes: one rank does the work "
                    f"of all. In a ring each sends {ideal:.0f} to the right")  # fmt: skip
    for f, sent in zip(found, sends):
        if sent > ideal + 2 * n * item:
            raise Wrong(
                f"{where}: right sum, but rank {f.rank} sent {sent} bytes; a ring sends "
                f"2(n-1)/n of the tensor, {ideal:.0f} bytes. Send one chunk a round, not the whole"
            )


# 02.3

NEIGHBOURS = "The neighbours are (rank + 1) % n and (rank - 1) % n"


def _exchange(rank, world_size, box, notes, size):
    import torch

    found = []
    with noted(notes, rank):
        answer = box[0].load()
        for turn in range(2):
            if rank == world_size - 1 and turn == 0:
                time.sleep(0.2)  # a rank that comes late, as ranks do
            x = torch.full((size,), 100.0 * turn + rank)
            got = answer(x)
            notes.add(rank, "returned")
            if not isinstance(got, torch.Tensor) or got.shape != x.shape:
                found.append({"shape": what(got)})
                continue
            span = (float(got.min()), float(got.max())) if not got.isnan().any() else (NAN, NAN)
            found.append({"span": span})
            x.fill_(-1)  # the caller uses its tensor again
    return found


def judge_exchange(bench: Bench, answer) -> str:
    for n in (2, 3, 4):
        for size in (3, 300_000):
            notes = Notes(n)
            found = bench.ranks(n, _exchange, [answer], notes, size, timeout=6)
            where = f"{n} ranks, {size} numbers"
            made = [notes.of(r) for r in range(n)]
            seen = [[words[0] for words in of_rank] for of_rank in made]
            for rank, (_, to) in ((k, w) for k in range(n) for w in made[k] if len(w) == 2):
                if to.lstrip("-").isdigit() and not 0 <= int(to) < n:
                    raise Wrong(f"{where}: right at 2 ranks, but rank {rank} turns to rank {to}. "
                                f"{NEIGHBOURS}")  # fmt: skip
            _judge_exchange_ended(found, seen, n, where)
            _judge_exchange_values(found, seen, n, size, where)
    return "every rank of 2, 3 and 4 has its left neighbour's tensor, and nobody waits for ever"


def _unwaited(seen: list[list[str]]) -> str | None:
    """isend or irecv, where a rank has started one and returned without having waited."""
    for words in seen:
        for name in ("isend", "irecv"):
            if {name, "returned"} <= set(words) and "waited" not in words:
                return name
    return None


def _judge_exchange_ended(found: list[Rank], seen: list[list[str]], n: int, where: str) -> None:
    hung = [f for f in found if f.hung]
    own = [f for f in found if f.error and not any(words in f.error for words in PEER_LOST)]
    if n > 2 and own and not own[0].error.startswith("NotImplementedError"):
        raise Wrong(
            f"{where}: right at 2 ranks, but rank {own[0].rank} of {n} raised "
            f"{own[0].error}. {NEIGHBOURS}"
        )
    if own or not hung:
        return raise_if_broken(found)
    if name := _unwaited(seen):
        raise Wrong(_not_waited(name, where))
    if any("barrier" in words for words in seen):
        raise Wrong(
            f"{where}: rank {hung[0].rank} never returned. A barrier cures no deadlock: "
            "all ranks pass it, and then stand in the same place together"
        )
    if n > 2:
        at = [w[-1] if w else "its first line" for w in seen]
        at = ["has returned" if word == "returned" else f"in {word}" for word in at]
        last = ", ".join(f"rank {r} {word}" for r, word in enumerate(at))
        raise Wrong(
            f"{where}: right at 2 ranks, but here it never returns ({last}). Follow it "
            "with pencil and paper for three ranks"
        )
    why = {
        "recv": "nobody has sent yet",
        "send": "a send waits until its receiver has come, and nobody receives",
    }
    for name in why:
        if all(words and words[-1] == name for words in seen):
            raise Wrong(f"{where}: a deadlock: every rank stands in {name}, and {why[name]}")
    raise_if_broken(found)


def _not_waited(name: str, where: str) -> str:
    what = {
        "isend": "the tensor must not be changed or given up before it has gone",
        "irecv": "the tensor holds nothing before it has arrived",
    }[name]
    return f"{where}: {name} only starts the work and nobody waits for its handle: {what}. " \
        "Call handle.wait() before you return"  # fmt: skip


def _judge_exchange_values(found, seen, n: int, size: int, where: str) -> None:
    used = {name for f in found for name in count.collectives(f.calls)} - {"barrier"}
    if used:
        raise Wrong(f"{where}: this calls {', '.join(sorted(used))}, which sends every tensor to "
                    "every rank; mend it with send and recv")  # fmt: skip
    for f in found:
        for turn, got in enumerate(f.value):
            if "shape" in got:
                raise Wrong(f"{where}: rank {f.rank} returned {got['shape']}; return the tensor "
                            f"that arrived, of shape ({size},)")  # fmt: skip
            want = 100.0 * turn + (f.rank - 1) % n
            if got["span"] == (want, want):
                continue
            if name := _unwaited(seen):
                raise Wrong(_not_waited(name, where))
            low, high = got["span"]
            if low != low:
                raise Wrong(f"{where}: rank {f.rank} has NaN in it")
            has = f"{low:g}" if low == high else f"{low:g} to {high:g}"
            at = f"{where}: rank {f.rank} has {has}, its left neighbour gave {want:g}"
            if got["span"] == (100.0 * turn + f.rank,) * 2:
                raise Wrong(f"{at}: that is its own tensor; return the one that arrived")
            if n > 2 and got["span"] == (100.0 * turn + (f.rank + 1) % n,) * 2:
                raise Wrong(f"{at}: that is the right neighbour's. Send to (rank + 1) % n, receive "
                            "from (rank - 1) % n")  # fmt: skip
            raise Wrong(at)
    for f in found:
        sent = count.sent(f.calls)
        if sent > 2 * 4 * size:
            raise Wrong(f"{where}: rank {f.rank} sent {sent} bytes in two exchanges; one tensor "
                        f"each is {2 * 4 * size}")  # fmt: skip


# 02.5


def _broadcast(rank, world_size, box, notes, size):
    import torch

    truth = torch.arange(size, dtype=torch.float64) + 7
    x = truth.clone() if rank == 0 else torch.full_like(truth, -1)
    with noted(notes, rank):
        got = box[0].load()(x)
    got = x if got is None else got
    if not isinstance(got, torch.Tensor) or got.shape != x.shape:
        return {"shape": what(got)}
    return {"right": bool(torch.equal(got, truth)),
            "untouched": bool((got == -1).all()), "nan": bool(got.isnan().any())}  # fmt: skip


def judge_broadcast(bench: Bench, answer) -> str:
    for n in (2, 3, 4, 7):
        notes = Notes(n)
        found = bench.ranks(n, _broadcast, [answer], notes, 5, timeout=6)
        where = f"{n} ranks"
        broken = sorted((f for f in found if f.error or f.hung), key=lambda f: not f.error)
        if n & (n - 1) and broken:
            how = f"raised {broken[0].error}" if broken[0].error else "never returned"
            raise Wrong(f"{where}: right at 2, but rank {broken[0].rank} of {n} {how}. {n} is not "
                        "a power of two: some ranks have no partner in some round")  # fmt: skip
        raise_if_broken(found)
        used = {name for f in found for name in count.collectives(f.calls)} - {"barrier"}
        if used:
            raise Wrong(f"{where}: this calls {', '.join(sorted(used))}; use send and recv")
        for f in found:
            if "shape" in f.value:
                raise Wrong(f"{where}: rank {f.rank} returned {f.value['shape']}, not x")
            if f.value["untouched"]:
                raise Wrong(f"{where}: rank {f.rank}'s tensor is as before: nothing reached it")
            if f.value["nan"]:
                raise Wrong(f"{where}: rank {f.rank} has NaN in it")
            if not f.value["right"]:
                raise Wrong(f"{where}: rank {f.rank} has other numbers than rank 0")
        need, took = (n - 1).bit_length(), rounds(notes, n)
        most = max(range(n), key=lambda r: sum("send" in w[0] for w in notes.of(r)))
        times = sum("send" in w[0] for w in notes.of(most))
        if took > need:
            if times == n - 1:
                hint = f"rank {most} sends all {times} messages itself, one after another"
            elif times == 1:
                hint = "each rank passes it to one other only, so it goes down a chain"
            else:
                hint = "some rank that has the tensor already sits idle while others still wait"
            raise Wrong(f"{where}: right, but it takes {took} rounds and {need} are enough: {hint}")
    return "right at 2, 3, 4 and 7 ranks, in log2(n) rounds, rounded up"


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
    Exercise(
        id="02.3", title="mend a deadlock", difficulty=2, minutes=10,
        target="the left neighbour's tensor on each of 2, 3 and 4 ranks, one tensor sent by each",
        hints=(
            "Write down, for three ranks, in which call each one stands. Who could go on?",
            "Somebody's send must be under way before its own recv waits. isend does not wait.",
            "isend returns a handle. The tensor is free again only after handle.wait().",
        ),
        judge=judge_exchange,
    ),
    Exercise(
        id="02.4", title="read a mismatch report", difficulty=3, minutes=20,
        target="what every rank called, and at which sequence number, from fresh reports",
        hints=(
            "re.findall with one pattern finds both fingerprints of a report, in order.",
            "'Rank 2 is running collective: CollectiveFingerPrint(SequenceNumber=7, OpType=REDUCE, "
            "TensorShape=[2, 3], …': four groups: rank, number, operation, shape.",
            "Numbers have one digit or more. A shape's numbers are separated by ', '. Go through "
            "all reports, and put every rank that you meet into one dictionary.",
        ),
        judge=judge_report,
    ),
    Exercise(
        id="02.5", title="a tree broadcast", difficulty=3, minutes=20,
        target="rank 0's tensor on 2, 3, 4 and 7 ranks, in log2(n) rounds, rounded up",
        hints=(
            "In each round, everyone who has the tensor gives it to one rank that has not.",
            "With step = 1, 2, 4, …: ranks below step have it, and rank r sends to r + step.",
            "Not every r + step exists. A rank receives once, from rank - step, where step is the "
            "largest power of two that is not above the rank.",
        ),
        judge=judge_broadcast,
    ),
]  # fmt: skip
