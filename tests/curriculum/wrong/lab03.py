"""Wrong answers to lab 03 that people really write, and what the verdict must say of each."""

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DistributedSampler, Sampler

ONE = Path(__file__).resolve().parents[3] / "notebooks" / "scripts" / "train_one.py"
RANKS = """    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
"""

# What turns train_one.py into DDP; each wrong answer changes one of these.
RIGHT = {
    "import torch\nfrom": "import torch\nimport torch.distributed as dist\nfrom",
    "from torch.nn import functional as F\n": "from torch.nn import functional as F\n"
    "from torch.nn.parallel import DistributedDataParallel\n",
    "    rank, local_rank, world_size = 0, 0, 1\n": RANKS,
    "    global_batch = ": '    dist.init_process_group("gloo")\n    global_batch = ',
    ".to(device)\n    optimizer": ".to(device)\n"
    "    ddp_model = DistributedDataParallel(model)\n    optimizer",
    "starts, args.block_size, device)\n        t1": "starts.chunk(world_size)[rank], "
    "args.block_size, device)\n        t1",
    "loss = model(x, y)\n        t2": "loss = ddp_model(x, y)\n        t2",
    "    return model\n": "    dist.destroy_process_group()\n    return model\n",
}


def edit(*pairs):
    """An answer: the right script, with some of its parts replaced."""
    named = {"ranks": RANKS, "chunk": "starts.chunk(world_size)[rank]"}

    def answer():
        text = ONE.read_text()
        for old, new in [*RIGHT.items(), *((named.get(old, old), new) for old, new in pairs)]:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text

    return answer


