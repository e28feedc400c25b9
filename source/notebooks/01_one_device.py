# ---
# # For authors; the builder leaves these lines out of the notebook.
# # Before the lesson the learner believes:
# #   - the forward pass is the work; backward is about as long
# #   - more loader workers are always faster, or num_workers = number of cores is always right
# #   - a model needs the memory that its parameters (its checkpoint file) take
# #   - what the operating system or nvidia-smi shows is what the tensors take
# #   - mixed precision halves the memory, parameters and optimizer included
# #   - accumulation is an approximation of the large batch; or it is exact whatever one divides by
# #   - with Adam it works, so the division must have been right
# #   - activation checkpointing has to do with saving the model
# #   - a second device is the first thing to try when training is slow
# # Afterwards the learner can do what the list under "You will be able to" says, and has seen each
# # of the above contradicted by something that ran.
# title: Say where time and memory go on one device
# minutes: 50
# ranks: 1
# cluster: none
# objective: say where a step's time and memory go, feed the device, and know what fits on it
# ---

# %% [markdown]
# # Say where time and memory go on one device
#
# You take one training step apart: where its time goes, and where its memory goes. You predict each part from a
# formula, measure it, and then change it. Every later lesson is compared with what you find here.
#
# **You will be able to**
# 1. say which part of a step takes the time, and read it off a timeline;
# 2. tell a starved device from a slow one, and choose `num_workers` by a calculation;
# 3. predict the bytes of parameters, gradients, optimizer state and activations, and check them;
# 4. say what bf16 autocast, gradient accumulation and activation checkpointing save, and what each costs;
# 5. decide, with two numbers, whether one device is enough.
#
# **You need** lesson 00, and to have trained a model in PyTorch. No GPU: the cells use one if they find it.
#
# **Time** 50 minutes; the cells run for about a minute. **Uses** 1 rank, no cluster.
#
# **How to work** Run the cells from the top. Where a line says `my_... = None`, put your own guess there first.

# %% tags=["parameters"]
num_nodes = 1  # this lesson trains on one device; section 7 asks what changes with more
nproc_per_node = 1
batch_size = 8  # sequences in a batch
block_size = 64  # characters (tokens) in a sequence
layers, width, heads = 2, 64, 4  # the GPT. On a GPU try 12, 768, 12 and block_size 1024

# %%
import os

os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler's own messages; read when torch is imported
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
import copy
import resource
import sys
import time
import warnings
from statistics import median
from types import SimpleNamespace

# %%
import matplotlib.pyplot as plt
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from scalelab.grading import Question, predict

sys.path.insert(0, "scripts")  # so that the next two lines find the scripts of the lessons
from slow_books import SlowBooks
from train_one import BOOKS, GPT, clock, windows

# %% [markdown]
# ## 1. Where does the time of a step go?
#
# The model is the GPT of `scripts/train_one.py`, which the later lessons spread over many devices. Here it is, with a
# batch of real text:

# %%
torch.set_num_threads(1)  # one thread: two runs are then equal to the last bit
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
args = SimpleNamespace(
    batch_size=batch_size, block_size=block_size, layers=layers, width=width, heads=heads
)
text = BOOKS.read_text(encoding="utf-8")
characters, tokens = torch.tensor([ord(c) for c in text]).unique(return_inverse=True)
vocabulary = len(characters)


def batch(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - block_size, [size], generator=generator)
    x, y = windows(tokens, starts, block_size, device)
    return x.clone(), y.clone()  # two tensors, not two views of one


# %%
def new_model(dtype=torch.float32, **changes):
    torch.manual_seed(0)
    return GPT(vocabulary, SimpleNamespace(**{**vars(args), **changes})).to(device, dtype)


model = new_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = batch(batch_size)
print("tokens in a batch:", y.numel())
print("parameters:       ", f"{sum(p.numel() for p in model.parameters()):,}")

# %% [markdown]
# A step has four parts: get the **data**, run the model **forward**, run it **backward**, **update** the parameters.
# Predict: how many times as much arithmetic is there in backward as in forward? 1, 2, 3 times?

# %%
my_ratio = predict("01.backward", None)  # put your number in place of None


# %%
def table(rows):
    print(f"{'':34}{'you said':>10}{'theory':>14}{'measured':>14}")
    for name, mine, theory, measured in rows:
        print(f"{name:34}{str(mine):>10}{theory:>14,}{measured:>14,}")


def count_flops(function, *inputs):
    with FlopCounterMode(display=False) as counter:
        out = function(*inputs)
    return out, counter.get_total_flops()


