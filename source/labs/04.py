# ---
# title: "Lab 04: measuring the network"
# minutes: 95
# ranks: 1 to 3
# cluster: local
# objective: compute busbw; fit alpha and beta; predict a step; place jobs on a topology; see through a bandwidth report
# ---

# %% [markdown]
# # Lab 04: measuring the network
#
# Five exercises on [lesson 04](../notebooks/04_measuring_the_network.ipynb). Write each function, and run the check below it: it
# tries your answer and names the mistake. Nothing that your answer does (hang, exit, crash) harms this notebook.
# `grading.hint("04.1")` gives a hint, and another one when you ask again. GB are 1e9 bytes here, n is `world_size`.

# %%
import itertools
import re

import numpy as np

from scalelab import grading
from scalelab.grading.labs.lab04 import reports, topologies

# %% [markdown]
# ## busbw from a timing
#
# **Exercise 04.1** · ★☆☆☆☆ · 10 minutes · target: algbw and busbw of five operations, 1 to 16 ranks, to 1e-6; equal to the bytes that real ranks send
#
# `op` is one of `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"broadcast"` and `"send-recv"`. `nbytes` is the size as
# nccl-tests counts it: for all-reduce, broadcast and send-recv the buffer of one rank; for all-gather and reduce-scatter *the
# whole*, which is n times the part that a rank puts in or gets out.
#
# Return `(algbw, busbw)` in GB/s: busbw is what the link of the busiest rank has carried where the data goes round in a ring, so
# that `busbw * 1e9 * seconds` is the bytes it has sent. One rank alone sends nothing. After the formula the check times rings of
# sends on real ranks and counts.


# %%
def bandwidths(op, nbytes, seconds, world_size):
    """(algbw, busbw) in GB/s of 1e9 bytes."""
    ### BEGIN SOLUTION
    n = world_size
    factor = {
        "all-reduce": 2 * (n - 1) / n,
        "all-gather": (n - 1) / n,
        "reduce-scatter": (n - 1) / n,
        "broadcast": 1,
        "send-recv": 1,
    }
    algbw = nbytes / seconds / 1e9
    return algbw, algbw * factor[op]
    ### END SOLUTION


# %%
grading.check("04.1", bandwidths)

# %% [markdown]
# ## Fit alpha and beta
#
# **Exercise 04.2** · ★★★☆☆ · 20 minutes · target: alpha within 10 %, beta within 5 %, from sweeps of 1 KiB to 64 MiB with 4 % of noise
#
# An all-reduce sweep gives `sizes` (bytes) and `seconds`, two lists. A ring sends 2(n-1) messages of size/n each, so
#
# $$t = 2(n-1)\,\alpha + \frac{2(n-1)}{n}\,\frac{\mathrm{size}}{\beta}$$
#
# Return `(alpha, beta)`, in seconds and in bytes a second. The largest size can take thousands of times as long as the
# smallest, and every time is off by a few percent *of itself*.


# %%
def fit(sizes, seconds, world_size):
    """(alpha in seconds, beta in bytes a second) of a ring all-reduce."""
    ### BEGIN SOLUTION
    n, s, t = world_size, np.asarray(sizes, float), np.asarray(seconds, float)
    rows = np.stack([2 * (n - 1) / t, 2 * (n - 1) / n * s / t], axis=1)
    (alpha, seconds_a_byte), *_ = np.linalg.lstsq(rows, np.ones(len(t)), rcond=None)
    return alpha, 1 / seconds_a_byte
    ### END SOLUTION


# %%
grading.check("04.2", fit)

# %% [markdown]
# ## Predict a step on a link not yet measured
#
# **Exercise 04.3** · ★★★☆☆ · 25 minutes · target: seconds of a DDP step within 15 %, on links from 100 mbit to NVLink, 1 to 8 ranks
#
# `forward` and `backward` are the seconds of one micro-batch, `update` those of the optimizer, once a step. `buckets` are the
# bytes of DDP's buckets, in the order in which backward fills them. The model:
#
# - Of `micro_batches`, all but the last one are under `no_sync`.
# - In the last backward a bucket is ready when its share of the work is done: the share that its bytes, and those of the buckets
#   before it, have of all bytes.
# - Buckets are all-reduced one after another, as rings (the formula of 04.2), while backward goes on.
# - The update begins when backward and the last all-reduce have both ended.
#
# Where hosts can be emulated the check then measures alpha and beta on one link, sets the link to another rate, and compares
# your prediction with a real step there (20 to 30 seconds).


# %%
def predict(forward, backward, update, buckets, world_size, alpha, beta, micro_batches):
    """Seconds of one optimizer step. alpha in seconds, beta in bytes a second."""
    ### BEGIN SOLUTION
    n, done, end = world_size, 0, 0.0  # end: of the latest all-reduce, from where backward begins
    for nbytes in buckets:
        done += nbytes
        ready = backward * done / sum(buckets)
        end = max(ready, end) + 2 * (n - 1) * alpha + 2 * (n - 1) / n * nbytes / beta
    quiet = (micro_batches - 1) * (forward + backward)
    return quiet + forward + max(backward, end) + update
    ### END SOLUTION


