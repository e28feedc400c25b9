# ---
# # For authors; the builder leaves these lines out of the notebook.
# # Before the lesson the learner believes:
# #   - the speed of a network is one number, and it is the one on the box
# #   - algbw is the speed of the link; it falls when machines are added, so the link got slower
# #   - a message half as long takes half as long
# #   - latency matters only across cities; or: latency is what makes two cities hopeless
# #   - a tree saves bandwidth, and a model converges otherwise with it
# #   - all machines must be in one subnet (one broadcast domain)
# #   - jumbo frames make a network several times faster
# #   - if communication is 30 % of the step, the strategy must change
# #   - two machines tell how sixteen will do; one slow machine costs its own share
# #   - NVLink's 900 GB/s against a card's 50 GB/s is 18 times
# #   - NCCL_DEBUG=INFO shows how long communication takes
# # Afterwards the learner can do what the list under "You will be able to" says, and has seen each
# # of the above contradicted by something that ran or was computed.
# title: Measure the network and predict a step
# minutes: 70
# ranks: 2 and 4
# cluster: virtual or local
# objective: measure busbw, fit alpha and beta, predict the time of a step, read a topology
# ---

# %% [markdown]
# # Measure the network and predict a step
#
# You time all-reduces on links that you set, count what they send, and fit two numbers to them. With these two you predict:
# which algorithm is faster, what a delay costs, how long a training step takes on a link that you have not tried. Then you
# try it.
#
# **You will be able to**
# 1. say what *algbw* and *busbw* mean, and which one to compare with the speed of a link;
# 2. fit a latency α and a bandwidth β to measured times, and say which one a given message pays for;
# 3. predict where a ring, a tree and a hierarchical all-reduce take over from one another;
# 4. predict the time of a DDP step from α, β and the bytes of the gradients, and find the link at which the network becomes
#    the limit;
# 5. say why two machines do not tell how sixteen will do;
# 6. compare real fabrics on equal terms, and read your own machine's.
#
# **You need** lessons 02 (ring and tree) and 03 (buckets, overlap). No GPU, no cluster, no root.
#
# **Time** 70 minutes; the cells run for two to three. **Uses** 2 and 4 ranks, on a `virtual` or `local` cluster. Links can
# only be set between emulated machines: where there are none, a cell shows its recorded result and says so.

# %% tags=["parameters"]
num_nodes = 2  # machines of section 1, which also takes twice as many; later sections say what they take
nproc_per_node = 1  # ranks on each of them

# %%
from pathlib import Path

import matplotlib.pyplot as plt

from scalelab import cluster, grading, runs
from scalelab.doctor.read import read
from scalelab.measure import cost, step, sweep
from scalelab.measure.fit import fit
from scalelab.measure.recorded import recall
from scalelab.panels import BandwidthPanel
from scalelab.plan import hardware

MB = 1_000_000  # bytes; 1 GB/s is 1e9 bytes a second, 1 gbit is 1e9 bits a second
MBIT = MB / 8  # bytes a second


# %% [markdown]
# Three helpers. `swept` sets every machine's link, times all-reduces of the given sizes with real ranks, checks their sums,
# and returns what it found. `launched` starts one of the scripts in `scripts/` and returns the lines that its ranks wrote.
# `axes` makes a plot.


# %%
def swept(key, c, sizes, ranks_a_node=1, **link):
    def measure():
        c.set_link(**link)
        found = sweep.measure(c, sizes=sizes, nproc_per_node=ranks_a_node)
        return {k: v for k, v in found.items() if k not in ("dir", "run", "nodes")}

    return recall(f"04_{key}", measure, cluster=c).value


# %%
def launched(key, c, script, *args, **link):
    def measure():
        c.set_link(**link)
        run = runs.launch(f"scripts/{script}", args, cluster=c, timeout=90).wait()
        assert run.status == "succeeded", f"{run.words()}\n{run.first_failure}"
        return run.metrics()

    return recall(f"04_{key}", measure, cluster=c).value


# %%
def axes(title, marks):
    _, ax = plt.subplots(figsize=(7.5, 4), layout="constrained")
    ax.set(xscale="log", yscale="log", title=title)
    ax.set(xlabel="size of the tensor (kB)", ylabel="time of one all-reduce (ms)")
    for axis in (ax.xaxis, ax.yaxis):
        axis.get_major_locator().set_params(subs=marks)
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    return ax


# %% [markdown]
# ## 1. One all-reduce, timed and counted
#
# Two machines, then four, each with a link of 1 gbit/s. All ranks sum a tensor of 2 MB. Lesson 02 counted the bytes of a
# ring: each rank sends 2(n-1)/n times the tensor.
#
# **Predict.** How many MB does one machine send, of 2 and of 4? How many if the link has 100 mbit/s in place of 1 gbit/s?

# %%
my_megabytes = {"2 machines": None, "4 machines": None, "2 machines, 100 mbit": None}
for which, guess in my_megabytes.items():
    grading.predict(f"04.megabytes of {which}", guess)

# %% tags=["nbval-ignore-output"]
SIZE = 2 * MB
with cluster.start(nodes=num_nodes) as c:
    few = swept("few", c, [SIZE], nproc_per_node, rate="1gbit")
with cluster.start(nodes=2 * num_nodes) as c:
    many = swept("many", c, [SIZE], nproc_per_node, rate="1gbit")
print("ranks   time (ms)   algbw   busbw (MB/s)")
for found in (few, many):
    (row,) = found["rows"]
    print(f"{found['world_size']:5} {row['time_us'] / 1000:11.1f}"
          f" {1000 * row['algbw']:7.1f} {1000 * row['busbw']:7.1f}")  # fmt: skip

# %% [markdown]
# **Compare.** The counters of the network cards say what each machine has sent for one all-reduce, in sizes of the
# tensor:

