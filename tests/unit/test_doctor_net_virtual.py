"""The doctor on emulated hosts whose network is broken in one way, and on healthy ones."""

import contextlib
import functools
import os
import re
import subprocess
import sys

import pytest

from scalelab import cluster, doctor
from scalelab.cluster.firewall import find_nft

PROBLEM = cluster.virtual_problem()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(PROBLEM), reason=f"no emulated hosts here: {PROBLEM}"),
]
needs_nft = pytest.mark.skipif(not find_nft(), reason="the program nft is missing")
# importing torch on every host each time would take most of these tests' time
examine = functools.partial(doctor.examine, without=["matmul"])
TOPICS = {"own name", "endpoint", "rendezvous port", "interface", "connect", "mtu", "link",
          "speed", "round trip", "clock"}  # fmt: skip


def wrong(report):
    """What the network's checks say. (Others are other tests' business.)"""
    return [f for f in report.findings if f.name in TOPICS and f.status in ("fail", "warn")]


def said(report):
    assert not report.seen.broken
    return [(f.status, f.name, f.node) for f in wrong(report)]


def hosts_file(c, **instead):
    """/etc/hosts with other addresses for some names; None leaves one out."""
    lines = {n.name: n.addr for n in c.nodes} | instead
    return "127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in lines.items() if a)


@contextlib.contextmanager
def busy(loops=2):
    """As many processes as there are cores, that do nothing but compute."""
    code = "import time; e = time.time() + 120\nwhile time.time() < e: pass"
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def pair():
    with cluster.start("virtual", nodes=2) as c:
        yield c


@pytest.fixture
def two(pair):
    """Two hosts, mended after the test."""
    yield pair
    for node in pair.nodes:
        node.set_hosts(hosts_file(pair))
        if find_nft():
            node.firewall([])


def test_two_healthy_hosts(two):
    assert said(examine(two)) == []


@pytest.mark.parametrize("addr", ["127.0.1.1", None, "10.77.0.1"])
def test_own_name_and_the_line_that_mends_it(two, addr):
    two.node(1).set_hosts(hosts_file(two, node1=addr))
    report = examine(two)
    assert said(report) == [("fail", "own name", "node1")]
    line = re.search("`(.*)`", wrong(report)[0].fix).group(1)
    two.node(1).set_hosts(hosts_file(two, node1=None) + line + "\n")
    assert said(examine(two)) == []


def test_gloo_variable_mends_a_loopback_name_too(two):
    two.node(1).set_hosts(hosts_file(two, node1="127.0.1.1"))
    report = examine(two, node_env={1: {"GLOO_SOCKET_IFNAME": "eth0"}})
    assert said(report) == []


def test_endpoints(two):
    assert said(examine(two, endpoint="localhost:29400")) == [("fail", "endpoint", None)]
    for i, addr in enumerate(("10.77.9.9", "10.77.0.1")):
        two.node(i).set_hosts(hosts_file(two) + f"{addr} head-ib\n")
    report = examine(two, endpoint="head-ib:29400")
    assert said(report) == [("fail", "endpoint", "node0")]
    mended = re.search(r"--rdzv-endpoint=(\S+:\d+)", wrong(report)[0].fix).group(1)
    assert said(examine(two, endpoint=mended)) == []
    two.node(1).set_hosts(hosts_file(two, node0="10.77.0.9"))
    assert said(examine(two)) == [("fail", "endpoint", "node1")]


def test_rendezvous_port_taken_and_in_the_ephemeral_range(two):
    null = os.open(os.devnull, os.O_RDWR)
    code = ("import socket, time; s = socket.create_server(('', 29400)); print('up', flush=True); "
            "time.sleep(100)")  # fmt: skip
    read, write = os.pipe()
    server = two.node(0).spawn([sys.executable, "-c", code], out=write, err=null)
    try:
        assert os.read(read, 2) == b"up"
        report = examine(two)
        assert said(report) == [("fail", "rendezvous port", "node0")]
        assert "import socket, time" in wrong(report)[0].detail
        other = re.search(r"such as (\d+)", wrong(report)[0].fix).group(1)
        assert said(examine(two, endpoint=f"node0:{other}")) == []
    finally:
        server.signal(9, group=True)
        for fd in (null, read, write):
            os.close(fd)
    report = examine(two, endpoint="node0:40000")
    assert said(report) == [("warn", "rendezvous port", "node0")]


@pytest.mark.parametrize("env", [{"GLOO_SOCKET_IFNAME": "ens5"}, {"GLOO_SOCKET_IFNAME": "lo"},
                                 {"NCCL_SOCKET_IFNAME": "ens"}])  # fmt: skip
def test_interface_variables(two, env):
    report = examine(two, node_env={1: env})
    assert said(report) == [("fail", "interface", "node1")]
    name, value = re.search(r"export (\w+)=(\w+)", wrong(report)[0].fix).groups()
    assert said(examine(two, node_env={1: {name: value}})) == []


def test_a_container_address_that_is_published():
    with cluster.start("virtual", nodes=2) as c:
        for node in c.nodes:  # both have it, as Docker's default is on every machine
            node.sh("ip link add docker0 type bridge && ip addr add 172.17.0.2/16 dev docker0 && "
                    "ip link set docker0 up")  # fmt: skip
        if "docker0" not in c.node(1).sh("ip -o addr").stdout:
            pytest.skip("no ip program, or no bridges, here")
        c.node(1).set_hosts(hosts_file(c, node1="172.17.0.2"))
        report = examine(c)
        assert said(report) == [("fail", "interface", "node1")]
        assert "172.17.0.2 of docker0 (a container network's)" in wrong(report)[0].detail


