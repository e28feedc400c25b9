"""Wrong answers to lab 04 that people really write, and what the verdict must say of each."""

import itertools
import math
import os
import re
import time

import numpy as np

RING = {"all-reduce": lambda n: 2 * (n - 1) / n, "all-gather": lambda n: (n - 1) / n,
        "reduce-scatter": lambda n: (n - 1) / n, "broadcast": lambda n: 1.0,
        "send-recv": lambda n: 1.0}  # fmt: skip


def bandwidths(unit=1e9, algbw=lambda a, n: a, **factors):
    """An answer: the right one but for a unit, or the factor of some operation."""
    named = {**RING, **{op.replace("_", "-"): f for op, f in factors.items()}}

    def answer(op, nbytes, seconds, world_size):
        a = algbw(nbytes / seconds / unit, world_size)
        return a, a * named[op](world_size)

    return answer


def swapped(op, nbytes, seconds, world_size):
    return bandwidths()(op, nbytes, seconds, world_size)[::-1]


def only_busbw(op, nbytes, seconds, world_size):
    return bandwidths()(op, nbytes, seconds, world_size)[1]


def busbw_in_gbit(op, nbytes, seconds, world_size):
    algbw, busbw = bandwidths()(op, nbytes, seconds, world_size)
    return algbw, 8 * busbw


def one_rank_as_algbw(op, nbytes, seconds, world_size):
    algbw, busbw = bandwidths()(op, nbytes, seconds, world_size)
    return algbw, busbw if world_size > 1 else algbw


def same_factor_for_all(op, nbytes, seconds, world_size):
    return bandwidths()("all-reduce", nbytes, seconds, world_size)


def one_part_as_size(op, nbytes, seconds, world_size):
    gathers = op in ("all-gather", "reduce-scatter")
    return bandwidths()(op, nbytes * (world_size if gathers else 1), seconds, world_size)


def divides_by_n_minus_1(op, nbytes, seconds, world_size):
    algbw = nbytes / seconds / 1e9
    return algbw, algbw * world_size / (2 * (world_size - 1))


def keys_with_underscores(op, nbytes, seconds, world_size):
    return {op.replace("-", "_"): f for op, f in RING.items()}[op](world_size)


def infinite(*case):
    return math.inf, math.inf


def ends_its_process(*case):
    os._exit(0)


def prints_without_end(*case):
    while True:
        print("x" * 1000)


# -- fit ----------------------------------------------------------------------------------------


def least_squares(sizes, seconds, n, power=0.0):
    """alpha and beta of the ring, each row times t**power."""
    s, t = np.asarray(sizes, float), np.asarray(seconds, float)
    w = t**power
    rows = np.stack([2 * (n - 1) * w, 2 * (n - 1) / n * s * w], axis=1)
    (alpha, slope), *_ = np.linalg.lstsq(rows, t * w, rcond=None)
    return alpha, 1 / slope


def fitted(change=lambda alpha, beta, n: (alpha, beta), power=-1.0):
    """An answer: the fit with weights t**power, and what someone makes of it."""

    def answer(sizes, seconds, world_size):
        return change(*least_squares(sizes, seconds, world_size, power), world_size)

    return answer


def two_points(sizes, seconds, world_size):
    return least_squares([sizes[0], sizes[-1]], [seconds[0], seconds[-1]], world_size)


def smallest_and_largest(sizes, seconds, world_size):
    n = world_size
    return seconds[0] / (2 * (n - 1)), 2 * (n - 1) / n * sizes[-1] / seconds[-1]


def small_sizes_only(sizes, seconds, world_size):
    return least_squares(sizes[:6], seconds[:6], world_size, -1)


def polyfit_unweighted(sizes, seconds, world_size):
    n = world_size
    slope, intercept = np.polyfit(sizes, seconds, 1)
    return intercept / (2 * (n - 1)), 2 * (n - 1) / n / slope


# -- step ---------------------------------------------------------------------------------------


