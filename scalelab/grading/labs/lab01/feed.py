"""01.1: a pipeline whose costs are sleeps must keep its device busy."""

from __future__ import annotations

import os
import statistics
import time

from ...bench import Bench
from ...verdict import Wrong

SAMPLES, BATCH = 190, 8  # the last batch has 6: it must not be lost
SAMPLE_S, STEP_S = 0.006, 0.030  # both are sleeps: the target is about structure, not about a CPU
STEPS = -(-SAMPLES // BATCH)
BUSY = 0.75
MOST_WORKERS = 8
TRIES = 3  # sleeps bound every wrong answer from below, so trying again cannot pass one


class SlowSamples:
    """SAMPLES samples, each 6 ms to read. Remembers who read which."""

    def __init__(self) -> None:
        import torch

        self.reads = torch.zeros(SAMPLES, dtype=torch.long).share_memory_()
        self.readers = torch.zeros(SAMPLES, dtype=torch.long).share_memory_()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i):
        import torch

        if not 0 <= i < SAMPLES:
            raise IndexError(i)
        time.sleep(SAMPLE_S)
        self.reads[i] += 1
        self.readers[i] = os.getpid()
        return torch.tensor([i, i * i])


def _epoch(rank, world_size, answer):
    import torch

    samples, seen, times = SlowSamples(), [], []
    reads_at_first = []

    def step(batch):
        begin = time.perf_counter()
        if not seen:
            reads_at_first.append(int(samples.reads.sum()))
        seen.append(batch.clone() if isinstance(batch, torch.Tensor) else repr(type(batch)))
        time.sleep(STEP_S)
        times.append((begin, time.perf_counter()))

    answer(samples, step, BATCH)
    readers = set(samples.readers.tolist()) - {0, os.getpid()}
    return {"seen": seen, "times": times, "reads": samples.reads.tolist(),
            "workers": len(readers), "at_first": sum(reads_at_first)}  # fmt: skip


def judge_feed(bench: Bench, answer) -> str:
    best = 0.0
    for _ in range(TRIES):
        (found,) = bench.values(1, _epoch, answer, group=False)
        _judge_batches(found)
        times = found["times"]
        if any(b[0] < a[1] for a, b in zip(times, times[1:])):
            raise Wrong(
                "a step began before the one before it had ended: a device does one step at a "
                "time, and each step starts from the parameters of the last"
            )
        busy = STEPS * STEP_S / (times[-1][1] - times[0][0])
        best = max(best, busy)
        if found["at_first"] == SAMPLES:
            raise Wrong(
                f"all {SAMPLES} samples had been read before the first step: the device waited for "
                "all of them, and a real data set does not fit in memory. Read the next batches "
                "while the device works on this one"
            )
        if found["workers"] > MOST_WORKERS:
            raise Wrong(
                f"{found['workers']} worker processes for this: at most {MOST_WORKERS}. A batch is "
                f"{1000 * BATCH * SAMPLE_S:.0f} ms of reading for {1000 * STEP_S:.0f} ms of step: "
                "from how many workers on do more of them give nothing?"
            )
        if busy >= BUSY:
            return (f"{SAMPLES} samples once each and in order, the device busy at least "
                    f"{BUSY:.0%} of the time")  # fmt: skip
        if busy < 0.45 or found["workers"] == 1:
            break  # no noise does the first, and one worker reads slower than the device trains
    gap = statistics.median(b[0] - a[1] for a, b in zip(times, times[1:]))
    said = f"the device was busy {best:.0%} of the time, the target is {BUSY:.0%}"
    if not found["workers"]:
        raise Wrong(f"{said}. Between two steps it waited {1000 * gap:.0f} ms: no worker process "
                    "read anything, so each batch is read after the step before it")  # fmt: skip
    raise Wrong(
        f"{said}, with {found['workers']} worker(s) and {1000 * gap:.0f} ms of waiting between two "
        f"steps. A batch takes {1000 * BATCH * SAMPLE_S:.0f} ms to read and {1000 * STEP_S:.0f} ms "
        "to train on: how many workers read as fast as the device trains?"
    )


def _judge_batches(found) -> None:
    import torch

    seen = found["seen"]
    if not seen:
        raise Wrong("step was never called: the device did nothing. Call it for each batch")
    strange = [s for s in seen if isinstance(s, str) or s.dim() != 2 or s.shape[1] != 2]
    if strange:
        first = strange[0]
        got = first if isinstance(first, str) else f"a tensor of {tuple(first.shape)}"
        raise Wrong(f"step was given {got}; give it a batch of samples, as (batch_size, 2)")
    if len(seen[0]) != BATCH:
        raise Wrong(
            f"the first batch has {len(seen[0])} samples, batch_size is {BATCH}. Another batch "
            "size is another training, not a faster loader"
        )
    order = torch.cat(seen)[:, 0].tolist()
    if len(seen) > 1 and torch.equal(seen[0], seen[1]):
        raise Wrong(
            "the second step got the first batch again: the loader's iterator is made new for each "
            "batch. Make it once, with one for loop over the loader"
        )
    missing = sorted(set(range(SAMPLES)) - set(order))
    if missing:
        last = SAMPLES - SAMPLES % BATCH
        why = ("the last batch is smaller, and drop_last=True drops it" if missing[0] == last
               else "each sample must reach step once in an epoch")  # fmt: skip
        raise Wrong(f"{len(missing)} of {SAMPLES} samples never reached step, first number "
                    f"{missing[0]}: {why}")  # fmt: skip
    if len(order) != SAMPLES:
        raise Wrong(f"{len(order)} samples reached step, there are {SAMPLES}: some came twice")
    if order != sorted(order):
        raise Wrong("the samples came in another order than the data set's: this pipeline does not "
                    "shuffle, and its run must stay comparable")  # fmt: skip
    twice = sum(n > 1 for n in found["reads"])
    if twice:
        raise Wrong(f"{twice} samples were read more than once: the slow part is done again")