@needs_nft
@pytest.mark.parametrize(
    "node, rules, words",
    [
        (0, [{"action": "accept", "proto": "tcp", "ports": "29400"},
             {"action": "drop", "proto": "tcp"}], "the rendezvous port 29400 is open, but"),
        (0, [{"action": "drop", "proto": "tcp", "ports": "29400"}], "29400 alone is closed"),
        (0, [{"action": "drop"}], "all ports"),
        (1, [{"action": "reject", "proto": "tcp"}], "refused"),
        (1, [{"action": "drop", "proto": "tcp", "ports": "40000-50000"}], "pass"),
    ],
)  # fmt: skip
def test_a_firewall_and_the_rule_that_opens_it(two, node, rules, words):
    two.node(node).firewall(rules)
    report = examine(two)
    assert said(report) == [("fail", "connect", f"node{node}")]
    found = wrong(report)[0]
    assert words in found.detail and "though not back" in found.detail
    rule = re.search(r"(nft insert rule .*? accept)", found.fix).group(1)
    done = two.node(node).sh(f"PATH=$PATH:/usr/sbin; {rule.replace('{', chr(92) + '{')}")
    assert done.returncode == 0, done.stderr
    assert said(examine(two)) == []


@needs_nft
def test_every_probe_times_out_and_still_it_ends_soon():
    with cluster.start("virtual", nodes=4) as c:
        for node in c.nodes:
            node.firewall([{"action": "drop"}])
        report = examine(c)
        assert said(report) == [("fail", "connect", None)]
        assert report.seconds < 20


@pytest.mark.parametrize("nodes, blamed", [(2, "node0→node1"), (3, "node1")])
def test_a_black_hole(nodes, blamed):
    with cluster.start("virtual", nodes=nodes, mtu=9000) as c:
        c.set_link(1, port_mtu=1500)
        report = examine(c)
        assert said(report) == [("fail", "mtu", blamed)]
        assert "MTU 9000" in wrong(report)[0].detail
        assert "passes 1500, not 1600" in wrong(report)[0].detail
        c.set_link(mtu=int(re.search(r"mtu (\d+)", wrong(report)[0].fix).group(1)))
        assert said(examine(c)) == []


def test_one_host_with_another_mtu():
    with cluster.start("virtual", nodes=3, mtu=9000) as c:
        c.set_link(1, mtu=1500)
        assert said(examine(c)) == [("warn", "mtu", "node1")]


@pytest.mark.parametrize(
    "nodes, rate, blamed, loops",
    [(2, "1gbit", "node0→node1", 2), (3, "1gbit", "node1", 0), (4, "1gbit", "node1", 2),
     (3, None, "node1", 0)],
)  # fmt: skip
def test_a_link_at_a_tenth_of_its_rate(nodes, rate, blamed, loops):
    with cluster.start("virtual", nodes=nodes, rate=rate) as c, busy(loops):
        c.set_link(1, rate="100mbit")
        assert said(examine(c)) == [("fail", "speed", blamed)]
        c.set_link(1, rate=rate)
        assert said(examine(c)) == []


def test_a_host_that_is_far():
    with cluster.start("virtual", nodes=3) as c:
        c.set_link(2, delay="20ms")
        assert said(examine(c)) == [("warn", "round trip", "node2")]


@pytest.mark.parametrize(
    "options",
    [
        {"nodes": 4}, {"nodes": 4, "rate": "1gbit"}, {"nodes": 3, "rate": "100mbit"},
        {"nodes": 2, "rate": "10gbit"}, {"nodes": 3, "rate": "1gbit", "delay": "5ms"},
        {"nodes": 3, "delay": "50ms"}, {"nodes": 3, "loss": "1%"},
        {"nodes": 3, "rate": "1gbit", "loss": "1%", "delay": "5ms"}, {"nodes": 4, "racks": 2},
        {"nodes": 3, "mtu": 9000}, {"nodes": 8},
    ],
    ids=str,
)  # fmt: skip
def test_healthy_links_of_a_busy_machine(options):
    with cluster.start("virtual", **options) as c, busy():
        report = examine(c)
        assert said(report) == []
        assert report.seconds < 20


def test_hosts_of_one_machine():
    with cluster.start("local", nodes=4) as c, busy():
        assert said(examine(c)) == []


def test_two_faults_at_once(two):
    two.node(0).set_hosts(hosts_file(two, node0="127.0.1.1"))
    report = examine(two, node_env={1: {"GLOO_SOCKET_IFNAME": "ens5"}})
    assert said(report) == [("fail", "own name", "node0"), ("fail", "interface", "node1")]


def test_a_link_that_lost_its_carrier_meanwhile(two, monkeypatch):
    from scalelab.doctor import exchange

    def pull(seen, ask, **options):
        two.channel.ask(None, "links", links=two._wire_links()).result(10)
        done = two.node(1).sh("ip link set eth0 down && ip link set eth0 up")
        assert done.returncode == 0, done.stderr

    monkeypatch.setattr(exchange, "measure", pull)
    report = examine(two)
    flaps = [f for f in report.findings if f.name == "link" and f.status == "fail"]
    assert [f.node for f in flaps] == ["node1"] and "carrier" in flaps[0].detail