def ring(nbytes, n, alpha, beta):
    return 2 * (n - 1) * alpha + 2 * (n - 1) / n * nbytes / beta


def predicted(cost=ring, forward_hides=False, from_start=False, one_bucket=False, update=True,
              equal=False):  # fmt: skip
    """An answer: the right model but for one thing."""

    def answer(forward, backward, update_time, buckets, world_size, alpha, beta, micro_batches):
        buckets = [sum(buckets)] if one_bucket else buckets
        done, end = 0, -forward if forward_hides else 0.0
        for i, nbytes in enumerate(buckets, 1):
            done += nbytes
            ready = backward * (i / len(buckets) if equal else done / sum(buckets))
            ready = -forward if forward_hides else 0.0 if from_start else ready
            end = max(ready, end) + cost(nbytes, world_size, alpha, beta)
        quiet = (micro_batches - 1) * (forward + backward)
        return quiet + forward + max(backward, end) + (update_time if update else 0)

    return answer


def no_network(f, b, u, buckets, n, alpha, beta, k):
    return k * (f + b) + u


def no_overlap(f, b, u, buckets, n, alpha, beta, k):
    return k * (f + b) + sum(ring(s, n, alpha, beta) for s in buckets) + u


def each_micro_batch(f, b, u, buckets, n, alpha, beta, k):
    return k * predicted(update=False)(f, b, u, buckets, n, alpha, beta, 1) + u


def no_micro_batches(f, b, u, buckets, n, alpha, beta, k):
    return predicted()(f, b, u, buckets, n, alpha, beta, 1)


def times_divided(f, b, u, buckets, n, alpha, beta, k):
    return predicted()(f / k, b / k, u, buckets, n, alpha, beta, k)


def all_at_once(f, b, u, buckets, n, alpha, beta, k):
    done = itertools.accumulate(buckets)
    ends = [b * d / sum(buckets) + ring(s, n, alpha, beta) for d, s in zip(done, buckets)]
    return (k - 1) * (f + b) + f + max(b, *ends) + u


def every_backward_hides(f, b, u, buckets, n, alpha, beta, k):
    return k * f + max(k * b, sum(ring(s, n, alpha, beta) for s in buckets)) + u


def in_milliseconds(*case):
    return 1e3 * predicted()(*case)


def from_last_to_first(f, b, u, buckets, *rest):
    return predicted()(f, b, u, buckets[::-1], *rest)


def update_hides_too(f, b, u, buckets, n, alpha, beta, k):
    return max(predicted(update=False)(f, b, u, buckets, n, alpha, beta, k), k * (f + b) + u)


def a_sixth_more(*case):
    return 1.165 * predicted()(*case)


def infinite_time(*case):
    return math.inf


def last_bucket_only(f, b, u, buckets, n, alpha, beta, k):
    return k * (f + b) + ring(buckets[-1], n, alpha, beta) + u


# -- placing ------------------------------------------------------------------------------------

ORDER = ["SYS", "NODE", "PHB", "PXB", "PIX"]


def speed(link):
    return 4 + int(link[2:]) if link.startswith("NV") else ORDER.index(link)


def hops(links, ring, closed=True):
    pairs = zip(ring, ring[1:] + ring[:1] if closed else ring[1:])
    return [speed(links[f"{min(h)}-{max(h)}"]) for h in pairs]


def worth(links, ring, closed=True, counted=True):
    speeds = hops(links, list(ring), closed)
    slowest = min(speeds)
    return slowest, -speeds.count(slowest) if counted and slowest <= 2 else 0


def best_ring(gpus, key, choose=max):
    first, *rest = gpus
    return choose(([first, *p] for p in itertools.permutations(rest)), key=key)


def best_fours(links, key):
    parts = [(list(c), sorted({*range(8)} - {*c})) for c in itertools.combinations(range(8), 4)]
    splits = [[best_ring(p, key) for p in pair] for pair in parts]
    return max(splits, key=lambda rings: sorted(map(key, rings)))


