# ---
# # For authors; the builder leaves these lines out of the notebook.
# # Before the lesson the learner believes:
# #   - rank 0 to 7 is the GPU's number; the rank can be used as a device index
# #   - get_rank() tells machines apart
# #   - gradients travel through the master: MASTER_ADDR is a parameter server
# #   - opening MASTER_PORT is enough
# #   - an all-reduce of n ranks sends n times the tensor from each
# #   - a tree gives another result than a ring, or saves bytes
# #   - a hang is a network fault; ranks that disagree always get an error
# #   - PyTorch's timeout says who is at fault
# # Afterwards the learner can do what the list under "You will be able to" says, and has seen each
# # of the above contradicted by something that ran.
# title: Make ranks talk to each other
# minutes: 50
# ranks: 4
# cluster: virtual or local
# objective: explain rank, local rank, world size and master address; follow a ring all-reduce byte by byte; name the cause of a hang
# ---

# %% [markdown]
# # Make ranks talk to each other
#
# You start a few processes, have them introduce themselves, and follow their numbers from one to the other: first with
# `send` and `recv`, then with the seven collectives that most distributed training is made of. Then you break them.
#
# **You will be able to**
# 1. say what `RANK`, `LOCAL_RANK`, `GROUP_RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` mean, for any layout;
# 2. say what goes through the store at the master address, and what does not;
# 3. say what every rank holds after each of the seven collectives;
# 4. predict the bytes and the rounds of an all-reduce, as a ring and as a tree;
# 5. tell a deadlock, a duplicated rank, a wrong world size and a mismatched collective apart by their symptoms.
#
# **You need** lesson 00. No GPU, no cluster, no root.
#
# **Time** 50 minutes; the cells run for one to two minutes. **Uses** 4 ranks, on a `virtual` or `local` cluster.

# %% tags=["parameters"]
num_nodes = 2  # machines
nproc_per_node = 2  # ranks on each machine; keep num_nodes * nproc_per_node at 4 or less
num_numbers = 2_000_000  # size of the largest tensor that is sent, 4 bytes each

# %%
import ast
import json
import re
from pathlib import Path

import matplotlib.pyplot as plt

from scalelab import cluster, grading, runs
from scalelab.measure.recorded import recall
from scalelab.panels.tensors import draw

world_size = num_nodes * nproc_per_node

# %% [markdown]
# Two helpers. `start` runs one of the scripts in `scripts/` with a real `torchrun` on every machine, and collects what the
# ranks said: each prints lines of JSON, for example what it held before and after. `code` shows a part of a script.


# %%
def start(script, *args, nodes=num_nodes, nproc=nproc_per_node, link=None, **env):
    with cluster.start(nodes=nodes) as c:
        if link and c.kind == "virtual":
            c.set_link(**link)
        run = runs.launch(f"scripts/{script}", [str(a) for a in args], cluster=c,
                          nproc_per_node=nproc, timeout=90, env=env).wait()  # fmt: skip
    lines = [line for _, log in sorted(run.logs().items()) for line in log.splitlines()]
    assert run.status == "succeeded", f"{run.words()}\n{run.first_failure}"
    return run, [json.loads(line) for line in lines if line.startswith("{")]


def code(script, *names):
    text = Path("scripts", script).read_text()
    parts = {getattr(part, "name", None): part for part in ast.parse(text).body}
    print("\n\n".join(ast.get_source_segment(text, parts[name]) for name in names))


# %% [markdown]
# ## 1. Who am I?
#
# A rank is a process. `torchrun` starts it and gives it a few environment variables; that is all it knows about itself.
# First, all ranks on **one** machine. `scripts/show_ranks.py` prints the variables and does not even import PyTorch.