# %%
print("you said", my_megabytes)
for found in (few, many):
    (row,), n = found["rows"], found["world_size"]
    theory = 2 * (n - 1) / n
    print(f"{n} ranks: {row['wire_bytes'] / SIZE:.1f} tensors;",
          f"theory {theory}, that is {theory * SIZE / MB:g} MB; wrong sums: {row['wrong']}")  # fmt: skip

# %% [markdown]
# **Explain.** The bytes depend on the tensor and the number of ranks, not on the link. (A slower one carries the same
# bytes for longer; section 2 has the count at 100 mbit/s.)
#
# From this come the two speeds of the table. It has the columns of *nccl-tests*, the programs that everyone uses on GPUs:
#
# $$\text{algbw} = \frac{S}{t} \qquad\qquad \text{busbw} = \frac{2(n-1)}{n}\cdot\frac{S}{t}$$
#
# **algbw** is tensor over time. It is what your program sees, and it falls as ranks are added, though the link is the same.
# **busbw** is what one rank has *sent*, over time. That is a property of the link, so compare this one with the number on
# the box. At 1 gbit/s the box says 125 MB/s. 2 ranks come near it in both columns, since 2(n-1)/n is 1 at n = 2. With 4
# ranks only busbw does.
#
# Other collectives send less than an all-reduce, so they have other factors. Sizes are of the whole tensor:

# %%
for op in cost.BUS_FACTORS:
    print(f"{op:15}", *(f"n={n}: {cost.bus_factor(op, n):.3f}" for n in (2, 4, 8, 64)), sep="   ")

# %% [markdown]
# ## 2. Small messages, large messages
#
# **Predict.** 512 bytes are 1/4096 of 2M. (K and M are 1,024 and 1,024² bytes, as nccl-tests writes them.) How many times
# shorter is their all-reduce, at 1 gbit/s?

# %%
my_times_shorter = None
grading.predict("04.times_shorter", my_times_shorter)

# %% [markdown]
# The panel times two links side by side. Change rate, delay, hosts or sizes, and press *Launch*; here the cell does it for
# you.

# %% tags=["nbval-ignore-output"]
panel = BandwidthPanel(rate="1gbit", rate_b="100mbit", sizes="512:2M:8")
with cluster.start(nodes=2) as c:
    two_links = recall("04_two_links", lambda: [
        {k: v for k, v in found.items() if k not in ("dir", "run", "nodes")}
        for found in panel.run()
    ], cluster=c).value  # fmt: skip
panel

# %% [markdown]
# The same run as a table, and a third one on links without a limit:

# %% tags=["nbval-ignore-output"]
sweeps = dict(zip(("1 gbit", "100 mbit"), two_links))
with cluster.start(nodes=2) as c:
    sweeps["no limit"] = swept("no_limit", c, "32K,512K,8M", rate=None)
print(sweep.table(sweeps["1 gbit"]))
times = {row["bytes"]: row["time_us"] for row in sweeps["1 gbit"]["rows"]}
ratio = times[2 << 20] / times[512]
same = sweeps["100 mbit"]["rows"][-1]
print(f"\nat 100 mbit/s, 2M: {same['wire_bytes'] / same['bytes']:.2f} tensors sent, with headers")
print(f"2M against 512 bytes: {ratio:.0f} times as long, for 4096 times the bytes; you said", my_times_shorter)

# %% [markdown]
# **Explain.** A message costs something before its first byte arrives. Two numbers describe it: **α**, the seconds for each
# message whatever its size, and **β**, the bytes a second once it flows. A ring passes 2(n-1) messages of S/n bytes, one
# after another:
#
# $$t = 2(n-1)\,\alpha + \frac{2(n-1)}{n}\cdot\frac{S}{\beta}$$
#
# The table's line *alpha … beta …* has these two, fitted to the times. (By least squares, each point relative to its
# own time; otherwise the long times drown α. Behind ± is the uncertainty; *misses by*, in the panel, says how far the
# curve is from the points.) The α printed is one latency of the link. With gloo a message costs two (lesson 02), so put
# twice that into the formula, as the helper below does.
#
# The first half of the formula equals the second at S = n α β. Well below it a message is **all latency**: half the
# size takes the same time. At ten times that size α is a tenth of the second half, and half the size takes about half
# the time.
#
# (Why does the column *wire B* say more than theory at 512 bytes? Headers, and gloo's own small messages.)


# %%
def all_reduce(nbytes, found, beta_by=1):
    """Seconds by the fitted alpha and beta, or by so many times this beta."""
    ring = found["fits"]["ring"]
    alpha = ring["latencies_a_message"] * ring["alpha_us"] / 1e6  # gloo: 2 a message
    beta = beta_by * ring["beta_gbs"] * 1e9
    return cost.seconds("ring", nbytes, found["world_size"], alpha, beta)


# %%
ax = axes("2 machines, no delay", marks=(1,))
for color, (link, found) in zip(("C0", "C1", "C2"), sweeps.items()):
    sizes = [row["bytes"] for row in found["rows"]]
    measured = [row["time_us"] / 1000 for row in found["rows"]]
    ax.plot([s / 1000 for s in sizes], measured, "o", color=color, label=f"{link}, measured")
    curve = [2**k for k in range(sizes[0].bit_length() - 1, sizes[-1].bit_length())]
    fitted = [1000 * all_reduce(s, found) for s in curve]
    ax.plot([s / 1000 for s in curve], fitted, "-", color=color, label=f"{link}, fitted")
ax.legend(frameon=False, ncols=3, fontsize=8)
plt.show()

