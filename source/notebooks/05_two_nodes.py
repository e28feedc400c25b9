# ---
# # For authors; the builder leaves these lines out of the notebook.
# # Before the lesson the learner believes:
# #   - node 0 must be started first, and the others at once after it
# #   - the two machines need different commands; node_rank is the rank
# #   - the machine that the endpoint names is the one with rank 0
# #   - ping works, so the network is fine; opening MASTER_PORT is enough
# #   - the machine with the traceback is the broken one
# #   - a missing file is the worst that storage can do
# #   - a time-out of 15 s bounds the wait
# #   - MASTER_ADDR is enough with the c10d rendezvous
# #   - going to two machines means rewriting the script
# # Afterwards the learner can do what the list under "You will be able to" says, and has seen each
# # of the above contradicted by something that ran.
# title: Take a job to two machines
# minutes: 75
# ranks: 2 and 4
# cluster: virtual or local
# objective: launch one job across machines, and find and mend the five pits on the way
# ---

# %% [markdown]
# # Take a job to two machines
#
# You start one job on two machines, from both sides, in either order. Then you break the machines in the ways in which
# real ones are broken, one after another, and find out each time with two commands what is wrong.
#
# **You will be able to**
# 1. type the right line on each machine, say which may be first, and how long to wait before something is wrong;
# 2. take a script from one machine to two, and say what a rendezvous does and who gets which rank;
# 3. tell five pits apart by what is seen first: storage, network, environment, launch lines, no checkpoint;
# 4. say which rank to believe, and find the cause with two commands on each machine;
# 5. examine machines *before* a job with `scalelab doctor`, and launch lines before they are typed.
#
# **You need** lessons 02 (ranks), 03 (DDP, `torchrun`) and 04 (MTU). No GPU, no cluster, no root.
#
# **Time** 75 minutes; the cells run for about two and a half. **Uses** 2 and 4 ranks, on a `virtual` or `local` cluster.
# Broken machines can only be had where machines can be emulated: elsewhere a cell shows its recorded result and says so.

# %% tags=["parameters"]
num_nodes = 2  # machines of the first job in section 2; later ones are 2
nproc_per_node = 2  # ranks on each of them

# %%
import difflib
import json
import re
import shutil
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from scalelab import cluster, doctor, grading, runs
from scalelab.drills import FAULTS, Lab, by_id
from scalelab.measure.recorded import recall
from scalelab.panels import PitsPanel
from scalelab.runs.lines import LinesRun

# %% [markdown]
# Helpers. `real` shows what happened on emulated machines, or the record of it. `screens` says what stands on each
# machine's screen, without the long tracebacks between. (Nor does it show what torchrun complains of at a healthy end: the
# store that left a moment before it did.)

# %%
can = cluster.capabilities()
lacking = [tool for tool in ("ss", "ping") if not shutil.which(tool)]
lacking += ["nft"] if not can["firewall"] else []
why = can["why_not"] or (f"this machine lacks {', '.join(lacking)}" if lacking else "")
here = SimpleNamespace(kind="local" if why else "virtual", why=why)


def real(key, look):
    return recall(f"05_{key}", look, cluster=here).value


# %%
LONG = re.compile(r"^\[?[EW]\d{4} .*?\] |^\[rank\d\]: |\[/\S+\] |[\w.]+\.(?=\w+Error)")  # left out
SHOWN = re.compile(r"rank \d|step |validation|\w+Error: |master_addr")


def screens(run, last=6):
    rows = []
    for i, code in run.exits.items():
        state = "still running" if code is None else f"exit {code}"
        rows.append(f"node{i}: {state} after {run.seconds:.0f} s")
        said = [LONG.sub("", line) for _, line in run.stamped(i)]
        said = [f"    {line[:130]}" for line in said if SHOWN.match(line)]
        said = [line for line in said if code != 0 or "Error: " not in line]
        rows += said[-last:] or ["    (not a word)"]
    return "\n".join(rows)


# %% [markdown]
# ## 1. Four plain questions
#
# Both machines hold the same script, the same Python environment and the same data. On each of them somebody types a
# line. There are two forms of it. Either says how many machines there are (`--nnodes`) and where they meet: on node0,
# at a port. (`--rdzv-id` is a name for the job. Any word will do, if it is the same on all machines.)

# %%
script = "scripts/train_ddp.py --steps 20"
c10d = f"torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=node0:29400 --rdzv-id=job {script}"
static = f"torchrun --nnodes=2 --node-rank=NUMBER --master-addr=node0 --master-port=29500 {script}"
forms = {"c10d": {0: c10d, 1: c10d},
         "static": {i: static.replace("NUMBER", str(i)) for i in (0, 1)}}  # fmt: skip
