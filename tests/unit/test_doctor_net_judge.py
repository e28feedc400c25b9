"""What the doctor makes of a network that it has seen: made-up facts, no machine."""

import copy

import pytest

from scalelab.doctor.blame import blame
from scalelab.doctor.checks.clock import clock, round_trip
from scalelab.doctor.checks.connect import connects
from scalelab.doctor.checks.endpoint import endpoints, port_is_good
from scalelab.doctor.checks.interface import chosen
from scalelab.doctor.checks.link import links
from scalelab.doctor.checks.mtu import mtu
from scalelab.doctor.checks.names import names
from scalelab.doctor.checks.speed import partners, speed, suspects
from scalelab.doctor.registry import Host, Seen, judge

ALL = [names, endpoints, port_is_good, chosen, connects, mtu, links, speed, round_trip, clock]
RANGE = [32768, 60999]
GIGABIT = 125e6


def nic(name, addr, **more):
    return {"name": name, "index": 2, "up": True, "loopback": name == "lo", "mtu": 1500,
            "kind": "", "addrs": [[addr, 8 if name == "lo" else 24]] if addr else [],
            "addrs6": [], "errors": {"receive errors": 0}, "flaps": 2, "speed": None,
            **more}  # fmt: skip


def healthy(count, separate=True):
    hosts = []
    for i in range(count):
        addr = f"10.77.0.{i + 1}"
        host = Host(f"node{i}", addr)
        cards = [nic("lo", "127.0.0.1"), nic("eth0", addr)]
        link = {"eth0": {"errors": {"receive errors": 5}, "flaps": 2, "speed": None,
                         "kind": "", "up": True}}  # fmt: skip
        facts = {
            "identity": {"boot_id": "b", "net": f"net:{i if separate else 0}"},
            "own name": {"name": host.name, "addrs": [addr], "error": "", "usable": addr},
            "endpoint": {"addrs": ["10.77.0.1"], "error": "", "itself": i == 0,
                         "hostname": host.name},
            "rendezvous port": {"held": None, "range": RANGE, "reserved": False, "free": 29401,
                                "privileged": False},
            "interface": {"nics": cards, "gloo": "", "nccl": ""},
            "firewall": {"chain": "inet filter input"},
            "listening": {"ports": {addr: [40000, 50000]}, "range": RANGE,
                          "rendezvous": "listening" if i == 0 else ""},
            "link": link, "link again": copy.deepcopy(link),
        }  # fmt: skip
        host.facts = {k: {"value": v} for k, v in facts.items()}
        hosts.append(host)
    seen = Seen(hosts)
    for a in hosts:
        for b in hosts:
            if a is b:
                continue
            rows = [{"port": p, "kind": "range", "result": "ok"} for p in (40000, 50000)]
            if b is hosts[0]:
                rows.insert(0, {"port": 29400, "kind": "rendezvous", "result": "ok"})
            seen.pairs[a.name, b.name] = {
                "dialled": {b.addr: rows}, "addr": b.addr, "at": b.addr, "port": 40000,
                "ping": {"rtt": 1e-4, "span": 2e-4, "offset": 1e-5},
                "burst": {"size": 1500, "passes": True, "largest": 1500, "blocked": None},
                "sends": [send(GIGABIT)],
            }  # fmt: skip
    return seen


def send(rate, **more):
    return {"rate": rate, "alone": rate, "share": 1.0, "flight": 1e6, "min_rtt": 1e-4, "late": 0.0,
            "cpu": 0.05, "retrans": 0.0, **more}  # fmt: skip


def fact(seen, index, probe, **change):
    seen.hosts[index].facts[probe]["value"].update(change)


def wrong(seen):
    return [f for f in judge(ALL, seen) if f.status in ("warn", "fail")]