# %% tags=["nbval-ignore-output"]
grading.check("04.3", predict)

# %% [markdown]
# ## Place jobs on a topology
#
# **Exercise 04.4** · ★★★☆☆ · 20 minutes · target: rings of 8 and of 4 and 4 GPUs with the best slowest hop, on three machines, however numbered
#
# Three machines, made up as such machines are wired. In a virtual machine the numbers come in any order, so a neighbour by number
# need not be one by cable. In words: `NV4` are four NVLinks; `PIX` one PCIe switch, `PXB` several; `PHB` goes through the
# processor's PCIe host bridge, `NODE` between two of them, `SYS` from one processor to the other.

# %%
for name, machine in topologies.GIVEN.items():
    print(f"{name}\n{topologies.table(machine)}\n")

# %% [markdown]
# `links` is such a matrix as a dict: `links["0-3"]` is the link of GPU 0 and GPU 3, the smaller number first. Return the ring
# for one job on all eight, and the two rings for two jobs of four that run at the same time:
# `{"eight": [eight GPUs], "fours": [[four GPUs], [the four others]]}`.
#
# A ring is as quick as its slowest hop; the hop from the last GPU to the first one counts too. The order of links is NV# by its
# number, then PIX, PXB, PHB, NODE, SYS. `PHB`, `NODE` and `SYS` go through a processor, which all such hops share: if the slowest
# hop is one of these, have as few hops of that kind as you can. Of two jobs the one with the worse ring counts first, then the
# other. There are 2520 rings of 8 and 35 ways to share 8 out, so trying all of them is a good plan: a second for all machines.
#
# The check uses these three machines and the same ones with other numbers.


# %%
def place(links):
    """{"eight": ring, "fours": [ring, ring]}, each ring a list of GPU numbers."""
    ### BEGIN SOLUTION
    order = ["SYS", "NODE", "PHB", "PXB", "PIX"]

    def key(ring):
        names = [links[f"{min(h)}-{max(h)}"] for h in zip(ring, ring[1:] + ring[:1])]
        speeds = [4 + int(s[2:]) if s.startswith("NV") else order.index(s) for s in names]
        slowest = min(speeds)
        return slowest, -speeds.count(slowest) if slowest <= 2 else 0

    def best(gpus):
        first, *rest = gpus
        return max(([first, *p] for p in itertools.permutations(rest)), key=key)

    splits = [
        [best(part), best(sorted({*range(8)} - {*part}))]
        for part in itertools.combinations(range(8), 4)
    ]
    fours = max(splits, key=lambda rings: sorted(map(key, rings)))
    return {"eight": best(range(8)), "fours": fours}
    ### END SOLUTION


# %%
grading.check("04.4", place)

# %% [markdown]
# ## Find the wrong claim
#
# **Exercise 04.5** · ★★★☆☆ · 20 minutes · target: jobs of each report, and whether it supports its claim, right in all of 26
#
# "Two nodes of eight GPUs, busbw 480 GB/s: the network is fine." Started without the right `mpirun` line, nccl-tests runs once
# on each node, or once on each GPU, and nothing crosses the network. It raises no error; the output tells. Two small reports (hosts
# and figures made up, in the form of nccl-tests):

# %%
for report in reports.examples():
    print(f"claim: {report.claim}\n{report.text}")

# %% [markdown]
# The second is two jobs: each begins with a Rank 0 of its own, and their lines are mixed, as in one terminal.
#
# `claim` is a dict with `ranks`, `nodes` and `busbw` (GB/s), `text` an output. Return `(supported, jobs)`: `jobs` is a list with
# `(ranks, nodes)` of each job in the output, in any order; a node is a different host. `supported` is True where there is *one* job,
# of as many ranks and nodes as claimed, no value is wrong (`#wrong`, two columns), and the largest busbw in the table (two
# columns) reaches the claim, or 98 % of it: people round.


# %%
def read_report(claim, text):
    """(supported, [(ranks, nodes) of each job])."""
    ### BEGIN SOLUTION
    jobs = []  # of each, the host of every rank
    for rank, host in re.findall(r"^#\s+Rank\s+(\d+) .*?\bon\s+(\S+)", text, re.M):
        if int(rank) == 0:
            jobs.append([])
        fitting = [job for job in jobs if len(job) == int(rank)]
        next((job for job in fitting if host in job), fitting[-1]).append(host)
    found = [(len(job), len(set(job))) for job in jobs]
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*\d+\s", line)]
    right = all(row[i] in ("0", "N/A") for row in rows for i in (-5, -1))
    busbw = max(float(row[i]) for row in rows for i in (-6, -2))
    as_claimed = found == [(claim["ranks"], claim["nodes"])]
    return as_claimed and right and busbw >= 0.98 * claim["busbw"], found
    ### END SOLUTION


# %%
grading.check("04.5", read_report)

# %% [markdown]
# `scalelab bench all-reduce` measures a sweep such as that of exercise 04.2 and fits it; `scalelab read FILE` reads topologies and
# nccl-tests outputs of real machines.
# Lesson 05 goes to two nodes.