for name, lines in forms.items():
    differ = [words for words in zip(lines[0].split(), lines[1].split()) if words[0] != words[1]]
    print(f"{name:7} {lines[0]}\n        differs on node1: {differ or 'nothing'}")

# %% [markdown]
# **What differs between the two lines?** With the *c10d* rendezvous nothing. In the older, *static* form one number. And
# nobody logs in to the other machine: `torchrun` needs no ssh. It only has to be started everywhere.
#
# **Which machine do I start first?** Predict: "node0", "node1", or "either".

# %%
my_first = None
grading.predict("05.first", my_first)

# %% [markdown]
# Three pairs of machines. In the first, node1 is started 5 s *before* node0, which holds the endpoint. In the second,
# with the static form, node0 is first. In the third, node0 never comes, and node1 is told to give up after 4 s.


# %%
def late(lines, node):
    return lines | {node: "sleep 5; " + lines[node]}


def three_starts():
    alone = c10d.replace("--rdzv-id", "--rdzv-conf=read_timeout=4 --rdzv-id")
    with ExitStack() as stack:
        jobs = []
        for lines in (late(forms["c10d"], 0), late(forms["static"], 1), {1: alone}):
            machines = stack.enter_context(cluster.start(nodes=2))
            jobs.append(stack.enter_context(LinesRun(machines, lines, timeout=150)))
        all(job.wait() for job in jobs)
        first_word = min(at for at, _ in jobs[0].stamped(0)) - 5
        return {"screens": [screens(job) for job in jobs], "start": round(first_word, 1)}


# %% tags=["nbval-ignore-output"]
starts = real("three_starts", three_starts)
titles = ["c10d, node0 5 s late", "static, node1 5 s late", "c10d, node0 never comes"]
for title, screen in zip(titles, starts["screens"]):
    print(f"{title}\n{screen}\n")
print("you said", my_first)

# %% [markdown]
# **Either.** Whoever is first waits. (The seconds count from the typing: what `torchrun` takes to start is in them,
# also in those of the third pair.)
#
# **What appears on each screen, and where do results land?** One line on node1, all the rest on node0. That is as it
# should be: rank 0 prints the loss, and a machine without rank 0 stays quiet, for hours. What a rank *writes* lands on
# the disk of the machine it runs on, so a checkpoint lies where rank 0 is.
#
# **How long may it wait before something is wrong?** Torch's own patience, looked up in its code:

# %%
from inspect import getsource, signature

from torch.distributed import constants, launcher
from torch.distributed.elastic.agent.server import SimpleElasticAgent
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

looks = re.search(r'"read_timeout", (\d+)', getsource(c10d_rendezvous_backend))
waits = {
    "c10d: look for the endpoint": int(looks[1]),
    "c10d: wait for the other machines": dynamic_rendezvous.RendezvousTimeout().join.seconds,
    "static: look, and wait": launcher.LaunchConfig(1, 1, 1).rdzv_configs["timeout"],
    "a collective, gloo": constants.default_pg_timeout.seconds,
    "torchrun, done, waits for the others": signature(SimpleElasticAgent).parameters["exit_barrier_timeout"].default,
}

# %%
for what, seconds in waits.items():
    print(f"{what:38} {seconds:5} s")

# %% [markdown]
# So "either" has an edge. With c10d, node0, which holds the endpoint, waits ten minutes for node1. node1 looks for
# node0 one minute (once more, if node0 refuses the connection), and then gives up with the error of the third pair.
# (`--rdzv-conf=read_timeout=300` gives it five.) In the static form both wait fifteen minutes. NCCL's collectives wait
# 10 minutes in place of gloo's 30.
#
# Nobody should sit through these. A healthy start takes seconds, and you can measure yours:

# %% tags=["nbval-ignore-output"]
print(f"from typing the last line to the first word of a rank, three pairs at once: {starts['start']} s")
patience = max(8, 2 * starts["start"])
print(f"from here on, {patience:.0f} s without a word count as a symptom")

# %% [markdown]
# On a cluster, where images and data are loaded from afar, a minute is a fair limit. After that, look; do not wait.
#
# ## 2. From one machine to two
#
# How much of a script has to change? Three people start from three scripts: one runs under `torchrun` already
# (`train_ddp.py`, lesson 03), one uses `mp.spawn`, one starts each rank by hand. The goal is `train_ddp.py`.


