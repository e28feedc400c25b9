"""03.2: what all ranks' samplers yield, without ranks."""

from __future__ import annotations

import itertools
import math

from ...bench import Bench
from ...verdict import Wrong


def _sample(rank, world_size, answer, cases):
    import random

    import torch

    out = []
    for size, replicas, seed in cases:
        for r in range(replicas):
            # As on real ranks, where the global generators are anywhere.
            torch.manual_seed(1000 + r)
            random.seed(1000 + r)
            state = torch.get_rng_state()
            sampler = answer(size, replicas, r, seed)
            got = {"case": (size, replicas, seed), "rank": r, "length": len(sampler), "epochs": []}
            for epoch in (0, 1, 2, 1):
                sampler.set_epoch(epoch)
                indices = itertools.islice(sampler, size * replicas + 1)  # it may never end
                got["epochs"].append([int(i) for i in indices])
            got["disturbed"] = not torch.equal(state, torch.get_rng_state())
            out.append(got)
    return out


def judge_sampler(bench: Bench, answer) -> str:
    cases = [(12, 1, 0), (12, 2, 0), (100, 4, 0), (101, 4, 0), (103, 4, 7), (10, 7, 0), (3, 7, 0)]
    cases.append((100, 4, 1))
    (found,) = bench.values(1, _sample, answer, cases, group=False)
    orders = {}
    for case in cases:
        ranks = [f for f in found if f["case"] == case]
        _judge_case(case, ranks)
        orders[case] = ranks[0]["epochs"][0]
    if orders[100, 4, 0] == orders[100, 4, 1]:
        raise Wrong("seed 0 and seed 1 give the same order: use the seed")
    return f"{len(cases)} layouts: each sample at least once an epoch, another order in each epoch"


def _judge_case(case, ranks) -> None:
    size, replicas, _ = case
    where = f"{size} samples, {replicas} ranks"
    each = math.ceil(size / replicas)
    for f in ranks:
        if any(len(e) != f["length"] for e in f["epochs"]):
            raise Wrong(f"{where}: len() of rank {f['rank']}'s sampler says {f['length']}, it "
                        f"yields {len(f['epochs'][0])} indices; the DataLoader relies on "
                        "len()")  # fmt: skip
    lengths = [f["length"] for f in ranks]
    for e in range(4):
        read = sorted(i for f in ranks for i in f["epochs"][e])
        if read and (read[0] < 0 or read[-1] >= size):
            raise Wrong(f"{where}: index {read[-1]} is outside the data set")
        seen = len(set(read))
        if sum(lengths) == size * replicas and replicas > 1:
            raise Wrong(f"{where}: every rank goes through all {size} samples; a rank takes its "
                        "part only")  # fmt: skip
        if len(set(lengths)) > 1:
            raise Wrong(f"{where}: the ranks get {lengths} samples. A rank with fewer leaves the "
                        "others waiting: repeat some, until all have the same number")  # fmt: skip
        if seen == size and lengths[0] == each:
            continue
        if seen < size and lengths[0] == size // replicas < each:
            raise Wrong(f"{where}: {size - seen} samples are never read: this drops the rest that "
                        "does not divide. Repeat some samples instead")  # fmt: skip
        if seen < size and e == 0 and all(f["epochs"][0] == ranks[0]["epochs"][0] for f in ranks):
            raise Wrong(f"{where}: all ranks read the same {seen} samples: take every "
                        f"{replicas}th index, beginning at the rank")  # fmt: skip
        if seen < size:
            raise Wrong(f"{where}: only {seen} of {size} samples are read in an epoch. Do all "
                        "ranks shuffle in the same order, from seed and epoch alone, without the "
                        "rank or a global generator?")  # fmt: skip
        raise Wrong(f"{where}: each rank reads {lengths[0]} samples, {each} are enough")
    first = ranks[0]["epochs"]
    if any(f["disturbed"] for f in ranks):
        raise Wrong("the sampler reseeds or uses torch's global generator: dropout then repeats in "
                    "each epoch. Shuffle with a torch.Generator of its own")  # fmt: skip
    if size < 100:
        return
    if any(f["epochs"][1] != f["epochs"][3] for f in ranks):
        raise Wrong(f"{where}: epoch 1, asked for twice, came in two orders: a resumed run could "
                    "not continue. The order must follow from seed and epoch alone")  # fmt: skip
    if first[0] == first[1] or first[1] == first[2]:
        sorted_ = first[0] == sorted(first[0])
        what = "nothing is shuffled" if sorted_ else "every epoch has the same order"
        raise Wrong(f"{where}: {what}; set_epoch has to change the order")
    whole = [sorted(e) for e in first]
    if whole[0] == whole[1] and replicas > 1:
        raise Wrong(f"{where}: rank 0 reads the same samples in every epoch, in another order: "
                    "shuffle all indices first, and split them then")  # fmt: skip
