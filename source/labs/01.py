# ---
# title: "Lab: one device"
# minutes: 60
# ranks: 1
# cluster: none
# objective: feed a starved device; account for every byte; accumulate an uneven batch
# ---

# %% [markdown]
# # Lab 01: one device
#
# Three exercises on [lesson 01](../notebooks/01_one_device.ipynb). In each you write one function. `grading.check` tries it
# in a process of its own and says what it found: a function that hangs or crashes does no harm here.
#
# Run each cell as you go. The first check stops with *your turn* until you have written something. Stuck?
# `grading.hint("01.1")` gives one hint at a time.

# %%
import torch
from torch.utils.data import DataLoader

from scalelab import grading

# %% [markdown]
# ## Feed a starved device
#
# **Exercise 01.1** · ★★☆☆☆ · 15 minutes · target: the device busy 75 % of the time or more, every sample once and in order
#
# *Builds on lesson 01, section 2.*
#
# Here is the pipeline that you are given. `dataset[i]` takes 6 ms to read a sample: it waits, as for a disk. `step(batch)`
# keeps the device busy for 30 ms. The batch size is 8, so a batch is 48 ms of reading for 30 ms of work:


# %%
def given(dataset, step, batch_size):
    """One epoch: every sample once, in order."""
    for start in range(0, len(dataset), batch_size):
        stop = min(start + batch_size, len(dataset))
        step(torch.stack([dataset[i] for i in range(start, stop)]))


# %% [markdown]
# The device is busy 30 ms of every 78: 38 %. Write `train_epoch` so that it is busy three quarters of the time.
#
# - `step` gets the same batches as before, in the same order, one at a time, the last and smaller one too.
# - The data set is to be taken for one that does not fit in memory.
# - At most 8 worker processes. How many do you need? Calculate before you try.


# %%
def train_epoch(dataset, step, batch_size):
    """Call step(batch) for every batch of the dataset, and never let it wait."""
    ### BEGIN SOLUTION
    # a batch every 48 / w ms, at least every 30 ms: w >= 1.6, so 2; and one more for the odd slow read
    for batch in DataLoader(dataset, batch_size=batch_size, num_workers=3):
        step(batch)
    ### END SOLUTION


# %%
grading.check("01.1", train_epoch)

# %% [markdown]
# ## Account for every byte
#
# **Exercise 01.2** · ★★★☆☆ · 25 minutes · target: each of four parts within 2 % of the bytes counted, for five models
#
# *Builds on lesson 01, section 3.*
#
# Write a function that tells, before anything is run, what one training step of our GPT takes in memory. The check builds five
# such models, runs a step of each, and counts the bytes of the tensors.
#
# - The model is the one in `notebooks/scripts/train_one.py`, all of it in `dtype` (no autocast): `"float32"`, `"bfloat16"` or
#   `"float64"`.
# - `optimizer` is `"sgd"` (plain), `"momentum"` (SGD with momentum) or `"adamw"`. Count what it keeps from one step to the
#   next, without its counters of steps.
# - *activations*: the numbers that forward keeps for backward. Parameters themselves and the token ids do not count.
# - 2 % leaves room: the means and deviations of the LayerNorms may be left out.

# %%
BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


def memory_by_part(vocabulary, batch_size, block_size, layers, width, heads, dtype, optimizer):
    """Bytes: {"parameters": ..., "gradients": ..., "optimizer": ..., "activations": ...}"""
    ### BEGIN SOLUTION
    block = 12 * width**2 + 10 * width  # the matrices; two LayerNorms 4, biases 1 + 4 + 1
    embeddings = (vocabulary + block_size) * width
    head = 2 * width + width * vocabulary + vocabulary  # last LayerNorm, Linear with a bias
    parameters = embeddings + layers * block + head
    tokens = batch_size * block_size
    kept = tokens * (layers * 16 * width + 2 * width + vocabulary)
    states = {"sgd": 0, "momentum": 1, "adamw": 2}[optimizer]
    size = BYTES[dtype]
    return {
        "parameters": size * parameters,
        "gradients": size * parameters,
        "optimizer": size * states * parameters,
        "activations": size * kept,
    }
    ### END SOLUTION


# %%
grading.check("01.2", memory_by_part)

# %% [markdown]
# ## Accumulate an uneven batch
#
# **Exercise 01.3** · ★★★☆☆ · 20 minutes · target: parameters and loss equal to those of the whole batch, to 1e-9
#
# *Builds on lesson 01, section 5.*
#
# The batch has 20 samples, and 8 fit on the device: micro-batches of 8, 8 and 4. Make **one** update that is equal to the one of the
# whole batch.
#
# - `model(x, y)` returns the mean loss over the samples it is given. Give it `micro_batch` samples at most.
# - Return the mean loss over the whole batch, as a number.
# - The function is called for batch after batch, with the same model and optimizer. The number of samples need not be a multiple of
#   `micro_batch`, and may be smaller.


# %%
def accumulate(model, optimizer, x, y, micro_batch):
    """One update from all of x and y. Returns the mean loss over the batch."""
    ### BEGIN SOLUTION
    total = 0.0
    optimizer.zero_grad()
    for xs, ys in zip(x.split(micro_batch), y.split(micro_batch)):
        loss = model(xs, ys) * (len(xs) / len(x))  # this micro-batch's share of the mean
        loss.backward()  # adds to .grad and frees the activations
        total += loss.item()
    optimizer.step()
    return total
    ### END SOLUTION


# %%
grading.check("01.3", accumulate)

# %% [markdown]
# **Next:** [lesson 02](../notebooks/02_ranks_and_collectives.ipynb): more than one process.
