# ---
# # For authors; the builder leaves these lines out of the notebook.
# # Before the lesson the learner believes:
# #   - several machines are needed to learn about several machines
# #   - torchrun needs ssh, Slurm or Kubernetes, or logs in to the other machine by itself
# #   - there is a master script and a worker script
# #   - a rank is a machine; world size is the number of machines
# #   - a job that prints "world size 2" has proven that two machines took part
# #   - more machines make each step faster, or see the same data twice
# #   - a slower network gives a worse model
# # Afterwards the learner can do what the list under "You will be able to" says, and has seen each
# # of the above contradicted by something that ran.
# title: Run one job on two machines
# minutes: 15
# ranks: 2
# cluster: virtual or local
# objective: say what this machine can emulate; have run two nodes once
# ---

# %% [markdown]
# # Run one job on two machines
#
# You start a real training job on two machines, watch it learn, and prove that both took part.
# You need one computer: it makes the two machines itself.
#
# **You will be able to**
# 1. say what this computer can emulate, what it cannot, and why;
# 2. predict how many ranks a job has and how many tokens one step takes in, and check it;
# 3. start one job on two machines, from a button and from code;
# 4. prove which machines took part, and not take the job's word for it;
# 5. write the command that does the same on a real cluster.
#
# **You need** to have trained a model on one device in PyTorch. No GPU, no cluster, no root.
#
# **Time** 15 minutes; the cells run for less than a minute. **Uses** 2 ranks, on a `virtual` or `local` cluster.
#
# **How to work** Run the cells from the top, each with Shift+Enter. The results on this page were measured when
# the page was made. When you run a cell, yours replace them.

# %% tags=["parameters"]
num_nodes = 2  # machines
nproc_per_node = 1  # ranks (training processes) on each machine
num_steps = 200  # optimizer steps
rate = "1gbit"  # speed of each machine's network link
delay = "0ms"  # extra time that each packet takes, one way

# %%
import os
from statistics import median

import matplotlib.pyplot as plt

from scalelab import cluster, grading
from scalelab.measure.recorded import recall
from scalelab.panels import RunPanel, draw_progress

# %% [markdown]
# ## 1. What can this computer be?
#
# To a training job, another machine is three things: a host name, an address, and a network between them.
# Linux can give these to any group of processes. What such a group sees is its *namespace*: a host name,
# network cards and a process list of its own. ScaleLab makes one for each machine you ask for. It needs no root
# and leaves nothing behind.
#
# Ask this computer what it can do:

# %% tags=["nbval-ignore-output"]
can = cluster.capabilities()
yes = {True: "yes", False: "no"}
print("emulated machines   ", yes[can["virtual"]], can["why_not"])
print("links with a rate   ", yes[can["virtual"]])
print("links with a delay  ", can["delay"] or "no")
print("firewalls           ", yes[can["firewall"]])
print("cores               ", can["cores"], "shared by all machines")
print("memory, free        ", can["memory_gb"], "GB, shared by all machines")
print("GPUs                ", can["gpus"])
print("ranks worth running ", can["max_ranks"], "or fewer; more would time the scheduler")

# %% [markdown]
# If the first line says *yes*, this lesson runs on a **virtual** cluster: machines with their own names and addresses.
# If it says *no*, the reason stands beside it, and the lesson runs on a **local** cluster: the same program, with all
# ranks on this one host. Many containers and Binder are like that, and macOS always is. Where a step needs separate
# machines, you then see a recorded result that says when and on what it was recorded.
#
# | | on a virtual cluster |
# |---|---|
# | real | the processes, `torchrun`, PyTorch, the sockets, host names and addresses, link speed, every failure |
# | shared | cores, memory and disk: two machines here do not compute twice as fast as one |
# | not there | fast GPU links (NVLink, InfiniBand), thousands of ranks |
#
# So you can trust what you see here about *who talks to whom, how much is sent, and what breaks*. Do not read a
# cluster's speed from it.

