"""Wrong answers to lab 02 that people really write, and what the verdict must say of each."""

import re

import torch
import torch.distributed as dist

# 02.1


def first_node_everywhere(rank, layout):
    return rank // layout[0], rank % layout[0], sum(layout)


def global_rank_as_local(rank, layout):
    node, left = 0, rank
    while left >= layout[node]:
        left -= layout[node]
        node += 1
    return node, rank, sum(layout)


def world_size_counts_nodes(rank, layout):
    node, left = 0, rank
    while left >= layout[node]:
        left -= layout[node]
        node += 1
    return node, left, len(layout)


def counts_from_one(rank, layout):
    node, left = 0, rank
    while left >= layout[node]:
        left -= layout[node]
        node += 1
    return node + 1, left + 1, sum(layout)


def prints_it(rank, layout):
    print(rank // layout[0], rank % layout[0], sum(layout))


# 02.2


def whole_tensor_round_the_ring(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    total, going = x.clone(), x.clone()
    for _ in range(n - 1):
        arrived = torch.empty_like(x)
        sending = dist.isend(going, (rank + 1) % n)
        dist.recv(arrived, (rank - 1) % n)
        sending.wait()
        total += arrived
        going = arrived
    return total


def ring(x, rounds=None, first=1, copy=True, mean=False, chunk=torch.tensor_split,
         recv_first=False):  # fmt: skip
    rank, n = dist.get_rank(), dist.get_world_size()
    x = x.clone()
    chunks = list(chunk(x, n))
    for k in range(2 * (n - 1) if rounds is None else rounds(n)):
        gather = k >= n - 1
        shift = first - 1 if gather else 0
        out, into = chunks[(rank + shift - k) % n], chunks[(rank + shift - k - 1) % n]
        arrived = torch.empty_like(into)
        if recv_first:
            dist.recv(arrived, (rank - 1) % n)
        sending = dist.isend(out.contiguous(), (rank + 1) % n)
        if not recv_first:
            dist.recv(arrived, (rank - 1) % n)
        sending.wait()
        if gather and copy:
            into.copy_(arrived)
        else:
            into += arrived
    return x / n if mean else x


def only_half(x):
    return ring(x, rounds=lambda n: n - 1)


def adds_in_the_second_half(x):
    return ring(x, copy=False)


def starts_at_its_own_chunk(x):
    return ring(x, first=0)


def the_mean(x):
    return ring(x, mean=True)


def torch_chunk(x):
    return ring(x, chunk=torch.chunk)


def everyone_receives_first(x):
    return ring(x, recv_first=True)


def calls_all_reduce(x):
    dist.all_reduce(x)
    return x


def through_rank_0(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    total = x.clone()
    if rank == 0:
        for other in range(1, n):
            arrived = torch.empty_like(x)
            dist.recv(arrived, other)
            total += arrived
        for other in range(1, n):
            dist.send(total, other)
    else:
        dist.send(x, 0)
        dist.recv(total, 0)
    return total


# 02.3


def swap_of_two(x):
    other = 1 - dist.get_rank()
    arrived = torch.empty_like(x)
    sending = dist.isend(x, other)
    dist.recv(arrived, other)
    sending.wait()
    return arrived


def neighbours(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    return torch.zeros_like(x), (rank - 1) % n, (rank + 1) % n


def barrier_first(x):
    arrived, left, right = neighbours(x)
    dist.barrier()
    dist.recv(arrived, left)
    dist.send(x, right)
    return arrived


def all_send_first(x):
    arrived, left, right = neighbours(x)
    dist.send(x, right)
    dist.recv(arrived, left)
    return arrived


def unchanged(x):
    arrived, left, right = neighbours(x)
    dist.recv(arrived, left)
    dist.send(x, right)
    return arrived


def isend_not_waited(x):
    arrived, left, right = neighbours(x)
    dist.isend(x, right)
    dist.recv(arrived, left)
    return arrived


def isend_kept_and_not_waited(x, kept=[]):  # noqa: B006
    arrived, left, right = neighbours(x)
    kept.append(dist.isend(x, right))
    dist.recv(arrived, left)
    return arrived


def irecv_not_waited(x):
    arrived, left, right = neighbours(x)
    dist.irecv(arrived, left)
    dist.send(x, right)
    return arrived


def to_the_left(x):
    arrived, left, right = neighbours(x)
    sending = dist.isend(x, left)
    dist.recv(arrived, right)
    sending.wait()
    return arrived


def gathers_everything(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    parts = [torch.empty_like(x) for _ in range(n)]
    dist.all_gather(parts, x)
    return parts[rank - 1]


def returns_what_it_gave(x):
    arrived, left, right = neighbours(x)
    sending = dist.isend(x, right)
    dist.recv(arrived, left)
    sending.wait()
    return x


def middle_rank_forgotten(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(x)
    if rank == 0:
        dist.send(x, 1)
        dist.recv(arrived, 1)
    elif rank == 1:
        dist.recv(arrived, 0)
        dist.send(x, 0)
    else:
        dist.recv(arrived, rank - 1)
        dist.send(x, (rank + 1) % n)
    return arrived


# 02.4

PRINT = r"Rank (\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=(\d+), " \
        r"OpType=(\w+), TensorShape=\[([\d, ]*)\]"  # fmt: skip


def shape_of(text):
    return [int(s) for s in text.split(",")]


def read(reports, pattern=PRINT, pick=slice(None), shape=shape_of, plus=0):
    calls, number = {}, None
    for report in reports:
        for rank, sequence, operation, dims in re.findall(pattern, report)[pick]:
            calls[int(rank)] = operation, shape(dims)
            number = int(sequence) + plus
    return number, calls


def first_report_only(reports):
    return read(reports[:1])


def counts_collectives_from_one(reports):
    return read(reports, plus=1)


def one_digit(reports):
    return read(reports, pattern=PRINT.replace(r"Number=(\d+)", r"Number=(\d)\d*"))


def first_dimension(reports):
    return read(reports, pattern=PRINT.replace(r"([\d, ]*)\]", r"(\d+)"))


def place_in_the_list(reports):
    number, _ = read(reports)
    calls = {i: re.findall(PRINT, r)[0] for i, r in enumerate(reports)}
    return number, {i: (c[2], shape_of(c[3])) for i, c in calls.items()}


def the_other_ranks_call(reports):
    number, calls = None, {}
    for report in reports:
        (rank, number, _, _), (_, _, operation, dims) = re.findall(PRINT, report)[:2]
        calls[int(rank)] = operation, shape_of(dims)
    return int(number), calls


def only_the_number(reports):
    return read(reports)[0]


# 02.5


def star(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for other in range(1, n):
            dist.send(x, other)
    else:
        dist.recv(x, 0)
    return x


def chain(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.recv(x, rank - 1)
    if rank < n - 1:
        dist.send(x, rank + 1)
    return x


def powers_of_two_only(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    step = 1
    while step < n:
        if rank < step:
            dist.send(x, rank + step)
        elif rank < 2 * step:
            dist.recv(x, rank - step)
        step *= 2
    return x


def heap(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.recv(x, (rank - 1) // 2)
    for child in (2 * rank + 1, 2 * rank + 2):
        if child < n:
            dist.send(x, child)
    return x


def calls_broadcast(x):
    dist.broadcast(x, 0)
    return x


def does_nothing(x):
    return x


def receives_elsewhere(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    arrived = torch.empty_like(x)
    if rank > 0:
        dist.recv(arrived, (rank - 1) // 2)
    for child in (2 * rank + 1, 2 * rank + 2):
        if child < n:
            dist.send(x, child)
    return arrived


WRONG = {
    "02.1": [
        ("divides by the first node's ranks", first_node_everywhere, r"only where every node has"),
        ("global rank as local rank", global_rank_as_local, r"starts from 0 again on every node"),
        ("world size counts nodes", world_size_counts_nodes, r"over all nodes, not nodes"),
        ("counts from one", counts_from_one, r"counted from 0"),
        ("prints instead of returning", prints_it, r"returned None"),
    ],
    "02.2": [
        ("passes the whole tensor on", whole_tensor_round_the_ring, r"one chunk a round"),
        ("only the reduce-scatter", only_half, r"all-gather is missing"),
        ("adds in the second half too", adds_in_the_second_half, r"differs in \d+ of|the sum is"),
        ("wrong chunk first", starts_at_its_own_chunk, r"Which chunk does a rank own"),
        ("divides by n", the_mean, r"the mean"),
        ("torch.chunk gives fewer chunks", torch_chunk, r"tensor_split gives n"),
        ("everyone receives first", everyone_receives_first, r"isend first, then recv"),
        ("calls all_reduce", calls_all_reduce, r"calls all_reduce"),
        ("through rank 0", through_rank_0, r"one rank does the work of all"),
    ],
    "02.3": [
        ("unchanged", unchanged, r"deadlock: every rank stands in recv"),
        ("a barrier before it", barrier_first, r"barrier cures no deadlock"),
        ("everyone sends first", all_send_first, r"deadlock: every rank stands in send"),
        ("swaps two ranks", swap_of_two, r"right at 2 ranks"),
        ("cures ranks 0 and 1 only", middle_rank_forgotten, r"right at 2 ranks"),
        ("isend without wait", isend_not_waited, r"isend only starts"),
        ("isend kept, without wait", isend_kept_and_not_waited, r"isend only starts"),
        ("irecv without wait", irecv_not_waited, r"irecv only starts"),
        ("gives to the left", to_the_left, r"the right neighbour's"),
        ("all_gather instead", gathers_everything, r"calls all_gather"),
        ("returns its own", returns_what_it_gave, r"its own tensor"),
    ],
    "02.4": [
        ("first report only", first_report_only, r"read all the reports"),
        ("counts from one", counts_collectives_from_one, r"counts from 0"),
        ("one digit", one_digit, r"more than one digit"),
        ("first dimension only", first_dimension, r"as many numbers as the tensor has dimensions"),
        ("place in the list is the rank", place_in_the_list, r"reports come in any order"),
        ("takes the other rank's call", the_other_ranks_call, r"about another rank"),
        ("only the number", only_the_number, r"return \(sequence number"),
    ],
    "02.5": [
        ("a star", star, r"sends all 3 messages itself"),
        ("a chain", chain, r"down a chain"),
        ("powers of two only", powers_of_two_only, r"not a power of two"),
        ("a binary heap", heap, r"sits idle"),
        ("calls broadcast", calls_broadcast, r"calls broadcast"),
        ("does nothing", does_nothing, r"nothing reached it"),
        ("passes on the wrong tensor", receives_elsewhere, r"other numbers than rank 0"),
    ],
}
