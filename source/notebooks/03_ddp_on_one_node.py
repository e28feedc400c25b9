# ---
# # For authors; the builder leaves these lines out of the notebook.
# # Before the lesson the learner believes:
# #   - DDP splits the model, or the batch, by itself
# #   - optimizer.step() synchronises the gradients
# #   - the loss (or the learning rate) has to be divided by the number of ranks to get the same result
# #   - shuffle=True in the DataLoader is fine as long as all ranks are on one machine
# #   - DistributedSampler reshuffles by itself; a seed of its own for every rank is safer
# #   - accumulating gradients saves traffic by itself
# #   - a barrier repairs ranks that have different numbers of batches
# #   - the average of all ranks' accuracies is the accuracy
# #   - four ranks are four times as fast
# # Afterwards the learner can do what the list under "You will be able to" says, and has seen each
# # of the above contradicted by something that ran.
# title: Turn a script into DDP on one node
# minutes: 60
# ranks: 2 and 4
# cluster: virtual or local
# objective: turn a script into DDP with torchrun and prove that it equals one device
# ---

# %% [markdown]
# # Turn a script into DDP on one node
#
# You take a script that trains on one device, make it train on many, and prove that the result is the same.
# Then you break it in the ways that people break it, and see how each of them looks.
#
# **You will be able to**
# 1. turn a script into DistributedDataParallel (DDP), first with `mp.spawn`, then with `torchrun`;
# 2. say when gradients are synchronised, in which pieces, and how many bytes that takes;
# 3. prove that N ranks train the same model as one device with the global batch;
# 4. give every rank its own part of the data, another order in each epoch, and each sample once;
# 5. recognise six traps by their symptoms: shuffling alone, padding, accumulation, uneven data, unused parameters,
#    everybody writing;
# 6. measure a speed-up, and say why it bends.
#
# **You need** lessons 01 (a step on one device) and 02 (ranks, all-reduce). No GPU.
#
# **Time** 60 minutes; the cells run for about one. **Uses** 2 and 4 ranks on one machine.

# %% tags=["parameters"]
num_nodes = 1  # machines; this lesson needs one
nproc_per_node = 2  # ranks on it
num_steps = 10  # optimizer steps of the comparisons
num_samples = 1000  # of the data set in section 5

# %%
import ast
import contextlib
import difflib
import io
import json
import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from scalelab import cluster, grading, runs

world_size = num_nodes * nproc_per_node


# %% [markdown]
# Three helpers. `torchrun` starts a script on real ranks and waits for them, `facts` reads the JSON lines that the
# ranks have printed, and `show` prints a function of a script.


# %%
def torchrun(script, *args, ranks=nproc_per_node):
    with cluster.start(nodes=num_nodes) as c:
        return runs.launch(f"scripts/{script}", args, cluster=c, nproc_per_node=ranks).wait(120)