# %% [markdown]
# ## 2. Predict
#
# A **node** is a machine. A **rank** is one training process, with its own copy of the model. The **world size** is the
# number of ranks in the job. The script we run is plain PyTorch: `scripts/train_ddp.py`, a small GPT that learns to
# write English one character (here, one token) at a time. In each step every rank takes `batch_size` = 8 sequences of
# `block_size` = 64 tokens.
#
# Write down two numbers before you go on. A wrong guess teaches more than none.

# %%
my_world_size = None  # how many ranks are in the whole job?
my_tokens_per_step = None  # how many tokens do all ranks together take in, in one step?

grading.predict("00.world_size", my_world_size)
grading.predict("00.tokens_per_step", my_tokens_per_step)

# %% [markdown]
# ## 3. Run it with a button
#
# Run the next cell, then press **Launch** in it. You will see, in this order:
#
# 1. *looking for each other*: on every machine a `torchrun` agent starts, and they meet. Importing PyTorch takes most of
#    these seconds.
# 2. The table fills: each rank reports the machine and the address that it runs on.
# 3. The loss falls, one line a rank. **Stop** ends the job at any time, and **Launch** starts a new one.
#
# The cell is finished at once; the job goes on beside the notebook, also while you reload the page. (If a reload shows you a
# picture in place of the panel, JupyterLab does not trust this notebook yet: *File*, *Trust Notebook*.)

# %%
settings = dict(
    nodes=num_nodes, nproc_per_node=nproc_per_node, steps=num_steps, rate=rate, delay=delay
)
panel = RunPanel("scripts/train_ddp.py", **settings)
panel

# %% [markdown]
# ## 4. Run it from code
#
# `run()` is the same without your hand on the mouse. It waits for the end, and raises an error if a rank fails, or if
# fewer ranks or steps are reported than were asked for. From here on we look at this run.

# %%
by_code = RunPanel("scripts/train_ddp.py", **settings)
run = by_code.run()
print(run.status)

# %%
by_code.picture()

# %% [markdown]
# Two lines, close together and not equal: each rank reports the loss on its *own* 8 sequences, and each reads different
# ones. The model behind both lines is the same: in every step the ranks average their gradients, so all copies
# take the same step.
#
# ## 5. Compare
#
# *Measured* is counted from what the ranks wrote down in step 1.

# %%
batch_size, block_size = 8, 64
world_size = num_nodes * nproc_per_node
tokens = sum(line["tokens"] for line in run.metrics() if line["step"] == 1)
rows = [
    ("ranks", my_world_size, world_size, len(run.ranks)),
    ("tokens a step", my_tokens_per_step, world_size * batch_size * block_size, tokens),
]
print(f"{'':14}{'you said':>10}{'theory':>10}{'measured':>10}")
for name, mine, theory, measured in rows:
    print(f"{name:14}{str(mine):>10}{theory:>10}{measured:>10}")
assert all(theory == measured for _, _, theory, measured in rows)

# %% [markdown]
# **Theory.** World size = nodes × ranks on each. Tokens a step = world size × `batch_size` × `block_size`.
#
# A second machine does not make a step shorter. It makes a step take in more: the **global batch** (the sequences of all
# ranks together) doubles. Speed is therefore given in tokens a second, with the global batch beside it, and not in
# steps a second.

# %% [markdown]
# ## 6. Were there two machines?
#
# A job with world size 2 may be two processes on one machine. Its own word is no proof. So every rank reports the
# host name and the address that it found itself:

# %% tags=["nbval-ignore-output"]
found = recall(
    "two_machines",
    lambda: [[r["rank"], r["hostname"], r["addr"]] for r in run.ranks],
    cluster=run.cluster,
)
for rank, hostname, addr in found.value:
    print(f"rank {rank}: I run on {hostname}, at {addr}")
hosts = {(hostname, addr) for _, hostname, addr in found.value}
assert found.recorded or len(hosts) == num_nodes