# %%
def changed(old, new="train_ddp.py"):
    texts = [Path("scripts", name).read_text().splitlines() for name in (old, new)]
    diff = list(difflib.unified_diff(*texts, n=0, lineterm=""))[2:]
    return [line for line in diff if not line.startswith("@@")]


for old in ("train_ddp.py", "spawn_ddp.py", "by_hand_ddp.py"):
    lines, whole = changed(old), len(Path("scripts", old).read_text().splitlines())
    print(f"{old:15} {sum(line[0] == '-' for line in lines)} lines of {whole} go,",
          f"{sum(line[0] == '+' for line in lines)} come")  # fmt: skip
print("\n" + "\n".join(changed("by_hand_ddp.py")))

# %% [markdown]
# What goes is what was **hard-coded**: address, port, number of ranks, rank. Nothing of the training changes. (A script
# that gave each rank no part of its own of the data, or saved from every rank, was wrong on one machine too.)
#
# **What happens in a rendezvous.** `torchrun` on a machine is an **agent**: it starts the ranks there, watches them, and
# if one fails, ends or restarts them all. The agent on the endpoint's machine also opens the **store**, a little server of
# keys and values, on port 29400. Each agent writes itself down there. When `nnodes` are on the list, it is closed, each
# agent gets a **group rank**, and the ranks are counted through: rank = group rank × ranks a machine + local rank.

# %%
with cluster.start(nodes=num_nodes) as c:
    job = runs.launch("scripts/show_ranks.py", cluster=c, nproc_per_node=nproc_per_node).wait(90)
assert job.status == "succeeded", job.words()
for log in job.logs().values():
    me = json.loads(log.splitlines()[-1])
    print("group rank {GROUP_RANK}, local rank {LOCAL_RANK}: rank {RANK} of {WORLD_SIZE}".format(**me))

# %% [markdown]
# (*Node rank* is another word for group rank.) Which machine gets which? Two machines, *s2* and *s10*. The endpoint is on
# s2, s2 is told `--node-rank=0` and s10 `--node-rank=1`. **Predict:** where does rank 0 run, and who therefore prints and
# saves?

# %%
my_rank_0 = None  # "s2" or "s10"
grading.predict("05.rank_0", my_rank_0)


# %%
def renamed():
    with cluster.start(nodes=2) as c:
        for node, name in zip(c.nodes, ("s2", "s10")):
            node.sh(f"hostname {name}")
            node.set_hosts("127.0.0.1 localhost\n10.77.0.1 s2\n10.77.0.2 s10\n")
        line = c10d.replace("node0", "s2").replace(script, "--nproc-per-node=2 scripts/show_ranks.py")
        lines = {i: line.replace("--rdzv-id", f"--node-rank={i} --rdzv-id") for i in (0, 1)}
        with LinesRun(c, lines, timeout=90) as job:
            job.wait()
            said = [text for i in (0, 1) for _, text in job.stamped(i) if text.startswith("{")]
    return sorted((json.loads(text) for text in said), key=lambda me: int(me["RANK"]))


# %%
for me in real("renamed", renamed):
    told = {"s2": 0, "s10": 1}[me["host"]]
    print(f"rank {me['RANK']} on {me['host']:3} told --node-rank={told}, group rank {me['GROUP_RANK']};",
          "MASTER_ADDR", me["MASTER_ADDR"])  # fmt: skip
print("you said", my_rank_0)

# %% [markdown]
# c10d sorts the machines by name, as *text*, and "s10" comes before "s2". It does not read `--node-rank` at all, and
# the endpoint's machine has no privilege but to hold the list. (torchrun says that it ignores the number, where
# that is not 0, in a line that is easily missed.) So look for rank 0 where the first line says that it is. If you need to
# decide it, use the static form: there `--node-rank` *is* the group rank. It is not the rank, unless every machine has
# one.
#
# After the rendezvous the ranks are on their own. They meet once more, at `MASTER_ADDR` and `MASTER_PORT` (with c10d a
# free port of rank 0's machine; in the static form the port of the line once more), tell each other their addresses,
# and connect **in pairs, on ports that the kernel picks**. Three rounds of meetings: the agents, the ranks at one
# place, the ranks in pairs. A port that is open for one need not be open for the next. Keep that in mind for pit 2.
#
# ## 3. Five pits
#
# The job is `scripts/two_nodes.py`. It does next to nothing, and says how far it has come: *started*, *joined*, *small
# all-reduce*, *large all-reduce*, *done*. **How far each rank has come** is the first thing to find out about any broken
# job. The faults come from `scalelab.drills`.
#
# Four more helpers: `lab` gives two machines with a fault in them, `typed` types the job's line on both, `watch` waits
# until something has ended or no more is said, `tell` runs a command on both.


