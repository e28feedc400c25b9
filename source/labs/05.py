# ---
# title: "Lab 05: two nodes"
# minutes: 125
# ranks: 2 to 6
# cluster: virtual
# objective: write launch lines; mend three broken clusters; open a firewall just enough; teach the doctor a check
# ---

# %% [markdown]
# # Lab 05: two nodes
#
# Five exercises on [lesson 05](../notebooks/05_two_nodes.ipynb). Write each function, and run the check below it: it
# tries your answer on emulated hosts and names the mistake. Nothing that your answer does (hang, exit, crash) harms this notebook.
# `grading.hint("05.1")` gives a hint, and another one when you ask again. A check takes 15 to 60 seconds, since it runs real jobs.
#
# 05.2 to 05.4 are clusters that somebody has broken. Nobody says how: there is the job, there are the hosts, and there is
# `scalelab doctor`. They need emulated hosts, and 05.3 the program `nft` too; where a machine cannot have them, the check says so.

# %%
import os
import shlex
import shutil

from scalelab import doctor, grading
from scalelab.grading.labs.lab05 import broken

# %% [markdown]
# ## Launch lines
#
# **Exercise 05.1** · ★★☆☆☆ · 15 minutes · target: one line a node, for any hosts, ranks a node, port and job; 6 ranks start on 3 nodes
#
# `hosts` are the names of the nodes, `port` is free on all of them, `job` is a script and its arguments, such as `"train.py --seed 7"`. Return what
# is to be typed on each node: `{0: "torchrun …", 1: "torchrun …", …}`. The check reads the lines as torchrun does, and then
# types them on three nodes of two ranks.


# %%
def lines(hosts, ranks_per_node, port, job):
    """{node: launch line}."""
    ### BEGIN SOLUTION
    line = (
        f"torchrun --nnodes={len(hosts)} --nproc-per-node={ranks_per_node} --rdzv-backend=c10d "
        f"--rdzv-endpoint={hosts[0]}:{port} --rdzv-id=lab05 {job}"
    )
    return {node: line for node in range(len(hosts))}
    ### END SOLUTION


# %% tags=["nbval-ignore-output"]
grading.check("05.1", lines)

# %% [markdown]
# ## A cluster that does not come together
#
# **Exercise 05.2** · ★★★★☆ · 35 minutes · target: six faults found and mended on the host that has them, nothing else changed, the job passes
#
# Each time you run the next cell there is another broken cluster of two nodes. The launch lines are right. One thing is wrong with the
# cluster: a name, a variable, or what the network carries. `broken_cluster.cluster.node(0).sh("cat /etc/hosts").stdout` runs a command
# there, `node.set_hosts(text)` rewrites that file, `node.name` and `node.addr` are the right name and address, `node.env` holds the
# variables that a job gets there, `doctor.examine(cluster).table()` asks the doctor, and `broken_cluster.job()` types the launch lines
# again.

# %% tags=["nbval-ignore-output"]
broken_cluster = broken("05.2")
print(broken_cluster.job())

# %% [markdown]
# When you have seen enough of them, write down what you do as a function. Return the name of the host that had the fault (`"node1"`),
# `"all"` where every host had it, `"network"` where it lay between them, `None` where nothing is wrong.
#
# - The hosts have an MTU of 9000 (`cat /sys/class/net/eth0/mtu`), and that is well where the network carries it.
#   `cluster.set_link(mtu=…)` sets all hosts. Where it has to be less, make it as large as the network carries.
# - Other people rely on what stands in `/etc/hosts` and in `node.env` beside: change what is wrong, and nothing else.
#
# The check puts in six faults one after another, on either host, and has a look at a healthy cluster too.


# %%
def mend_names(cluster):
    """Mend what is wrong; the name of the host that had it, "all", "network", or None."""
    ### BEGIN SOLUTION
    blamed = []
    for node in cluster.nodes:
        wrong = {}
        for other in cluster.nodes:
            found = node.sh(f"getent ahostsv4 {other.name}").stdout.split()
            if found[:1] != [other.addr]:
                wrong[other.name] = other.addr
        if wrong:
            old = node.sh("cat /etc/hosts").stdout.splitlines()
            kept = [line for line in old if not set(line.split()[1:]) & set(wrong)]
            new = [f"{addr} {name}" for name, addr in wrong.items()]
            node.set_hosts("\n".join(kept + new) + "\n")
            blamed.append(node.name)
        elif node.env.get("GLOO_SOCKET_IFNAME", "eth0") != "eth0":
            del node.env["GLOO_SOCKET_IFNAME"]
            blamed.append(node.name)
    if blamed:
        return "all" if len(blamed) == len(cluster.nodes) else blamed[0]
    first, second = cluster.nodes
    whole = 9000 - 28  # less the headers of IP and ICMP; may not be cut in pieces
    if first.sh(f"ping -c 1 -W 1 -M do -s {whole} {second.name}").returncode:
        cluster.set_link(mtu=1500)
        return "network"
    return None
    ### END SOLUTION


# %% tags=["nbval-ignore-output"]
grading.check("05.2", mend_names)

# %% [markdown]
# ## The smallest opening
#
# **Exercise 05.3** · ★★★☆☆ · 20 minutes · target: the job passes behind the firewall; no other host and no other port gets through
#
# Somebody has put firewalls up, and the job does not start any more.

# %% tags=["nbval-ignore-output"]
broken_cluster = broken("05.3")
print(broken_cluster.job())