# %% [markdown]
# You can also go and look. `node.sh` runs a shell command inside one machine. Linux numbers its networks; a process sees
# only the network cards and ports of the network that it is in.

# %% tags=["nbval-ignore-output"]
with cluster.start(nodes=num_nodes) as c:
    for node in c.nodes:
        name = node.sh("hostname").stdout.strip()
        network = node.sh("readlink /proc/self/ns/net").stdout.strip()
        processes = node.sh("ls -d /proc/[0-9]* | wc -l").stdout.strip()
        print(f"{node.name}: host name {name}, network {network}, {processes} processes to see")
print("this notebook:", os.readlink("/proc/self/ns/net") if can["virtual"] else "the same network")

# %% [markdown]
# ## 7. What was started?
#
# This is the command, as you would type it:

# %% tags=["nbval-ignore-output"]
command = run.manifest["command"].replace(run.manifest["script"], "scripts/train_ddp.py")
print(command.replace(" --", " \\\n    --"))

# %% [markdown]
# And it was the same on every machine. There is no master script and no worker script:

# %%
agents = run.manifest["agents"]
same = {tuple(word for word in words if "--rdzv-conf" not in word) for words in agents.values()}
print("machines:", len(agents))
print("different commands:", len(same))

# %% [markdown]
# How, then, does a process know that it is rank 1? The agents **meet** at the address in `--rdzv-endpoint`
# (*rendezvous*). There they count who has come, wait until `--nnodes` are present, and number the ranks. Each rank gets its
# numbers as environment variables: `RANK`, `LOCAL_RANK` (its number on its own machine), `WORLD_SIZE`.
#
# `torchrun` does not log in to other machines and needs no ssh. *Something* must start the command on each of them, and
# this is all that ssh, Slurm or Kubernetes does for the job. Here, ScaleLab did. (On a local cluster, where all agents
# have one address, one more flag says which of them hosts the meeting.)
#
# ## 8. Where did the time go?
#
# Guess before you run the cell: which part of a step takes longest?

