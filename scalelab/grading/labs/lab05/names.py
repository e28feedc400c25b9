"""05.2: the job does not come together: names, interfaces, MTU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ...bench import Bench
from . import mending, parts
from .mending import Bed, Family, Trouble

MTU, SMALL_MTU = 9000, 1500
STORAGE, STORAGE_ADDR = "storage", "10.77.0.200"  # another name that the hosts need
TEAM, CACHE = "TEAM_CACHE", "/scratch/team"  # another variable that the jobs need
PORTS = (20011, 20012)  # for the transfers there and back

# On a host, as a job there would find it: where names lead, and the address that gloo publishes.
LOOK = """
import fcntl, json, os, socket, struct, sys
def addrs(name):
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        return [f[4][0] for f in found]
    except OSError:
        return [None]
def addr(name):
    return addrs(name)[0]
def of(nic, what):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            return fcntl.ioctl(s, what, struct.pack("256s", nic.encode()[:15]))
        except OSError:
            return None
nic = os.environ.get("GLOO_SOCKET_IFNAME")
raw = of(nic, 0x8915) if nic else None
published = (raw and socket.inet_ntoa(raw[20:24])) if nic else addr(socket.gethostname())
mtu = struct.unpack("i", of("eth0", 0x8921)[16:20])[0]
print(json.dumps({"nic": nic, "published": published, "mtu": mtu,
                  "team": os.environ.get("TEAM_CACHE"),
                  "all": {n: addrs(n) for n in sys.argv[1:]},
                  "names": {n: addr(n) for n in sys.argv[1:]}}))
"""
# 200 KB from one host to the other, and a byte back
TAKE = """
import socket, sys
with socket.create_server(("", int(sys.argv[1]))) as server:
    server.settimeout(6)
    stream, _ = server.accept()
    stream.settimeout(4)
    left = 200_000
    while left > 0 and (data := stream.recv(65536)):
        left -= len(data)
    stream.send(b"!")
print("true")
"""
SEND = """
import socket, sys, time
until = time.monotonic() + 4
while True:
    try:
        stream = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2)
        break
    except ConnectionRefusedError:
        if time.monotonic() > until:
            raise
        time.sleep(0.02)
stream.settimeout(2.5)
try:
    stream.sendall(bytes(200_000))
    print("true" if stream.recv(1) else "false")
except TimeoutError:
    print("false")