# %%
@cache
def lab(fault):
    bench = Lab(by_id(fault))
    bench.inject()
    return bench


def typed(bench, extra="", timeout=200):
    lines = {i: line + extra for i, line in bench.lines().items()}
    return LinesRun(bench.cluster, lines, timeout=timeout, cwd=str(bench.dir))


# %%
def watch(*jobs, last=6):
    for job in jobs:
        while not job.wait(0.3) and not any(job.exits.values()):
            words = [at for i in job.lines for at, _ in job.stamped(i)]
            if job.seconds > patience + max(words, default=0):
                break
        job.wait(1)
    return [screens(job, last) for job in jobs]


# %%
def tell(bench, *commands, nodes=(0, 1)):
    rows, bin = [], Path(sys.executable).parent
    for command, i in ((command, i) for command in commands for i in nodes):
        done = bench.node(i).sh(f"cd '{bench.dir}'; PATH={bin}:$PATH; {command}", timeout=20)
        rows += [f"node{i}$ {command}", (done.stdout + done.stderr).rstrip()]
    return "\n".join(rows)


# %% [markdown]
# ### Pit 1: storage
#
# The data are 8 files. Each rank lists the directory and takes every second one, from its rank on. On node1 somebody's
# copy stopped after 5 files. Checkpoints go to `checkpoints/last.pt`, which is not a shared directory but a folder of the
# same name on each machine. **Predict:** which comes first, an error or something else? How many files are read?

# %%
my_files = None  # read by both ranks together
grading.predict("05.files", my_files)


# %%
def storage():
    bench = lab("fewer-files")
    by_id("checkpoint-on-own-disk").inject(bench)
    with typed(bench, " --save checkpoints/last.pt") as job:
        (screen,) = watch(job)
    return screen, tell(bench, "ls data | wc -l", "ls checkpoints")


# %% tags=["nbval-ignore-output"]
screen, told = real("storage", storage)
print(screen)
print("\nyou said", my_files)

# %% [markdown]
# Two faults, and only the second one makes a noise. Rank 1 cannot read a checkpoint that rank 0 has just saved: believe
# the rank whose traceback came **first**. (Among the ranks of its own machine, torchrun calls it *Root Cause (first
# observed failure)*.) But the worse one is silent: 6 files of 8 were read, and nobody would have known. And look at
# node0: its rank is *done*, and the command does not return. It waits for the other machine, for 5 minutes. A screen
# that hangs after *done* means: look at the other one.
#
# **The two commands that tell**, on each machine: count what the job reads; look for what the other one wrote.

# %% tags=["nbval-ignore-output"]
print(told)


# %%
def storage_mended():
    bench = lab("fewer-files")
    bench.cure()  # the whole copy
    by_id("checkpoint-on-own-disk").cure(bench)  # one directory for both machines
    with typed(bench, " --save checkpoints/last.pt") as job:
        return watch(job)[0]


# %% tags=["nbval-ignore-output"]
mended = real("storage_mended", storage_mended)
print(mended)

# %%
for when, text in {"broken": screen, "mended": mended}.items():
    print(when, "read", set(re.findall(r"together have read (\d)", text)), "of 8 files,",
          len(re.findall("checkpoint of step 1 read", text)), "of 2 ranks read the checkpoint")  # fmt: skip

# %% [markdown]
# | also in this pit | what one sees first | the command | the cure |
# |---|---|---|---|
# | data on node0 only | *No such file or directory*, at once | `ls data` | copy, or mount |
# | same files, listed in another order | no error; some files are read twice, some never | `ls -U data \| md5sum` | `sorted(os.listdir(…))` |
# | directory belongs to another uid | *Permission denied* on rank 0's machine, at the first checkpoint | `id -u; ls -ldn checkpoints` | the same uid on all machines |
# | read-only mount | *Read-only file system*, also then | `touch checkpoints/x` | mount it rw |
# | small `/dev/shm` (Docker: 64 MB) | *Bus error* or *No space left on device* in a DataLoader worker | `df -h /dev/shm` | `--shm-size` |
#
# A shared directory is one way. Copies on each machine are as good for *data*, as long as they are equal: compare the
# number of files, better a checksum of the list. Checkpoints need a place that every rank can read again.
#
# ### Pit 2: names, interfaces, ports, MTU
#
# **Predict.** The firewalls of both machines let `ping` and the port 29500 (`MASTER_PORT`) through, and nothing else. Will
# the job run?

