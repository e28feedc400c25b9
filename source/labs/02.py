# ---
# title: "Lab 02: ranks and collectives"
# minutes: 85
# ranks: up to 7, on this machine
# cluster: local
# objective: number ranks in any layout; write a ring and a tree; mend a deadlock; read a mismatch report
# ---

# %% [markdown]
# # Lab 02: ranks and collectives
#
# Five exercises on [lesson 02](../notebooks/02_ranks_and_collectives.ipynb). Write each function, and run the check below it:
# it tries your answer on real ranks and names the mistake. Nothing that your answer does (hang, exit, crash) harms this notebook.
# `grading.hint("02.1")` gives a hint, and another one when you ask again.

# %%
import re

import torch
import torch.distributed as dist

from scalelab import cluster, grading, runs

# %% [markdown]
# ## Where is this rank?
#
# **Exercise 02.1** · ★☆☆☆☆ · 5 minutes · target: every rank of any layout, uneven ones too
#
# Builds on section 1. `layout` says how many ranks each node has: `[2, 2]` are two nodes of two ranks, `[1, 2, 3]` three
# uneven ones. Ranks are numbered node by node. Return the node's index, the local rank and the world size:
# `locate(3, [2, 2])` is `(1, 1, 4)`.


# %%
def locate(rank, layout):
    """(node, local_rank, world_size) of a rank, all counted from 0."""
    ### BEGIN SOLUTION
    local_rank = rank
    for node, ranks in enumerate(layout):
        if local_rank < ranks:
            return node, local_rank, sum(layout)
        local_rank -= ranks
    ### END SOLUTION


# %%
grading.check("02.1", locate)

# %% [markdown]
# ## A ring all-reduce
#
# **Exercise 02.2** · ★★★★☆ · 30 minutes · target: the sum on every rank, at most 2(n-1)/n of the tensor's bytes sent by each
#
# Builds on section 5. Your function runs on every rank of a group, with a tensor of one dimension, another one on each rank.
# Return the sum over all ranks. Use `dist.isend`, `dist.recv` and `handle.wait()`, no collective. The tensor may have a length
# that n does not divide.


# %%
def ring_all_reduce(x):
    """The sum of x over all ranks."""
    rank, n = dist.get_rank(), dist.get_world_size()
    ### BEGIN SOLUTION
    chunks = x.tensor_split(n)  # views of x; tensor_split always gives n
    for k in range(2 * (n - 1)):
        out, into = chunks[(rank - k) % n], chunks[(rank - k - 1) % n]
        arrived = torch.empty_like(into)
        sending = dist.isend(out, (rank + 1) % n)
        dist.recv(arrived, (rank - 1) % n)
        sending.wait()
        if k < n - 1:
            into += arrived  # reduce-scatter
        else:
            into.copy_(arrived)  # all-gather
    return x
    ### END SOLUTION


# %%
grading.check("02.2", ring_all_reduce)

# %% [markdown]
# ## Mend a deadlock
#
# **Exercise 02.3** · ★★☆☆☆ · 10 minutes · target: the left neighbour's tensor on each of 2, 3 and 4 ranks, one tensor sent by each
#
# Builds on section 7. This hangs on any number of ranks:
#
# ```python
# def exchange(x):
#     rank, n = dist.get_rank(), dist.get_world_size()
#     arrived = torch.empty_like(x)
#     dist.recv(arrived, src=(rank - 1) % n)
#     dist.send(x, dst=(rank + 1) % n)
#     return arrived
# ```
#
# Mend it. One rank comes later than the others, and whoever calls your function uses `x` again as soon as it returns.


# %%
def exchange(x):
    """Give x to the right neighbour; return what the left one gave."""
    ### BEGIN SOLUTION
    rank, n = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(x)
    sending = dist.isend(x, dst=(rank + 1) % n)
    dist.recv(arrived, src=(rank - 1) % n)
    sending.wait()
    return arrived
    ### END SOLUTION


# %%
grading.check("02.3", exchange)

# %% [markdown]
# ## Read a mismatch report
#
# **Exercise 02.4** · ★★★☆☆ · 20 minutes · target: what every rank called, and at which sequence number, from fresh reports
#
# Builds on section 9. Here are the reports of a real mismatch on this machine, under `TORCH_DISTRIBUTED_DEBUG=DETAIL`:

# %%
with cluster.start("local", nodes=1) as c:
    run = runs.launch("../notebooks/scripts/wrong.py", ["mismatch"], cluster=c, nproc_per_node=3,
                      timeout=60, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}).wait()  # fmt: skip
sample = [re.search(r"RuntimeError: .*?(?=\", \"line)", log)[0] for log in run.logs().values()]
print(sample[0])

# %% [markdown]
# Write a function that reads such reports: a list of texts, one from each rank, **in any order** (logs are collected as they
# come), each perhaps with a traceback around it. Return the sequence number at which the ranks parted, as the report gives it,
# and what each rank called there: `(2, {0: ("ALLREDUCE", [3]), 1: ("ALLREDUCE", [3]), 2: ("BROADCAST", [5])})` for the
# reports above. The check makes new mismatches each time, with other operations, shapes and ranks.


# %%
def read_reports(reports):
    """(sequence number, {rank: (operation, shape)})"""
    ### BEGIN SOLUTION
    pattern = (
        r"Rank (\d+) is running collective: CollectiveFingerPrint\("
        r"SequenceNumber=(\d+), OpType=(\w+), TensorShape=\[([\d, ]*)\]"
    )
    number, calls = None, {}
    for report in reports:
        for rank, sequence, operation, shape in re.findall(pattern, report):
            number = int(sequence)
            calls[int(rank)] = operation, [int(size) for size in shape.split(", ")]
    return number, calls
    ### END SOLUTION


# %%
print(read_reports(sample))
grading.check("02.4", read_reports)

# %% [markdown]
# ## A tree broadcast
#
# **Exercise 02.5** · ★★★☆☆ · 20 minutes · target: rank 0's tensor on 2, 3, 4 and 7 ranks, in log2(n) rounds, rounded up
#
# Builds on section 6. Rank 0 holds a tensor; all others hold one of the same shape with other numbers. Afterwards all hold rank
# 0's. In one round a rank can send one message, and it can pass on what it got in an earlier round. Use `dist.send` and
# `dist.recv`.


# %%
def tree_broadcast(x):
    """Rank 0's x, on every rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    ### BEGIN SOLUTION
    step = 1  # ranks below step have the tensor
    while step < n:
        if rank < step and rank + step < n:
            dist.send(x, rank + step)
        elif step <= rank < 2 * step:
            dist.recv(x, rank - step)
        step *= 2
    return x
    ### END SOLUTION


# %%
grading.check("02.5", tree_broadcast)