# %%
loss, forward = count_flops(model, x, y)
_, backward = count_flops(loss.backward)
weights = 12 * layers * width**2 + width * vocabulary  # in the matrix products
theory = 2 * y.numel() * weights
optimizer.zero_grad()
table([
    ("forward, operations", "", theory, forward),
    ("backward, operations", "", 2 * theory, backward),
    ("backward / forward", my_ratio, 2, backward // forward),
])  # fmt: skip
assert device.type == "cuda" or (forward, backward) == (theory, 2 * theory)

# %% [markdown]
# **Theory.** Each weight of a matrix is multiplied once and added once for each token: 2 operations. Backward does two
# products where forward did one, since it needs the gradient of the input *and* of the weights. So a step costs about
# **6 operations for each weight and token**. Keep this number. It predicts training time in section 7.
#
# (The counter knows matrix products. It does not know the CPU's attention kernel, which adds some 4 × `block_size` ×
# `width` operations a token and layer at most. On a GPU it counts that too, so the figures are a little larger there.)
#
# Arithmetic is not time. Measure the time of each part:

# %%
PARTS = ("data", "forward", "backward", "update")


def train_step(x, y):
    with record_function("forward"):
        loss = model(x, y)
    with record_function("backward"):
        loss.backward()
    with record_function("update"):
        optimizer.step()
        optimizer.zero_grad()


# %% tags=["nbval-ignore-output"]
for seed in range(5):  # the first steps are slower: memory is new, kernels are being chosen
    train_step(*batch(batch_size, seed))
activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
with profile(activities=activities) as profiled:
    for seed in range(3):
        with record_function("data"):
            x, y = batch(batch_size, seed)
        train_step(x, y)
        clock(device)  # a GPU is given work and does it later: wait, or the next part pays for it

# %% tags=["nbval-ignore-output"]
spent = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
operations = [e for e in profiled.key_averages() if e.key.startswith("aten::")]
for e in sorted(operations, key=lambda e: -getattr(e, spent))[:7]:
    name = e.key.removeprefix("aten::")
    print(f"{name:48}{e.count // 3:4} calls {getattr(e, spent) / 3000:7.2f} ms a step")

# %% [markdown]
# The table names the operations that take most time; `mm` and `addmm` are the matrix products. The timeline says *when*.
# Above: the four parts. Below: the operations that PyTorch ran for them.

# %% tags=["nbval-ignore-output"]
fig, ax = plt.subplots(figsize=(9, 2.6), layout="constrained")
events = [e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CPU]
zero = min(e.time_range.start for e in events if e.name in PARTS)
for e in events:
    span = [((e.time_range.start - zero) / 1000, e.time_range.elapsed_us() / 1000)]
    if e.name in PARTS:
        ax.broken_barh(span, (1.1, 0.8), color=f"C{PARTS.index(e.name)}")
    elif e.name.startswith("aten::") and e.self_cpu_time_total > 20:
        ax.broken_barh(span, (0.1, 0.8), color="0.35", edgecolor="white", linewidth=0.3)
for i, part in enumerate(PARTS):
    ax.plot([], [], color=f"C{i}", linewidth=8, label=part)
ax.set_yticks([0.5, 1.5], ["operations", "parts"])
ax.set_xlabel("time since the first step began (ms)")
ax.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
plt.show()

# %% [markdown]
# Three steps. Backward is the longest part of each: about twice forward, as the arithmetic says. Data is hardly seen,
# because this text is already in memory. The profiler itself costs time, so read shares from it, not speeds.
#
# `optimizer.step()` changes the parameters and computes no gradient. Backward has done that. (Lesson 03: backward is
# also where many devices exchange gradients, not `step()`.)

# %% [markdown]
# ## 2. Feed the device
#
# Real data is not in memory. A sample is fetched from a disk or over a network, and then decoded. `scripts/slow_books.py`
# is a dataset with both costs: `wait` seconds of waiting and `compute` seconds of work for a core, for each sample.
#
# We let one batch take **three times as long to read as to train on**. First measure a step:

# %% tags=["nbval-ignore-output"]
def seconds_of(function, times):
    """Median: one slow run, because something else wanted the core, does not count."""
    seconds = []
    for _ in range(times):
        start = clock(device)
        function()
        seconds.append(clock(device) - start)
    return median(seconds)


x, y = batch(batch_size)
step_s = min(max(seconds_of(lambda: train_step(x, y), 40), 0.004), 0.02)
wait = 3 * step_s / batch_size
print(f"a step takes {1000 * step_s:.1f} ms; so each sample waits {1000 * wait:.1f} ms")

# %% [markdown]
# With `num_workers=0` the training process reads the batch itself and trains on it afterwards: 3 + 1 = 4 units of time.
# Workers are processes of their own. They read the *next* batches while this one is trained on. Predict: how many workers
# until the device never waits?

# %%
my_workers = predict("01.workers", None)


# %%
def spans(num_workers, batches, **cost):
    """Begin and end of each step, in seconds since the first batch was there."""
    # PyTorch warns above one worker a core. Workers that only wait need no core.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    books = SlowBooks(batches * batch_size, block_size, **cost)
    found = []
    pin = device.type == "cuda"  # more on this below
    for x, y in DataLoader(books, batch_size, num_workers=num_workers, pin_memory=pin):
        begin = clock(device)
        train_step(x.to(device, non_blocking=pin), y.to(device, non_blocking=pin))
        found.append((begin, clock(device)))
    return [(begin - found[0][0], end - found[0][0]) for begin, end in found]


# %% tags=["nbval-ignore-output"]
waiting = {n: spans(n, 20, wait=wait) for n in (0, 1, 2, 3, 4, 6)}

# %% tags=["nbval-ignore-output"]
fig, ax = plt.subplots(figsize=(9, 3), layout="constrained")
for row, found in enumerate(waiting.values()):
    bars = [(1000 * begin, 1000 * (end - begin)) for begin, end in found]
    ax.broken_barh(bars, (row - 0.35, 0.7), color="C0")
    busy = sum(end - begin for begin, end in found) / found[-1][1]
    ax.text(1010 * found[-1][1], row, f" busy {busy:.0%}", va="center")
ax.set_yticks(range(len(waiting)), [f"{n} workers" for n in waiting])
ax.set_xlim(0, 1200 * max(found[-1][1] for found in waiting.values()))
ax.invert_yaxis()
ax.set_xlabel("time since the first batch (ms); blue: the device works, white: it waits for data")
plt.show()

# %% [markdown]
# Each line is the same 20 steps. White is a **starved** device: it is not slow, it has nothing to do. A faster device would
# only make more white. The same in tokens a second; and again with samples that *compute* for as long as these wait:

# %% tags=["nbval-ignore-output"]
def tokens_per_second(found):
    return (len(found) - 1) * batch_size * block_size / found[-1][0]  # from first to last begin


computing = {n: spans(n, 16, compute=wait) for n in (0, 1, 2, 4)}
sweeps = {"samples that wait": waiting, "samples that compute": computing}

# %% tags=["nbval-ignore-output"]
T = batch_size * block_size  # tokens in a batch
load = batch_size * wait  # seconds to read a batch; to train on one, in the runs above:
train = median(end - begin for found in waiting.values() for begin, end in found)
fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
for ax, (name, sweep), cores in zip(axes, sweeps.items(), (float("inf"), os.cpu_count())):
    pace = [max(load / n, train, (load + train) / cores) if n else load + train for n in sweep]
    ax.plot(list(sweep), [T / s for s in pace], "--", color="0.5", label="theory")
    measured = [tokens_per_second(found) for found in sweep.values()]
    ax.plot(list(sweep), measured, "o", color="C0", label="measured")
    ax.set(title=name, xlabel="num_workers", xticks=list(sweep))
axes[0].set_ylim(bottom=0)
axes[0].set_ylabel(f"tokens/s, batch {batch_size}")
axes[0].legend(loc="lower right", frameon=False)
plt.show()

# %%
needed = -(-3 // 1)  # 3 units to read a batch, 1 to train on it, rounded up
print("workers needed: you said", my_workers, "- theory", needed)

# %% [markdown]
# **Theory.** With `w` workers a batch arrives every `load / w`. The step takes `train`. The slower of the two sets the
# pace: `max(load / w, train)`. From `w = load / train` on, the device is the limit, and **more workers give nothing**.
#
# On the right, reading is work for a core. All of it together, reading and training, needs 4 units of core time a batch, so
# no number of workers makes a batch faster than `(load + train) / cores`. There the cure is more cores, or less work: decode
# once and store the result. (On a GPU the training leaves the cores free.) Points below the line: something else
# was using the cores.
#
# Workers are not free: each is a process with its own memory. Take as many as the calculation says, and one or two to spare.
#
# Two more things come with them:
#
# **Prefetch.** Each worker keeps `prefetch_factor` batches ready (2 if you do not say). This evens out a slow file now and
# then. It does not help when reading is slower on average. It takes memory. How many batches have been read when you
# have taken *one*, with 2 workers and `prefetch_factor=3`?

# %%
my_batches_read = predict("01.prefetch", None)

# %%
books = SlowBooks(40 * batch_size, block_size)
batches = iter(DataLoader(books, batch_size, num_workers=2, prefetch_factor=3))
next(batches)
deadline = time.monotonic() + 20
while int(books.read.sum()) < 7 * batch_size and time.monotonic() < deadline:
    time.sleep(0.05)
time.sleep(0.5)  # would they go on reading?
print("batches read: you said", my_batches_read, "- theory", 1 + 2 * 3,
      "- measured", int(books.read.sum()) // batch_size)  # fmt: skip
del batches  # ends the workers

# %% [markdown]
# The finished batches pass through shared memory, `/dev/shm`. In a container it is often 64 MB. Too small, and a worker dies
# with *"DataLoader worker is killed by signal: Bus error"*. The cure is `docker run --shm-size=8g`, not fewer workers.
#
# **Pinned memory.** A GPU fetches a batch by itself, while it computes, only from memory that the system may not
# move: *pinned* memory. `pin_memory=True` puts each batch there, and `.to(device, non_blocking=True)` then returns at
# once. One without the other gains little. Without a GPU there is nothing to gain:

# %% tags=["nbval-ignore-output"]
if device.type == "cuda":
    big = torch.empty(256 << 20, dtype=torch.uint8)
    for name, source in (("pageable", big), ("pinned", big.pin_memory())):
        seconds = seconds_of(lambda source=source: source.to(device, non_blocking=True), 5)
        print(f"{name:9} {big.numel() / seconds / 1e9:6.1f} GB/s to the GPU")
else:
    print("skipped: copying to a GPU is timed where there is one; this machine has none")

# %% [markdown]
# ## 3. Where does the memory go?
#
# Four parts. For each there is a formula; *P* is the number of parameters.
#
# | part | bytes in float32 | lives |
# |---|---|---|
# | parameters | 4 *P* | always |
# | gradients | 4 *P* | from backward to `zero_grad` |
# | optimizer (AdamW) | 8 *P*: two averages for each parameter | from the first `step()` on |
# | activations | what forward keeps for backward | from forward to backward |
#
# Predict: how many times the parameters' own memory do the first three take together?

# %%
my_times = predict("01.times", None)

# %%
P = (2 * vocabulary + block_size + 2) * width + vocabulary + layers * (12 * width**2 + 10 * width)


def nbytes(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


x, y = batch(batch_size)
model(x, y).backward()
optimizer.step()
parameters = nbytes(model.parameters())
gradients = nbytes(p.grad for p in model.parameters())
state = nbytes(t for of in optimizer.state.values() for t in of.values())
optimizer.zero_grad()

# %%
each = len(list(model.parameters()))  # AdamW counts its steps, in 4 bytes for each tensor
together = (parameters + gradients + state) // parameters
table([
    ("parameters, bytes", "", 4 * P, parameters),
    ("gradients, bytes", "", 4 * P, gradients),
    ("AdamW state, bytes", "", 8 * P + 4 * each, state),
    ("together / parameters", my_times, 4, together),
])  # fmt: skip
assert (parameters, gradients, state) == (4 * P, 4 * P, 8 * P + 4 * each)

# %% [markdown]
# **16 bytes a parameter**, four times the size of the weights: a model whose float32 file has 4 GB needs 16 GB from its
# first step on, activations not counted. Plain SGD has no state (8 bytes a parameter), SGD with momentum one number (12 bytes).
#
# **Activations.** PyTorch keeps, for backward, the inputs of most operations. It hands each tensor that it keeps to a *hook* if
# you ask. So we can count them, one by one, by their storage: the queries, keys and values are three views of one.

# %%
def activation_bytes(model, x, y):
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:  # a weight is kept too, but takes no new memory
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x, y)  # alive until we return, so that no storage is used twice
    del loss
    return sum(kept.values())


# %% [markdown]
# Read `Block.forward` in `scripts/train_one.py` and count, in units of one number for each token and each of `width` places:
#
# | kept | units |
# |---|---|
# | input and output of each of the two LayerNorms | 4 |
# | query, key, value, and the output of attention | 4 |
# | the wide layer, before and after GELU: 4 × `width` each | 8 |
#
# Sixteen. Small things come on top: mean and deviation for each LayerNorm (4 numbers a token), one number for each
# attention head. After the blocks: one more LayerNorm, and the probability of each of the `vocabulary` characters.

# %%
def activation_theory(size, layers=layers):
    tokens = size * block_size
    block = tokens * (16 * width + 4 + heads)
    head = tokens * (2 * width + 2 + vocabulary) + 1
    batch = 2 * 8 * tokens  # x and y themselves, 8 bytes a number
    return 4 * (layers * block + head) + batch


rows = []
for size in (1, batch_size, 4 * batch_size):
    measured = activation_bytes(model, *batch(size))
    rows.append((f"activations of batch {size}, bytes", "", activation_theory(size), measured))
    assert abs(measured / activation_theory(size) - 1) < (0.05 if device.type == "cuda" else 1e-9)
table(rows)

# %% [markdown]
# To the byte. (Another attention kernel, as on a GPU, keeps a little more or less; there the cell allows 5 %.)
#
# Note what is *not* in the list: the `block_size` × `block_size` attention scores. The kernel behind
# `scaled_dot_product_attention` computes them in pieces and never keeps them. Formulas from before such kernels have
# a term with `block_size` squared.
#
# Parameters, gradients and state do not depend on the batch. Activations are proportional to it:

# %%
sizes = [1, 2, 4, 8, 16, 32, 64]
fixed = [("parameters", 4 * P), ("gradients", 4 * P), ("AdamW state", 8 * P)]
fig, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
bottom = 0.0
for name, size in fixed:
    ax.bar(range(len(sizes)), size / 1e6, 0.7, bottom, label=name)
    bottom += size / 1e6
ax.bar(range(len(sizes)), [activation_theory(s) / 1e6 for s in sizes], 0.7, bottom,
       label="activations")  # fmt: skip
ax.set_xticks(range(len(sizes)), sizes)
ax.set(xlabel="batch_size (sequences)", ylabel="memory (MB, 1e6 bytes)")
ax.legend(frameon=False)
plt.show()
print("activations are the larger part from batch", 16 * P // activation_theory(1) + 1)

# %% [markdown]
# ### Memory over one step
#
# The profiler notes each allocation of a tensor and each release. Their running sum is the memory alive at each moment, short-lived
# results included, counted from before the step. Here is a step of a deeper model, 8 layers:

# %%
def memory_curve(model, x, y):
    """Milliseconds, and bytes alive beyond those before the step."""
    model(x, y).backward()  # gradients are there, from now on they are reused
    clock(device)
    with profile(activities=activities, profile_memory=True) as profiled:
        model(x, y).backward()
        clock(device)
    at, alive = [0.0], [0]
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    for e in sorted(events, key=lambda e: e.start_ns()):
        if e.device_type().name == device.type.upper():
            at.append((e.start_ns() - events[0].start_ns()) / 1e6)
            alive.append(alive[-1] + e.nbytes())
    return at, alive


# %% tags=["nbval-ignore-output"]
deep = new_model(layers=8)
at, alive = memory_curve(deep, x, y)
fig, ax = plt.subplots(figsize=(8, 3), layout="constrained")
ax.step(at, [n / 1e6 for n in alive], where="post", label="measured: alive now")
kept = activation_theory(batch_size, layers=8) / 1e6
ax.axhline(kept, color="0.5", linestyle="--", label="theory: kept by forward")
ax.set(xlabel="time (ms)", ylabel="memory (MB, 1e6 bytes)", ylim=(0, 1.35 * kept))
ax.legend(loc="upper right", frameon=False)
plt.show()

# %% [markdown]
# Up in forward, down in backward, which releases each activation once it has used it. The **peak is at the turn**. It is a
# little above the line, because backward's first results come before the first release. An out-of-memory error
# comes there too, and its traceback names whatever operation happened to ask next: not the culprit.
#
# ### What the system shows is something else

# %% tags=["nbval-ignore-output"]
unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
print(f"peak resident memory of this process: {peak / 1e6:8.0f} MB")
print(f"parameters, gradients, AdamW state:   {16 * P / 1e6:8.1f} MB")
print(f"activations of one batch:             {activation_theory(batch_size) / 1e6:8.1f} MB")

# %% [markdown]
# The first number holds Python, the PyTorch library, matplotlib, and memory that was freed and not handed back. It is a
# peak over the life of the process and never falls. Use it to see whether a process fits; never to say what a tensor
# takes.
#
# **On CUDA** there are three numbers, each larger than the one before:

# %% tags=["nbval-ignore-output"]
if device.type == "cuda":
    free, total = torch.cuda.mem_get_info()
    print(f"memory_allocated  {torch.cuda.memory_allocated() / 1e6:10,.0f} MB  tensors alive")
    print(f"memory_reserved   {torch.cuda.memory_reserved() / 1e6:10,.0f} MB  held by the allocator")
    print(f"nvidia-smi        {(total - free) / 1e6:10,.0f} MB  all processes, contexts too")
else:
    print("skipped: these three are read from a GPU; this machine has none")

# %% [markdown]
# - **allocated**: tensors that are alive. This is what our formulas predict (rounded up to 512 bytes each).
# - **reserved**: PyTorch asks CUDA for large segments and keeps them for the next tensors. `empty_cache()` hands unused ones back
#   to other processes. It does not help your own: PyTorch does the same by itself before it gives up.
# - **nvidia-smi** adds the CUDA *context* (0.5 to 2 GiB for each process: kernels, driver, later NCCL's
#   buffers). That is why 80 GB are never 80 GB, and why eight devices are not one device of eight times the memory.
#
# **Fragmentation** is reserved memory in pieces too small for the next tensor. A toy model: a segment of 16 places, full of
# tensors of one place. Every second one is freed. Will a tensor of two places fit?

# %%
segment = [True] * 16  # True: in use
for place in range(0, 16, 2):
    segment[place] = False
fits = any(not segment[i] and not segment[i + 1] for i in range(15))
print("".join("#" if used else "." for used in segment))
print("free places:", segment.count(False), " a tensor of 2 fits:", fits)

# %% [markdown]
# Half is free and the request fails. On a GPU the message is *"reserved but unallocated memory is large"*, and it comes from batches
# whose lengths change all the time. The cure is `PYTORCH_ALLOC_CONF=expandable_segments:True`, or
# equal lengths. It is not a smaller model.

# %% [markdown]
# ## 4. Mixed precision
#
# bfloat16 has 2 bytes: the range of float32 and fewer digits. float16 has more digits than bfloat16 (about 3 against 2), and a small range.

# %%
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    one, small = torch.tensor(1.0, dtype=dtype), torch.tensor(1e-8, dtype=dtype)
    print(f"{str(dtype):15} 1 + 0.001 = {(one + 0.001).item():.4f}   1e-8 = {small.item():.0e}")

# %% [markdown]
# Two lines to remember. In bfloat16 the weight 1 plus an update of 0.001 is still 1: so **weights and optimizer state stay in
# float32**. In float16 a gradient of 1e-8 is 0: so float16 needs loss scaling (`torch.amp.GradScaler`), and bfloat16 does
# not.
#
# `torch.autocast` runs the matrix products in bfloat16, the loss and the LayerNorms in float32. Predict: what
# percentage of the float32 activations does it keep?

# %%
my_percent = predict("01.autocast", None)


# %%
def in_bf16(x, y):
    with torch.autocast(device.type, torch.bfloat16):
        return model(x, y)


in_bf16.parameters = model.parameters

# %%
T = batch_size * block_size
theory_bf16 = layers * T * ((14 * 2 + 2 * 4) * width + 4 * (4 + heads))  # 14 units of 2 bytes, 2 of 4
theory_bf16 += T * ((4 + 2) * width + 4 * (2 + vocabulary)) + 4 + 16 * T  # after the blocks; x and y
theory_bf16 += 2 * weights  # copies of the weights in bfloat16
measured_bf16 = activation_bytes(in_bf16, x, y)
full = activation_theory(batch_size)
table([
    ("activations, bytes", "", theory_bf16, measured_bf16),
    ("% of float32", my_percent, 100 * theory_bf16 // full, 100 * measured_bf16 // full),
])  # fmt: skip

# %% [markdown]
# Not half. Of the 16 units in a block, 14 shrink to 2 bytes; the two that LayerNorm takes in are on the float32 residual path
# and keep 4. That makes 36 bytes for 64. The loss stays in float32, and the weights get a bf16 *copy*, which weighs most with
# small batches. And the other parts?

# %%
optimizer.zero_grad()
loss_bf16 = in_bf16(x, y)
loss_bf16.backward()
print("dtype of the parameters:", {p.dtype for p in model.parameters()})
print("dtype of the gradients: ", {p.grad.dtype for p in model.parameters()})
from_bf16 = torch.cat([p.grad.flatten() for p in model.parameters()])
optimizer.zero_grad()
loss = model(x, y)
loss.backward()
exact = torch.cat([p.grad.flatten() for p in model.parameters()])
error = ((from_bf16 - exact).norm() / exact.norm()).item()
print("loss differs by less than 0.02:     ", abs(loss_bf16.item() - loss.item()) < 0.02)
print("gradient differs by 0.01 % to 5 %:  ", 1e-4 < error < 0.05)
optimizer.zero_grad()

# %% [markdown]
# Parameters and gradients are float32 as before. **Autocast does not touch the 16 bytes a parameter.** Only activations
# shrink. (Systems that keep bf16 weights and gradients add a float32 master copy: 2 + 2 + 12 = 16 bytes again.)
#
# And speed? bf16 is fast where the device has units for it, and where the matrices are large enough to keep them busy. Every
# recent GPU has such units. Some CPUs have them; with matrices as small as ours, converting may still cost more than it saves:

# %% tags=["nbval-ignore-output"]
def whole_step(forward):
    forward(x, y).backward()
    optimizer.zero_grad()


for name, forward in (("float32", model), ("bf16 autocast", in_bf16)):
    whole_step(forward)
    seconds = seconds_of(lambda forward=forward: whole_step(forward), 20)
    print(f"{name:14} {y.numel() / seconds:10,.0f} tokens/s")

# %% [markdown]
# That is this machine, this model, one thread. It says nothing about another: measure yours.

# %% [markdown]
# ## 5. Gradient accumulation
#
# You want a batch of 32 and only 8 fit. Run four **micro-batches** of 8, let their gradients add up (`backward()` adds to
# `.grad`), and make one update. The loss is a *mean* over the batch, so each micro-batch counts for a quarter. Predict: if
# you forget to divide, how many times too long is the gradient?

# %%
my_factor = predict("01.factor", None)


# %%
def gradient(model, x, y, micro_steps, divide=True):
    model.zero_grad()
    for xs, ys in zip(x.chunk(micro_steps), y.chunk(micro_steps)):
        loss = model(xs, ys) / (micro_steps if divide else 1)
        loss.backward()  # frees this micro-batch's activations
    return torch.cat([p.grad.flatten() for p in model.parameters()])


x32, y32 = batch(32)
precise = new_model(torch.float64)
whole, four = (gradient(precise, x32, y32, n) for n in (1, 4))
forgot = gradient(precise, x32, y32, 4, divide=False)
print("four micro-batches equal the batch, to 1e-12:", torch.allclose(four, whole, 0, 1e-12))
print(f"not divided: you said {my_factor} - theory 4 - measured "
      f"{(forgot.norm() / whole.norm()).item():.6f}")  # fmt: skip

# %% [markdown]
# Equal, up to the order of additions. Five whole updates in float32, and the parameters compared afterwards:

# %%
def train(make_optimizer, micro_steps, divide=True, steps=5):
    model = new_model()
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        gradient(model, *batch(32, seed=step), micro_steps, divide)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


start, whole, four = train(sgd, 1, steps=0), train(sgd, 1), train(sgd, 4)
print("the training moved a parameter by more than 0.01:", (whole - start).abs().max().item() > 0.01)
print("largest difference below 1e-6:                   ", (whole - four).abs().max().item() < 1e-6)

# %% [markdown]
# So accumulation is **not** an approximation, with one exception: layers that look at the whole batch, such as BatchNorm, see only
# the micro-batch.
#
# Now the trap. Forget to divide, and train once with SGD and once with AdamW. How much longer is the first update?

# %%
def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


for name, make in (("SGD", sgd), ("AdamW", adamw)):
    start = train(make, 1, steps=0)
    right, wrong = (train(make, 4, divide, steps=1) - start for divide in (True, False))
    print(f"{name:6} update, not divided / divided: {(wrong.norm() / right.norm()).item():.2f}")

# %% [markdown]
# AdamW divides by the size of the gradient, so it **hides** the mistake. It comes out later: when gradients are clipped (all
# are now too long), when the logged norm is compared with another run, when somebody changes the optimizer. "The
# loss falls" proves nothing here. The comparison above does.
#
# And the memory:

# %%
small = activation_bytes(model, *batch(8))
large = activation_bytes(model, *batch(32))
table([("activations of 32, bytes", "", activation_theory(32), large),
       ("activations of 4 x 8, bytes", "", activation_theory(8), small)])  # fmt: skip
print(f"share: {small / large:.4f}")

# %% [markdown]
# A quarter, since each backward frees what its forward kept. The time for a token stays, or grows where small batches leave the device
# idle. Accumulation makes room in memory; it does not save time on one device. (On many it does: lesson 03.)
#
# Mind the last, smaller micro-batch: 8 + 8 + 4 sequences are not three equal thirds. The lab asks for that case.

# %% [markdown]
# ## 6. Activation checkpointing
#
# Keep only the input of each block, and compute the rest again when backward needs it. (Nothing is saved to a file; that is lesson
# 07, and another checkpoint.) It trades time for memory. Predict for 8 layers: how many times is a block run in one step?

# %%
my_runs = predict("01.runs", None)


# %%
class Checkpointed(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


light = copy.deepcopy(deep)
light.blocks = torch.nn.Sequential(*(Checkpointed(block) for block in light.blocks))
runs = {"all kept": 0, "checkpointed": 0}
for name, blocks in (("all kept", deep.blocks), ("checkpointed", [b.block for b in light.blocks])):
    for block in blocks:
        block.register_forward_pre_hook(
            lambda *_, name=name: runs.update({name: runs[name] + 1})
        )

# %%
measured = {}
for name, net in (("all kept", deep), ("checkpointed", light)):
    net.zero_grad()
    runs[name] = 0
    loss, forward = count_flops(net, x, y)
    _, backward = count_flops(loss.backward)
    measured[name] = (runs[name], forward + backward)
same = all(torch.equal(a.grad, b.grad) for a, b in zip(deep.parameters(), light.parameters()))
kept = {name: activation_bytes(net, x, y) for name, net in (("all kept", deep), ("checkpointed", light))}
print("gradients equal to the last bit:", same)

# %%
T = y.numel()
forward = 2 * T * (12 * 8 * width**2 + width * vocabulary)
# the last product of a block is not run again: nobody needs its result
again = 2 * T * 8 * 8 * width**2
only_inputs = activation_theory(batch_size, layers=0) + 4 * 8 * T * width
table([
    ("blocks run, all kept", "", 8, measured["all kept"][0]),
    ("blocks run, checkpointed", my_runs, 16, measured["checkpointed"][0]),
    ("operations, all kept", "", 3 * forward, measured["all kept"][1]),
    ("operations, checkpointed", "", 3 * forward + again, measured["checkpointed"][1]),
    ("kept by forward, all, bytes", "", activation_theory(batch_size, 8), kept["all kept"]),
    ("kept, checkpointed, bytes", "", only_inputs, kept["checkpointed"]),
])  # fmt: skip

# %% tags=["nbval-ignore-output"]
fig, ax = plt.subplots(figsize=(8, 3), layout="constrained")
for name, net in (("all kept", deep), ("checkpointed", light)):
    at, alive = memory_curve(net, x, y)
    ax.step(at, [n / 1e6 for n in alive], where="post", label=name)
one_block = activation_theory(batch_size, 1) - activation_theory(batch_size, 0)
ax.axhline((only_inputs + one_block) / 1e6, color="0.5", linestyle="--", label="inputs + one block")
ax.set(xlabel="time (ms)", ylabel="memory (MB, 1e6 bytes)")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# Lower and longer. Forward keeps one unit a block in place of more than 16. In backward each block is run again, and for that
# moment has all its activations: the teeth. So the peak is *the inputs of all blocks + the activations of one*, not the inputs
# alone. The price is nearly one more forward pass: 4 units of arithmetic for 3, a third more at most. (The profiler
# and other programs stretch the time axis above.)
#
# It cuts activations only. Where the 16 bytes a parameter do not fit, it cannot help.

# %% [markdown]
# ## 7. When is one device enough?
#
# Two questions, two numbers.
#
# 1. **Does it fit?** 16 *P* bytes, 2 *P* more for the bf16 copies of autocast, and the activations of *one* micro-batch,
#    checkpointed if need be, in 90 % of the device.
# 2. **Is it done in time?** 6 × *P* × tokens operations, at the speed that your device *reaches*.
#
# What does this one reach? Not what its data sheet says. Compare it with a large matrix product:

# %% tags=["nbval-ignore-output"]
a = torch.randn(1024, 1024, device=device)
peak = 2 * 1024**3 / seconds_of(lambda: a @ a, 10)
x, y = batch(batch_size)
reached = 6 * weights * y.numel() / seconds_of(lambda: train_step(x, y), 20)
print(f"a large matrix product: {peak / 1e9:8.1f} GFLOP/s (1e9 operations a second)")
print(f"this training:          {reached / 1e9:8.1f} GFLOP/s, {reached / peak:.0%} of it")

# %% [markdown]
# Now models of real size, by formula. Assumed, and worth changing: an 80 GB device that reaches 400 TFLOP/s in bf16 (40 % of the
# 989 on an H100's data sheet), 20 tokens for each parameter (a common rule), blocks of 1024 tokens, micro-batch 1, every block
# checkpointed.

# %%
def on_one_device(layers, width, vocabulary=50257, block=1024, memory_gb=80, tflops=400):
    """Gigabytes (1e9), days, and whether they fit. The formulas are those measured above."""
    P = layers * (12 * width**2 + 10 * width) + (2 * vocabulary + block + 2) * width + vocabulary
    inputs = 4 * layers * block * width  # what checkpointing keeps
    one_block = block * 36 * width  # a block that is being run again, autocast
    head = block * 4 * vocabulary * 2  # probabilities, and their gradient
    gb = (18 * P + inputs + one_block + head) / 1e9
    days = 8 * P * 20 * P / (tflops * 1e12) / 86400  # forward, forward again, backward: 2 + 2 + 4
    return P / 1e9, gb, days, gb < 0.9 * memory_gb


print(f"{'parameters':>12}{'memory':>12}{'training':>14}   fits in 80 GB")
for shape in ((12, 768), (24, 1024), (36, 1280), (48, 1600), (32, 2560), (32, 4096)):
    billions, gb, days, fits = on_one_device(*shape)
    print(f"{billions:10.2f} B{gb:9.1f} GB{days:9.1f} days   {'yes' if fits else 'no'}")

# %% [markdown]
# **The rule.** Up to nearly 4 billion parameters (72 GB / 18 bytes, less the activations) training fits on one 80 GB
# device. If the days are too many but it fits, you need more devices and nothing clever: data parallelism, lesson 03.
# If it does not fit, the state must be split: lesson 08. If it fits and the days are few, **stay on one device**: no network,
# no rank that fails, no lesson 05.
#
# And before adding a second device, look at the first. A starved device (section 2) stays starved when there are two: they
# wait together.
#
# With more devices, the batch that goes into one update is shared out. To keep a global batch of 32, fewer micro-steps are left
# for each:

# %%
for devices in (1, 2, 4):
    micro_steps = 32 // (8 * devices)
    print(f"{devices} devices x {micro_steps} micro-steps x 8 sequences = {devices * micro_steps * 8}")
print("your num_nodes x nproc_per_node:", num_nodes * nproc_per_node)

# %% [markdown]
# ## On a real cluster
#
# The same four questions, on one GPU of a node:
#
# ```
# srun --gpus=1 --cpus-per-task=12 --pty python scripts/train_one.py --steps 200 --layers 12 --width 768 --block-size 1024
# ```
#
# - **Cores.** `--cpus-per-task` is what the loader workers share. Slurm's default is often 1, and six workers then run on one core. With 8
#   GPUs a node, each training process gets an eighth of the cores: choose `num_workers` for that share.
# - **Loader.** `DataLoader(..., num_workers=8, pin_memory=True, persistent_workers=True)` and `.to("cuda", non_blocking=True)`.
# - **Time.** A GPU works behind Python's back. A clock without `torch.cuda.synchronize()` times the *giving* of work. `train_one.py`
#   waits in its `clock()`.
# - **Memory.** `torch.cuda.max_memory_allocated()` for the peak of tensors; `torch.cuda.memory._record_memory_history()` and
#   `_dump_snapshot("mem.pickle")` for a picture, which pytorch.org/memory_viz draws.
# - **Precision.** `torch.autocast("cuda", torch.bfloat16)`, no GradScaler. `torch.set_float32_matmul_precision("high")` for the rest.
#
# ## Summary
#
# - A step is data, forward, backward, update. Backward is two forwards. Together: 6 operations a weight and token.
# - A loader gives a batch every `load / workers`. From `load / train` workers on, more give nothing; cores may end it sooner.
# - float32 with AdamW: 4 + 4 + 8 = 16 bytes a parameter. Activations: 16 numbers a layer, token and width, times the batch.
# - bf16 autocast shrinks activations to a bit more than half, and nothing else.
# - Accumulation equals the large batch if each sample has its weight; Adam hides it when it does not.
# - Checkpointing keeps one number in place of 16 and pays up to a third more arithmetic.
# - One device is enough while 18 *P* bytes + activations fit and 6 *P* × tokens operations are done in time.
#
# ## Check yourself

# %%
Question(
    "01.starved",
    "A batch takes 90 ms to read (waiting for a disk) and 20 ms to train on. num_workers goes from 5 to 10. Tokens a second will",
    ["double", "stay the same", "grow by about a tenth", "fall by half"],
    1,
    "90 / 20 = 4.5, so 5 workers already deliver every 18 ms, and the step takes 20. The device is the limit.",
)

# %%
Question(
    "01.memory",
    "A model of 1 billion parameters trains in bf16 autocast with AdamW. Parameters, gradients and optimizer state take",
    ["2 GB", "4 GB", "8 GB", "16 GB"],
    3,
    "Autocast leaves parameters (4), gradients (4) and both averages (8) in float32: 16 bytes each. Only activations shrink.",
)

# %%
Question(
    "01.accumulate",
    "Accumulation over 4 micro-batches without dividing, AdamW, gradients clipped at norm 1. Compared with the right run,",
    [
        "nothing changes: AdamW does not see the length",
        "the learning rate is 4 times as high",
        "gradients are clipped that should not have been, and the loss still falls",
        "the loss becomes NaN",
    ],
    2,
    "The norm is 4 times too long, so clipping strikes where it should not. AdamW hides the factor itself, so no curve shows it.",
)

# %% [markdown]
# **Lab:** [one device](../labs/01.ipynb): feed a starved device, account for every byte, and accumulate an uneven batch.
#
# **Next:** lesson 02 starts more than one process and lets them talk.