# %% tags=["nbval-ignore-output"]
for link, found in sweeps.items():
    rate = found["line_rate_gbs"]
    of_rate = f"{found['efficiency']:.0%} of the {1000 * rate:g} MB/s that were set" if rate else "no rate was set"
    ring = found["fits"]["ring"]
    half = 2 * ring["latencies_a_message"] * ring["alpha_us"] / 1e6 * ring["beta_gbs"] * 1e9
    print(f"{link:>9}: alpha {ring['alpha_us']:6.0f} us, beta {1000 * ring['beta_gbs']:6.0f} MB/s;",
          f"best busbw: {of_rate}; half latency at {max(half, 0) / 1000:.0f} kB")  # fmt: skip

# %% [markdown]
# Read the picture from the left. At the smallest sizes a link ten times as fast gains next to nothing, and the quicker
# the link, the further its curve stays flat (S grows with β). On the right the two with a limit are parallel, about one
# power of ten apart. That is why DDP gathers gradients in buckets (lesson 03), and why "the speed of the network" is
# not one number.
#
# Four remarks. A busbw of about 95 % of the rate is all that there is to have: headers take the rest (section 6). A
# middle size can even lie above the rate, since what limits these links lets a short burst through; the large sizes
# count. Without a limit no network is measured at all: both ends are on this computer, and its cores copy every byte.
# And the smallest times are the noisiest ones (*spread*: how far the middle half of the repeats lies apart): they are a
# few wake-ups of a process long. If a large size falls far short of the rate, something else was running: measure
# again.
#
# ## 3. Delay: a rack, a building, two cities
#
# Now the rate stays at 1 gbit/s and the *distance* grows. Light in glass takes 5 µs for a kilometre, switches a little
# on top. So within a rack or a building the delay is some microseconds (with TCP, the operating system adds some tens),
# within a town it is below 1 ms. Between two distant cities it is about 15 ms one way, 30 ms there and back: cables
# make detours and pass many routers.
#
# **Predict.** A tiny all-reduce (4 kB) on 2 machines takes 2(n-1) α. What will it be at 1 ms and at 15 ms, one way?

# %%
my_milliseconds = {1: None, 15: None}
for delay, guess in my_milliseconds.items():
    grading.predict(f"04.milliseconds at {delay} ms", guess)

# %% tags=["nbval-ignore-output"]
with cluster.start(nodes=2) as c:
    delays = {ms: swept(f"delay_{ms}", c, "4K,1M", rate="1gbit", delay=f"{ms}ms") for ms in (1, 15)}
print("delay (ms)   2(n-1) alpha   you said   4 kB took     1 MB took   busbw at 1 MB (MB/s)")
print(f"{'none':>10} {0:14} {'':>10} {times[4096] / 1000:11.1f}")
for ms, found in delays.items():
    small, large = (row["time_us"] / 1000 for row in found["rows"])
    said = str(my_milliseconds[ms])
    busbw = 1000 * found["rows"][1]["busbw"]
    print(f"{ms:10} {2 * ms:14} {said:>10} {small:11.1f} {large:13.1f} {busbw:13.1f}")

# %%
small = delays[15]["rows"][0]["time_us"] / 1000
print(f"at 15 ms: {small / (2 * 15):.0f} times 2(n-1) times the delay")

# %% [markdown]
# **Twice 2(n-1) delays.** The formula is right about the number of messages; a message simply costs two latencies here,
# as in lesson 02. gloo's receiver first tells the sender that it is ready; only then do the numbers come. So its α is
# twice the link's delay. (`sweep` knows that, and prints the delay of the link.) It need not be so: a receiver can say
# that it is ready *before* it is needed. The next section's script does that, and you will see the difference. NCCL
# does it as well, so with NCCL a message costs one latency. (That needs GPUs on several machines, and is not measured
# here.)
#
# The delay of a rack or a building would be lost in the row *none*: this computer takes longer to wake a process.
#
# What does a delay do to training? A step pays it once per all-reduce *that nothing hides*, whatever the size of the model.
# If the step is 100 ms long, 60 ms ruin it. If it lasts half a minute, as at the largest models, nobody will notice. So
# neither "another building is too far" nor "two cities are hopeless" can be said without the length of the step. Across
# cities bandwidth is usually what runs out first (lesson 09).
#
# ## 4. Ring or tree, through a router
#
# Now four machines in two racks, each rack a subnet of its own, and between them a **router**. "All machines must share one
# broadcast domain", some say. Look at the addresses, and see whether it works.

# %% tags=["nbval-ignore-output"]
SIZES = [16_384, 65_536, 262_144, 1_048_576]
CALM = {"rate": "250mbit", "delay": "5ms"}  # of every machine's link; the router adds nothing
can_route = not cluster.virtual_problem()
with cluster.start(nodes=4, racks=2 if can_route else 1) as c:
    addresses = recall("04_addresses", lambda: [node.addr for node in c.nodes], cluster=c).value
    flat = launched("flat", c, "algorithms.py", "--sizes", *map(str, SIZES),
                    "--methods", "gloo", "ring", "tree", **CALM)  # fmt: skip

# %%
print("addresses:", *addresses, "- subnets:", *sorted({a.rpartition(".")[0] + ".*" for a in addresses}))
print("wrong sums, of all methods and sizes:", sum(line["wrong"] for line in flat))
gloo_1M = next(o for o in flat if o["method"] == "gloo" and o["bytes"] == SIZES[-1])
print(f"gloo's all-reduce through the router: {gloo_1M['wire'] / SIZES[-1]:.1f} tensors sent by a machine,"
      f" as without one: {2 * 3 / 4}")  # fmt: skip

# %% [markdown]
# TCP is routed, and so are NCCL's sockets and version 2 of RoCE (section 9). (Version 1 is not, and InfiniBand needs a
# router of its own kind.) What lies between has to let the traffic *through*; being one subnet is not needed.
#
# The same job also timed a ring and a tree made of `send` and `recv`. All of its receives are posted before the first byte
# is sent, so that a message costs *one* latency. Messages and bytes, for n = 4:
#
# | | messages one after another | tensors over a link, one after another |
# |---|---|---|
# | ring | 2(n-1) = 6 | 2(n-1)/n = 1.5 |
# | tree, of lesson 02 | 2 log₂ n = 4 | 2 log₂ n = 4 |
#
# **Predict.** For small tensors the tree is ahead by two latencies; then it loses 2.5 tensors' worth of time. At which size
# are they equal, with α = 5 ms and β = 250 mbit/s? And will they give the same sum?