# %%
my_firewall = None  # "runs", "error", or "hangs"
grading.predict("05.firewall", my_firewall)

# %% [markdown]
# That is pair B below. Pairs A and C have other faults. All three are started at once: a job that hangs costs nothing.


# %%
timeout = max(3, round(patience / 3))  # s, of pair B's process group


def only_master_port():
    bench = lab("only-rendezvous-port")
    ports = [{"action": "accept", "proto": "tcp", "ports": "29500"}]
    for node in bench.cluster.nodes:
        node.firewall([*ports, {"action": "accept", "proto": "icmp"}], policy="drop")
    line = static.replace(script, f"two_nodes.py --timeout {timeout}")
    lines = {i: line.replace("NUMBER", str(i)) for i in (0, 1)}
    return LinesRun(bench.cluster, lines, timeout=200, cwd=str(bench.dir))


# %%
pairs = {"A": "name-is-loopback", "B": "only-rendezvous-port", "C": "mtu-black-hole"}
commands = {"A": "getent hosts $(hostname)", "B": "ping -c1 node0 | grep rec; ss -tn | grep SYN",
            "C": "for s in 1400 8000; do ping -c1 -W1 -M do -s $s node0 | grep rec; done"}  # fmt: skip


def network():
    jobs = {"A": typed(lab(pairs["A"])), "B": only_master_port(), "C": typed(lab(pairs["C"]))}
    seen = dict(zip(jobs, watch(*jobs.values())))
    told = {p: tell(lab(pairs[p]), commands[p], nodes=(0, 1) if p == "A" else (1,)) for p in pairs}
    jobs["B"].wait()
    words = "started on", "connectFullMesh failed"
    first, last = [[at for at, line in jobs["B"].stamped(0) if word in line][0] for word in words]
    for job in jobs.values():
        job.stop()
    return {"screens": seen, "told": told, "waited": last - first, "timeout": timeout}


# %% tags=["nbval-ignore-output"]
found = real("network", network)
for pair, screen in found["screens"].items():
    print(f"pair {pair}\n{screen}\n")
print("you said", my_firewall)

# %% [markdown]
# Read how far each has come. **A** has not joined, and one rank has an error. (Which of the two is chance: one dials,
# the other listens. What the other machine adds later is the echo, once the store or the partner is gone.) **B** has
# not joined either, and both screens are silent. **C** has joined, a small all-reduce passed, a large one does not. In
# B and C no rank has an error, so there is none to believe: how far they came is all there is to go by. Now the
# commands:

# %% tags=["nbval-ignore-output"]
for pair, told in found["told"].items():
    print(f"pair {pair}\n{told}\n")

# %% [markdown]
# **A: each machine's own name leads to 127.0.1.1.** Debian and Ubuntu install it so. Addresses that begin with 127 are
# *loopback*: on every machine they mean that machine itself. gloo looks its own name up, and tells the others the
# address that it finds. So one rank was told "I am at 127.0.1.1", dialled that, and reached *its own* machine. The
# traceback stands on the machine that dialled; the address in it is the one that the *other* gave away. **The machine
# with the traceback need not be the broken one**: read the address in the message, and ask whose it is.
#
# **B: one port is not enough.** `ping` passes, the store on 29500 is reached, and then `SYN-SENT`: node1 dials node0 at
# a port that the kernel has picked, and no answer comes. Firewalls that *drop* make no error, only silence: it hangs.
# Between the machines of a job all TCP ports must be open, or at least the rendezvous port, and the range that the
# kernel picks from: `sysctl net.ipv4.ip_local_port_range`.
#
# **C: an MTU black hole.** Both machines send packets of up to 9,000 bytes, a switch between them carries 1,500. What is
# small passes: ping, ssh, the rendezvous, a small all-reduce. `-M do` forbids to cut a packet up, and shows the limit.
#
# And the time-out? B's ranks call `init_process_group(timeout=…)`:

# %% tags=["nbval-ignore-output"]
times = found["waited"] / found["timeout"]
print(f"time-out {found['timeout']} s; rank 0 gave up after {found['waited']:.0f} s, {times:.1f} times that")
print(f"with gloo's own time-out it would be {times * waits['a collective, gloo'] / 3600:.1f} hours")

# %% [markdown]
# For a first connection gloo waits five times as long. And torchrun's rendezvous does not know this time-out at all. So set
# one (some minutes), but let your own clock decide.
#
# Mended: names right in `/etc/hosts`, firewalls opened, MTU 1,500 on both machines.