def said(seen):
    return [(f.status, f.name, f.node) for f in wrong(seen)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("separate", [True, False])
def test_nothing_is_said_of_a_healthy_network(count, separate):
    seen = healthy(count, separate)
    assert wrong(seen) == []
    assert not any("itself failed" in f.detail for f in judge(ALL, seen))


# Names and the endpoint.


@pytest.mark.parametrize(
    "facts, words",
    [
        ({"addrs": ["127.0.1.1"], "usable": "127.0.1.1"}, "dial loopback"),
        ({"addrs": [], "usable": None, "error": "Name or service not known"}, "not resolve"),
        ({"addrs": ["10.77.0.1"], "usable": None}, "no address of this machine"),
        ({"addrs": [], "usable": None, "error": "no answer within 2 s"}, "no answer"),
    ],
)
def test_a_bad_own_name_is_named_and_the_line_that_mends_it_printed(facts, words):
    seen = healthy(2)
    fact(seen, 1, "own name", **facts)
    assert said(seen) == [("fail", "own name", "node1")]
    found = wrong(seen)[0]
    assert words in found.detail
    assert "`10.77.0.2 node1`" in found.fix and "GLOO_SOCKET_IFNAME=eth0" in found.fix


def test_a_right_gloo_variable_makes_up_for_a_loopback_name_but_not_a_wrong_one():
    seen = healthy(2)
    fact(seen, 1, "own name", addrs=["127.0.1.1"], usable="127.0.1.1")
    fact(seen, 1, "interface", gloo="eth0")
    assert said(seen) == []
    fact(seen, 1, "interface", gloo="eth7")
    assert said(seen) == [("fail", "own name", "node1"), ("fail", "interface", "node1")]


def test_a_loopback_name_is_fine_where_all_hosts_are_one_machine():
    seen = healthy(2, separate=False)
    fact(seen, 1, "own name", addrs=["127.0.1.1"], usable="127.0.1.1")
    assert said(seen) == []


def test_an_alias_that_nobody_knows_as_itself():
    seen = healthy(3)
    fact(seen, 0, "endpoint", itself=False)
    assert said(seen) == [("fail", "endpoint", "node0")]
    assert "--rdzv-endpoint=node0:29400" in wrong(seen)[0].fix
    assert "is_host=1 on node0" in wrong(seen)[0].fix
    # with the head's own name bad that is the reason, and named once
    fact(seen, 0, "own name", addrs=["127.0.1.1"], usable="127.0.1.1")
    assert said(seen) == [("fail", "own name", "node0")]
    # with gloo served by its variable, the rendezvous is what is left, and is not passed over
    fact(seen, 0, "interface", gloo="eth0")
    assert said(seen) == [("fail", "endpoint", "node0")]


def test_localhost_as_endpoint_of_separate_machines():
    seen = healthy(2)
    seen.endpoint = ("localhost", 29400)
    for i in (0, 1):
        fact(seen, i, "endpoint", addrs=["127.0.0.1"], itself=True)
    assert said(seen) == [("fail", "endpoint", None)]
    assert "--rdzv-endpoint=node0:29400" in wrong(seen)[0].fix


@pytest.mark.parametrize("count", [2, 3, 4])
def test_one_host_means_another_machine_by_the_endpoint(count):
    seen = healthy(count)
    fact(seen, 1, "endpoint", addrs=["10.77.0.9"])
    assert said(seen) == [("fail", "endpoint", "node1")]
    assert "`10.77.0.1 node0`" in wrong(seen)[0].fix
    fact(seen, 1, "endpoint", addrs=["127.0.0.1"])
    assert said(seen) == [("fail", "endpoint", "node1")]
    fact(seen, 1, "endpoint", addrs=[], error="Name or service not known")
    assert said(seen) == [("fail", "endpoint", "node1")]


def test_two_that_take_the_endpoint_for_themselves():
    seen = healthy(3)
    fact(seen, 2, "endpoint", itself=True)
    assert said(seen) == [("fail", "endpoint", "node2")]
    assert said(healthy(3, separate=False)) == []


def test_the_rendezvous_port():
    seen = healthy(2)
    held = {"pid": 77, "command": "python old.py", "seconds": 7200.0}
    fact(seen, 0, "rendezvous port", held=held)
    assert said(seen) == [("fail", "rendezvous port", "node0")]
    assert "77 (python old.py), started 2 hours ago" in wrong(seen)[0].detail
    assert "kill 77" in wrong(seen)[0].fix and "such as 29401" in wrong(seen)[0].fix
    fact(seen, 0, "rendezvous port", held={"pid": None, "why": "another user's process"})
    assert "another user's" in wrong(seen)[0].detail and "kill" not in wrong(seen)[0].fix
    fact(seen, 0, "rendezvous port", held=None, privileged=True)
    assert said(seen) == [("fail", "rendezvous port", "node0")]
    fact(seen, 0, "rendezvous port", privileged=False)
    fact(seen, 1, "rendezvous port", held=held)  # not the head: its business
    assert said(seen) == []
    seen.endpoint = ("node0", 40000)
    assert said(seen) == [("warn", "rendezvous port", "node0")]
    fact(seen, 0, "rendezvous port", reserved=True)
    assert said(seen) == []


# Interfaces.


@pytest.mark.parametrize(
    "variables",
    [
        {"gloo": "ens5"}, {"gloo": "eth"}, {"gloo": "eth0,ens5"}, {"gloo": "lo"},
        {"gloo": "down0"}, {"gloo": "bare0"},
        {"nccl": "ens"}, {"nccl": "=eth"}, {"nccl": "^eth,lo"}, {"nccl": "lo"}, {"nccl": "down"},
    ],
)  # fmt: skip
def test_a_variable_that_names_no_usable_interface(variables):
    seen = healthy(2)
    cards = seen.hosts[1].facts["interface"]["value"]["nics"]
    cards += [nic("down0", "10.88.0.1", up=False), nic("bare0", None)]
    fact(seen, 1, "interface", **variables)
    assert said(seen) == [("fail", "interface", "node1")]
    assert "=eth0" in wrong(seen)[0].fix


@pytest.mark.parametrize(
    "variables", [{"gloo": "eth0"}, {"nccl": "eth"}, {"nccl": "=eth0"}, {"nccl": "^lo,docker"}]
)
def test_a_variable_that_is_right(variables):
    seen = healthy(2)
    fact(seen, 1, "interface", **variables)
    assert said(seen) == []


def test_a_container_address_that_peers_do_not_reach_is_named_as_published():
    seen = healthy(3)
    cards = seen.hosts[1].facts["interface"]["value"]["nics"]
    cards.append(nic("docker0", "172.17.0.2"))
    fact(seen, 1, "own name", addrs=["172.17.0.2"], usable="172.17.0.2")
    for pair in (("node0", "node1"), ("node2", "node1")):
        seen.pairs[pair]["dialled"] = {
            "172.17.0.2": [{"port": 40000, "kind": "range", "result": "timeout"}],
            **seen.pairs[pair]["dialled"],
        }
    assert said(seen) == [("fail", "interface", "node1")]
    assert "published address 172.17.0.2 of docker0 (a container" in wrong(seen)[0].detail
    assert "--network=host" in wrong(seen)[0].fix
    for pair in (("node0", "node1"), ("node2", "node1")):  # an overlay that routes it
        seen.pairs[pair]["dialled"]["172.17.0.2"][0]["result"] = "ok"
    assert said(seen) == []


# Connections.


def close(seen, pairs, result="timeout", ports=(40000, 50000)):
    for pair in pairs:
        found = seen.pairs[pair]
        rows = found["dialled"][found["at"]]
        for row in rows:
            if row["port"] in ports:
                row["result"] = result
        if all(r["result"] != "ok" for r in rows):
            found["addr"] = None
            for key in ("ping", "burst", "sends"):
                found.pop(key)


def test_a_firewall_before_one_host_is_that_hosts():
    for count in (2, 3, 4):
        seen = healthy(count)
        close(seen, [p for p in seen.pairs if p[1] == "node1"])
        assert said(seen) == [("fail", "connect", "node1")], count
        assert "tcp dport 32768-60999 accept" in wrong(seen)[0].fix
        assert "10.77.0.0/24" in wrong(seen)[0].fix
        assert "though not back" in wrong(seen)[0].detail


def test_only_the_rendezvous_port_is_open():
    seen = healthy(3)
    close(seen, [("node1", "node0"), ("node2", "node0")])
    assert said(seen) == [("fail", "connect", "node0")]
    assert "the rendezvous port 29400 is open, but" in wrong(seen)[0].detail
    assert "ip_local_port_range" in wrong(seen)[0].fix


@pytest.mark.parametrize("count", [2, 3])
def test_only_the_rendezvous_port_is_closed(count):
    seen = healthy(count)
    close(seen, [p for p in seen.pairs if p[1] == "node0"], ports=(29400,))
    assert said(seen) == [("fail", "connect", "node0")]
    assert "29400 alone is closed" in wrong(seen)[0].detail
    assert "dport 29400 accept" in wrong(seen)[0].fix


def test_a_part_of_the_range_names_what_passes():
    seen = healthy(3)
    close(seen, [p for p in seen.pairs if p[1] == "node2"], ports=(50000,))
    assert said(seen) == [("fail", "connect", "node2")]
    assert "50000 time out; 40000 pass" in wrong(seen)[0].detail


def test_a_refusal_means_a_firewall_that_rejects():
    seen = healthy(3)
    close(seen, [p for p in seen.pairs if p[1] == "node2"], "refused")
    assert "rejects them, for the doctor listens there" in wrong(seen)[0].detail


def test_a_host_from_which_nothing_gets_out():
    seen = healthy(3)
    close(seen, [p for p in seen.pairs if p[0] == "node1"], ports=(29400, 40000, 50000))
    assert said(seen) == [("fail", "connect", "node1")]
    assert "let TCP out" in wrong(seen)[0].fix


def test_two_hosts_deaf_to_each_other_are_named_as_a_pair_and_all_as_none():
    seen = healthy(2)
    close(seen, list(seen.pairs), ports=(29400, 40000, 50000))
    assert said(seen) == [("fail", "connect", "node0→node1")]
    seen = healthy(4)
    close(seen, list(seen.pairs), ports=(29400, 40000, 50000))
    assert said(seen) == [("fail", "connect", None)]


def test_two_faults_are_both_named():
    seen = healthy(4)
    close(seen, [p for p in seen.pairs if p[1] == "node2"])
    fact(seen, 1, "own name", addrs=["127.0.1.1"], usable="127.0.1.1")
    assert said(seen) == [("fail", "own name", "node1"), ("fail", "connect", "node2")]


def test_blame():
    four = [(a, b) for a in "abcd" for b in "abcd" if a != b]
    of_b = [p for p in four if "b" in p]
    assert blame([], four) == []
    assert blame(of_b, four) == [("b", sorted(of_b))]
    assert blame([("a", "b")], four) == [(("a", "b"), [("a", "b")])]
    assert blame(four, four) == [(None, sorted(four))]
    into_b = [p for p in four if p[1] == "b"]
    assert blame(into_b, four, directed=True) == [("b", sorted(into_b))]
    of_c = [p for p in four if "c" in p]
    assert {w for w, _ in blame(of_b + of_c, four)} == {"b", "c"}
    assert blame([("a", "b")], [("a", "b"), ("b", "a")], directed=True)[0][0] == "b"
    assert blame([("a", "b")], [("a", "b"), ("b", "a")])[0][0] == ("a", "b")


# MTU and link.


def hole(seen, pairs, size=9000, largest=1500, blocked=1600):
    for pair in pairs:
        seen.pairs[pair]["burst"] = {"size": size, "passes": False, "largest": largest,
                                     "blocked": blocked}  # fmt: skip
        seen.pairs[pair].pop("sends")


def test_a_black_hole_is_a_hosts_a_pairs_or_everybodys():
    for count, node in ((2, "node0→node1"), (3, "node1"), (4, "node1")):
        seen = healthy(count)
        hole(seen, [p for p in seen.pairs if "node1" in p])
        assert said(seen) == [("fail", "mtu", node)]
        assert "MTU 9000" in wrong(seen)[0].detail
        assert "passes 1500, not 1600" in wrong(seen)[0].detail
        assert "ip link set dev eth0 mtu 1500" in wrong(seen)[0].fix
    seen = healthy(4)
    hole(seen, list(seen.pairs))
    assert said(seen) == [("fail", "mtu", None)]


def test_mtus_that_differ():
    for count, node in ((2, "node0→node1"), (3, "node1")):
        seen = healthy(count)
        seen.hosts[1].facts["interface"]["value"]["nics"][1]["mtu"] = 9000
        assert said(seen) == [("warn", "mtu", node)]


@pytest.mark.parametrize(
    "before, after, status",
    [
        ({}, {"errors": {"receive errors": 6}}, "fail"),
        ({}, {"flaps": 3}, "fail"),
        ({"flaps": 400}, {"flaps": 400}, "warn"),
        ({"speed": 10**9}, {"speed": 10**9}, "fail"),
    ],
)
def test_a_link_that_errs_flaps_or_negotiated_less(before, after, status):
    seen = healthy(4)
    for host in seen.hosts:
        for key in ("link", "link again"):
            host.facts[key]["value"]["eth0"]["speed"] = 10 * 10**9
    assert said(seen) == []
    seen.hosts[2].facts["link"]["value"]["eth0"].update(before)
    seen.hosts[2].facts["link again"]["value"]["eth0"].update(after)
    assert said(seen) == [(status, "link", "node2")]


# Throughput, round trips, clocks.


def slow(seen, host, *sends):
    for pair, found in seen.pairs.items():
        if host in pair:
            found["sends"] = [dict(s) for s in sends]


@pytest.mark.parametrize("line", [GIGABIT, None])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_link_at_a_tenth_of_its_rate(count, line):
    seen = healthy(count)
    seen.line_rate = line
    slow(seen, "node1", *3 * [send(GIGABIT / (10 if line else 5), retrans=0.02)])
    if not line:  # peers of one machine are judged more mildly
        assert said(seen) == []
        for i, host in enumerate(seen.hosts):
            host.facts["identity"]["value"]["boot_id"] = f"b{i}"
    if count == 2 and line is None:
        assert said(seen) == []
        skips = [f for f in judge([speed], seen) if f.status == "skip"]
        assert len(skips) == 2 and "nothing to judge it by" in skips[0].detail
    elif count == 2:
        assert said(seen) == [("fail", "speed", "node0→node1")]
        assert "which of the two it is cannot be told" in wrong(seen)[0].detail
    else:
        assert said(seen) == [("fail", "speed", "node1")]


@pytest.mark.parametrize(
    "sends",
    [
        [send(GIGABIT / 10), send(GIGABIT)],  # it was chance
        [send(GIGABIT / 10, alone=GIGABIT)],  # the reader was late to read
        [send(GIGABIT / 10, flight=GIGABIT / 10 * 1e-4)],  # the window, a round trip
        [send(GIGABIT / 10, flight=GIGABIT / 10 * 0.1, min_rtt=0.1)],  # the same on a long way
        [send(GIGABIT / 90, flight=40e3, min_rtt=0.1, retrans=0.01)],  # loss kept it small
    ],
)
def test_one_that_was_not_held_up_by_the_link_is_acquitted(sends):
    seen = healthy(3)
    seen.line_rate = GIGABIT
    slow(seen, "node1", *sends)
    if sends[0]["min_rtt"] > 0.01:
        for pair in seen.pairs.values():
            pair["ping"].update(rtt=0.1, span=0.1)
    assert said(seen) == [] and suspects(seen) == []


def test_one_slow_measurement_is_none_and_three_that_disagree_are_not_a_link():
    seen = healthy(3)
    seen.line_rate = GIGABIT
    slow(seen, "node1", send(GIGABIT / 10))
    assert said(seen) == [] and len(suspects(seen)) == 4
    slow(seen, "node1", send(GIGABIT / 10), send(GIGABIT / 25), send(GIGABIT / 4))
    assert said(seen) == []
    slow(seen, "node1", send(GIGABIT / 10), send(GIGABIT / 11), send(GIGABIT / 10))
    assert said(seen) == [("fail", "speed", "node1")]


@pytest.mark.parametrize("why", [{"share": 0.4}, {"cpu": 0.9}, {"late": 0.5}])
def test_one_on_a_busy_machine_is_not_judged(why):
    seen = healthy(3)
    seen.line_rate = GIGABIT
    slow(seen, "node1", *3 * [send(GIGABIT / 10, **why)])
    assert said(seen) == []
    skips = [f for f in judge([speed], seen) if f.status == "skip"]
    assert len(skips) == 4 and all("node busy" in f.detail for f in skips)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9, 64])
