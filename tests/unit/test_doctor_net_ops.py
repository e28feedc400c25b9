"""The doctor's own probes of the network: two hosts' parts on loopback, in this process."""

import concurrent.futures
import socket
import threading
import time

import pytest

from scalelab.doctor import exchange, nics, sockets
from scalelab.doctor.checks import endpoint, names
from scalelab.doctor.checks.clock import clock
from scalelab.doctor.net_ops import NetOps
from scalelab.doctor.registry import Host, NotChecked, Seen, judge

TOKEN = "0123456789abcdef"
HERE, THERE = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def two():
    a, b = NetOps({"name": "a"}), NetOps({"name": "b"})
    yield a, b
    a.close(), b.close()


@pytest.fixture
def ports(two):
    return two[1].op_listen(TOKEN, [THERE])["ports"][THERE]


def test_ports_lie_all_over_the_ephemeral_range_and_all_answer(two, ports):
    low, high = nics.port_range()
    assert len(set(ports)) == 6 and all(low <= p <= high for p in ports)
    assert max(ports) - min(ports) > (high - low) / 2
    found = two[0].op_dial(TOKEN, [[THERE, p] for p in ports], 2)
    assert [(f["result"], f["who"]) for f in found] == [("ok", "b")] * 6


def test_one_without_the_token_is_hung_up_on(two, ports):
    assert two[0].op_dial("another token", [[THERE, ports[0]]], 2)[0]["result"] == "stranger"


def test_a_port_on_which_nobody_listens_is_refused(two):
    with socket.create_server((THERE, 0)) as s:
        port = s.getsockname()[1]
    assert two[0].op_dial(TOKEN, [[THERE, port]], 2)[0]["result"] == "refused"


def test_a_server_that_says_nothing_is_silent_and_one_that_says_else_a_stranger(two):
    with socket.create_server((THERE, 0)) as mute, socket.create_server((THERE, 0)) as other:

        def talk():
            stream, _ = other.accept()
            with stream:
                stream.sendall(b"SSH-2.0-OpenSSH\r\n")

        threading.Thread(target=talk, daemon=True).start()
        began = time.monotonic()
        found = two[0].op_dial(TOKEN, [[THERE, s.getsockname()[1]] for s in (mute, other)], 0.5)
    assert [f["result"] for f in found] == ["silent", "stranger"]
    assert time.monotonic() - began < 3


def test_the_rendezvous_port_is_listened_on_only_where_it_is_free(two):
    with socket.create_server((THERE, 0)) as s:
        taken = s.getsockname()[1]
        assert two[1].op_listen(TOKEN, [THERE], rendezvous=taken)["rendezvous"] == "taken"
    two[1].close()
    again = NetOps({"name": "c"})
    try:
        assert again.op_listen(TOKEN, [THERE], rendezvous=taken)["rendezvous"] == "listening"
        assert two[0].op_dial(TOKEN, [[THERE, taken]], 2)[0]["result"] == "ok"
    finally:
        again.close()


def test_nothing_holds_a_port_when_all_is_closed(two, ports):
    a, b = two
    a.op_ping(TOKEN, [[THERE, ports[0]]], 2)
    a.op_send(TOKEN, THERE, ports[0], 0.05, 2)
    b.close()
    end = time.monotonic() + 5
    while any(sockets.listening().get(p) for p in ports) and time.monotonic() < end:
        time.sleep(0.01)
    for port in ports:  # without SO_REUSEADDR: not even a connection in TIME_WAIT is left
        with socket.socket() as s:
            s.bind((THERE, port))


def test_round_trip_and_a_clock_that_is_ahead(two, ports):
    a, b = two
    right = a.op_ping(TOKEN, [[THERE, ports[0]]], 2)[0]
    assert 0 < right["rtt"] < 1 and abs(right["offset"]) < 0.04 + right["span"] / 2
    b.clock = lambda: time.time() + 100
    wrong = a.op_ping(TOKEN, [[THERE, ports[0]]], 2)[0]
    assert abs(wrong["offset"] - 100) < 0.04 + wrong["span"] / 2


def test_full_packets_pass_on_loopback(two, ports):
    found = two[0].op_burst(TOKEN, [[THERE, ports[0]]], 2.5)[0]
    assert found["passes"] and found["size"] > 1500 and found["blocked"] is None