# %%
my_crossover = None  # kB
grading.predict("04.crossover", my_crossover)

# %%
theory = cost.crossover(4, alpha=0.005, beta=250 * MBIT, few="tree", many="ring")
print(f"you said {my_crossover} kB; theory: {theory / 1000:.0f} kB")
took = {(o["method"], o["bytes"]): o["seconds"] for o in flat}
faster = ["tree" if took["tree", s] < took["ring", s] else "ring" for s in SIZES]
print("sizes (kB):", [s // 1024 for s in SIZES], "- measured faster:", faster[0], "...", faster[-1])
print("largest difference from another order of adding is below 1e-5:", max(o["apart"] for o in flat) < 1e-5)

# %%
ax = axes("4 machines, 5 ms, 250 mbit/s", marks=(1, 2, 5))
kilobytes = [s / 1000 for s in SIZES]
for color, method in (("C0", "ring"), ("C1", "tree"), ("0.6", "gloo")):
    measured = [1000 * took[method, s] for s in SIZES]
    ax.plot(kilobytes, measured, "o-", color=color, label=f"{method}, measured")
for color, method in (("C0", "ring"), ("C1", "tree")):
    ms = [1000 * cost.seconds(method, s, 4, 0.005, 250 * MBIT) for s in SIZES]
    ax.plot(kilobytes, ms, "--", color=color, label=f"{method}, theory")
ax.axvline(theory / 1000, color="0.5", linestyle=":", label="crossover, theory")
ax.legend(frameon=False, fontsize=8, ncols=2)
plt.show()

# %% [markdown]
# **Compare.** The tree starts lower, the ring ends lower, and they cross not far from the predicted size. gloo's own
# all-reduce is a ring too: on the left it takes much longer than the ring that posts its receives ahead (by theory
# twice as long), which is section 3's handshake; on the right they come together. The measured curves lie above theory:
# the first message of a call finds no receiver ready, and the calls, the copies and the switch take time too, all on
# this computer's cores.
#
# The tree does *not* save bytes, it saves messages. And it gives the same sum, but for the order in which rounded numbers
# are added: a few units of the seventh digit. A model converges the same.
#
# ## 5. A slow link between two racks
#
# Links are seldom all alike. Now the router is slow, 100 mbit/s and 5 ms, and the links inside a rack are quick, 1 gbit/s
# and 1 ms. A **hierarchical** all-reduce makes use of that: reduce-scatter inside each rack, then a ring between the racks
# for each half of the tensor, then all-gather inside.

# %% tags=["nbval-ignore-output"]
with cluster.start(nodes=4, racks=2 if can_route else 1) as c:
    if c.kind == "virtual":
        c.set_link("router", rate="100mbit", delay="5ms")
    tiers = launched("tiers", c, "algorithms.py", "--sizes", "4096", "1048576",
                     "--methods", "ring", "tree", "hierarchical", rate="1gbit", delay="1ms")  # fmt: skip
took = {(o["method"], o["bytes"]): 1000 * o["seconds"] for o in tiers}

# %% [markdown]
# What crosses the slow link, in each direction, follows from the algorithm:

# %%
for o in tiers[3:]:
    print(f"{o['method']:13} {o['across'] / 2 / o['bytes']:.1f} tensors cross in each direction; wrong sums: {o['wrong']}")

# %% [markdown]
# **Predict** before you run the next cell. Across, a message takes 6 ms (1 + 5) and the link carries 12.5 MB/s; inside,
# 1 ms and 125 MB/s. In the ring a chunk's 6 messages cross and stay inside in turn. The tree goes up and then down, so
# its two tensors cross one after the other. The hierarchical one sends 1 message inside, 2 across and 1 inside; it has
# two rings of half a tensor at the same time on the slow link, so each gets half of it. Which is the fastest for 4 kB,
# which for 1 MB?

# %%
my_fastest = {"4 kB": None, "1 MB": None}
for size, guess in my_fastest.items():
    grading.predict(f"04.fastest for {size}", guess)

# %% tags=["nbval-ignore-output"]
inside, across = (0.001, 1000 * MBIT), (0.006, 100 * MBIT)
print("                    4 kB                 1 MB")
print("              theory  measured     theory  measured (ms)")
for method in ("ring", "tree", "hierarchical"):
    line = f"{method:13}"
    for s in (4096, 1 << 20):
        theory = {
            "ring": 3 * (0.001 + 0.006) + 1.5 * s / across[1],
            "tree": 2 * (0.001 + s / inside[1]) + 2 * (0.006 + s / across[1]),
            "hierarchical": cost.hierarchical(s, 2, 2, inside, (across[0], across[1] / 2)),
        }[method]
        line += f"{1000 * theory:7.1f} {took[method, s]:9.1f}    "
    print(line)

# %% [markdown]
# **Explain.** Few bytes over the slow link decide at 1 MB, few messages over it decide at 4 kB: the hierarchical one is
# good at the first, tree and hierarchical at the second. The flat ring drags 1.5 tensors across. (Again the first message
# to cross finds no receiver ready, which can add 6 ms.) On a GPU cluster "inside" is NVLink and "across" is the network
# card, and the same arithmetic holds with larger numbers.
#
# Two other shapes, by the same model. It assumes that links never disturb each other. A **fat tree** is layers of
# switches; if it does not block, every machine can send at full rate to any other one, so any algorithm runs as on the
# plain formula. In a **2D torus** the machines form a grid whose edges are joined, without a switch: each has one link
# along its row and one along its column, and both work at once. Two more algorithms join in. *Halving-doubling*
# exchanges half the tensor with one partner, a quarter with the next, and so on, then back: 2 log₂ n messages, and the
# bytes of a ring. A *double tree*, which NCCL uses as its tree, is two trees at once, each for half the data, cut into
# pieces that flow behind each other: nearly as few bytes as a ring, as few messages as a tree. 100 MB, α = 10 µs, 12.5
# GB/s for each link:

# %%
a, b, size = 10e-6, 12.5e9, 100 * MB
print("milliseconds      ranks:", *(f"{n:8}" for n in (16, 64, 256, 1024)))
for name in ("ring", "tree", "double-tree", "halving-doubling"):
    print(f"fat tree, {name:17}", *(f"{1000 * cost.seconds(name, size, n, a, b):7.1f}" for n in (16, 64, 256, 1024)))
two = [1000 * cost.seconds("double-tree", size, n, a, 2 * b) for n in (16, 64, 256, 1024)]
print(f"{'same, 2 links a machine':27}", *(f"{ms:7.1f}" for ms in two))
torus = [1000 * cost.torus(size, k, k, a, b) for k in (4, 8, 16, 32)]
print(f"{'2D torus, both ways':27}", *(f"{ms:7.1f}" for ms in torus))

# %% [markdown]
# The torus wins by its second link: give each machine of the fat tree two links as well, and they are nearly alike.
# What the model leaves out decides in practice: a torus is cheap to build and good for neighbours, a fat tree lets any
# machine talk to any other one.
#
# ## 6. Packets, headers and jumbo frames
#
# A packet holds at most **MTU** bytes: 1,500 on Ethernet, up to 9,000 with *jumbo frames*. Of these 40 are IP's and TCP's
# headers, and 12 a time stamp. Ethernet adds 14. (And on a real cable 24 more, as preamble, checksum and gap.)
#
# **Predict.** By how many percent will an all-reduce of 2M at 100 mbit/s be faster with an MTU of 9,000?

# %%
my_percent = None
grading.predict("04.jumbo_percent", my_percent)

# %%
share = {mtu: (mtu - 52) / (mtu + 14) for mtu in (1500, 9000)}  # payload in what the link is set to carry
cable = {mtu: (mtu - 52) / (mtu + 38) for mtu in (1500, 9000)}  # and on a real cable
for mtu in share:
    print(f"MTU {mtu}: {share[mtu]:.1%} payload, on a real cable {cable[mtu]:.1%}")
print(f"gain by theory: {share[9000] / share[1500] - 1:.1%}")

# %% tags=["nbval-ignore-output"]
with cluster.start(nodes=2) as c:
    jumbo = swept("jumbo", c, "2M", rate="100mbit", mtu=9000)["rows"][-1]
plain = sweeps["100 mbit"]["rows"][-1]  # section 2's, which had an MTU of 1,500
for mtu, row in ((1500, plain), (9000, jumbo)):
    print(f"MTU {mtu}: busbw {1000 * row['busbw']:.2f} MB/s; packets {row['wire_packets']:.0f};",
          f"headers {row['wire_bytes'] / row['theory_bytes'] - 1:.1%}")  # fmt: skip
print(f"gain: {jumbo['busbw'] / plain['busbw'] - 1:.1%}; you said {my_percent} percent")

# %% [markdown]
# A few percent, and no more: that is all that headers take. What these machines **cannot** show: a real card and its
# driver do work for each packet, and jumbo frames save five sixths of that, which matters at 10 gbit/s and more if the
# card does not cut the packets itself. Here the kernel hands over several frames in one piece (so the packets counted,
# which include acknowledgements, are not the frames), and no card exists. And if one port on the way takes 1,500 only,
# large messages vanish while `ping` works: lesson 05 breaks and mends that.
#
# ## 7. Predict a training step
#
# A step of DDP is forward, backward, update, and what of the all-reduces backward does not hide. You have all parts of it:
# measure computing without a network, take α and β from section 2, and lay DDP's buckets along backward.
#
# `scripts/step_time.py` trains two equal layers with 1 MB of gradients each. Its first job runs at 100 mbit/s; it also says
# how long forward, backward and update take by themselves (under `no_sync`).

# %% tags=["nbval-ignore-output"]
MODEL = ("--layers", "2", "--batch-size", "1280", "--steps", "8")
with cluster.start(nodes=2) as c:
    steps = {100: launched("step_100", c, "step_time.py", *MODEL, rate="100mbit")[0]}
parts = {name: steps[100][name] for name in ("forward", "backward", "update")}
print({name: f"{1000 * seconds:.1f} ms" for name, seconds in parts.items()})

# %% [markdown]
# The first bucket closes at 1 MB, the others at 25 MB, in the order in which backward makes the gradients, from the last
# layer to the first:

# %%
buckets = step.buckets(steps[100]["parameter_bytes"])
print("buckets, bytes:", buckets)

# %% [markdown]
# The first bucket travels while backward is in its second half. The second one is full when backward is over, so nothing
# hides it. (A model of several hundred MB has many buckets, and only the last one is sure to be exposed.)
#
# **Predict** the step at 100 mbit/s, at 1 gbit/s, and at 250 mbit/s, where nothing was measured: take 2.5 times the β
# of 100 mbit/s. Do one of them by hand; the next cells do all three, before the jobs at 250 and 1000 mbit/s have run.


# %%
def predicted(mbit):
    known, by = (sweeps["1 gbit"], 1) if mbit == 1000 else (sweeps["100 mbit"], mbit / 100)
    return step.predict(**parts, buckets=buckets, all_reduce=lambda s: all_reduce(s, known, by))


# %% tags=["nbval-ignore-output"]
forecast = {mbit: predicted(mbit) for mbit in (100, 250, 1000)}
for mbit, one in forecast.items():
    print(f"{mbit:5} mbit/s: step {1000 * one.seconds:5.0f} ms,",
          f"of which communication is exposed {1000 * one.exposed:5.0f} ms")  # fmt: skip

# %% tags=["nbval-ignore-output"]
with cluster.start(nodes=2) as c:
    for mbit in (250, 1000):
        steps[mbit] = launched(f"step_{mbit}", c, "step_time.py", *MODEL, rate=f"{mbit}mbit")[0]
alone = {name: min(run[name] for run in steps.values()) for name in parts}  # the fastest counts
print("mbit/s   predicted   measured   difference   share of communication")
for mbit, one in forecast.items():
    measured = steps[mbit]["step_seconds"]
    share = 1 - sum(alone.values()) / measured
    print(f"{mbit:6} {1000 * one.seconds:8.0f} ms {1000 * measured:7.0f} ms",
          f"{one.seconds / measured - 1:+11.0%} {share:14.0%}")  # fmt: skip

# %% [markdown]
# Where the network takes most of the step, the prediction is close. On quick links the real step is often longer:
# sending costs the processor too, and here the same few cores compute and copy. (A GPU has copy engines and a network
# card beside it, and still gives some of its time to communication.)
#
# **Where does communication pass computing?** All-reduces take G · 2(n-1)/n ÷ β for G bytes of gradients; forward and
# backward take what they take. They are equal at
#
# $$\beta^* = \frac{2(n-1)}{n}\cdot\frac{G}{t_\text{forward} + t_\text{backward}}$$

# %% tags=["nbval-ignore-output"]
computing = alone["forward"] + alone["backward"]
balance = sum(buckets) / computing  # 2(n-1)/n is 1
print(f"equal at {balance / MBIT:.0f} mbit/s")
for mbit, run in steps.items():
    waiting = run["step_seconds"] - sum(alone.values())
    print(f"measured at {mbit:4} mbit/s: exposed communication is {waiting / computing:.1f} times computing")

# %% [markdown]
# Far above that rate a faster network buys little, far below it a faster GPU buys little. Near it each of the two buys
# something. Twice the batch on each rank, or two micro-batches under `no_sync`, double the computing and leave the
# bytes: they halve β*.
#
# **What is a 30 % rule worth?** "If communication is more than 30 % of the step, change the strategy", one reads. With a
# share s, *removing all of it* makes training 1/(1-s) times as fast, and nothing can do more:

# %%
for s in (0.1, 0.3, 0.5, 0.8):
    print(f"share {s:.0%}: at most {1 / (1 - s):.2f} times as fast")

# %% [markdown]
# So the share is a bound on what there is to gain, not an answer. Two jobs on 2 machines with gloo, computed: A has a small
# model and a far neighbour, B a larger model next door. Both spend 30 % on communication. Which cure helps whom?


# %%
def speed_up(nbytes, alpha, beta, bytes_by=1.0, beta_by=1.0, micro_batches=1):
    now = cost.seconds("ring", nbytes, 2, alpha, beta)
    compute = now * 0.7 / 0.3  # so that communication is 30 %
    then = cost.seconds("ring", nbytes * bytes_by, 2, alpha, beta * beta_by)
    return (compute + now) / (compute + then / micro_batches)  # for the same number of samples


jobs = {"A, 1 MB, 15 ms": (1 * MB, 0.030, 120e6), "B, 8 MB, 0.1 ms": (8 * MB, 0.0002, 120e6)}
cures = {"half the bytes (16 bits)": {"bytes_by": 0.5}, "a link 10 times as fast": {"beta_by": 10},
         "4 micro-batches": {"micro_batches": 4}}  # fmt: skip
print(f"{'times as fast with':26}", *jobs, sep="   ")
for name, cure in cures.items():
    print(f"{name:26}", *(f"{speed_up(*job, **cure):14.2f}" for job in jobs.values()), sep="   ")

# %% [markdown]
# The same share, and the money for a faster link is lost on A: it pays for latency. Ask first *what* the time is spent on,
# α or β, then what each cure costs (a larger global batch is another training, lesson 03).
#
# ## 8. What two machines do not tell
#
# Suppose you rent two machines, measure, and then order sixteen. What have you not seen?

# %%
print("machines:                          ", *(f"{n:7}" for n in (2, 4, 16)))
print("tensors that each sends, 2(n-1)/n: ", *(f"{2 * (n - 1) / n:7.3f}" for n in (2, 4, 16)))
print("latencies one after another 2(n-1):", *(f"{2 * (n - 1):7}" for n in (2, 4, 16)))
print("links that may be the slow one:    ", *(f"{n:7}" for n in (2, 4, 16)))
print("pairs that share switches:         ", *(f"{n * (n - 1) // 2:7}" for n in (2, 4, 16)))

# %% [markdown]
# At n = 2, algbw and busbw are the same number, so nobody notices which one was quoted. A ring, a tree and a direct
# exchange can hardly be told apart. No switch is loaded by others. And the chance to meet a bad machine grows with their
# number. Try that:
#
# **Predict.** Four machines at 1 gbit/s, as in section 1; then one of them gets a worn cable, 100 mbit/s. What will the
# busbw of the four be?

# %%
my_busbw = None  # MB/s
grading.predict("04.one_slow_host", my_busbw)

# %% tags=["nbval-ignore-output"]
with cluster.start(nodes=4) as c:

    def measure():
        c.set_link(rate="1gbit")
        c.set_link(3, rate="100mbit")
        return sweep.measure(c, sizes=[SIZE])["rows"]

    (one_slow,) = recall("04_one_slow", measure, cluster=c).value
print(f"busbw {1000 * one_slow['busbw']:.1f} MB/s; you said {my_busbw}; with four good ones",
      f"{1000 * many['rows'][0]['busbw']:.1f} MB/s.")  # fmt: skip
print(f"A hundred mbit/s are {100 * MBIT / MB} MB/s; the average of the four links is",
      f"{(3 * 1000 + 100) / 4 * MBIT / MB:.1f} MB/s.")  # fmt: skip

# %% [markdown]
# Not the average (and if it reads a little more than 12.5, that is section 2's short burst): **the whole ring runs at
# the speed of its slowest link**, since every chunk passes through every machine. Three quarters of the machines are
# fine and each shows the same poor number. To find the culprit, measure *pairs*: the machine that is slow with every
# partner is it. Two machines taken from the good three would have told you that the fabric is perfect.
#
# ## 9. Real fabrics, the same formula
#
# The names first. *NVLink* joins the GPUs of one machine; *PCIe* is the slot that every card sits in. Between machines
# there is Ethernet, or *InfiniBand*, a network made for clusters. *RDMA* means that a network card reads and writes
# memory without the processor, with *GPUDirect* a GPU's memory. InfiniBand has RDMA; *RoCE* is RDMA over Ethernet.
#
# NVLink is said to have 900 GB/s and a network card 50. Eighteen times? **Predict**, then read the columns.

# %%
my_factor = None  # NVLink 4 against a 400 Gb/s port
grading.predict("04.nvlink_factor", my_factor)

# %%
chosen = [*hardware.NVLINK, *hardware.PCIE, *hardware.INFINIBAND, *hardware.ETHERNET]
n, size = 8, 1e9
print(f"{'':26} GB/s: one way    duplex   1 GB all-reduce on {n}, at best")
for link in chosen:
    best = cost.bus_factor("all-reduce", n) * size / (link.one_way * 1e9)
    label = f"{link.name} {link.gpu and '(' + link.gpu + ')'}"
    print(f"{label:32} {link.one_way:7g} {link.duplex:9g} {1000 * best:12.1f} ms")

# %% [markdown]
# Sources: ML Engineering Open Book, github.com/stas00/ml-engineering (NVLink, PCIe from 4 on, InfiniBand), the
# standards (PCIe 3, Ethernet). A RoCE port has the rate of the Ethernet port that it uses. NVLink counts all links of
# one GPU together; the others are one port or one slot.
#
# Makers print NVLink and PCIe **duplex**, both directions added, and network ports **one way**. A ring sends and receives
# at the same time, and busbw counts what is *sent*: compare one way with one way.

# %%
nvlink, port = hardware.NVLINK[3], hardware.INFINIBAND[2]
print(f"{nvlink.name} against {port.name}: {nvlink.duplex / port.one_way:.0f} times as printed,",
      f"{nvlink.one_way / port.one_way:.0f} times in truth; you said {my_factor}")  # fmt: skip
print(f"NVLink 3 against 1 Gb/s Ethernet: {hardware.NVLINK[2].one_way / hardware.ETHERNET[0].one_way:.0f} times")

# %% [markdown]
# And a server of 8 GPUs usually has several ports, one for each GPU at best. Then eight rings run at once, each through a
# port of its own, and the *sum* counts: 8 × 50 = 400 GB/s against 450.
#
# Some history that is often told wrong: NVLink 1 came with the P100. NVSwitch, which joins all GPUs of a machine at
# full rate, came with the V100 (16 of these in a DGX-2), not with the H100. Cards of the RTX 40 series have no NVLink
# at all: theirs is the PCIe row.
#
# Practice stays below "at best". Published, for 8 A100 with NVLink 3 (ML Engineering Open Book, `all_reduce_perf`): bytes,
# time in µs, busbw in GB/s. How much of the one-way rate is that, and do two numbers describe it?

# %%
published = [(32768, 43.83, 1.31), (1048576, 101.9, 18.0), (16777216, 276.6, 106.16),
             (268435456, 2420.6, 194.07), (17179869184, 127997, 234.89)]  # fmt: skip
found = fit([(s, us / 1e6) for s, us, _ in published], world_size=8)
for s, us, busbw in published:
    print(f"{s / 1e6:9.2f} MB: {us:9.1f} us, fitted {1e6 * found.seconds(s):9.1f} us;",
          f"busbw {busbw:6.2f} GB/s, {busbw / hardware.NVLINK[2].one_way:.1%} of one way")  # fmt: skip
print(f"alpha {1e6 * found.alpha:.1f} us, beta {found.beta / 1e9:.0f} GB/s, median misfit {found.misfit:.0%}")

# %% [markdown]
# The times span a factor of 3,000, and two numbers follow them, roughly: NCCL changes algorithm and protocol on the way, so
# its curve has steps. Small messages are all latency here too, and below 1 MB nobody sees NVLink. (4 RTX 4090 over PCIe,
# with a patched driver, were published with 24.4 GB/s, in tinygrad/open-gpu-kernel-modules: a tenth. Enough for DDP of a
# small model.)
#
# Two traps when you read such tables. Hardware that adds numbers up inside the switch (NVLink SHARP) sends less than a
# ring, so its busbw can be *above* the line rate (8 H100: 480 GB/s where a GPU has 450, NVIDIA/nccl-tests#212). It is no
# wire speed then. And on two machines NCCL's tree does the same; `NCCL_ALGO=Ring` shows the network card.
#
# ## 10. Read your own
#
# Three outputs tell what a machine has and does. `scalelab read FILE` turns each into facts, a verdict and a next step. Two
# made-up servers, *fox* and *owl*, with 8 H100 each, are slow. (The files are invented for this lesson, in the format of
# the real tools.) First, what is there: `nvidia-smi topo -m`.

# %%
matrix = Path("data/topo_fox.txt").read_text().expandtabs(8).splitlines()[:11]
print("\n".join(line[:86].rstrip() for line in matrix))  # without the columns on processors

# %% [markdown]
# Read a row: how GPU 0 reaches each other one. *NV18* means 18 NVLinks; *PIX* one PCIe switch; *PXB* several; *PHB* through
# the processor; *NODE* between two PCIe bridges of one processor; *SYS* from one processor to the other, the slowest.


# %%
def verdict(name):
    found = read(f"data/{name}")
    print(f"verdict: {found['verdict']}\nwhy: {found['why']}\nnext: {found['next']}")
    return found["facts"]


facts = verdict("topo_fox.txt")
print("class:", facts["class"], "- nearest card of each GPU:", facts["gpu_nic"])

# %% [markdown]
# All pairs are alike here, so any 4 GPUs will do for a job of 4. Where they are not (NVLink within pairs only, or SYS
# between two halves), give a job the set whose *slowest* pair is quickest, and think of what the second job is left
# with.
#
# Second, how fast it is: nccl-tests' `all_reduce_perf` on both machines. Look at three things before any speed: how many
# *ranks* the header lists and on which machines, the column *#wrong*, and whether the largest size is large enough.

# %%
lines = Path("data/nccl_tests_fox_owl.txt").read_text().splitlines()
print("\n".join([*lines[3:6], "...", *lines[11:13], "...", *lines[-12:-2]]), "\n")  # the header in part
facts = verdict("nccl_tests_fox_owl.txt")
print("nodes", facts["nodes"], "- ranks", facts["ranks"], "- wrong", facts["wrong"],
      "- one job:", not facts["independent_runs"])  # fmt: skip

# %% [markdown]
# Third, why: a log with `NCCL_DEBUG=INFO`. It shows interfaces, transports and settings. It does **not** show how long
# communication takes; for that use a profiler, or the step with and without `no_sync`, as in section 7. *P2P* is from
# GPU to GPU, *SHM* through the host's memory, *NET/IB* RDMA, *NET/Socket* TCP. Some of its lines:

# %%
lines = Path("data/nccl_log_fox_owl.txt").read_text().splitlines()
print(*(line for line in lines if "Channel" in line or "set by" in line), "", sep="\n")
facts = verdict("nccl_log_fox_owl.txt")
print("transports:", facts["transport"], "- interfaces:", facts["interfaces"], "- settings:", facts["env"])

# %% [markdown]
# The cards are there and somebody has switched them off: the traffic takes the ordinary Ethernet port. One variable.
#
# `NCCL_SOCKET_IFNAME` would not have helped: it picks the interface of NCCL's *sockets* and of its first contact. The
# InfiniBand cards are picked by `NCCL_IB_HCA`. Nor does `NCCL_P2P_LEVEL=NV`, which is often recommended, do anything:
# the value is `NVL`. And that one forbids P2P over PCIe, which rarely helps.

# %% [markdown]
# ## On a real cluster
#
# - The sweep is a plain script. With GPUs it uses NCCL: `torchrun --nnodes=2 --nproc-per-node=8 …
#   scalelab/measure/collective_ranks.py --op all-reduce --backend nccl --sizes 1048576 1073741824`. On one machine with 8
#   GPUs: `scalelab bench all-reduce --cluster local --nodes 1 --nproc-per-node 8 --line-rate 450GB/s`.
# - nccl-tests: build with `make MPI=1`, then `mpirun -np 16 -H fox:8,owl:8 ./build/all_reduce_perf -b 8 -e 8G -f 2 -g 1`.
#   Without `MPI=1` you get 16 jobs of one rank, busbw 0, and no error.
# - The wire below NCCL: `iperf3 -s` on one and `iperf3 -c HOST -P 4` on the other machine for TCP; `ib_write_bw` (package
#   *perftest*) for InfiniBand and RoCE.
# - On two machines, `NCCL_ALGO=Ring` before you compare busbw with a port.
# - Measure pairs, then all; twice, at another time of day; write down the spread.
#
# ## Summary
#
# - busbw is bytes *sent* over time, 2(n-1)/n · S/t for an all-reduce. Compare it, not algbw, with a link's one-way rate.
# - Two numbers: α for each message, β for bytes. Below S = n α β latency decides, above it bandwidth.
# - Trees save messages, rings save bytes, a hierarchy saves the slow link; all give the same sum.
# - No common subnet is needed. Jumbo frames gain a few percent.
# - A step = computing + what backward does not hide. The share of communication bounds the gain by 1/(1-s), and does not
#   name the cure.
# - The slowest link sets the speed of the whole ring. Two machines do not characterise a fabric.
#
# ## Check yourself

# %%
grading.Question(
    "04.q1",
    "A 1 GB all-reduce on 8 ranks takes 50 ms. What is the busbw, and which port fits?",
    ["20 GB/s, a port of 25", "35 GB/s, a port of 50", "160 GB/s, a port of 200"],
    right=1,
    why="algbw is 1 GB / 50 ms = 20 GB/s; times 2 x 7/8 = 1.75 makes 35 GB/s sent by each rank.",
)

# %%
grading.Question(
    "04.q2",
    "64 ranks, alpha 20 us, beta 10 GB/s. Somebody makes 100 all-reduces of 40 kB a step. What helps most?",
    ["gather them into one of 4 MB", "a link twice as fast", "sending 16 bits in place of 32"],
    right=0,
    why="n alpha beta is 12.8 MB: 40 kB is all latency. One call pays 126 alpha once, not 100 times.",
)

# %%
grading.Question(
    "04.q3",
    "Four good machines give busbw 45 GB/s, and 12 with a fifth one. What do you do first?",
    [
        "order faster links for all",
        "change from ring to tree",
        "measure pairs, to find which machine is slow with everyone",
    ],
    right=2,
    why="A ring runs at the speed of its slowest link, and every machine shows the same number.",
)

# %% [markdown]
# **Lab:** [lab 04](../labs/04.ipynb) lets you compute busbw, fit α and β, predict a step and find the wrong claim in a
# bandwidth report. **Next:** lesson 05 takes a job to two machines and clears the five pits on the way.