# %%
def network_mended():
    jobs = []
    for fault in pairs.values():
        lab(fault).cure()
        jobs.append(typed(lab(fault)))
    return dict(zip(pairs, watch(*jobs, last=2)))


# %% tags=["nbval-ignore-output"]
mended = real("network_mended", network_mended)
for pair, screen in mended.items():
    print(f"pair {pair}\n{screen}")

# %%
for pair, screen in mended.items():
    print(pair, "ranks that are done:", len(re.findall(r"rank \d: done", screen)))

# %% [markdown]
# | also in this pit | what one sees first | the command | the cure |
# |---|---|---|---|
# | `GLOO_SOCKET_IFNAME=enp5s0` where it is eth0 | *Unable to find address for: enp5s0*, at once | `ip -br addr` | the name on *this* machine |
# | the endpoint is an alias, of a second card say | nothing for a minute or two, on *all* machines | `getent hosts ALIAS; hostname` | the name that `hostname` prints, or `--rdzv-conf=is_host=1` on node0 |
# | rendezvous port closed | nothing | `ss -tn` on node1: `SYN-SENT` | open it |
# | own name unknown | *Name or service not known* | `getent hosts $(hostname)` | a line in `/etc/hosts` |
# | each machine publishes a container's address | *Connection refused* at 172.17.… | `getent hosts $(hostname)` | `--network=host` |
# | a link at a tenth of its rate | no error; slow (lesson 04) | `ethtool eth0 \| grep Speed` | cable, port, switch |
#
# ### Pit 3: environment
#
# node1 has an older version of one package.


# %%
def environment():
    bench = lab("another-version")
    with typed(bench) as job:
        (broken,) = watch(job, last=3)
    ask = "from importlib.metadata import version as v; print(*map(v, ['torch', 'recipe']))"
    told = tell(bench, "python -V", f'python -c "{ask}"')
    bench.cure()
    with typed(bench) as job:
        return {"broken": broken, "told": told, "mended": watch(job, last=3)[0]}


# %% tags=["nbval-ignore-output"]
for what, text in real("environment", environment).items():
    print(f"{what}\n{text}\n")

# %% [markdown]
# This is the friendly form: an error, on the machine that is behind. Here the one with the traceback *is* the odd one.
# The unfriendly form has no error: another CPU, another setting, and the two machines compute slightly different
# numbers. Lesson 06 is about that. The two commands: versions on each machine, and for the settings
# `env | grep -E 'NCCL|GLOO|OMP|CUDA' | sort`. (The whole of `env` may well differ between healthy machines: their names
# are often in it.) The cure: one image, or one lock file, for all.
#
# ### Pit 4: launch lines
#
# Two more pairs. In the first both people have typed `--node-rank=0`. In the second they mixed the two forms: the c10d
# rendezvous, and `--master-addr` in place of an endpoint. **Predict:** what stands on the screens?

# %%
my_screens = None  # "errors" or "nothing"
grading.predict("05.launch", my_screens)

# %%
wrong = ["two-nodes-zero", "address-without-endpoint"]


def launch_lines():
    jobs = [typed(lab(fault)) for fault in wrong]
    seen = watch(*jobs)
    told = [tell(lab(fault), "ss -Hltn | grep :29") for fault in wrong]
    for job in jobs:
        job.stop()
    return [{"lines": list(lab(f).lines().values()), "seen": s, "told": t}
            for f, s, t in zip(wrong, seen, told)]  # fmt: skip


# %% tags=["nbval-ignore-output"]
silent = real("launch_lines", launch_lines)
for job in silent:
    print(*job["lines"], job["seen"], job["told"], "", sep="\n")
print("you said", my_screens)

# %% [markdown]
# **Two heads.** `ss -ltn` shows who listens: the rendezvous port must be open on *one* machine. Here both have opened
# it, and each waits for the other: in the first pair for a number 1, which nobody is, for fifteen minutes; in the
# second, at its own localhost, for ten. No rank exists yet, so there is none to believe. In the second pair the only
# word said is the true one: c10d does not read `--master-addr`.
#
# The other command reads the lines, side by side and before they are typed. `scalelab doctor --launch FILE` needs the
# lines of all machines, nothing else:

# %%
import subprocess

text = "\n".join(silent[0]["lines"])
command = [sys.executable, "-m", "scalelab", "doctor", "--launch", "-"]
print(subprocess.run(command, input=text, capture_output=True, text=True, timeout=60).stdout)

