"""03.4: ranks with different numbers of batches."""

from __future__ import annotations

from ... import count
from ...bench import Bench, raise_if_broken
from ...verdict import Wrong
from .parts import ROWS, data, flat, net, warm

UNEVEN = {2: (5, 3), 3: (2, 4, 3)}


def _uneven(rank, world_size, answer):
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    model = net()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    batches = [data(10 * rank + i, ROWS) for i in range(UNEVEN[world_size][rank])]
    used, known = [], {float(x[0, 0]): i for i, (x, _) in enumerate(batches)}
    model.register_forward_pre_hook(lambda m, a: used.append(known.get(float(a[0][0, 0]))))
    answer(ddp, optimizer, list(batches), cross_entropy)
    return {"parameters": flat(model), "used": [i for i in used if i is not None]}


def _uneven_alone(rank, world_size, counts, active_only):
    """One device: in each step the mean over ranks (or over those that still have data)."""
    import torch
    from torch.nn.functional import cross_entropy

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for i in range(max(counts)):
        have = [r for r, c in enumerate(counts) if i < c]
        optimizer.zero_grad()
        losses = []
        for r in have:
            x, y = data(10 * r + i, ROWS)
            losses.append(cross_entropy(model(x), y))
        (sum(losses) / (len(have) if active_only else len(counts))).backward()
        optimizer.step()
    return {"parameters": flat(model), "start": flat(net())}


def judge_uneven(bench: Bench, answer) -> str:
    warm()
    for n, counts in UNEVEN.items():
        refs = [bench.values(1, _uneven_alone, counts, a)[0] for a in (False, True)]
        found = bench.ranks(n, _uneven, answer, timeout=8)
        _judge_uneven_once(found, refs, n, counts)
    return ("2 and 3 ranks with different numbers of batches: all batches used once, all ranks "
            "end, with the same parameters as one device")  # fmt: skip


def _judge_uneven_once(found, refs, n, counts) -> None:
    where = f"{n} ranks with {', '.join(map(str, counts))} batches"
    lost = ("closed by peer", "Connection reset", "Broken pipe", "Timed out")
    if any(f.hung or any(w in f.error for w in lost) for f in found) and not any(
        f.sys_exit or f.error and not any(w in f.error for w in lost) or (f.exit or 0) < 0 and
        not f.hung for f in found):  # fmt: skip
        stuck = [f.rank for f in found if f.hung or f.error]
        barrier = any("barrier" in count.collectives(f.calls) for f in found)
        barrier = barrier or any(", line" in f.where and "barrier" in f.where for f in found)
        more = ("; a barrier is one more place to wait, it does not send the missing gradients"
                if barrier else "")  # fmt: skip
        raise Wrong(f"{where}: this hangs (rank {', '.join(map(str, stuck))} did not come back). "
                    "The rank with more batches waits in backward for gradients that the others "
                    f"never send{more}. Who answers its all-reduces?")  # fmt: skip
    raise_if_broken(found)
    values = [f.value for f in found]
    first = values[0]["parameters"]
    same = all((v["parameters"] - first).abs().max() == 0 for v in values)
    if same and any((first - r["parameters"]).abs().max() < 1e-9 for r in refs):
        return
    for rank, (v, c) in enumerate(zip(values, counts)):
        missing = c - len(set(v["used"]))
        if missing:
            raise Wrong(f"{where}: {missing} of rank {rank}'s {c} batches are never used. Cutting "
                        "all ranks to the shortest one throws data away")  # fmt: skip
        if len(v["used"]) > c:
            raise Wrong(f"{where}: rank {rank} uses some of its {c} batches more than once: these "
                        "count too much")  # fmt: skip
    if not same:
        raise Wrong(f"{where}: all end, with different parameters on the ranks: some steps were "
                    "not synchronised (through ddp_model.module, or under no_sync?)")  # fmt: skip
    raise Wrong(f"{where}: all batches used, but the parameters are not those of one device that "
                "averages each step's gradients; one step for each batch, zero_grad before each, "
                "the loss not scaled")  # fmt: skip