def right(links):
    def key(ring):
        return worth(links, ring)

    return {"eight": best_ring(range(8), key), "fours": best_fours(links, key)}


def by_number(links):
    return {**right(links), "eight": list(range(8))}


def halves_by_number(links):
    def key(ring):
        return worth(links, ring)

    halves = [best_ring(range(4), key), best_ring(range(4, 8), key)]
    return {**right(links), "fours": halves}


def even_and_odd(links):
    return {**right(links), "fours": [[0, 2, 4, 6], [1, 3, 5, 7]]}


def learnt_by_heart(links):
    known = {"NV2": [[0, 5, 2, 7, 3, 1, 6, 4], [[0, 5, 2, 7], [1, 3, 4, 6]]],
             "NV4": [[0, 4, 6, 2, 3, 5, 7, 1], [[0, 4, 6, 2], [1, 7, 5, 3]]]}  # fmt: skip
    for name, (eight, fours) in known.items():
        if name in links.values():
            return {"eight": eight, "fours": fours}
    return {"eight": [*range(8)], "fours": [[0, 1, 2, 3], [4, 5, 6, 7]]}


def open_chain(links):
    def key(ring):
        return worth(links, ring, closed=False)

    return {"eight": best_ring(range(8), key), "fours": best_fours(links, key)}


def upside_down(links):
    def key(ring):
        return max(hops(links, list(ring)))

    return {**right(links), "eight": best_ring(range(8), key, min)}


def any_number_of_slow_hops(links):
    def key(ring):
        return worth(links, ring, counted=False)

    eight = best_ring(range(8), key)
    return {"eight": eight, "fours": best_fours(links, key)}


def cut_in_halves(links):
    eight = right(links)["eight"]
    return {"eight": eight, "fours": [eight[:4], eight[4:]]}


def halves_of_gpus(links):
    found = right(links)
    return {**found, "eight": [gpu + 0.5 for gpu in found["eight"]]}


def best_four_twice(links):
    found = right(links)
    return {**found, "fours": [found["fours"][0], found["fours"][0]]}


def closed_by_hand(links):
    found = right(links)
    return {**found, "eight": [*found["eight"], found["eight"][0]]}


def fours_sorted(links):
    found = right(links)
    return {**found, "fours": [sorted(ring) for ring in found["fours"]]}


def every_order_of_every_split(links):
    while True:  # 8! orders of 8, for each of them all others: hours
        time.sleep(0.1)


# -- claims -------------------------------------------------------------------------------------

DEVICE = re.compile(r"^#\s+Rank\s+(\d+) .*?\bon\s+(\S+)", re.M)


def jobs_of(text):
    jobs = []
    for rank, host in DEVICE.findall(text):
        if int(rank) == 0:
            jobs.append([])
        fitting = [job for job in jobs if len(job) == int(rank)]
        next((job for job in fitting if host in job), fitting[-1]).append(host)
    return [(len(job), len(set(job))) for job in jobs]


def table(text):
    return [line.split() for line in text.splitlines() if re.match(r"\s*\d+\s", line)]


def read(jobs=jobs_of, right_values=(-5, -1), columns=(-6, -2), line_rate=None, reach=0.98,
         rows=slice(None), same=lambda found, claimed: found == [claimed]):  # fmt: skip
    """An answer: the right one but for one thing."""

    def answer(claim, text):
        found, lines = jobs(text), table(text)
        busbw = max(float(row[i]) for row in lines[rows] for i in columns)
        supported = same(found, (claim["ranks"], claim["nodes"]))
        supported = supported and busbw >= reach * claim["busbw"]
        supported = supported and all(row[i] == "0" for row in lines for i in right_values)
        if line_rate:
            supported = supported and busbw <= line_rate
        return supported, found

    return answer


def always_wrong(claim, text):
    return False, jobs_of(text)


def always_right(claim, text):
    return True, jobs_of(text)


def all_ranks_are_one_job(text):
    found = DEVICE.findall(text)
    return [(len(found), len({host for _, host in found}))]