def test_who_is_measured_with_whom(count):
    hosts = [f"n{i}" for i in range(count)]
    pairs = partners(hosts)
    assert len(pairs) == len(set(pairs)) and all(a != b for a, b in pairs)
    assert {p for p in pairs} == {(b, a) for a, b in pairs}  # both ways
    for host in hosts:
        peers = {a for a, b in pairs if b == host}
        assert len(peers) >= min(2, count - 1)
    assert len(pairs) <= max(12, 2 * count)


@pytest.mark.parametrize("count", [3, 4])
def test_a_far_host(count):
    seen = healthy(count)
    for pair, found in seen.pairs.items():
        if "node2" in pair:
            found["ping"]["rtt"] = 0.02
    assert said(seen) == [("warn", "round trip", "node2")]
    for found in seen.pairs.values():  # far, but all of them
        found["ping"]["rtt"] = 0.02
    assert said(seen) == []


@pytest.mark.parametrize(
    "offset, span, status",
    [(0.04, 0.0, None), (0.06, 0.0, "warn"), (0.06, 0.05, None), (-0.3, 0.0, "warn"),
     (-3600.0, 0.1, "fail")],
)  # fmt: skip
def test_a_clock_that_is_off(offset, span, status):
    for count, node in ((2, "node0→node1"), (3, "node1"), (4, "node1")):
        seen = healthy(count)
        for (a, b), found in seen.pairs.items():
            sign = 1 if b == "node1" else -1 if a == "node1" else 0
            found["ping"].update(offset=sign * offset, span=span)
        assert said(seen) == ([(status, "clock", node)] if status else [])
        if status and count > 2:
            assert ("behind" in wrong(seen)[0].detail) == (offset < 0)


def test_what_was_not_measured_is_not_good():
    seen = healthy(3)
    for pair in seen.pairs.values():
        for key in ("ping", "burst", "sends", "dialled"):
            pair.pop(key)
        pair.update(addr=None, at=None, error="node1 did not answer in time")
    found = judge([connects, mtu, speed, round_trip, clock], seen)
    assert {f.status for f in found} == {"skip"} and len(found) == 5 * 6