# %% [markdown]
# What it says of every wrong line in the list of faults:

# %%
from scalelab.doctor import launch

two = SimpleNamespace(fixed=False, cluster=SimpleNamespace(nodes=[SimpleNamespace(index=i) for i in (0, 1)]))
for fault in FAULTS:
    if fault.by == "launch" and fault.named != "script":
        first = launch.read_launch("\n".join(fault.lines(two).values()))["checks"][0]
        print(f"{fault.id}\n    {first['name']}: {first['detail']}")

# %% [markdown]
# The lines put right, seen again:


# %%
def launch_mended():
    for fault in wrong:
        lab(fault).cure()
    seen = watch(*[typed(lab(fault)) for fault in wrong], last=1)
    return [[*lab(fault).lines().values(), screen] for fault, screen in zip(wrong, seen)]


# %% tags=["nbval-ignore-output"]
for pair in real("launch_mended", launch_mended):
    print(*pair, sep="\n")

# %% [markdown]
# Also in this pit: a port that another program holds (*EADDRINUSE* on node0; `ss -ltnp` says who), a port from the
# kernel's own range (fails on some days only: take one below 32768), and an address in the script's
# `init_process_group` (each machine dials itself; `--launch` reads the script too, and says so).
#
# ### Pit 5: no checkpoint
#
# The more machines, the more often one of them fails. 15 steps; at step 12 all ranks are lost, as in a power cut. A loop
# in the shell types the line again until it succeeds. Once as it is, once with `--save`.


# %%
def power_cut():
    with ExitStack() as stack:
        benches = [stack.enter_context(Lab(by_id("no-checkpoint"))) for _ in range(2)]
        benches[1].cure()  # the same line with --save
        jobs = [stack.enter_context(typed(bench)) for bench in benches]
        benches[0].watch(jobs[0], 170)  # until it begins anew
        jobs[0].stop()
        jobs[1].wait()
        said = [[line for _, line in job.stamped(0)] for job in jobs]
    return [[line for line in one if re.match("rank 0: (begins|lost|ended)", line)] for one in said]


# %%
without, saved = real("power_cut", power_cut)
print("without a checkpoint:", *without, "with one:", *saved, sep="\n    ")

# %% [markdown]
# No error tells that steps are missing. Twelve of them are simply gone, and a job of two weeks can lose days in this
# way. All ranks were lost at once, so none knows more than another: believe the first step that rank 0 names after the
# restart. **The two commands**, to be typed *before* anything fails: `ls -l checkpoints` (is there one, and how old is
# it?), and the same on the other machine (does it see that one too? see pit 1). The cure: save, where every rank can
# read it again. How often, and how to resume exactly, is lesson 07.
#
# ## 4. Examine first
#
# You have typed a dozen commands on two machines. `scalelab doctor` does that on all machines and every pair of them,
# before the job. It uses its own small probes, not `torch.distributed`, so that it also works where that does not. One
# pair, **two faults at once**: names that lead to loopback, and the MTU black hole.


# %%
def two_faults():
    faults = [by_id("mtu-black-hole"), by_id("name-is-loopback")]
    with Lab(faults[0]) as bench:
        for fault in faults:
            fault.inject(bench)
        broken = doctor.examine(bench.cluster)
        for fault in faults:
            fault.cure(bench)
        healthy = doctor.examine(bench.cluster)
    failed = list(dict.fromkeys(f.name for f in broken.findings if f.status == "fail"))
    return {"table": broken.table(), "failed": failed, "after": healthy.json()["checks"]}


# %% tags=["nbval-ignore-output"]
examined = real("two_faults", two_faults)
print(examined["table"])

# %%
print("failed:", examined["failed"])
print("failed once mended:", [c["name"] for c in examined["after"] if c["status"] == "fail"])

# %% [markdown]
# Worst first, and causes before consequences: the first line is what to mend first. Each comes with a line that mends it.
# What could not be looked at says *not checked*, and why; it never counts as good.
#
# On a real cluster no program reaches into the other machines, so start it on each. They meet at the one that `--join`
# names:
#
# ```
# scalelab doctor --join node0:29400 --nodes 2 --shared /shared/checkpoints --data /data/train    # on every machine
# srun --ntasks-per-node=1 scalelab doctor --shared /shared/checkpoints                           # under Slurm
# ```
#
# Then the job. Checks of your own are one function each; lab 05 has you write one.
#
# ## 5. Now you
#
# All of the faults, to be broken, run, examined and mended with buttons. Pick a pit and a fault; *Break it*, *Run*, look at
# the screens, and make up your mind *before* you press *Doctor*. With *Which is it?* the panel picks a fault for you.