# %%
parts = ["data", "forward", "backward", "communication", "update"]
fig, ax = plt.subplots(figsize=(8, 0.9 + 0.5 * len(run.ranks)), layout="constrained")
for r in run.ranks:
    lines = [m for m in run.metrics() if m["rank"] == r["rank"] and m["step"] > num_steps // 10]
    left = 0.0
    for color, part in enumerate(parts):
        ms = 1000 * median(line["seconds"][part] or 0 for line in lines)
        label = part if r is run.ranks[0] else None
        ax.barh(f"rank {r['rank']} on {r['node']}", ms, 0.6, left, color=f"C{color}", label=label)
        left += ms
ax.invert_yaxis()
ax.set_xlabel("time in one step, median of each part (ms)")
ax.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
plt.show()

# %% [markdown]
# *communication* is the time in which a rank only waits for the average of the gradients. One rank alone would not
# have it. Lesson 04 predicts this bar from the size of the model and the speed of the link.
#
# ## 9. A slower network
#
# Predict: the same job over links of 50 mbit a second, a twentieth of the speed. Which will change: the loss at step 60,
# the time of a step, or both?

# %%
my_guess = None  # "loss", "time" or "both"

grading.predict("00.slow_link", my_guess)


# %% tags=["nbval-ignore-output"]
def slow_link():
    other = {**settings, "rate": "50mbit", "steps": min(60, num_steps)}
    slow = RunPanel("scripts/train_ddp.py", **other).run().metrics()
    fast = run.metrics()[: len(slow)]
    same = [m["loss"] for m in fast] == [m["loss"] for m in slow]
    waits = [median(m["seconds"]["communication"] or 0 for m in lines) for lines in (fast, slow)]
    return {"same": same, "milliseconds": [1000 * wait for wait in waits]}


result = recall("slow_link", slow_link, cluster=run.cluster).value
print("your guess:", my_guess)
print("same loss in every step of every rank:", result["same"])
print("waiting in a step: {:.0f} ms at first, {:.0f} ms now".format(*result["milliseconds"]))
assert result["same"]

# %% [markdown]
# Only the time. The ranks read the same sequences and average the same gradients, so every loss is equal to its last bit.
# They wait longer for the average, but not twenty times longer: over the fast link most of the wait was not the link's, but
# the software's and the other rank's. A slow network makes training slow; it does not make the model worse.
# (Methods that send *less* can: lesson 09.)
#
# **Try it** in the panel of section 3: 4 nodes, or 2 nodes of 2 ranks, or a `delay` of `5ms`. Predict first: ranks,
# tokens a step, and whether a step takes longer.

# %% [markdown]
# ## On a real cluster
#
# Type this on **each** of two machines with 8 GPUs. `gpu-a` is one of the two, by a name that both can resolve:
#
# ```
# torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d \
#     --rdzv-endpoint=gpu-a:29500 --rdzv-id=lesson00 \
#     scripts/train_ddp.py --steps 200
# ```
#
# The script takes CUDA and NCCL (NVIDIA's library that moves tensors between GPUs) where it finds them. With Slurm, one line starts the same command on both:
#
# ```
# srun --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 torchrun --nnodes=2 ... the same as above
# ```
# (inside an `sbatch` or `salloc` job; there the first node's name is `$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)`)
#
# Three things were done for you here and are yours there: the script, the data and the same versions of Python and
# PyTorch must be on both machines; `gpu-a` must resolve to an address that the other machine reaches; port 29500 and
# the ports that the ranks choose must be open between them. Lesson 05 breaks and mends each of these.
#
# ## Summary
#
# - A machine, to a job, is a name, an address and a network. This computer can make several (if section 1 said *yes*).
# - World size counts ranks, not machines. Each rank reads its own data; all average their gradients in every step.
# - More ranks take in more tokens a step. Compare tokens a second, with the global batch beside them.
# - The same command runs on every machine. Rendezvous numbers the ranks; `torchrun` starts nothing remotely.
# - A slower link changes the time of a step and nothing else.
# - Two machines, as the job sees them, are proven by the names and addresses that the ranks found, not by the world size.
#   (On a real cluster compare `/proc/sys/kernel/random/boot_id` too: containers of one host share it, and so do ours.)
#
# ## Check yourself
#
# Click an answer. What you click here and what you predicted above is kept with your progress, in
# `~/.scalelab` (or where `SCALELAB_HOME` points), and nowhere else.

# %%
grading.Question(
    "00.q1",
    "Two nodes, 4 ranks on each, batch_size 8, block_size 64. World size, and tokens in one step?",
    ["2 and 1,024", "8 and 4,096", "8 and 512"],
    right=1,
    why="World size counts ranks: 2 x 4 = 8. Tokens a step: 8 x 8 x 64 = 4,096. "
    "(Rank 5 is the second process on its node, so its local rank is 1.)",
)

# %%
grading.Question(
    "00.q2",
    'A colleague wants to give node0 ssh access to node1, "because torchrun needs it".',
    ["Right: torchrun starts the other ranks by ssh", "It does not need it"],
    right=1,
    why="The agents connect over TCP to the rendezvous endpoint; nobody logs in anywhere. ssh is "
    "one way to start the command on the second machine. Typing it there works as well.",
)

# %%
grading.Question(
    "00.q3",
    'Your job prints "world size 16" and runs at half the speed you expected. What first?',
    ["Buy a faster network", "See on which machines the 16 ranks run", "Double the batch"],
    right=1,
    why="Have each rank print its host name and address. Sixteen ranks on one machine with eight "
    "GPUs also print world size 16.",
)

# %% [markdown]
# ## Where you are
#
# Each lesson from 01 on has a lab with graded exercises. Come back to this cell to see what is done and what is next.
# (In a terminal: `scalelab progress`.)

# %% tags=["nbval-ignore-output"]
draw_progress()

# %% [markdown]
# **Next:** lesson 01 looks at one device: where its time and memory go. What is slow there stays slow on every machine.