class Sharded(Sampler):
    """A right one, for the wrong ones to differ from."""

    def __init__(self, size, num_replicas, rank, seed=0):
        self.size, self.num_replicas, self.rank, self.seed = size, num_replicas, rank, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return -(-self.size // self.num_replicas)

    def generator(self):
        return torch.Generator().manual_seed(self.seed + self.epoch)

    def __iter__(self):
        order = torch.randperm(self.size, generator=self.generator()).tolist()
        total = len(self) * self.num_replicas
        order = (order * -(-total // len(order)))[:total]
        return iter(order[self.rank :: self.num_replicas])


class IgnoresEpoch(Sharded):
    def generator(self):
        return torch.Generator().manual_seed(self.seed)


class RankInSeed(Sharded):
    def generator(self):
        return torch.Generator().manual_seed(self.seed + self.epoch + self.rank)


class GlobalGenerator(Sharded):
    def generator(self):
        return None


class ReseedsEverything(Sharded):
    def generator(self):
        torch.manual_seed(self.seed + self.epoch)


class DropsTheRest(Sharded):
    def __len__(self):
        return self.size // self.num_replicas

    def __iter__(self):
        order = torch.randperm(self.size, generator=self.generator()).tolist()
        return iter(order[self.rank :: self.num_replicas][: len(self)])


class NoPadding(Sharded):
    def __len__(self):
        return len(range(self.rank, self.size, self.num_replicas))

    def __iter__(self):
        order = torch.randperm(self.size, generator=self.generator()).tolist()
        return iter(order[self.rank :: self.num_replicas])


class EveryRankReadsAll(Sharded):
    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(torch.randperm(self.size, generator=self.generator()).tolist())


class SplitsThenShuffles(Sharded):
    def __iter__(self):
        total = len(self) * self.num_replicas
        mine = [i % self.size for i in range(total)][self.rank :: self.num_replicas]
        order = torch.randperm(len(mine), generator=self.generator()).tolist()
        return iter([mine[i] for i in order])


class NeverShuffles(Sharded):
    def __iter__(self):
        total = len(self) * self.num_replicas
        return iter([i % self.size for i in range(total)][self.rank :: self.num_replicas])


class PadsOnlyOnce(Sharded):
    def __iter__(self):
        order = torch.randperm(self.size, generator=self.generator()).tolist()
        order += order[: len(self) * self.num_replicas - self.size]  # too few on tiny data
        return iter(order[self.rank :: self.num_replicas])


class SameForAllRanks(Sharded):
    def __iter__(self):
        order = torch.randperm(self.size, generator=self.generator()).tolist()
        return iter(order[: len(self)])


def no_no_sync(ddp_model, optimizer, batches, loss_fn):
    optimizer.zero_grad()
    for x, y in batches:
        (loss_fn(ddp_model(x), y) / len(batches)).backward()
    optimizer.step()


def no_sync_round_backward_only(ddp_model, optimizer, batches, loss_fn):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches):
        loss = loss_fn(ddp_model(x), y) / len(batches)
        quiet = i < len(batches) - 1
        with ddp_model.no_sync() if quiet else contextlib.nullcontext():
            loss.backward()
    optimizer.step()


def no_sync_round_all(ddp_model, optimizer, batches, loss_fn):
    optimizer.zero_grad()
    with ddp_model.no_sync():
        for x, y in batches:
            (loss_fn(ddp_model(x), y) / len(batches)).backward()
    optimizer.step()


def accumulate(ddp_model, optimizer, batches, loss_fn, scale):
    for i, (x, y) in enumerate(batches):
        quiet = i < len(batches) - 1
        with ddp_model.no_sync() if quiet else contextlib.nullcontext():
            (loss_fn(ddp_model(x), y) / scale).backward()
    optimizer.step()


def loss_not_divided(ddp_model, optimizer, batches, loss_fn):
    optimizer.zero_grad()
    accumulate(ddp_model, optimizer, batches, loss_fn, 1)


def loss_divided_by_ranks_too(ddp_model, optimizer, batches, loss_fn):
    optimizer.zero_grad()
    accumulate(ddp_model, optimizer, batches, loss_fn, len(batches) * dist.get_world_size())


def never_zeroed(ddp_model, optimizer, batches, loss_fn):
    accumulate(ddp_model, optimizer, batches, loss_fn, len(batches))


def zeroed_in_the_loop(ddp_model, optimizer, batches, loss_fn):
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        quiet = i < len(batches) - 1
        with ddp_model.no_sync() if quiet else contextlib.nullcontext():
            (loss_fn(ddp_model(x), y) / len(batches)).backward()
    optimizer.step()


def inner_model(ddp_model, optimizer, batches, loss_fn):
    optimizer.zero_grad()
    for x, y in batches:
        (loss_fn(ddp_model.module(x), y) / len(batches)).backward()
    optimizer.step()


def steps_each_time(ddp_model, optimizer, batches, loss_fn):
    for x, y in batches:
        optimizer.zero_grad()
        loss_fn(ddp_model(x), y).backward()
        optimizer.step()


def no_step(ddp_model, optimizer, batches, loss_fn):
    optimizer.zero_grad()
    accumulate(ddp_model, torch.optim.SGD([torch.zeros(1)], lr=1), batches, loss_fn, len(batches))


def one_step(model, optimizer, x, y, loss_fn):
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    optimizer.step()


def plain_loop(ddp_model, optimizer, batches, loss_fn):
    for x, y in batches:
        one_step(ddp_model, optimizer, x, y, loss_fn)


def barrier_at_the_end(ddp_model, optimizer, batches, loss_fn):
    for x, y in batches:
        one_step(ddp_model, optimizer, x, y, loss_fn)
    dist.barrier()


def barrier_each_step(ddp_model, optimizer, batches, loss_fn):
    for x, y in batches:
        one_step(ddp_model, optimizer, x, y, loss_fn)
        dist.barrier()


def shortest_for_all(ddp_model, optimizer, batches, loss_fn):
    number = torch.tensor(len(batches))
    dist.all_reduce(number, dist.ReduceOp.MIN)
    for x, y in batches[: int(number)]:
        one_step(ddp_model, optimizer, x, y, loss_fn)


def from_the_start_again(ddp_model, optimizer, batches, loss_fn):
    number = torch.tensor(len(batches))
    dist.all_reduce(number, dist.ReduceOp.MAX)
    for i in range(int(number)):
        one_step(ddp_model, optimizer, *batches[i % len(batches)], loss_fn)


def without_ddp(ddp_model, optimizer, batches, loss_fn):
    for x, y in batches:
        one_step(ddp_model.module, optimizer, x, y, loss_fn)


def rest_alone(ddp_model, optimizer, batches, loss_fn):
    number = torch.tensor(len(batches))
    dist.all_reduce(number, dist.ReduceOp.MIN)
    for i, (x, y) in enumerate(batches):
        model = ddp_model if i < number else ddp_model.module
        one_step(model, optimizer, x, y, loss_fn)


def join_and_scaled(ddp_model, optimizer, batches, loss_fn):
    with ddp_model.join():
        for x, y in batches:
            one_step(ddp_model, optimizer, x, y, lambda a, b: loss_fn(a, b) / 2)


def measure(model, xs, ys, batch_size, indices):
    """[sum of losses, number right, number] over some samples."""
    total = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for at in range(0, len(indices), batch_size):
            part = list(indices[at : at + batch_size])
            out = model(xs[part])
            right = (out.argmax(1) == ys[part]).sum()
            loss = F.cross_entropy(out, ys[part], reduction="sum")
            total += torch.stack([loss, right.double(), torch.tensor(float(len(part)))])
    return total


def mine(xs):
    return range(dist.get_rank(), len(xs), dist.get_world_size())


def padded(model, xs, ys, batch_size):
    total = measure(model, xs, ys, batch_size, list(DistributedSampler(xs, shuffle=False)))
    dist.all_reduce(total)
    return (total[0] / total[2]).item(), (total[1] / total[2]).item()


def dropped(model, xs, ys, batch_size):
    sampler = DistributedSampler(xs, shuffle=False, drop_last=True)
    total = measure(model, xs, ys, batch_size, list(sampler))
    dist.all_reduce(total)
    return (total[0] / total[2]).item(), (total[1] / total[2]).item()


def last_batch_dropped(model, xs, ys, batch_size):
    indices = mine(xs)
    total = measure(model, xs, ys, batch_size, indices[: len(indices) // batch_size * batch_size])
    dist.all_reduce(total)
    return (total[0] / total[2]).item(), (total[1] / total[2]).item()


def mean_of_rank_means(model, xs, ys, batch_size):
    total = measure(model, xs, ys, batch_size, mine(xs))
    means = total[:2] / total[2]
    dist.all_reduce(means)
    return tuple((means / dist.get_world_size()).tolist())


def mean_of_batch_means(model, xs, ys, batch_size):
    indices, rows = mine(xs), []
    for at in range(0, len(indices), batch_size):
        total = measure(model, xs, ys, batch_size, indices[at : at + batch_size])
        rows.append(total[:2] / total[2])
    total = torch.cat([sum(rows, torch.zeros(2)).double(), torch.tensor([float(len(rows))])])
    dist.all_reduce(total)
    return (total[0] / total[2]).item(), (total[1] / total[2]).item()


def every_rank_all(model, xs, ys, batch_size):
    total = measure(model, xs, ys, batch_size, range(len(xs)))
    return (total[0] / total[2]).item(), (total[1] / total[2]).item()


def rank_0_only(model, xs, ys, batch_size):
    if dist.get_rank() == 0:
        return every_rank_all(model, xs, ys, batch_size)


def own_part_only(model, xs, ys, batch_size):
    total = measure(model, xs, ys, batch_size, mine(xs))
    return (total[0] / total[2].clamp(min=1)).item(), (total[1] / total[2].clamp(min=1)).item()


def reduced_to_rank_0(model, xs, ys, batch_size):
    total = measure(model, xs, ys, batch_size, mine(xs))
    dist.reduce(total, dst=0)
    return (total[0] / total[2].clamp(min=1)).item(), (total[1] / total[2].clamp(min=1)).item()


def only_loss(model, xs, ys, batch_size):
    total = measure(model, xs, ys, batch_size, mine(xs))
    dist.all_reduce(total)
    return (total[0] / total[2]).item()


TWO = RANKS.replace('int(os.environ["WORLD_SIZE"])', "2")
WRONG = {
    "03.1": [
        ("unchanged", ONE.read_text, r"as it was"),
        ("not wrapped", edit(("DistributedDataParallel(model)", "model")), r"never wrapped"),
        ("the model inside in forward", edit(("loss = ddp_model(x, y)", "loss = model(x, y)")),
         r"forward must go through the wrapped model"),
        ("ddp_model.module in forward", edit(("= ddp_model(x", "= ddp_model.module(x")),
         r"forward must go through the wrapped model"),
        ("every rank takes the whole batch", edit(("chunk", "starts")), r"they took in 24"),
        ("every rank takes the first part", edit(("chunk", "starts.chunk(world_size)[0]")),
         r"all read the same sequences"),
        ("batch not multiplied", edit(("global_batch = world_size * args.batch_size",
         "global_batch = args.batch_size")), r"they took in 6"),
        ("loss divided by ranks", edit(("loss.backward()", "(loss / world_size).backward()")),
         r"DDP averages over the ranks already"),
        ("learning rate multiplied", edit(("lr=args.lr", "lr=args.lr * world_size")),
         r"neither the loss nor the learning rate is multiplied"),
        ("world size 2 written down", edit(("ranks", TWO)), r"is a world size hard-coded"),
        ("a seed for each rank", edit(("args.seed * 1_000_000", "(args.seed + rank) * 1_000_000")),
         r"differ from one device"),
        ("all ranks print", edit(("if rank == 0 and", "if"), ("if rank == 0:", "if True:")),
         r"rank 1 of 2 prints the step lines"),
        ("group left open", edit(("    dist.destroy_process_group()\n", "")),
         r"left a process group"),
        ("returns nothing", edit(("    return model\n", "")), r"let it return model"),
        ("far too many lines", edit(("import argparse\n", "import argparse\n" + "# DDP\n" * 12)),
         r"15 are enough"),
        ("a syntax error", edit(("ddp_model(x, y)", "ddp_model(x, y")), r"not Python"),
    ],
    "03.2": [
        ("no set_epoch", IgnoresEpoch, r"set_epoch has to change the order"),
        ("rank in the seed", RankInSeed, r"all ranks shuffle in the same order"),
        ("global generator", GlobalGenerator, r"global generator"),
        ("reseeds the global generator", ReseedsEverything, r"dropout then repeats"),
        ("drops the rest", DropsTheRest, r"never read: this drops the rest"),
        ("no padding", NoPadding, r"leaves the others waiting"),
        ("every rank reads all", EveryRankReadsAll, r"every rank goes through all"),
        ("same part for all", SameForAllRanks, r"all ranks read the same"),
        ("splits, then shuffles", SplitsThenShuffles, r"shuffle all indices first"),
        ("never shuffles", NeverShuffles, r"nothing is shuffled"),
        ("pads only once", PadsOnlyOnce, r"3 samples, 7 ranks|len\(\) of rank"),
    ],
    "03.3": [
        ("no no_sync", no_no_sync, r"4 times the gradients' bytes"),
        ("no_sync round backward only", no_sync_round_backward_only, r"forward and backward both"),
        ("no_sync round all", no_sync_round_all, r"last micro-batch must run outside no_sync"),
        ("loss not divided", loss_not_divided, r"divide each loss by the number of micro-batches"),
        ("divided by ranks too", loss_divided_by_ranks_too, r"DDP averages over the ranks already"),
        ("never zeroed", never_zeroed, r"zero_grad"),
        ("zeroed in the loop", zeroed_in_the_loop, r"only one micro-batch left"),
        ("ddp_model.module", inner_model, r"not ddp_model\.module"),
        ("a step for each", steps_each_time, r"stepped 4 times"),
        ("no step", no_step, r"did the optimizer step"),
    ],
    "03.4": [
        ("plain loop", plain_loop, r"this hangs .*never send"),
        ("a barrier at the end", barrier_at_the_end, r"a barrier is one more place to wait"),
        ("a barrier each step", barrier_each_step, r"a barrier is one more place to wait"),
        ("cut to the shortest", shortest_for_all, r"throws data away"),
        ("from the start again", from_the_start_again, r"more than once"),
        ("without DDP", without_ddp, r"different parameters"),
        ("the rest alone", rest_alone, r"different parameters"),
        ("loss scaled", join_and_scaled, r"loss not scaled"),
    ],
    "03.5": [
        ("padded", padded, r"counted twice"),
        ("drop_last of the sampler", dropped, r"never looked at"),
        ("last batch dropped", last_batch_dropped, r"never looked at"),
        ("mean of the ranks' means", mean_of_rank_means, r"mean of means"),
        ("mean of the batches' means", mean_of_batch_means, r"mean of means"),
        ("every rank all", every_rank_all, r"2 times the work"),
        ("rank 0 only", rank_0_only, r"every rank has to know"),
        ("own part only", own_part_only, r"return different losses"),
        ("reduce, not all_reduce", reduced_to_rank_0, r"return different losses"),
        ("only the loss", only_loss, r"two numbers"),
    ],
}  # fmt: skip