# %% tags=["nbval-ignore-output"]
panel = PitsPanel(fault="endpoint-alias")
panel

# %% [markdown]
# ## On a real cluster
#
# | here | there |
# |---|---|
# | `node.sh("ss -ltn")` | `ssh node1 ss -ltn`, or `srun -w node1 ss -ltn` |
# | the firewall of B | the cloud's *security group*: allow all TCP from the group to itself |
# | `GLOO_SOCKET_IFNAME` | also `NCCL_SOCKET_IFNAME`, for NCCL's first contact and its sockets; RDMA cards are `NCCL_IB_HCA`. NCCL also takes a prefix (`eth`) or an exclusion (`^lo,docker`), for machines whose cards have different names; gloo takes a whole name only |
# | names in `/etc/hosts` | the same; or DNS, and `hostname` must be the name in it |
# | MTU of C | equal on every card, bond and switch port; 9000 everywhere or 1500 everywhere. 9000 is right where `ping -M do -s 8972` passes (28 bytes are headers) |
# | the shared directory | NFS: the server *exports*, the others *mount* (never the server its own export); the same uid; `root_squash` makes root nobody |
# | versions and settings of pit 3 | one container image for all, by its digest; `srun --ntasks-per-node=1 python -V`, and the same for `env` and packages |
# | `--save checkpoints/last.pt` | a path on the shared storage, or copied to all machines before the job begins again |
# | containers | `--network=host --ipc=host`, or `--shm-size` |
# | gloo is silent | NCCL is silent 10 minutes, then *Watchdog caught collective operation timeout* on the ranks that waited. The culprit is one that does not say it. `NCCL_DEBUG=INFO` shows the addresses (lesson 04) |
#
# Under Slurm, one task a machine runs torchrun, and the list of machines gives the endpoint:
#
# ```
# head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
# srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES --nproc-per-node=8 \
#     --rdzv-backend=c10d --rdzv-endpoint=$head:29400 --rdzv-id=$SLURM_JOB_ID train.py
# ```
#
# `--rdzv-id` keeps two jobs apart that meet at one endpoint. Slurm counts its tasks too (`SLURM_PROCID`), and here a
# task is an agent, not a rank. Other launchers take variables in place of options (`NODE_RANK`, `MASTER_ADDR`):
# `doctor --launch` reads those as well.
#
# ## Summary
#
# - With c10d: the same line on every machine, in any order, within a minute. Only rank 0 talks.
# - From one machine to two, what was hard-coded goes. c10d sorts machines by name; `--node-rank` is for the static form.
# - A healthy start takes seconds. Torch waits a minute to hours: do not wait with it.
# - First question: how far has each rank come? Second: who failed first? Third: whose address is in the message?
# - Nothing at all: launch lines or rendezvous. *Started*, not *joined*: names, interface, firewall. Small passes, large
#   hangs: MTU. All fine but wrong: storage, environment.
# - Silence is the commonest symptom, and the quiet faults are the dear ones. Examine first.
#
# ## Check yourself

# %%
grading.Question(
    "05.q1",
    "Two machines, c10d. node0 says nothing for 3 minutes, node1 neither. Each listens on port 29400. What is it?",
    ["a firewall", "each has a rendezvous of its own: the lines", "the MTU"],
    right=1,
    why="One endpoint, one listener. Two mean localhost, no endpoint, or a name that means each machine itself.",
)

# %%
grading.Question(
    "05.q2",
    "All ranks have joined, the first step hangs. ping and ssh work in both directions. What do you type next?",
    ["ping -M do -s 8000 to the other", "getent hosts with the own name", "ls on the data"],
    right=0,
    why="Joined means that names, ports and firewalls are fine. Small passes and large hangs: MTU.",
)

# %%
grading.Question(
    "05.q3",
    "Rank 5 has a traceback: Connection refused, remote=[127.0.1.1]. Which machine do you look at?",
    ["rank 5's, it failed", "the one whose rank gave that address away", "the endpoint's"],
    right=1,
    why="Rank 5 dialled what another rank had told it. That one's own name leads to loopback.",
)

# %% [markdown]
# **Lab:** [lab 05](../labs/05.ipynb) has you write launch lines for three machines, mend three broken clusters by their
# symptoms alone, write a check for the doctor, and open a firewall no further than needed. **Next:** lesson 06, where
# nothing fails and two machines still disagree.