def test_a_reader_that_never_reads_is_found_by_the_burst(two, monkeypatch):
    """Not a hang: the ladder is tried, nothing passes, and that is said in time."""
    with socket.create_server((THERE, 0)) as mute:
        began = time.monotonic()
        found = two[0].op_burst(TOKEN, [[THERE, mute.getsockname()[1]]], 1.0)[0]
    assert not found["passes"] and found["largest"] == 0
    assert time.monotonic() - began < 4


def test_throughput_is_measured_and_bounded_in_time(two, ports):
    began = time.monotonic()
    found = two[0].op_send(TOKEN, THERE, ports[0], 0.1, 2)
    assert found["rate"] > 1e6 and found["alone"] >= found["rate"] * 0.9
    assert time.monotonic() - began < 3


def test_who_holds_a_port_is_named(two):
    with socket.create_server((HERE, 0)) as s:
        port = s.getsockname()[1]
        held = sockets.holder(port)
        assert held["pid"] and held["command"] and held["seconds"] >= 0
        assert sockets.taken(port)
    assert sockets.holder(port) is None


@pytest.mark.slow  # imports torch
def test_the_rule_of_c10d_is_torchs_own():
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    own = socket.gethostname()
    try:
        socket.getaddrinfo(own, None)
    except OSError:
        pytest.skip("this machine's own name does not resolve, and torch's rule then raises")
    for host in ("localhost", HERE, "127.0.1.1", own, "192.0.2.77", "no-such-host.invalid"):
        assert endpoint.knows_itself(host) == _matches_machine_hostname(host), host


def test_a_resolver_that_hangs_is_left(monkeypatch):
    monkeypatch.setattr(names, "PATIENCE", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: time.sleep(3))
    assert names.resolve("node0") == ([], "no answer within 0.1 s")


def look(hosts, **shift):
    """The whole exchange among hosts of this process, each at a loopback address of its own."""
    parts = {h.name: NetOps({"name": h.name}) for h in hosts}
    for name, seconds in shift.items():
        parts[name].clock = lambda s=seconds: time.time() + s
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=4 * len(hosts))

    def ask(host, op, **args):
        def run():
            try:
                return getattr(parts[host.name], f"op_{op}")(**args)
            except OSError as e:
                raise NotChecked(str(e)) from None

        return pool.submit(run)

    net = {h.name: f"net:[{i}]" for i, h in enumerate(hosts)}  # as if they were apart
    for h in hosts:
        h.facts["identity"] = {"value": {"boot_id": "x", "net": net[h.name]}}
    seen = Seen(hosts, endpoint=(hosts[0].name, 29400))
    # All of 127.0.0.0/8 is this machine's; the exchange must not think it loopback.
    try:
        exchange.measure(seen, ask, one_at_a_time=True, deadline=time.monotonic() + 12)
        assert not any(part.open for part in parts.values())  # hushed
    finally:
        for part in parts.values():
            part.close()
        pool.shutdown()
    return seen


@pytest.fixture
def as_if_apart(monkeypatch):
    from scalelab.doctor import addresses

    monkeypatch.setattr(addresses, "is_loopback", lambda addr: False)


def test_the_whole_exchange_fills_every_pair_and_names_the_odd_clock(as_if_apart):
    hosts = [Host(f"n{i}", f"127.0.0.{i + 1}") for i in range(3)]
    seen = look(hosts, n1=-7200.0)
    assert len(seen.pairs) == 6
    for pair in seen.pairs.values():
        assert {"dialled", "ping", "burst", "sends"} <= set(pair), pair
    wrong = [f for f in judge([clock], seen) if f.status != "pass"]
    assert [(f.status, f.node) for f in wrong] == [("fail", "n1")]
    assert "7200.0 s behind" in wrong[0].detail
    assert all(f.status == "pass" for f in judge([clock], look(hosts)))


def test_a_host_that_cannot_listen_is_an_error_of_its_pairs_only(as_if_apart):
    hosts = [Host("n0", "127.0.0.1"), Host("n1", "127.0.0.2"), Host("n2", "192.0.2.9")]
    seen = look(hosts)  # the last address is none of this machine
    assert "cannot listen" in seen.pairs["n0", "n2"]["error"]
    assert seen.pairs["n0", "n1"]["addr"] and seen.pairs["n2", "n0"]["addr"]
