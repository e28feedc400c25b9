# ---
# title: "Lab 03: DDP on one node"
# minutes: 85
# ranks: 1 to 3
# cluster: local
# objective: turn a script into DDP; shard, accumulate, train on uneven data and validate correctly
# ---

# %% [markdown]
# # Lab 03: DDP on one node
#
# Five exercises on [lesson 03](../notebooks/03_ddp_on_one_node.ipynb). Write each function, and run the check below it: it
# tries your answer on real ranks, compares with one device, and names the mistake. Nothing that your answer does
# (hang, exit, crash) harms this notebook. `grading.hint("03.1")` gives a hint, and another one when you ask again.

# %%
import contextlib
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import Sampler

from scalelab import grading

# %% [markdown]
# ## train_one.py on many ranks
#
# **Exercise 03.1** · ★★☆☆☆ · 25 minutes · target: equal to one device at 1, 2 and 3 ranks to 1e-6, at most 15 lines changed
#
# Builds on sections 1 and 2. Copy `notebooks/scripts/train_one.py` to `labs/my_train_ddp.py`, open it in JupyterLab, and turn
# it into DDP. `--batch-size` is the batch of *one* rank, so the global batch is `world_size` times as large, as
# the script computes it already. Let `main()` return the model, as it does.
#
# Then let `my_script` return the text of your file: `return Path("my_train_ddp.py").read_text()`.
# (`torchrun --nproc-per-node 2 my_train_ddp.py --steps 20`, in a terminal in `labs/`, tries it without the check; give it
# `--data ../notebooks/data/books.txt`.) The check runs it with plain SGD in place of AdamW: Adam divides by the size of
# the gradient, and would hide a gradient that is N times too large.


# %%
def my_script():
    """Return the text of train_one.py, turned into DDP."""
    ### BEGIN SOLUTION
    text = Path("../notebooks/scripts/train_one.py").read_text()
    edits = [  # the same as in an editor, written down: this text goes, that text comes
        ("import torch\nfrom", "import torch\nimport torch.distributed as dist\nfrom"),
        ("as F\n", "as F\nfrom torch.nn.parallel import DistributedDataParallel\n"),
        ("rank, local_rank, world_size = 0, 0, 1", "rank, local_rank, world_size = (\n"
         '        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))'),
        ("    global_batch = ", '    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")\n'
         "    global_batch = "),
        ("    optimizer = ", "    ddp_model = DistributedDataParallel(model)\n    optimizer = "),
        ("starts, args.block_size, device)\n        t1", "starts.chunk(world_size)[rank], "
         "args.block_size, device)\n        t1"),
        ("loss = model(x, y)", "loss = ddp_model(x, y)"),
        ("    return model\n", "    dist.destroy_process_group()\n    return model\n"),
    ]
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text
    ### END SOLUTION


# %%
grading.check("03.1", my_script)

# %% [markdown]
# ## A sampler
#
# **Exercise 03.2** · ★★☆☆☆ · 15 minutes · target: every sample at least once an epoch, ranks of equal length, another order each epoch
#
# Builds on section 5. Write what `DistributedSampler` does, without using it. `size` samples are shared by `num_replicas` ranks;
# this is rank `rank`. If they do not divide, repeat as few as possible. The order follows from `seed` and epoch, and from
# nothing else.


# %%
class MySampler(Sampler):
    def __init__(self, size, num_replicas, rank, seed=0):
        ### BEGIN SOLUTION
        self.size, self.num_replicas, self.rank, self.seed = size, num_replicas, rank, seed
        self.epoch = 0
        ### END SOLUTION

    def set_epoch(self, epoch):
        ### BEGIN SOLUTION
        self.epoch = epoch
        ### END SOLUTION

    def __len__(self):
        """How many samples this rank reads in an epoch."""
        ### BEGIN SOLUTION
        return math.ceil(self.size / self.num_replicas)
        ### END SOLUTION

    def __iter__(self):
        """The indices of this rank, in the order of this epoch."""
        ### BEGIN SOLUTION
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=generator).tolist()
        total = len(self) * self.num_replicas
        order = (order * math.ceil(total / self.size))[:total]
        return iter(order[self.rank :: self.num_replicas])
        ### END SOLUTION


# %%
grading.check("03.2", MySampler)

# %% [markdown]
# ## Accumulation without extra traffic
#
# **Exercise 03.3** · ★★☆☆☆ · 15 minutes · target: equal to one device to 1e-9, the gradients all-reduced once for 4 micro-batches
#
# Builds on section 6. One optimizer step from several micro-batches of equal size. `batches` is a list of `(x, y)`;
# `loss_fn(ddp_model(x), y)` is a mean. The function is called once a step, on every rank.


# %%
def train_step(ddp_model, optimizer, batches, loss_fn):
    """One step of the optimizer, from all `batches` of all ranks."""
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches):
        quiet = i < len(batches) - 1
        with ddp_model.no_sync() if quiet else contextlib.nullcontext():
            (loss_fn(ddp_model(x), y) / len(batches)).backward()
    optimizer.step()
    ### END SOLUTION


# %%
grading.check("03.3", train_step)

# %% [markdown]
# ## Uneven data
#
# **Exercise 03.4** · ★★☆☆☆ · 10 minutes · target: every batch used once, no hang, equal parameters on all ranks, at 2 and 3 ranks
#
# Builds on section 7. Each rank gets a list of batches, and the lists are not equally long. Make one optimizer step for each
# batch; ranks that still have data average their gradients, divided by the number of all ranks or of those that still
# have data, as you like. Every rank comes back, with the same parameters.


# %%
def train_uneven(ddp_model, optimizer, batches, loss_fn):
    """Train on all of this rank's batches."""
    ### BEGIN SOLUTION
    with ddp_model.join():
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(ddp_model(x), y).backward()
            optimizer.step()
    ### END SOLUTION


# %%
grading.check("03.4", train_uneven)

# %% [markdown]
# ## Validation that counts each sample once
#
# **Exercise 03.5** · ★★★☆☆ · 20 minutes · target: loss and accuracy of all samples to 1e-6 on every rank, each sample read once
#
# Builds on sections 2 and 5. All ranks hold the same `xs` and `ys`, and a plain `model` (without DDP). Share the work: each
# sample goes through the model on one rank, at most `batch_size` at a time. Return `(loss, accuracy)`: the mean cross-entropy
# (`F.cross_entropy`) and the share of right answers (`argmax`) over *all* samples, the same on every rank. There may be fewer
# samples than ranks.


# %%
def validate(model, xs, ys, batch_size):
    """(mean loss, accuracy) over all samples, on every rank."""
    ### BEGIN SOLUTION
    total = torch.zeros(3, dtype=torch.float64)  # sum of losses, right answers, samples
    mine = range(dist.get_rank(), len(xs), dist.get_world_size())
    with torch.no_grad():
        for at in range(0, len(mine), batch_size):
            part = list(mine[at : at + batch_size])
            out = model(xs[part])
            total[0] += F.cross_entropy(out, ys[part], reduction="sum")
            total[1] += (out.argmax(1) == ys[part]).sum()
            total[2] += len(part)
    dist.all_reduce(total)
    return (total[0] / total[2]).item(), (total[1] / total[2]).item()
    ### END SOLUTION


# %%
grading.check("03.5", validate)

# %% [markdown]
# `scalelab progress`, in a terminal, shows what is done and what is next. Lesson 04 measures the network that the
# gradients cross.
