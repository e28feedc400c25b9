"""03.3: parameters and bytes of two steps, against one device."""

from __future__ import annotations

from ...bench import Bench
from ...verdict import Wrong
from .parts import ROWS, data, flat, net, warm

MICRO = 4


def _counting(ddp):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    sent = []

    def hook(state, bucket):
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, hook)
    return sent


def _accumulate(rank, world_size, answer):
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    model = net()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    sent, start, out = _counting(ddp), flat(model), []
    updates = []
    optimizer.register_step_post_hook(lambda *_: updates.append(1))
    for step in range(2):
        sent.clear(), updates.clear()
        batches = [data(100 * step + 10 * rank + i, ROWS) for i in range(MICRO)]
        answer(ddp, optimizer, batches, cross_entropy)
        out.append({"parameters": flat(model), "sent": sum(sent), "updates": len(updates)})
    return {"start": start, "steps": out}


def _accumulate_alone(rank, world_size, n):
    """One device, the batches of n ranks as one."""
    import torch
    from torch.nn.functional import cross_entropy

    model = net()
    optimizer, out = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(2):
        seeds = [100 * step + 10 * r + i for r in range(n) for i in range(MICRO)]
        parts = [data(seed, ROWS) for seed in seeds]
        x, y = (torch.cat(p) for p in zip(*parts))
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        out.append(flat(model))
    return out


def judge_accumulation(bench: Bench, answer) -> str:
    warm()
    for n in (2, 3):
        (want,) = bench.values(1, _accumulate_alone, n)
        values = bench.values(n, _accumulate, answer, timeout=8)
        size = values[0]["start"].numel() * 8
        for step in range(2):
            _judge_accumulated([v["steps"][step] for v in values], values[0]["start"], want, step,
                               size, n)  # fmt: skip
    return (f"equal to one device with all micro-batches at 2 and 3 ranks, to 1e-9, with one "
            f"all-reduce of the gradients for {MICRO} micro-batches")  # fmt: skip


def _judge_accumulated(ranks, start, want, step, size, n) -> None:
    got = ranks[0]["parameters"]
    where = f"{n} ranks, step {step + 1}"
    times = ranks[0]["updates"]
    if times > 1:
        raise Wrong(f"{where}: the optimizer stepped {times} times; accumulate over all {MICRO} "
                    "micro-batches, and step once")  # fmt: skip
    if times == 0 or step == 0 and (got - start).abs().max() == 0:
        raise Wrong(f"{where}: the parameters are as before; did the optimizer step?")
    traffic = ranks[0]["sent"] / size
    if traffic == 0:
        raise Wrong(f"{where}: nothing was all-reduced. The last micro-batch must run outside "
                    "no_sync, and every forward through ddp_model, not "
                    "ddp_model.module")  # fmt: skip
    if traffic > 1:
        raise Wrong(f"{where}: {traffic:.0f} times the gradients' bytes were all-reduced, once is "
                    "enough. All but the last micro-batch belong into ddp_model.no_sync(), "
                    "forward and backward both")  # fmt: skip
    if any((r["parameters"] - got).abs().max() > 0 for r in ranks):
        raise Wrong(f"{where}: the ranks have different parameters")
    off = (got - want[step]).abs().max().item()
    if off <= 1e-9:
        return
    before = start if step == 0 else want[0]
    moved, should = got - before, want[step] - before
    factor = float(moved @ should / (should @ should))
    why = "are all micro-batches used, and with the same weight?"
    if step == 1:
        why = "step 1 was right: are the gradients of step 1 still there? (zero_grad)"
    elif abs(factor - MICRO) < 0.5:
        why = f"they moved {MICRO} times as far: divide each loss by the number of micro-batches"
    elif abs(factor - 1 / n) < 0.1 / n:
        why = f"they moved 1/{n} as far: DDP averages over the ranks already"
    elif abs(factor - 1 / MICRO) < 0.35 / MICRO:
        why = "they moved a quarter as far: is only one micro-batch left when the optimizer steps?"
    raise Wrong(f"{where}: the parameters differ from one device by {off:.1e}: {why}")