# %% [markdown]
# On every host the firewall is a list of rules like this one. The first that matches wins; what matches none is dropped:
#
# ```
# [{"action": "accept", "proto": "icmp"},
#  {"action": "accept", "proto": "tcp", "ports": "22"},
#  {"action": "accept", "proto": "tcp", "ports": "9100", "peer": "10.77.0.4"},
#  {"action": "drop", "proto": "tcp", "ports": "20000-65535"}]
# ```
#
# A rule has an `action` (accept, drop, reject), and where it matters `proto` (tcp, udp, icmp), `ports` (`"22"` or
# `"20000-20999"`), `peer` (an address), `direction` (in, which is the default, or out). Replies to what a host has begun itself pass anyway.
#
# Return the rules of one host. `rules` are those that it has, `head` says whether the rendezvous is on this host, at `port`; `peers` are
# the addresses of the job's other hosts, and `low` and `high` the ends of `/proc/sys/net/ipv4/ip_local_port_range`, on every host. What was
# open stays open. Beyond that open what the job needs on *this* host, to the job's other hosts, and nothing more. (An administrator who
# finds 28,000 ports too many makes that range smaller. One of the check's jobs has such hosts.)
#
# The check sets your rules on each host of two jobs, knocks at ports from hosts of the job and from others, and then runs the
# job.


# %%
def opening(rules, head, peers, port, low, high):
    """The new rules of this host, a list of dicts."""
    ### BEGIN SOLUTION
    ports = [f"{low}-{high}"] + ([str(port)] if head else [])
    new = [
        {"action": "accept", "proto": "tcp", "ports": p, "peer": peer}
        for peer in peers
        for p in ports
    ]
    return new + rules
    ### END SOLUTION


# %% tags=["nbval-ignore-output"]
grading.check("05.3", opening)

# %% [markdown]
# ## Hosts that see different files
#
# **Exercise 05.4** · ★★★★☆ · 30 minutes · target: five faults found and mended on the host that has them, no checkpoint lost, nothing else changed
#
# Again another one each time. The job reads `datasets/books` and saves to `checkpoints`, both below `folder`, and both are meant to be
# one directory that all hosts see. Not every fault raises an error: this job shares files out in the order in which a directory lists
# them. The job is right as it is: mend the hosts. A healthy job reads eight files, each of them once.

# %% tags=["nbval-ignore-output"]
broken_cluster = broken("05.4")
print(broken_cluster.job())

# %% [markdown]
# `node.set_dir(str(path), "shared")` shows a directory on a host as the shared storage has it (as `mount -a` would). What the host had there of its
# own is out of sight then. This notebook sees the shared storage too, so `os` and `shutil` can look at it and copy.
#
# Every checkpoint that any host had must be there in the end. Two more directories are there: `scratch`, of which each host has its own and
# is meant to, and `reference`, which is read-only and is meant to be. Return the name of the host that had the fault, or `None`.


# %%
def mend_files(cluster, folder):
    """Mend what is wrong; the name of the host that had it, or None."""
    ### BEGIN SOLUTION
    for path in (folder / "datasets" / "books", folder / "checkpoints"):
        stat = os.stat(path)
        for node in cluster.nodes:
            same = node.sh(f"stat -c %d:%i {path}").stdout.strip() == f"{stat.st_dev}:{stat.st_ino}"
            if same and node.sh(f"test -w {path}").returncode == 0:
                continue
            rescued = folder / "rescued"
            if path.name == "checkpoints":
                rescued.mkdir()
                node.sh(f"cp -p {path}/* {rescued}")
            node.set_dir(str(path), "shared")
            if rescued.exists():
                for file in rescued.iterdir():
                    if not (path / file.name).exists():
                        shutil.copy2(file, path)
                shutil.rmtree(rescued)
            return node.name
    return None
    ### END SOLUTION


# %% tags=["nbval-ignore-output"]
grading.check("05.4", mend_files)

# %% [markdown]
# ## A check of your own
#
# **Exercise 05.5** · ★★☆☆☆ · 20 minutes · target: right on eight made-up hosts and on real ones; what cannot be known is not checked
#
# The doctor looks at the shared directory. It does not know that this team's jobs unpack their data to a *local* disk first, and die at
# night when it is full. Return a check for that: every host has at least `needed` bytes free in `folder`.
#
# ```
# @doctor.check("a name", each=True)      # called once a host
# def check(host, seen):
#     …                                   # yield doctor.ok(host, words) or doctor.fail(host, words, fix),
#     …                                   # or raise doctor.NotChecked(why)
# ```
#
# `host` is the host that is asked; `seen`, what the doctor's own probes found, is not needed here. `host.sh(command)` runs a command there
# and gives `.stdout`, `.stderr` and `.returncode`; take `df -Pk FOLDER`, whose output is the same on every system. What cannot be known
# must be *not checked*, and is never counted as good. `doctor.examine(cluster, checks=[check])` makes it a part of the doctor.


# %%
def make_check(folder, needed):
    """A check of the doctor's: `needed` bytes are free in `folder` on every host."""

    ### BEGIN SOLUTION
    @doctor.check("local disk", each=True)
    def local_disk(host, seen):
        done = host.sh(f"df -Pk {shlex.quote(folder)}")
        if done.returncode:
            raise doctor.NotChecked(done.stderr.strip())
        free = int(done.stdout.splitlines()[-1].split()[3]) * 1024
        words = f"{free / 1e9:.2f} GB free in {folder}"
        if free >= needed:
            yield doctor.ok(host, words)
        else:
            fix = f"remove what is not needed in {folder}, or leave this host out"
            yield doctor.fail(host, f"{words}, {needed / 1e9:.2f} GB needed", fix)

    return local_disk
    ### END SOLUTION


# %% tags=["nbval-ignore-output"]
grading.check("05.5", make_check)

# %%
broken_cluster.close()

# %% [markdown]
# `scalelab doctor` before a job, and `scalelab doctor --launch FILE` for its lines: that is this lesson in two commands. Lesson 06 asks whether
# the hosts compute the same.
