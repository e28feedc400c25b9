"""Pit 4: command lines that do not belong together, and scripts with an address in them."""

from __future__ import annotations

from .fault import (
    PORT,
    STATIC_PORT,
    Fault,
    Lab,
    finished,
    said,
    silent,
    static,
    torchrun,
    values,
)  # fmt: skip

EPHEMERAL = 40000

LISTEN = """
import socket, time
server = socket.create_server(("", {port}))
print("listening", flush=True)
time.sleep(3600)
"""
DIAL = """
import socket, time
ours = socket.socket()
ours.bind(("", {local}))  # the kernel could have chosen it: it is one of those it chooses from
ours.connect(("node1", {port}))
print("connected", flush=True)
time.sleep(3600)
"""


def wrong(make_wrong, make_right):
    """Lines that are wrong until they are put right."""
    return lambda lab: (make_right if lab.fixed else make_wrong)(lab)


def nothing(lab: Lab) -> None:
    """The cluster is fine."""


def put_right(lab: Lab) -> None:
    lab.fixed = True


def _mixed(lab: Lab) -> dict[int, str]:
    return {i: f"torchrun --nnodes=2 --rdzv-backend=c10d --master-addr=node0 --master-port={PORT} "
               "two_nodes.py" for i in range(2)}  # fmt: skip


def _two_ids(lab: Lab) -> dict[int, str]:
    return {0: torchrun(lab, rdzv_id="job-1")[0], 1: torchrun(lab, rdzv_id="job-2")[1]}


def _two_counts(lab: Lab) -> dict[int, str]:
    return {0: torchrun(lab, nproc_per_node=1)[0], 1: torchrun(lab, nproc_per_node=2)[1]}


def _three_ranks(run) -> str | None:
    sizes = {n for (n,) in values(run, r"joined, (\d+) ranks").values()}
    if not finished(run) or sizes != {"3"}:
        return None
    return "no error, but 3 ranks where 2 or 4 were meant: another global batch"


def _take_port(lab: Lab) -> None:
    lab.hold(0, LISTEN.format(port=STATIC_PORT))


def _take_ephemeral(lab: Lab) -> None:
    lab.hold(1, LISTEN.format(port=22))
    lab.hold(0, DIAL.format(local=EPHEMERAL, port=22))


def _end_holders(lab: Lab) -> None:
    lab.let_go()


def _below_the_range(lab: Lab) -> None:
    lab.fixed = True  # the connection stays; the job takes a port that the kernel gives to nobody


def _address_in_script(lab: Lab) -> None:
    lab.script(
        'dist.init_process_group("gloo", timeout',
        'dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29501",\n'
        '                            rank=int(os.environ["RANK"]),\n'
        '                            world_size=int(os.environ["WORLD_SIZE"]), timeout',
    )


def _no_set_epoch(lab: Lab) -> None:
    lab.script("        sampler.set_epoch(epoch)\n", "")


def _job(lab: Lab, args: str) -> dict[int, str]:
    return torchrun(lab, job="two_nodes.py" if lab.fixed else "spoiled.py", args=args)


def _same_order(run) -> str | None:
    first = values(run, r"epoch 0 begins with samples (.*)")
    second = values(run, r"epoch 1 begins with samples (.*)")
    if not finished(run) or not second or first != second:
        return None
    return f"no error; epoch 1 begins like epoch 0, with samples {second['0'][0]}"


def _static_wrong(**how):
    return wrong(lambda lab: static(lab, **how), static)


IN_USE = ("EADDRINUSE", "address already in use", "Address already in use")

LAUNCH = (
    Fault(
        id="two-nodes-zero", pit="launch", incidents=("RDZ04",), by="launch", named="node rank",
        title="Both nodes are started as node 0",
        inject=nothing, cure=put_right, lines=_static_wrong(ranks=(0, 0)), symptom=silent,
    ),
    Fault(
        id="node-rank-from-one", pit="launch", by="launch", named="node rank",
        title="Nodes counted from 1: a node rank that is not below nnodes",
        inject=nothing, cure=put_right, lines=_static_wrong(ranks=(1, 2)), symptom=silent,
    ),
    Fault(
        id="nnodes-disagree", pit="launch", by="launch", named="nnodes",
        title="node0 is told of 3 nodes, node1 of 2",
        inject=nothing, cure=put_right, lines=_static_wrong(nnodes=(3, 2)), symptom=silent,
    ),
    Fault(
        id="nproc-disagree", pit="launch", by="launch", named="nproc",
        title="One rank on node0, two on node1",
        inject=nothing, cure=put_right, lines=wrong(_two_counts, torchrun), symptom=_three_ranks,
    ),
    Fault(
        id="address-without-endpoint", pit="launch", incidents=("RDZ02",), by="launch",
        named="endpoint", title="--master-addr with the c10d rendezvous, and no endpoint",
        inject=nothing, cure=put_right, lines=wrong(_mixed, torchrun), symptom=silent,
    ),
    Fault(
        id="two-ids", pit="launch", by="launch", named="rdzv id",
        title="Two rendezvous ids",
        inject=nothing, cure=put_right, lines=wrong(_two_ids, torchrun), symptom=silent,
    ),
    Fault(
        id="localhost-everywhere", pit="launch", incidents=("RDZ05",), by="launch",
        named="endpoint", title="Each node is told that the rendezvous is on localhost",
        inject=nothing, cure=put_right, symptom=silent,
        lines=wrong(lambda lab: torchrun(lab, endpoint=f"localhost:{PORT}"), torchrun),
    ),
    Fault(
        id="port-taken", pit="launch", incidents=("RDZ06",), named="rendezvous port", node="node0",
        title="Another program listens on the port already",
        inject=_take_port, cure=_end_holders, lines=static,
        asks=lambda lab: {"endpoint": f"node0:{STATIC_PORT}"},
        symptom=lambda run: said(run, *IN_USE, node=0),
    ),
    Fault(
        id="ephemeral-port", pit="launch", incidents=("RDZ07",), named="rendezvous port",
        node="node0", title="A port of the kernel's own range, which a connection was given",
        inject=_take_ephemeral, cure=_below_the_range,
        lines=wrong(lambda lab: static(lab, port=EPHEMERAL), static),
        asks=lambda lab: {"endpoint": f"node0:{STATIC_PORT if lab.fixed else EPHEMERAL}"},
        symptom=lambda run: said(run, *IN_USE, node=0),
    ),
    Fault(
        id="address-in-script", pit="launch", by="launch", named="script",
        title="The script has an address of its own in init_process_group",
        inject=_address_in_script, cure=put_right, lines=lambda lab: _job(lab, "--timeout 10"),
        symptom=lambda run: said(run, "127.0.0.1, 29501", "127.0.0.1:29501"),
    ),
    Fault(
        id="set-epoch-forgotten", pit="launch", incidents=("DAT01",), by="launch", named="script",
        title="The sampler is never told the epoch: every epoch has the same order",
        inject=_no_set_epoch, cure=put_right, lines=lambda lab: _job(lab, "--epochs 2"),
        symptom=_same_order,
    ),
)  # fmt: skip