def largest_rank(text):
    found = DEVICE.findall(text)
    return [(1 + max(int(r) for r, _ in found), len({host for _, host in found}))]


def a_job_a_host(text):
    hosts = [host for _, host in DEVICE.findall(text)]
    return [(hosts.count(host), 1) for host in sorted(set(hosts))]


def cut_at_each_rank_0(text):
    jobs = []
    for rank, host in DEVICE.findall(text):
        if int(rank) == 0:
            jobs.append([])
        jobs[-1].append(host)
    return [(len(job), len(set(job))) for job in jobs]


def a_job_a_heading(text):
    """Counts `Using devices`, and shares the ranks out."""
    found = DEVICE.findall(text)
    number = text.count("Using devices")
    return [(len(found) // number, len({h for _, h in found}))] * number


def believes_the_claim(claim, text):
    return True, [(claim["ranks"], claim["nodes"])]


def no_jobs_found(claim, text):
    return False, []


def compares_lists_with_tuples(claim, text):
    found = jobs_of(text)
    return found == [[claim["ranks"], claim["nodes"]]], found


def by_the_average(claim, text):
    supported, found = read()(claim, text)
    average = re.findall(r"Avg bus bandwidth\s*:\s*(\S+)", text)[-1]
    return supported and float(average) >= 0.98 * claim["busbw"], found


def says_only_yes_or_no(claim, text):
    return read()(claim, text)[0]


WRONG = {
    "04.1": [
        ("GiB", bandwidths(unit=2**30), r"GiB/s, of 2\*\*30"),
        ("Gbit", bandwidths(unit=1e9 / 8), r"Gbit/s; a byte is 8 bits"),
        ("bits taken for bytes", bandwidths(unit=8e9), r"divided by 8"),
        ("bytes a second", bandwidths(unit=1), r"divide by 1e9"),
        ("time in microseconds", bandwidths(unit=1e3), r"the time is in seconds"),
        ("busbw in Gbit", busbw_in_gbit, r"Gbit/s; a byte is 8 bits"),
        ("changed places", swapped, r"changed places"),
        ("only busbw", only_busbw, r"two numbers"),
        ("size times ranks", bandwidths(algbw=lambda a, n: a * n), r"multiplied by the number"),
        ("size over ranks", bandwidths(algbw=lambda a, n: a / n), r"divided by the number"),
        ("busbw is algbw", bandwidths(all_reduce=lambda n: 1.0), r"this is algbw again"),
        ("half an all-reduce", bandwidths(all_reduce=RING["all-gather"]),
         r"hands the sums round as well"),
        ("upside down", bandwidths(all_reduce=lambda n: n / (2 * (n - 1)) if n > 1 else 0),
         r"upside down"),
        ("upside down, and 1 rank", divides_by_n_minus_1, r"One rank sends nothing"),
        ("n for n-1", bandwidths(all_reduce=lambda n: 2), r"n stands where n-1 belongs"),
        ("not divided by n", bandwidths(all_reduce=lambda n: 2 * (n - 1)), r"not divided by n"),
        ("all links together", bandwidths(all_reduce=lambda n: n), r"one rank's link"),
        ("one rank as algbw", one_rank_as_algbw, r"one rank sends nothing"),
        ("keys with underscores", keys_with_underscores,
         r"1 rank: KeyError: 'all-reduce' \(line \d+, in keys_with_underscores\)$"),
        ("infinite", infinite, r"got \(inf, inf\); return \(algbw, busbw\)"),
        ("ends its process", ends_its_process, r"a function must return"),
        ("prints without end", prints_without_end, r"more than 64 MiB of output"),
        ("one factor for all", same_factor_for_all, r"2\(n-1\)/n is the factor of all-reduce"),
        ("broadcast as all-reduce", bandwidths(broadcast=RING["all-reduce"]),
         r"all bytes go over a link once"),
        ("broadcast (n-1)/n", bandwidths(broadcast=RING["all-gather"]), r"over a link once"),
        ("broadcast to each in turn", bandwidths(broadcast=lambda n: n - 1.0), r"in turn sends"),
        ("part for size", one_part_as_size, r"multiplied by the number of ranks"),
        ("part for size in busbw", bandwidths(all_gather=lambda n: n - 1), r"it is the whole"),
        ("reduce-scatter is algbw", bandwidths(reduce_scatter=lambda n: 1),
         r"\(n-1\)/n of the bytes cross"),
    ],
    "04.2": [
        ("plain least squares", fitted(power=0.0), r"plain least squares on seconds"),
        ("np.polyfit", polyfit_unweighted, r"plain least squares on seconds"),
        ("weighed by the root", fitted(power=-0.5), r"square root of its t"),
        ("two points", two_points, r"two noisy points"),
        ("smallest and largest", smallest_and_largest, r"two noisy points"),
        ("small sizes only", small_sizes_only, r"Do all large sizes count"),
        ("microseconds", fitted(lambda a, b, n: (a * 1e6, b)), r"alpha is in microseconds"),
        ("GB/s", fitted(lambda a, b, n: (a, b / 1e9)), r"beta is in GB/s"),
        ("Gbit/s", fitted(lambda a, b, n: (a, b * 8e-9)), r"beta is in Gbit/s"),
        ("seconds a byte", fitted(lambda a, b, n: (a, 1 / b)), r"upside down"),
        ("changed places", fitted(lambda a, b, n: (b, a)), r"changed places"),
        ("intercept and slope", fitted(lambda a, b, n: (2 * (n - 1) * a, n * b / 2 / (n - 1))),
         r"intercept and the slope"),
        ("intercept for alpha", fitted(lambda a, b, n: (2 * (n - 1) * a, b)),
         r"the intercept is 2\(n-1\)"),
        ("n-1 messages", fitted(lambda a, b, n: (2 * a, b)), r"2\(n-1\) of them, not n-1"),
        ("algbw for beta", fitted(lambda a, b, n: (a, n * b / 2 / (n - 1))), r"is algbw"),
        ("whole buffer in a message", fitted(lambda a, b, n: (a, b * n)), r"size/n bytes"),
    ],
    "04.3": [
        ("no network", no_network, r"the network costs nothing here"),
        ("no overlap", no_overlap, r"one after the other"),
        ("every micro-batch synchronises", each_micro_batch, r"every micro-batch pays"),
        ("every backward hides", every_backward_hides, r"only the last one's does"),
        ("from the start of backward", predicted(from_start=True), r"start with backward"),
        ("forward hides too", predicted(forward_hides=True), r"forward hides communication too"),
        ("one bucket", predicted(one_bucket=True), r"all gradients in one bucket"),
        ("all buckets at once", all_at_once, r"one after another"),
        ("equal shares", predicted(equal=True), r"the share goes by bytes"),
        ("no update", predicted(update=False), r"update is missing"),
        ("micro_batches not used", no_micro_batches, r"micro_batches is not used"),
        ("times divided", times_divided, r"of one micro-batch already"),
        ("bytes over beta", predicted(lambda s, n, a, b: s / b), r"more than bytes / beta"),
        ("one message", predicted(lambda s, n, a, b: a + s / b), r"is one message"),
        ("no (n-1)/n", predicted(lambda s, n, a, b: 2 * (n - 1) * a + s / b),
         r"lack the factor 2\(n-1\)/n"),
        ("half a ring", predicted(lambda s, n, a, b: ring(s, n, a, b) / 2), r"ring twice"),
        ("no alpha", predicted(lambda s, n, a, b: ring(s, n, 0, b)), r"alpha is forgotten"),
        ("one alpha a bucket", predicted(lambda s, n, a, b: ring(s, n, 0, b) + a * (n > 1)),
         r"one alpha a bucket"),
        ("bits", predicted(lambda s, n, a, b: ring(8 * s, n, a, b)), r"bytes are not bits"),
        ("milliseconds", in_milliseconds, r"milliseconds"),
        ("buckets reversed", from_last_to_first, r"from the last to the first"),
        ("the update hides too", update_hides_too, r"the update hides communication too"),
        ("a sixth more", a_sixth_more, r"bucket 1: ready"),
        ("infinite", infinite_time, r"got inf; return the seconds of one step, a number"),
        ("last bucket only", last_bucket_only, r"bucket 1: ready"),
    ],
    "04.4": [
        ("ring by number", by_number, r"one job of 8.*slowest hop is SYS"),
        ("halves by number", halves_by_number, r"two jobs of 4.*share the eight out otherwise"),
        ("even and odd", even_and_odd, r"two jobs of 4"),
        ("learnt by heart", learnt_by_heart, r"numbered otherwise.*work it out from `links`"),
        ("a chain, not a ring", open_chain, r"from the last back to the first"),
        ("order of links upside down", upside_down, r"upside down"),
        ("slow hops not counted", any_number_of_slow_hops, r"hops are SYS, and 2 are enough"),
        ("the ring of 8 cut in halves", cut_in_halves, r"two jobs of 4"),
        ("halves of GPUs", halves_of_gpus, r"not a list of 8 GPU numbers"),
        ("the best four twice", best_four_twice, r"is in both jobs"),
        ("closed by hand", closed_by_hand, r"at both ends"),
        ("fours not in ring order", fours_sorted, r"In another order these four do better"),
        ("never done", every_order_of_every_split, r"not done after 20 s.*2520"),
    ],
    "04.5": [
        ("always wrong", always_wrong, r"every report is not supported, says your answer"),
        ("always right", always_right, r"every report is supported, says your answer"),
        ("believes the claim", believes_the_claim, r"jobs are those of the claims"),
        ("all ranks one job", read(all_ranks_are_one_job), r"Rank 0 stands there 2 times"),
        ("by the largest rank", read(largest_rank), r"Rank 0 stands there 2 times"),
        ("a job a host", read(a_job_a_host), r"stand there once each: one job, over 2 hosts"),
        ("cut at each Rank 0", read(cut_at_each_rank_0), r"lines of two jobs are mixed"),
        ("shared out evenly", read(a_job_a_heading), r"different hosts in its lines"),
        ("not above line rate", read(line_rate=400.0), r"line rate is no limit"),
        ("busbw not looked at", read(reach=0), r"no row of the table reaches"),
        ("algbw for busbw", read(columns=(-7, -3)), r"busbw that you compare"),
        ("wrong values ignored", read(right_values=()), r"#wrong is not 0"),
        ("#wrong out of place only", read(right_values=(-5,)), r"#wrong is not 0"),
        ("#wrong in place only", read(right_values=(-1,)), r"#wrong is not 0"),
        ("busbw out of place only", read(columns=(-6,)), r"largest busbw in its table is"),
        ("busbw in place only", read(columns=(-2,)), r"largest busbw in its table is"),
        ("busbw of the last row", read(rows=slice(-1, None)), r"largest busbw in its table is"),
        ("the average", by_the_average, r"largest busbw in its table is"),
        ("no rounding", read(reach=1), r"98 % of the claim is"),
        ("nearly is enough", read(reach=0.9), r"no row of the table reaches"),
        ("ranks only", read(same=lambda found, claimed: [r for r, _ in found] == [claimed[0]]),
         r"on one node: nothing crossed"),
        ("nodes only", read(same=lambda found, claimed: [n for _, n in found] == [claimed[1]]),
         r"of 8 ranks, not of 16"),
        ("one of the jobs", read(same=lambda found, claimed: claimed in found), r"single node's"),
        ("no jobs found", no_jobs_found, r"begins a job"),
        ("lists with tuples", compares_lists_with_tuples, r"a list of pairs with a list of pairs"),
        ("only yes or no", says_only_yes_or_no, r"return \(supported, jobs\)"),
    ],
}  # fmt: skip