"""


def settle(bed: Bed) -> None:
    bed.cluster.set_link(mtu=MTU, port_mtu=None)
    if any(seen["mtu"] != MTU for seen in parts.ask_all(bed.cluster, LOOK).values()):
        # A host's own `ip link set` is not known to the cluster, which sets what has changed.
        bed.cluster.set_link(mtu=SMALL_MTU)
        bed.cluster.set_link(mtu=MTU)
    for node in bed.cluster.nodes:
        node.set_hosts(hosts_text(bed))
        node.env.clear()
        node.env[TEAM] = CACHE


def hosts_text(bed: Bed, **other: str | None) -> str:
    """/etc/hosts, with some names leading elsewhere or (None) nowhere."""
    names = {n.name: n.addr for n in bed.cluster.nodes} | {STORAGE: STORAGE_ADDR} | other
    lines = [f"{addr} {name}" for name, addr in names.items() if addr]
    return "\n".join(["127.0.0.1 localhost", *lines]) + "\n"


def broken(bed: Bed) -> str:
    nodes = bed.cluster.nodes
    found = parts.ask_all(bed.cluster, LOOK, *(n.name for n in nodes))
    for node in nodes:
        seen = found[node.name]
        for other in nodes:
            led = set(seen["all"][other.name])
            if len(led) > 1 and other.addr in led:
                return (f"on {node.name} {other.name} still leads to "
                        f"{', '.join(led - {other.addr})} beside {other.addr}: both lines are in "
                        "/etc/hosts, and which one counts differs from program to "
                        "program")  # fmt: skip
        nic, published = seen["nic"], seen["published"]
        if nic and published is None:
            return (f"GLOO_SOCKET_IFNAME={nic} still names an interface that {node.name} does not "
                    "have: no rank there can join")  # fmt: skip
        if nic and published != node.addr:
            return (f"with GLOO_SOCKET_IFNAME={nic} {node.name} still publishes {published}, which "
                    "leads the other host to itself")  # fmt: skip
        if published is None:
            return f"{node.name} still does not know its own name"
        if published != node.addr:
            return (f"on {node.name} its own name still leads to {published}: the other host is "
                    f"told to connect there, and its address is {node.addr}")  # fmt: skip
    head = nodes[0]
    for node in nodes:
        led = found[node.name]["names"][head.name]
        mine = node is head and str(led).startswith("127.")  # to itself, which is well for a head
        if led is None:
            return f"{node.name} still does not know the name {head.name}: no rendezvous"
        if led != head.addr and not mine:
            return (f"on {node.name} the name {head.name} still leads to {led}, where nobody "
                    "answers: no rendezvous")  # fmt: skip
    return transfers(bed)


def transfers(bed: Bed) -> str:
    """Send 200 KB each way: what only small packets survive stops here."""
    a, b = bed.cluster.nodes
    with ThreadPoolExecutor(4) as pool:
        takes = [pool.submit(parts.ask, to, TAKE, port) for to, port in zip((b, a), PORTS)]
        sends = {
            f"{one.name} to {to.name}": pool.submit(parts.ask, one, SEND, to.addr, port)
            for one, to, port in zip((a, b), (b, a), PORTS)
        }
        lost = [way for way, job in sends.items() if job.result() is not True]
        for take in takes:
            take.exception()  # it says false of its own where the sender does
    if lost:
        return (f"200 KB from {' and from '.join(lost)} do not arrive, though small messages do: "
                "packets as large as the hosts' MTU are lost on the way")  # fmt: skip
    return ""


def harm(bed: Bed, trouble: str) -> str:
    found = parts.ask_all(bed.cluster, LOOK, STORAGE, "localhost")
    for name, seen in found.items():
        if seen["names"][STORAGE] != STORAGE_ADDR:
            return (f"on {name} the name {STORAGE}, which was in /etc/hosts, is lost. Change the "
                    "line that is wrong and keep the others")  # fmt: skip
        if seen["names"]["localhost"] != "127.0.0.1":
            return f"on {name} localhost leads to {seen['names']['localhost']} now"
        if seen["team"] != CACHE:
            return (f"{name}'s variable {TEAM} is lost: take out, or set right, only the variable "
                    "that is wrong")  # fmt: skip
        if seen["mtu"] < MTU and trouble != "mtu":
            return (f"{name}'s MTU is {seen['mtu']} now, and packets of {MTU} had passed: nothing "
                    "was wrong with it")  # fmt: skip
        if seen["mtu"] < SMALL_MTU:
            return (f"{name}'s MTU is {seen['mtu']} now; the network carries {SMALL_MTU}: as large "
                    "as it can be")  # fmt: skip
    return ""


def _loopback(bed: Bed, k: int) -> None:
    for node in bed.cluster.nodes:
        node.set_hosts(hosts_text(bed, **{node.name: "127.0.1.1"}))


def _stale(bed: Bed, k: int) -> None:
    bed.cluster.node(k).set_hosts(hosts_text(bed, node0="10.77.0.77"))


def _unknown(bed: Bed, k: int) -> None:
    bed.cluster.node(k).set_hosts(hosts_text(bed, **{f"node{k}": None}))


def _no_such_nic(bed: Bed, k: int) -> None:
    bed.cluster.node(k).env["GLOO_SOCKET_IFNAME"] = "enp5s0"


def _lo(bed: Bed, k: int) -> None:
    for node in bed.cluster.nodes:
        node.env["GLOO_SOCKET_IFNAME"] = "lo"


def _black_hole(bed: Bed, k: int) -> None:
    bed.cluster.set_link(k, port_mtu=SMALL_MTU)


# Which of two ranks dials the other follows from their addresses and ports, so that one host which
# publishes a loopback address harms every other time, and two of them always.
FAMILY = Family(
    troubles=(
        Trouble("loopback", "every host's own name leads to 127.0.1.1 there", _loopback,
                hosts=(0,), culprit="all"),
        Trouble("unknown", "node{k} does not know its own name", _unknown),
        Trouble("stale", "node{k} has an old address of node0 in its /etc/hosts", _stale,
                hosts=(1,)),
        Trouble("no such nic", "GLOO_SOCKET_IFNAME on node{k} names an interface of another "
                "machine", _no_such_nic),
        Trouble("lo", "GLOO_SOCKET_IFNAME is lo on every host", _lo, hosts=(0,), culprit="all"),
        Trouble("mtu", f"a switch port carries {SMALL_MTU} and the hosts send {MTU}", _black_hole,
                culprit="network"),
    ),
    settle=settle, broken=broken, harm=harm, cluster={"mtu": MTU},
    call=lambda answer, bed, where: parts.call(answer, bed.cluster, where=where),
)  # fmt: skip


def judge_names(bench: Bench, answer) -> str:
    return mending.judge(bench, answer, FAMILY)