def facts(run):
    assert run.status == "succeeded", run.words()
    lines = [line for log in run.logs().values() for line in log.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def show(script, name):
    text = Path("scripts", script).read_text()
    (found,) = [n for n in ast.parse(text).body if getattr(n, "name", "") == name]
    print(ast.get_source_segment(text, found))


# %% [markdown]
# ## 1. The change
#
# `scripts/train_one.py` trains a small GPT on one device. `scripts/spawn_ddp.py` trains it on two ranks. Lines with
# `-` go, lines with `+` come:


# %%
def show_diff(old, new):
    texts = [Path("scripts", name).read_text().splitlines() for name in (old, new)]
    for line in list(difflib.unified_diff(*texts, n=0, lineterm=""))[2:]:
        print("" if line.startswith("@@") else line)


show_diff("train_one.py", "spawn_ddp.py")

# %% [markdown]
# Four things, and they are the same four in every DDP script:
#
# 1. **Start** one process a rank, and let them meet (`init_process_group`).
# 2. **Split** the data: each rank takes its own piece of the batch. DDP does *not* do this for you.
# 3. **Wrap** the model, and call the *wrapped* one in forward.
# 4. **Write** on one rank only, and leave the group at the end.
#
# The loss, the backward call, the optimizer and the learning rate stay as they are. (The two lines with `t3` only
# measure time. `import torch.distributed.nn` and `del ddp_model` let gloo's threads end before Python does; without them a
# rank aborts now and then, when its work is done.)
#
# `mp.spawn` starts the ranks from Python itself. It works, on one machine:

# %% tags=["nbval-ignore-output"]
with cluster.start(nodes=num_nodes) as c:
    command = f"{sys.executable} scripts/spawn_ddp.py --steps {num_steps}"
    spawned = c.node(0).sh(f"cd '{Path.cwd()}' && OMP_NUM_THREADS=1 {command}")
print(spawned.stdout or spawned.stderr.splitlines()[-1])

# %% [markdown]
# But address, port and number of ranks are written into the script. A second job on the same machine picks the same
# port, and rank 0 of that job cannot open it. This is what it sees:

# %%
first_job = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
try:
    dist.TCPStore("127.0.0.1", first_job.port, is_master=True, wait_for_workers=False)
except RuntimeError as error:
    print(type(error).__name__, "-", "EADDRINUSE" if "EADDRINUSE" in str(error) else error)
del first_job

# %% [markdown]
# And a second machine does not know about the first at all. **torchrun** takes these lines out of the script: it picks
# ranks and port, and puts them into the environment. The script only reads them:

# %%
show_diff("spawn_ddp.py", "train_ddp.py")

# %% [markdown]
# `init_process_group` without an address reads `MASTER_ADDR`, `MASTER_PORT`, `RANK` and `WORLD_SIZE` from the environment.
# `@record` makes torchrun report the traceback of the rank that failed first. The same file now runs on 2 ranks or
# 2,000, on one machine or many.

# %% [markdown]
# ## 2. Is it the same training?
#
# A proof needs a control. `scripts/equals_one.py` trains three times from the same start, for the same number of steps:
#
# - DDP on N ranks, each with 1/N of a global batch of 16;
# - one device, with the whole batch of 16;
# - one device, with only one rank's share of 16/N: the control. If this were equal too, the test would show nothing.
#
# How large will the largest difference of any parameter be? They are numbers of about 0.01 to 1.

# %%
show("equals_one.py", "train")

# %%
my_difference = None  # the largest difference between DDP and one device: 1e-1, 1e-3, 1e-6 ...?

# %%
grading.predict("03.difference", my_difference)
equal = []
for ranks in sorted({nproc_per_node, 4}):
    equal += facts(torchrun("equals_one.py", "--steps", str(num_steps), ranks=ranks))
print("ranks  parameters  equals one device, to 1e-6  equals one with a rank's share")
for e in equal:
    same, control = (e[key] < 1e-6 for key in ("one_device", "rank_batch_only"))
    print(f"{e['world_size']:5}  {e['parameters']:10,}  {str(same):>26}  {str(control):>30}")
    assert same and not control

# %% tags=["nbval-ignore-output"]
print("you said:", my_difference)
for e in equal:
    print(f"{e['world_size']} ranks: {e['one_device']:.1e}; the control: {e['rank_batch_only']:.1e}")

# %% [markdown]
# **Why.** The loss is a mean over the samples. The mean over 16 is the mean of two means over 8, *because the two have
# the same size*. A gradient is linear in the loss, so it is averaged in the same way, and DDP averages: it sums over
# the ranks and divides by N. So you do not divide the loss by N, and you do not multiply the learning rate, as long as the
# global batch stays the same.
#
# One thing this proof cannot show: AdamW divides out a gradient that is N times too long (lesson 01, section 5), so it proves
# the data and the order of the work, not the factor. Lab 03.1 repeats it with SGD, which shows the factor too.
#
# The rest, some 1e-7, is rounding: the numbers are summed in another order. Bit-for-bit equality is not promised.
#
# Where the ranks' shares are *not* of equal size (sentences of different lengths, a loss that ignores padding), the mean
# of the ranks' means is not the mean. Then sum the loss, divide by the number of tokens on *all* ranks (an all-reduce), and
# multiply by the number of ranks, because DDP will divide by it:

# %%
losses = [torch.full([10], 4.0), torch.full([30], 2.0)]  # per token, on two ranks
print("mean of the ranks' means:", torch.stack([rank.mean() for rank in losses]).mean().item())
print("mean over all tokens:    ", torch.cat(losses).mean().item())

# %% [markdown]
# ## 3. When are gradients synchronised?
#
# "`optimizer.step()` synchronises the gradients" is in many tutorials. Which call do you think it is: `forward`,
# `backward` or `step`?

# %%
my_guess = None  # "forward", "backward" or "step"

# %% [markdown]
# A *communication hook* is called by DDP for every bucket of gradients that it sends, so we can count. `apart` is the largest difference
# between two ranks' copies. Every rank has other data:

# %%
show("ddp_cases.py", "count_buckets")
print()
show("ddp_cases.py", "backward")

# %%
grading.predict("03.synchronised_in", my_guess)
found = facts(torchrun("ddp_cases.py", "backward", "buckets", "no_sync"))
case = {name: [f for f in found if f["case"] == name] for name in ("backward", "buckets", "no_sync")}
words = {True: "equal", False: "different"}
print("you said:", my_guess)
print(f"{'on rank 0':16}{'gradients of the ranks':>24}{'all-reduces so far':>20}")
for when, difference, count in case["backward"][0]["rows"]:
    state = "not there yet" if difference is None else words[difference == 0]
    print(f"{when:16}{state:>24}{count:>20}")
states = [words[w == 0] for w in case["backward"][0]["weights_apart"]]
print("weights before wrapping: {}, after: {}, after the step: {}".format(*states))

# %% [markdown]
# **backward.** When `loss.backward()` returns, all ranks hold the same averaged gradient, bit for bit. `step()` sends
# nothing: every rank takes the same step from the same weights, and so the copies stay equal.
#
# The *same weights* come from the wrapping: each rank started from a seed of its own here, and `DistributedDataParallel(model)`
# sent rank 0's weights to all. It does so once for the weights. (Buffers, such as BatchNorm's running averages, go out from
# rank 0 before each forward.) After that nobody compares them: if one rank's optimizer had another
# setting, the copies would part without an error. Lesson 06 shows that.
#
# Three consequences:
# - Clip gradients *between* backward and step: they are already averaged there.
# - A forward pass through `ddp_model.module`, or through the model you had before wrapping, is never synchronised. The
#   first row shows it: different gradients, no all-reduce, no error.
# - A rank that skips one backward pass leaves the others waiting (section 7).

# %% [markdown]
# ## 4. Buckets and overlap
#
# One all-reduce for each parameter would pay the latency hundreds of times. One for all could only start when backward is
# over. DDP takes the middle: it puts gradients into **buckets** (25 MB each; the first one smaller, 1 MB), in about the
# order in which backward produces them, from the last layer to the first. A **hook** on each parameter counts; when a
# bucket is full, its all-reduce starts, while backward goes on with earlier layers. This is the **overlap**.
#
# The case `buckets` trains a model of nine layers with `bucket_cap_mb=0.6` (so that there are several) and notes when each
# gradient is ready and each bucket is sent:

# %%
show("ddp_cases.py", "buckets")

# %%
b = case["buckets"][0]
early = sum(at < b["ready"][-2] for at in b["sent"])
print("gradients, bytes:       ", b["gradients"])
print("buckets, bytes:         ", " + ".join(map(str, b["bytes"])), "=", sum(b["bytes"]))
print("sent before backward had made the last gradients:", early, "of", len(b["bytes"]), "buckets")
assert sum(b["bytes"]) == b["gradients"] and early == len(b["bytes"]) - 1

# %%
fig, ax = plt.subplots(figsize=(8, 3), layout="constrained")
line = {"arrowstyle": "-", "relpos": (0, 1)}
ax.eventplot([1000 * t for t in b["ready"]], lineoffsets=1, linelengths=0.6, colors="C0")
for number, (at, size) in enumerate(zip(b["sent"], b["bytes"])):
    ax.plot(1000 * at, 0, "v", color="C1", markersize=10)
    label, low = f"bucket {number}: {size / 1e6:.2f} MB", -0.6 - 0.55 * number
    ax.annotate(label, (1000 * at, -0.15), (1000 * at, low), arrowprops=line)
ax.axvline(1000 * b["end"], color="0.4", linestyle=":")
ax.annotate("backward returns", (1000 * b["end"], 1.5), xytext=(-4, 0), textcoords="offset points", ha="right")
ax.set(yticks=[0, 1], yticklabels=["bucket sent", "gradient ready"], ylim=(-2.1, 1.9), xlim=(0, 1250 * b["end"]))
ax.set_xlabel("time since backward began, rank 0 (ms)")
plt.show()

# %% [markdown]
# The earlier buckets travel while backward still computes. The last one has nothing to hide behind: `backward` returns
# (the dotted line) when its average has come. The time between the last gradient and that line is the *exposed*
# communication; `train_ddp.py` records it as *communication*.
#
# **On the wire.** An all-reduce of S bytes makes each rank send 2(n−1)/n · S (lesson 02): S with 2 ranks, 1.5 S with 4,
# close to 2 S with many. So a step sends about 2 × 4 bytes for each fp32 parameter, however large the batch is. That is
# why larger batches a rank scale better.

# %% [markdown]
# ## 5. Who reads what?
#
# DDP does not split data. `DistributedSampler` does: it shuffles all indices with a seed *that all ranks share*, and
# rank r takes every n-th, from r on. No process needs to be started to see that; it only needs to be told its rank:

# %%
samples, replicas = range(num_samples), 4


def epoch_of_all(epoch=0, **options):
    parts = []
    for rank in range(replicas):
        sampler = DistributedSampler(samples, num_replicas=replicas, rank=rank, **options)
        sampler.set_epoch(epoch)
        parts.append(list(sampler))
    return parts


parts = epoch_of_all()
print("samples a rank:", [len(part) for part in parts])
print("every sample once:", sorted(sum(parts, [])) == list(samples))

# %% [markdown]
# Now what goes wrong. "`shuffle=True` in the DataLoader is fine on one machine": there, every rank shuffles *for itself*.
# Left alone, each rank would go through *all* samples, and an epoch would be 4 times as long; so count after one epoch's worth
# of reading: each of 4 ranks reads a quarter as many samples, from its own order. How many of all samples
# has anybody seen by then? And how many if all ranks also have the same seed?

# %%
my_coverage_own_seeds = None  # percent
my_coverage_same_seed = None  # percent

# %%
share = num_samples // replicas


def shuffled_alone(seeds):
    orders = [torch.randperm(num_samples, generator=torch.Generator().manual_seed(s)) for s in seeds]
    return [order[:share].tolist() for order in orders]


ways = {
    "DistributedSampler": parts,
    "each rank shuffles alone": shuffled_alone(range(replicas)),
    "alone, all with one seed": shuffled_alone([0] * replicas),
}
counts = {k: torch.bincount(torch.tensor(sum(v, [])), minlength=num_samples) for k, v in ways.items()}

# %%
grading.predict("03.coverage_own_seeds", my_coverage_own_seeds)
grading.predict("03.coverage_same_seed", my_coverage_same_seed)
said = [None, my_coverage_own_seeds, my_coverage_same_seed]
theory = [1, 1 - (1 - 1 / replicas) ** replicas, 1 / replicas]
print(f"{'samples seen at all':28}{'you said':>10}{'theory':>10}{'measured':>10}")
for (name, count), mine, share_seen in zip(counts.items(), said, theory):
    seen = (count > 0).float().mean().item()
    print(f"{name:28}{str(mine):>10}{share_seen:>10.1%}{seen:>10.1%}")

# %%
fig, ax = plt.subplots(figsize=(8, 3), layout="constrained")
for number, (name, count) in enumerate(counts.items()):
    bars = torch.bincount(count, minlength=replicas + 1)
    at = torch.arange(replicas + 1) + 0.27 * (number - 1)
    drawn = ax.bar(at, bars, 0.25, label=name)
    ax.bar_label(drawn, [str(int(n)) if n else "" for n in bars], fontsize=8)
ax.set(xlabel="times that a sample was read in one epoch, by all ranks together", ylabel="samples")
ax.margins(y=0.1)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# **Theory.** A rank misses a sample with probability 1 − 1/n; all n miss it with (1 − 1/n)ⁿ: a quarter for 2 ranks, 32 % for 4, never more than 37 %. With
# one seed for all, everybody reads the same quarter, the average of four equal gradients is one of them, and three ranks
# work for nothing. The loss falls in all three cases and nothing warns you.
#
# **Seeds.** The sampler's seed must be *equal* on all ranks. Give each rank a seed of its own, and the pieces no longer
# fit together. (What *should* differ by rank is the randomness of augmentation and dropout.)
#
# **Epochs.** The order comes from `seed + epoch`, and the sampler does not know the epoch unless you tell it:

# %%
sampler = DistributedSampler(samples, num_replicas=replicas, rank=0)
without = [list(sampler) for epoch in range(3)]
told = []
for epoch in range(3):
    sampler.set_epoch(epoch)
    told.append(list(sampler))
print("different orders in 3 epochs, without set_epoch:", len(set(map(tuple, without))))
print("different orders in 3 epochs, with set_epoch:   ", len(set(map(tuple, told))))
own = [list(DistributedSampler(samples, replicas, rank, seed=rank)) for rank in range(replicas)]
print("a seed for each rank: every sample once?", len(set(sum(own, []))) == num_samples)

# %% [markdown]
# **Padding.** All ranks must make the same number of steps. So if the data do not divide, the sampler repeats some
# samples (or leaves some out, with `drop_last=True`). In training that is harmless. In validation it is a wrong number:

# %%
few = range(10)
for drop_last in (False, True):
    options = dict(num_replicas=replicas, shuffle=False, drop_last=drop_last)
    read = sum((list(DistributedSampler(few, rank=r, **options)) for r in range(replicas)), [])
    twice = sorted({i for i in read if read.count(i) > 1})
    missing = sorted(set(few) - set(read))
    print(f"drop_last={drop_last}: {len(read)} read of {len(few)}, twice: {twice}, missing: {missing}")

# %% [markdown]
# For validation, give rank r the indices `range(r, n, world_size)`, call the model *without* DDP's wrapper (the ranks may
# have different numbers of batches), and all-reduce **sums and counts**, not averages. Lab 03.5 is that.

# %% [markdown]
# ## 6. Accumulate without extra traffic
#
# To have a larger batch than fits, you run several micro-steps and step once (lesson 01). But DDP synchronises in
# *every* backward. Within `ddp_model.no_sync()` it does not. What fraction of the bytes is left, for 4 micro-steps, if
# only the last one synchronises?

# %%
my_fraction = None  # of the bytes without no_sync

# %%
show("ddp_cases.py", "no_sync")

# %%
grading.predict("03.no_sync", my_fraction)
n = case["no_sync"][0]
print("gradient, bytes:                 ", n["gradient"])
print("4 micro-steps, plain, bytes:     ", n["plain"])
print("4 micro-steps, no_sync, bytes:   ", n["no_sync"])
print("fraction: you said", my_fraction, "- theory 0.25 - measured", n["no_sync"] / n["plain"])
print("same gradient:", abs(n["plain gradient"] - n["no_sync gradient"]) < 1e-5)

# %% [markdown]
# The forward pass must stand *inside* `no_sync()` as well: DDP decides there whether the coming backward will
# synchronise. `with ddp_model.no_sync(): loss.backward()`, with the forward outside, saves nothing. And the loss of a
# micro-step is divided by the number of micro-steps, as on one device; by nothing else.

# %% [markdown]
# ## 7. Uneven data
#
# Rank 0 has 5 batches, rank 1 has 3. What will happen in rank 0's fourth backward?

# %%
show("ddp_traps.py", "uneven")

# %% [markdown]
# Nothing, until gloo's patience of 30 minutes ends. So that this page goes on, the script sets an alarm: after 3 s, Python prints where a
# rank stands, and after 5 s rank 0 ends. (`faulthandler.dump_traceback_later` is in the standard library; keep it.)


# %%
def where(log):
    """The line of the script in the first stack that the alarm has printed."""
    number = re.search(r"line (\d+) in uneven", log)[1]
    return Path("scripts/ddp_traps.py").read_text().splitlines()[int(number) - 1].strip()


stuck = torchrun("ddp_traps.py", "uneven")
print("status:", stuck.status)
for rank, log in stuck.logs().items():
    if "Timeout" in log:
        print(f"rank {rank} stands in: {where(log)}")

# %% [markdown]
# Rank 0 waits in its fourth all-reduce for a gradient that rank 1 will never send. Rank 1 waits in the barrier. The barrier
# did not repair anything: it is one more place to wait. On a GPU cluster the same shows as *Watchdog caught collective
# operation timeout*, 10 minutes later.
#
# Three cures, in the order to try them: give all ranks the same number of batches (`DistributedSampler` does); agree on
# the smallest number beforehand (an all-reduce with MIN, which drops data); or `ddp_model.join()`: a rank that is done
# goes on answering the others' all-reduces with zeros. (If what comes after also uses collectives, `join` does not
# know about them.)
#
# ## 8. Unused parameters, and who writes
#
# Two more traps, in the same job as the cure above. A model has a second head, and forward does not use it:

# %%
show("ddp_traps.py", "TwoHeads")

# %%
found = facts(torchrun("ddp_traps.py", "uneven_join", "unused", "write"))
case = {name: [f for f in found if f["case"] == name] for name in ("uneven_join", "unused", "write")}
print("batches done, with join:", sorted(f["batches"] for f in case["uneven_join"]))
error = case["unused"][0]["False"]
print("\nunused parameters, second step:")
for sentence in error.replace("\n", ". ").split(". "):
    if "Expected to" in sentence or "indices" in sentence:
        print("   ", sentence)
print("with find_unused_parameters=True:", case["unused"][0]["True"])

# %% [markdown]
# DDP waits for a gradient of *every* parameter. One that never comes leaves its bucket half full, and the *next* forward
# complains. The numbers are the places in `list(model.parameters())`; `TORCH_DISTRIBUTED_DEBUG=INFO` adds names.
# `find_unused_parameters=True` walks the graph in every step to find out, which costs time. Better: freeze what you do
# not train (`requires_grad = False` before wrapping), or take it out.
#
# **Writing.** Every line of the script runs on every rank, also the one that saves:

# %%
show("ddp_traps.py", "write")

# %%
for name, lines in case["write"][0].items():
    if name in ("all_write.txt", "rank_0_writes.txt"):
        print(f"{name:20} {lines} lines")

# %% [markdown]
# Appended lines double. A checkpoint opened for writing by all ranks at once may be torn. So rank 0 writes. But every
# rank must *reach* the same collectives: `if rank == 0:` round a forward pass of `ddp_model`, a barrier or an all-reduce
# is a hang. Save `ddp_model.module.state_dict()`; the wrapper's own has `module.` before every name.

# %% [markdown]
# ## 9. How much faster?
#
# Two questions hide in "does it scale":
#
# - **strong scaling**: the global batch stays, each rank gets less. The same training, sooner?
# - **weak scaling**: each rank's batch stays, the global batch grows. More samples a second?
#
# `scripts/scaling.py` measures both on 1, 2 and 4 ranks in one job. Each is measured twice: as it is, and under `no_sync`,
# where the ranks only compute. The difference is communication. (Each is measured in two rounds and the faster one counts, since
# other programs can only make it slower.) What speed-up do you expect at 4 ranks, on this machine?

# %%
my_speed_up = None  # at 4 ranks, strong scaling

# %%
grading.predict("03.speed_up", my_speed_up)
speeds = facts(torchrun("scaling.py", ranks=4))
strong = [s for s in speeds if s["kind"] == "strong"]
weak = [s for s in speeds if s["kind"] == "weak"]
for kind, rows in (("strong", strong), ("weak", weak)):
    print(kind, "scaling: ranks", [s["ranks"] for s in rows], end=", ")
    print("global batch", [s["global_batch"] for s in rows])

# %%


# %%
def draw_speed(ax):
    for rows, name in ((strong, "strong, global batch 32"), (weak, "weak, batch 8 a rank")):
        ax.plot(sizes, [s["tokens"] / 1000 for s in rows], "o-", label=name)
    ideal = [n * strong[0]["tokens"] / 1000 for n in sizes]
    ax.plot(sizes, ideal, "--", color="0.6", label="ideal")
    ax.set(xlabel="ranks", ylabel="speed (1,000 tokens/s)", xticks=sizes, ylim=(0, None))


def draw_time(ax):
    names, step = [str(n) for n in sizes], [1000 * s["step"] for s in strong]
    compute = [min(1000 * s["compute"], whole) for s, whole in zip(strong, step)]
    ax.bar(names, compute, label="compute")
    waiting = [whole - part for whole, part in zip(step, compute)]
    ax.bar(names, waiting, bottom=compute, label="communication, exposed")
    ax.plot(names, [step[0] / n for n in sizes], "k_", ms=30, label="ideal")
    ax.set(xlabel="ranks (strong scaling)", ylabel="time of a step (ms)", ylim=(0, 1.4 * max(step)))


# %%
sizes = [s["ranks"] for s in strong]
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
draw_speed(left)
draw_time(right)
for ax in (left, right):
    ax.legend(frameon=False)
plt.show()

# %% tags=["nbval-ignore-output"]
can = cluster.capabilities()
print("you said:", my_speed_up, "- cores of this machine:", can["cores"])
for s in strong[1:]:
    speed_up = strong[0]["step"] / s["step"]
    computing = strong[0]["compute"] / s["compute"]
    print(f"{s['ranks']} ranks: {speed_up:.2f} times as fast ({speed_up / s['ranks']:.0%} efficiency); ", end="")
    print(f"computing alone {computing:.2f} times")

# %% [markdown]
# **Why it bends.** Read the right picture from the bottom. The blue part should halve with each doubling, and can do so as
# long as every rank has a core of its own. Beyond the number of cores, ranks take turns, and the turns cost time of their own. (Every GPU rank has a GPU of its own, and
# there this part does halve, until a rank's batch is too small to fill the GPU.) The orange part does not shrink with
# more ranks: the gradients have the same size however many share the batch, and each rank sends 2(n−1)/n of them.
# (What one rank shows of it is DDP's own work: it copies gradients into buckets, and nobody is there to send to.)
# With compute C on one rank and exposed communication T, a step takes C/n + T. So the speed-up is C / (C/n + T), and
# stays below C/T with any number of ranks.
#
# Weak scaling keeps C on each rank, and pays the same T: where cores do not run out, its efficiency C / (C + T) falls
# little once n is large (T holds 2(n−1)/n, which is nearly 2 from then on). But it is another training: the global batch has grown.
#
# ## 10. Global batch and learning rate
#
# With 4 ranks and the same batch on each, one step takes in 4 times as much. There are 4 times fewer steps in an epoch, each
# with a less noisy gradient. Does the learning rate have to grow? One device can tell, since N ranks equal it: as many
# sequences, 1,280, in steps of 8 or of 32.

# %%
sys.path.insert(0, "scripts")
import train_one


def validation_loss(batch_size, lr):
    sys.argv = ["train_one.py", "--batch-size", str(batch_size), "--lr", str(lr)]
    sys.argv += ["--steps", str(1280 // batch_size)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train_one.main()
    return float(printed.getvalue().split()[-1])


tried = [(8, 1e-3), (32, 1e-3), (32, 2e-3), (32, 4e-3)]
ends = [validation_loss(*one) for one in tried]

# %%
fig, ax = plt.subplots(figsize=(8, 2.4), layout="constrained")
names = ["unchanged", "unchanged", "times √4", "times 4"]
labels = [f"global batch {b}, lr {lr:g} ({name})" for (b, lr), name in zip(tried, names)]
ax.bar_label(ax.barh(labels, ends, color=["C0", "C1", "C1", "C1"]), fmt="%.2f", padding=3)
ax.invert_yaxis()
ax.set(xlabel="validation loss after 1,280 sequences (nats a character)", xlim=(0, 1.15 * max(ends)))
plt.show()

# %% [markdown]
# The larger batch with the old rate has made a quarter of the steps, each about as long, and has come less far. A higher
# rate makes up for most or all of that. *Times n* with a warm-up is a rule for SGD, published for ImageNet up to a
# batch of 8,192 images (Goyal et al., 2017); with Adam, the square root of n is a common start. Neither is a law, and both
# fail above some batch size. Short runs like this one show the direction only; tune on your own model.
#
# Note what this is *not*: DDP does not change the learning rate, and at an unchanged global batch (section 2) there is
# nothing to change.

# %% [markdown]
# ## On a real cluster
#
# One machine with 8 GPUs. `--standalone` picks a free port:
#
# ```
# torchrun --standalone --nproc-per-node=8 scripts/train_ddp.py --steps 200
# ```
#
# Under Slurm, with one task that starts 8 ranks:
#
# ```
# srun --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 \
#     torchrun --standalone --nproc-per-node=8 scripts/train_ddp.py --steps 200
# ```
#
# - `cuda:{LOCAL_RANK}`, not `cuda:{RANK}`; with libraries that ask for "the current device", also
#   `torch.cuda.set_device(local_rank)`, before the first CUDA call.
# - The backend is NCCL, and overlap is real there: the all-reduce runs on a stream of its own while backward goes on.
# - A hang ends after 10 minutes by default (`init_process_group(timeout=...)`), with *Watchdog caught collective
#   operation timeout* on the ranks that waited. The culprit is a rank that does not say it.
# - `torch.nn.DataParallel` (one process, many GPUs) is not DDP, and slower.
#
# ## Summary
#
# - DDP is four changes: start, split, wrap, write once. It splits neither data nor model.
# - Gradients are averaged in backward, bucket by bucket, while backward goes on. `step()` sends nothing.
# - N ranks equal one device at the same global batch, to rounding: no division of the loss, no other learning rate.
# - One seed for all ranks' samplers, `set_epoch` in every epoch; validation counts sums, without padding.
# - `no_sync()` round forward *and* backward: traffic divided by the number of micro-steps.
# - Ranks that run out of data, skip a collective, or do not use a parameter stop all the others.
# - Speed-up ends where cores (or GPUs) end and where communication is as long as what is left to compute.
#
# ## Check yourself

# %%
grading.Question(
    "03.q1",
    "You wrap a model in DDP, and call loss.backward() and optimizer.step(). Which of them sends data?",
    ["backward only", "step only", "both"],
    right=0,
    why="Hooks start the all-reduces during backward. The step is local, and equal on all ranks.",
)

# %%
grading.Question(
    "03.q2",
    "From 1 rank with batch 64 to 4 ranks with batch 16 each. What else must change?",
    ["the loss is divided by 4", "the learning rate is multiplied by 4", "nothing"],
    right=2,
    why="The global batch is still 64, and DDP averages already: it is the same training (section 2).",
)

# %%
grading.Question(
    "03.q3",
    "A job on 8 ranks stops near the end of each epoch, without an error. What do you look at first?",
    ["the learning rate", "whether all ranks have the same number of batches", "the bucket size"],
    right=1,
    why="A rank that has run out of batches sends no gradient; the others wait in backward.",
)

# %% [markdown]
# **Now you**: [lab 03](../labs/03.ipynb) has you turn the script into DDP, write the sampler, and get past the traps.
# **Next:** lesson 04 measures the network that the gradients cross.