# %% tags=["nbval-ignore-output"]
names = ["host", "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


def table(said):
    print("".join(f"{name:>13}" for name in names))
    for one in said:
        print("".join(f"{one[name]:>13}" for name in names))


_, on_one_host = start("show_ranks.py", nodes=1, nproc=world_size)
table(on_one_host)

# %% [markdown]
# **Predict.** Now the same number of ranks on `num_nodes` machines. Which columns will change? What is the `LOCAL_RANK`
# of the last rank?

# %%
my_local_rank = None  # of the last rank
grading.predict("02.local_rank", my_local_rank)

# %% tags=["nbval-ignore-output"]
_, on_all_hosts = start("show_ranks.py")
table(on_all_hosts)

# %% [markdown]
# | variable | what it is | use it for |
# |---|---|---|
# | `RANK` | this process's number in the whole job, from 0 | which part of the data to read; "only rank 0 writes" |
# | `LOCAL_RANK` | its number on its own machine, from 0 again on each | which GPU to use; "once per machine" |
# | `GROUP_RANK` | the number of its machine (of its `torchrun` agent) | telling machines apart |
# | `WORLD_SIZE` | the number of processes in the job | dividing the data; averages |
# | `MASTER_ADDR`, `MASTER_PORT` | where the ranks meet | nothing; `init_process_group` reads them |
#
# On one machine `RANK` equals `LOCAL_RANK`, and a program that takes one for the other works. With a second machine it
# breaks (section 9). `GROUP_RANK` and not `dist.get_rank()` tells machines apart: `get_rank()` is `RANK`.
#
# Theory for equal machines: `RANK = GROUP_RANK × nproc_per_node + LOCAL_RANK`.

# %%
print("the last rank's local rank: you said", my_local_rank, "and it is", nproc_per_node - 1)
for said, nproc in ((on_one_host, world_size), (on_all_hosts, nproc_per_node)):
    found = {int(one["RANK"]): one for one in said}
    assert sorted(found) == list(range(world_size))
    for rank, one in found.items():
        assert rank == int(one["GROUP_RANK"]) * nproc + int(one["LOCAL_RANK"])
        assert int(one["WORLD_SIZE"]) == world_size
    groups = {one["GROUP_RANK"] for one in said}
    print(f"{len(groups)} machine(s): every rank from 0 to {world_size - 1} once, as predicted")

# %% [markdown]
# ## 2. Where they meet: the store
#
# Two words first. The library that moves the tensors is the **backend**: *gloo* between CPUs, *NCCL* between NVIDIA GPUs. The
# ranks that call a collective together are a **process group**; `init_process_group` makes the one of all ranks.
#
# `init_process_group` takes each rank to `MASTER_ADDR:MASTER_PORT`. There a **store** listens: a small dictionary that all
# ranks can read and write. It belongs to the first machine's `torchrun`. Each rank writes under its own key the address at which
# it can be reached, and waits until it can read the keys of the others.
#
# Many people think that the gradients then travel through this master. Look at what is in the store, and at how much
# grows in it while the ranks sum a tensor of `num_numbers` numbers. On a virtual cluster each machine has a network card
# of its own, and its counter says how many bytes it has sent.
#
# **Predict.** The tensor has 8 MB. How many bytes go through the store?

# %%
my_bytes_through_the_store = None
grading.predict("02.store_bytes", my_bytes_through_the_store)

# %% tags=["nbval-ignore-output"]
run, said = start("collectives.py", "--numbers", num_numbers)
says = {case: [one for one in said if one["case"] == case] for case in {o["case"] for o in said}}
print("keys in the store:", *says["store"][0]["keys"], sep="\n    ")
print("bytes in the store before the sum:", says["store"][0]["bytes"])

# %%
growth = [one["store"] for one in says["big"]]
print("the sum is right on every rank:", all(one["right"] for one in says["big"]))
print("bytes that the store grew by meanwhile: you said", my_bytes_through_the_store,
      "and it is", max(growth))  # fmt: skip
assert max(growth) == 0

# %% [markdown]
# Nothing. So the 8 MB went another way: the counters of the network cards saw them.

# %% tags=["nbval-ignore-output"]
sent = recall(
    "02_counters",
    lambda: {str(one["rank"]): round(one["wire"] / 1e6, 2) for one in says["big"]},
    cluster=run.cluster,
).value
for rank, megabytes in list(sent.items())[::nproc_per_node]:
    print(f"while the sum was made, the machine of rank {rank} sent {megabytes:.2f} MB")
for one in says.get("connections", []):
    print(f"rank {one['rank']}: {one['to_store']} connections to the store's port, "
          f"{one['elsewhere']} straight to other ranks")  # fmt: skip

# %% [markdown]
# With gloo, each rank is connected **straight** to every other rank, on ports of their own. The store only told them the addresses.
# (Two connections to the store: PyTorch's, and one that the script opened to look into it.) So:
#
# - the master is a meeting point, not a parameter server; it is not a bottleneck for gradients;
# - opening `MASTER_PORT` in a firewall is not enough: the ranks' own ports must be open too (lesson 05);
# - if the store's machine dies, everyone else complains about the store. That is the consequence, not the cause.
#
# Why 12 MB for a tensor of 8 MB, at 4 ranks? Section 5 counts it.
#
# ## 3. send and recv
#
# The simplest way to talk: one rank sends, another receives. Both must call, and both must know the shape. A number's **digits**
# say where it is from: rank 0 holds 1, 2, 3 …, rank 1 holds 10, 20, 30 …, rank 2 holds 100, 200, 300 …

# %%
code("collectives.py", "send_recv")


# %%
def held(*cases):
    """For the picture: of each case, what the ranks held before and after."""
    rows = []
    for case in cases:
        ranks = sorted(says[case], key=lambda one: one["rank"])
        rows.append((case, [[one[when] for one in ranks] for when in ("before", "after")]))
    return rows


draw(held("send_recv"), ["each rank's tensor", "what arrived"])

# %% [markdown]
# `send` and `recv` return when the work is done. `isend` and `irecv` return at once with a handle, and the work is done
# when `handle.wait()` has returned. Until then the tensor must not be touched.
#
# ## 4. Seven collectives
#
# A collective is called by **all** ranks of the group, in the same order, with tensors of the same shape. There are two kinds:
# those that move numbers, and those that also add them up. First the movers.
#
# **Predict**, before you look at each picture: what does rank 1 hold afterwards?

# %%
code("collectives.py", "broadcast", "scatter", "gather", "all_gather")

# %%
draw(held("broadcast", "scatter", "gather", "all_gather"), ["before", "after"])

# %% [markdown]
# | collective | afterwards | in training |
# |---|---|---|
# | broadcast | everyone holds what rank 0 held | all replicas start from the same weights |
# | scatter | rank r holds part r of what rank 0 held | handing out work |
# | gather | rank 0 holds everyone's part, in rank order | collecting results |
# | all-gather | everyone holds everyone's part | FSDP collects a layer's weights before using it |
#
# Now those that add. Dark cells are complete sums: every rank's digit is in them.

# %%
code("collectives.py", "reduce", "all_reduce", "reduce_scatter")

# %%
draw(held("reduce", "all_reduce", "reduce_scatter"), ["before", "after"])

# %% [markdown]
# | collective | afterwards | in training |
# |---|---|---|
# | reduce | rank 0 holds the sum | a loss to print |
# | all-reduce | everyone holds the sum | DDP: the gradients, during `backward` |
# | reduce-scatter | rank r holds part r of the sum | FSDP: each rank gets the gradients of its own weights |
#
# Look at `reduce` on the ranks other than 0: their tensor has changed too. It was used as scratch space. Only the
# destination's result is promised; use nothing else.
#
# One thing to remember: **all-reduce = reduce-scatter, then all-gather.** A ring does exactly that.

# %%
after = {case: [one["after"] for one in says[case]] for case in says if "after" in says[case][0]}
total = [sum((i + 1) * 10**r for r in range(world_size)) for i in range(world_size)]
assert after["all_reduce"] == [total] * world_size and after["reduce"][0] == total
assert after["reduce_scatter"] == [[number] for number in total]
assert sum(after["reduce_scatter"], []) == after["all_reduce"][0]
print("rank 1 after all_reduce:    ", after["all_reduce"][1])
print("rank 1 after reduce_scatter:", after["reduce_scatter"][1])

# %% [markdown]
# ## 5. A ring all-reduce, from send and recv
#
# How would you sum a tensor over n ranks? Everyone sends everything to everyone: (n-1) times the tensor, from each rank.
# A **ring** does better. Each rank talks to two neighbours only. It sends to the right and receives from the left.
# The tensor is cut into n chunks.
#
# - **Reduce-scatter**, n-1 rounds: each round a rank passes one chunk on, and adds the one that arrives to its own. After
#   n-1 rounds each rank owns one complete chunk.
# - **All-gather**, n-1 rounds: the complete chunks go round, and what arrives replaces what was there.

# %%
code("ring_and_tree.py", "ring_reduce_scatter")

# %% [markdown]
# The second half is the same walk, with a copy in place of the addition. You write it in the lab.
#
# **Predict.** Each rank of n sends how many bytes in total, for a tensor of S bytes? And in how many rounds? Fill in for
# n = `world_size` and S = 4,000 bytes.

# %%
my_ring_bytes = None  # sent by one rank
my_ring_rounds = None
grading.predict("02.ring_bytes", my_ring_bytes)
grading.predict("02.ring_rounds", my_ring_rounds)

# %% [markdown]
# One job measures ring and tree at several sizes. So that time has something to show, each machine's link gets
# 1 gbit/s and a delay of 5 ms, as between two cities.

# %%
sizes = [n for n in (1_000, 10_000, 100_000) if n < num_numbers] + [num_numbers]
run, said = start("ring_and_tree.py", "--sizes", *sizes, link={"rate": "1gbit", "delay": "5ms"})
states = {m: [o["states"] for o in said if o["case"] == "states" and o["method"] == m]
          for m in ("ring", "tree")}  # fmt: skip
rounds = len(states["ring"][0]) - 1


def panels(method):
    """states[rank][round] turned round: what all ranks held after each round."""
    return [list(moment) for moment in zip(*states[method])]


draw([("ring", panels("ring"))], ["start", *(f"round {k + 1}" for k in range(rounds))], width=14)

# %% [markdown]
# Follow the first column, chunk 0. In round 1 rank 0 sends it to rank 1, which adds its own; in round 2 rank 1 sends it on, and
# so forth; every round adds a digit. After n-1 rounds each rank holds one dark cell, a complete sum, and another one on
# each rank: that is the reduce-scatter. (This ring ends with chunk r + 1 on rank r; `reduce_scatter` promises chunk r. Only the
# numbering differs.) Then the dark cells go round.
#
# **Compare.** In each of 2(n-1) rounds a rank sends one chunk of S/n bytes:
#
# $$\text{bytes sent by one rank} = \frac{2(n-1)}{n}\,S$$

# %%
costs = {(o["method"], o["numbers"]): [] for o in said if o["case"] == "cost"}
for o in said:
    if o["case"] == "cost":
        costs[o["method"], o["numbers"]].append(o)
size = 4 * sizes[0]
theory = 2 * (world_size - 1) * size / world_size
counted = [o["sent"] for o in costs["ring", sizes[0]]]
print(f"{'':22}{'you said':>10}{'theory':>10}   counted on each rank")
print(f"{'bytes sent by a rank':22}{str(my_ring_bytes):>10}{theory:>10.0f}   {counted}")
print(f"{'rounds':22}{str(my_ring_rounds):>10}{2 * (world_size - 1):>10}   {rounds}")
assert counted == [theory] * world_size and rounds == 2 * (world_size - 1)

# %% [markdown]
# With 2 ranks a rank sends S, with 4 ranks 1.5 S, with a thousand ranks nearly 2 S. **It hardly grows with n**: this is why
# rings carry training. (Elements, not bytes: twice the number of parameters at most; times 4 for float32, 2 for bfloat16.)
#
# Did the network card see the same? The ring of 4 ranks on 2 machines leaves each machine at one place only, so a
# machine's card carries one rank's share.

# %% tags=["nbval-ignore-output"]
expected = 2 * (world_size - 1) / world_size * 4 * num_numbers * (num_nodes > 1) / 1e6
wire = recall(
    "02_ring_counters",
    lambda: [[round(o["wire"] / 1e6, 2), expected] for o in costs["ring", num_numbers]],
    cluster=run.cluster,
).value
for rank, (megabytes, share) in list(enumerate(wire))[::nproc_per_node]:
    print(f"the machine of rank {rank} sent {megabytes:.2f} MB; 2(n-1)/n of the tensor: {share:.2f}")
    assert abs(megabytes - share) <= 0.1 * share + 0.1

# %% [markdown]
# A few percent more than theory: every packet carries headers too.
#
# ## 6. A tree: same sum, fewer rounds
#
# Ranks pair up: 1 sends to 0, 3 sends to 2; then 2 sends to 0. Now rank 0 has the sum, and it goes back the same way.

# %%
code("ring_and_tree.py", "tree")

# %%
steps = len(states["tree"][0]) - 1
draw([("tree", panels("tree"))], ["start", *(f"round {k + 1}" for k in range(steps))], width=12)

# %%
levels = (world_size - 1).bit_length()  # log2(n), rounded up
sent = [o["sent"] for o in costs["tree", sizes[0]]]
print("same sum as the ring:", panels("tree")[-1] == panels("ring")[-1])
print(f"rounds: {steps}, theory 2 log2(n) = {2 * levels}; the ring needs {rounds}")
print(f"bytes sent by each rank: {sent}; the ring: {counted}")
assert steps == 2 * levels and max(sent) == max(levels, 1) * size

# %% [markdown]
# The tree has fewer rounds: 2 log₂ n against 2(n-1). At 1,024 ranks that is 20 against 2,046. But every message is the whole
# tensor, and rank 0 sends log₂ n of them. A round costs the link's delay, whatever its size. So:
#
# **Predict.** Which one is faster for 4 kB, and which for 8 MB?
#
# Theory, for machines joined by links: time = (rounds that cross a link) × α + (bytes that cross it, one after
# another) ÷ β. Each of the ring's 2(n-1) rounds crosses it; of the tree's rounds only those between machines do, but each
# with the whole tensor. β is the link's rate, 1 gbit/s or 125 kB/ms. α is **two** delays, 10 ms: gloo's receiver first tells the
# sender that it is ready, and only then do the numbers come.

# %%
my_faster = {"4 kB": None, "8 MB": None}  # "ring" or "tree"
for size_in_words, guess in my_faster.items():
    grading.predict(f"02.faster at {size_in_words}", guess)

# %%
levels_between = (num_nodes - 1).bit_length()  # of the tree, those that cross a link
crossings = {"ring": 2 * (world_size - 1), "tree": 2 * levels_between}
tensors = {"ring": 2 * (world_size - 1) / world_size, "tree": 2 * levels_between}
kilobytes = [4 * n / 1000 for n in sizes]
link_ms = {m: [crossings[m] * 10 + tensors[m] * kb / 125 for kb in kilobytes] for m in crossings}
measured_ms = {m: [1000 * max(o["seconds"] for o in costs[m, n]) for n in sizes] for m in crossings}

# %%
fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
for method, color in (("ring", "C0"), ("tree", "C1")):
    ax.plot(kilobytes, measured_ms[method], "o-", color=color, label=f"{method}, measured")
    if run.cluster.kind == "virtual" and num_nodes > 1:  # else there is no link
        ax.plot(kilobytes, link_ms[method], "--", color=color, label=f"{method}, theory: link only")
ax.set(xscale="log", yscale="log", xlabel="size of the tensor (kB)",
       ylabel="time of one all-reduce (ms)")  # fmt: skip
ax.set_title(f"{world_size} ranks on {num_nodes} machine(s), {run.cluster.kind} cluster")
for axis in (ax.xaxis, ax.yaxis):
    axis.get_major_locator().set_params(subs=(1, 2, 5))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# For small tensors the time is rounds × delay, and the tree wins: on 2 machines the ring crosses the link 6 times, the tree
# twice, once up and once down. As the tensor grows, bytes take over and the ring catches
# up: by the formula, with 4 ranks on 2 machines, the lines cross at 10 MB, where 60 + 1.5 S/125 = 20 + 2 S/125 (S in kB). At
# 8 MB the tree is still a little ahead. Measured times lie above
# theory, which knows the link only: calls, copies and additions take time too, and all ranks share this computer's cores. (On a local cluster there is no link: you see only the cost of the calls.)
#
# A tree neither saves bytes nor changes the result. The sums are the same but for rounding, since the order of additions differs; so a model
# converges the same. NCCL chooses between rings and trees by size and number of nodes. Its trees are double trees, cut
# into pieces that flow behind each other, which keeps every link busy; ours is the plain one.
#
# ## 7. What goes wrong: everyone waits
#
# From here on everything is wrong, runs for real, and ends after 3 seconds. PyTorch's own patience is 30 minutes with
# gloo, 10 with NCCL, which is why these mistakes feel like a dead network. One job makes the mistakes of sections 7 to 9, one
# after the other, each in a process group of its own.
#
# **Predict.** Each rank passes a number to its right neighbour. What happens?

# %%
code("wrong.py", "deadlock")

# %% tags=["nbval-ignore-output"]
run, said = start("wrong.py", "deadlock", "mended", "duplicate", "too-large", "mismatch",
                  "swapped", "device", "too-small")  # fmt: skip


def symptoms(case):
    for o in said:
        if o["case"] == case:
            words = o.get("error", f"no error, result {o.get('result')}")
            print(f"process {o['process']}:", re.sub(r"\[[^]]*/[^]]*\] ", "", words))


symptoms("deadlock")
assert all("error" in o for o in said if o["case"] == "deadlock")

# %% [markdown]
# The error says *recv* and not why. (If one rank's patience ends a moment before the others', those say *Connection closed
# by peer* instead: a consequence, not another fault.) What you need is the **stack of every rank**: where does each one stand? The script had
# asked for it with one line of standard Python, to be printed if it is not done within two seconds:
#
# ```python
# faulthandler.dump_traceback_later(2)
# ```


# %%
def stacks(case):
    for rank, log in sorted(run.logs().items()):
        stack = next(part for part in log.split("Timeout (") if f" in {case}\n" in part)
        calls = re.findall(r'File "[^"]*?([^/"]+)", line \d+ in (\w+)', stack)
        calls = [f"{name} ({file})" for file, name in calls if name != "wrapper"][:2]
        print(f"rank {rank} stands in {', called by '.join(calls)}")


stacks("deadlock")

# %% [markdown]
# All in `recv`, none in `send`: nobody can ever arrive. That is a deadlock, and no network setting will mend it. Put the send
# under way first:

# %%
code("wrong.py", "mended")
symptoms("mended")

# %% [markdown]
# Other cures: even ranks send first and odd ranks receive first; or `dist.batch_isend_irecv`, which starts all of them at once
# and is the form that NCCL wants.
#
# Two things cure nothing. A `barrier` lets all ranks reach the deadlock together. And *send, then recv* on every rank
# only moves it: with gloo a `send` is not done before its receiver has come, so now all stand in `send`; with NCCL the wait shows at
# the next synchronisation. (Some MPI
# libraries let small messages through, and hang at larger ones.)
#
# ## 8. What goes wrong: not everyone comes
#
# Three mistakes of jobs that are launched by hand, without `torchrun`: the last two processes both say that they are the
# same rank; every process says that the world is one larger than it is; or one smaller.

# %%
print("duplicate: the processes said they were ranks",
      [o["rank"] for o in said if o["case"] == "duplicate"])  # fmt: skip
symptoms("duplicate")

# %% [markdown]
# Nobody says "duplicate". Every process waits at the store for a **key that nobody writes**: the last part of the name is the
# rank that is missing. Read the key, then ask who should have been that rank.

# %%
print("world size too large")
symptoms("too-large")
print("world size too small")
symptoms("too-small")

# %% [markdown]
# Too large looks like the duplicate, but the missing rank is one that was never meant to exist. Too small is the worst: one process
# fails at once, the others **train happily without it** and report a smaller sum. Always print the world size that you got
# next to the one that you wanted. `torchrun` numbers the ranks itself and none of the three can happen inside one
# rendezvous, unless a script overrides its numbers. But leave out `--nnodes` on two machines, and you have two jobs of half the
# size, and neither complains.
#
# ## 9. What goes wrong: ranks that disagree
#
# After two all-reduces that fit, the last rank takes another branch:

# %%
code("wrong.py", "mismatch")

# %% tags=["nbval-ignore-output"]
symptoms("mismatch")
assert all("error" in o for o in said if o["case"] == "mismatch")

# %% [markdown]
# Some time out in a send, some in a receive, and nothing names the branch. Run it again with one environment variable:
# `TORCH_DISTRIBUTED_DEBUG=DETAIL`. Every rank then compares what it is about to do with the others, before it does it.

# %%
run_detail, said_detail = start("wrong.py", "mismatch", TORCH_DISTRIBUTED_DEBUG="DETAIL")
report = said_detail[0]["error"]
print(re.sub(r", TensorDtypes=.*?memory_format=\(nullopt\)\)\)", ", …)", report))

# %% [markdown]
# Read it like this. *SequenceNumber=2*: the third collective (they count from 0) is the first in which the ranks part. *OpType* and
# *TensorShape*: what each of the two ranks was about to call. Each rank compares itself with one other that differs, so collect
# the reports of **all** ranks: the odd one out is the rank whose call nobody shares.

# %%
for o in said_detail:
    number, kind = re.search(r"SequenceNumber=(\d+), OpType=(\w+)", o["error"]).groups()
    print(f"rank {o['rank']}: collective {number} is {kind:10} at: {o['line']}")

# %% [markdown]
# DETAIL costs time in every call, so switch it on to find a hang, and off again. (With DDP, torch 2.13 on CPU crashes in the
# constructor under DETAIL; it works on bare collectives, as here.)
#
# **A mismatch without an error.** Here the last rank makes the same two calls in the other order. The true averages are
# loss 2.0 and accuracy 0.5.

# %%
code("wrong.py", "swapped")
symptoms("swapped")

# %% [markdown]
# No error, no hang, and every number is wrong: the last rank added its accuracy to the others' loss. Operation, shape and
# sequence number agree, so DETAIL does not see it either. The only protection is that all ranks run the same code in the same
# order: never loop over a `set` or put a collective under an `if` that depends on the rank.
#
# **The rank as a device number.** `torch.cuda.set_device(rank)` is right on the first machine only. Without GPUs, a list with
# one name for each rank of the machine stands for its devices here:

# %%
symptoms("device")

# %% [markdown]
# The first machine is fine; every later one fails. With GPUs the same mistake reads `RuntimeError: CUDA error: invalid
# device ordinal` (seen in public in openai/gpt-oss#266, on 2 machines with 4 GPUs each). The cure is
# `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))`.
#
# | symptom | cause | first look |
# |---|---|---|
# | all ranks in `recv` | deadlock: nobody sends first | the stack of every rank |
# | all wait for the same store key | that rank never came: duplicate, wrong world size, dead host | the last part of the key |
# | `rank < size` on one process, others go on | world size too small | who launched it |
# | time-outs in different collectives | ranks disagree | `TORCH_DISTRIBUTED_DEBUG=DETAIL`, all ranks' reports |
# | no error, wrong numbers | same calls in another order | the code around the calls |
# | only later machines fail | `RANK` used for `LOCAL_RANK` | the device line |

# %% [markdown]
# ## On a real cluster
#
# - With GPUs: one process per GPU, `torch.cuda.set_device(LOCAL_RANK)` first, `init_process_group("nccl")`, tensors on the
#   GPU. The calls are the same. `scripts/collectives.py` takes CUDA and NCCL where it finds them.
# - NCCL's calls return before the work is done; the next CUDA operation waits for it by itself.
# - The stack of a rank that hangs, without having asked for it: `py-spy dump --pid PID` on its machine. With NCCL, PyTorch
#   keeps the last collectives of each rank itself (`TORCH_FR_BUFFER_SIZE=2000`, in older versions
#   `TORCH_NCCL_TRACE_BUFFER_SIZE`) and writes them to a file on a time-out (`TORCH_NCCL_DUMP_ON_TIMEOUT=1`).
# - Slurm without `torchrun`: `RANK=$SLURM_PROCID`, `LOCAL_RANK=$SLURM_LOCALID`, `WORLD_SIZE=$SLURM_NTASKS`. A mistake in these
#   three lines is section 8.
# - Shorten the patience while you look for a hang: `init_process_group(timeout=timedelta(seconds=60))`. It does not bound
#   the time in which gloo makes its connections; give the job a time limit too.
#
# ## Summary
#
# - `RANK` counts in the job, `LOCAL_RANK` on the machine, `GROUP_RANK` counts machines. Devices go by `LOCAL_RANK`.
# - The store at the master address tells ranks each other's addresses. Tensors never go through it.
# - All-reduce = reduce-scatter + all-gather. As a ring, each rank sends 2(n-1)/n of the tensor in 2(n-1) rounds.
# - A tree gives the same sum in 2 log₂ n rounds, with more bytes from its root. Small tensors: rounds count. Large: bytes.
# - A hang is a question: where does **each** rank stand? Ask for all stacks, then for the sequence number.
#
# ## Check yourself

# %%
grading.Question(
    "02.q1",
    "3 machines of 8 GPUs, one process on each GPU. What are RANK and LOCAL_RANK of the third "
    "process on the second machine?",
    ["RANK 2, LOCAL_RANK 10", "RANK 11, LOCAL_RANK 3", "RANK 10, LOCAL_RANK 2", "RANK 2, LOCAL_RANK 2"],
    2,
    "Eight ranks stand before it on machine 0, and two on its own: 8 + 2 = 10. Both count from 0.",
)  # fmt: skip

# %%
grading.Question(
    "02.q2",
    "A model's gradients are 1 GB. How much does each of 64 ranks send in a ring all-reduce?",
    ["about 64 GB", "about 2 GB", "1/64 GB", "1 GB to the master"],
    1,
    "2 × 63/64 × 1 GB = 1.97 GB, to its right neighbour only. The master gets none of it.",
)

# %%
grading.Question(
    "02.q3",
    "All ranks hang. Ranks 0 to 6 stand in all_reduce, rank 7 in save_checkpoint. What is it?",
    [
        "the network of rank 7 is broken",
        "the tensor is too large for the timeout",
        "rank 0's store is full",
        "rank 7 took another branch: the others wait for its all_reduce",
    ],
    3,
    "A collective needs all ranks. Rank 7 is alive and elsewhere; find the if that sent it there.",
)

# %% [markdown]
# **Lab:** [lab 02](../labs/02.ipynb) lets you write the ring, mend a deadlock and read a mismatch report.
# **Next:** lesson 03 gives all this to `DistributedDataParallel`, and checks what it does with it.
