"""Measurements between hosts: who listens, dials and sends when. Runs at the coordinator.

`measure` fills seen.pairs[(from, to)], by names of hosts, directed, with what there is of

    dialled   {address: [{"port", "kind": "rendezvous" or "range", "result", …}]}, dialling.py
    addr      the address at which it was reached (None: none), the one judged otherwise in `at`
    ping      {"rtt", "offset", "span"} (s) or {"error"}
    burst     {"size", "passes", "largest", "blocked"} (bytes) or {"error"}, NetOps.op_burst
    sends     [{"rate", …}, …], NetOps.op_send; the first, and again where it was suspiciously slow
    unsent    why there are none
    error     why nothing of it is known
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from .addresses import head, to_dial
from .checks.clock import far
from .checks.speed import partners, suspects
from .registry import NotChecked, Seen

DIAL = 2.0  # seconds that a connection may take
BURST = 2.5  # seconds for full-sized segments and, if they do not pass, for smaller ones
PING = 1.0
SEND = 0.1  # seconds of one throughput measurement, and as many round trips as a window grows in
GROW = 8  # round trips
LONGEST_SEND = 0.6
MANY = 16  # hosts; among more, each pair tries fewer ports
SPREAD = 5


def measure(seen: Seen, ask: Callable, *, one_at_a_time: bool, deadline: float) -> None:
    """Fill `seen.pairs`. `ask(host, op, **args)` returns a future; one_at_a_time: no two
    throughputs at once, since the hosts share a processor; deadline: time.monotonic()."""
    run = _Exchange(seen, ask, one_at_a_time, deadline)
    try:
        run.listen()
        run.dial()
        run.ping()
        run.burst()
        run.send()
    finally:
        asked = [ask(h, "hush", timeout=1) for h in seen.hosts]
        for answer in asked:
            try:
                answer.result()
            except NotChecked:
                pass


class _Exchange:
    def __init__(self, seen: Seen, ask: Callable, one_at_a_time: bool, deadline: float) -> None:
        self.seen, self.ask, self.one = seen, ask, one_at_a_time
        self.deadline, self.token = deadline, secrets.token_hex(16)
        self.by_name = {h.name: h for h in seen.hosts}
        self.listening: dict[str, dict] = {}
        self.top = head(seen).name

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def each(self, op: str, args: dict[str, dict]) -> dict[str, object]:
        """Ask every host that `args` names at the same time; a NotChecked where one failed."""
        asked = {
            name: self.ask(self.by_name[name], op, token=self.token, **a)
            for name, a in args.items()
        }  # fmt: skip
        results: dict[str, object] = {}
        for name, answer in asked.items():
            try:
                results[name] = answer.result()
            except NotChecked as e:
                results[name] = e
        return results

    def listen(self) -> None:
        port = self.seen.endpoint[1]
        args = {
            h.name: {
                "addrs": to_dial(h, self.seen), "timeout": 3,
                "rendezvous": port if h.name == self.top else None,
                "spread": SPREAD if len(self.seen.hosts) <= MANY else 2,
            } for h in self.seen.hosts
        }  # fmt: skip
        self.listening = self.each("listen", args)
        for host in self.seen.hosts:
            found = self.listening[host.name]
            is_error = isinstance(found, NotChecked)
            host.facts["listening"] = {"not_checked": str(found)} if is_error else {"value": found}
        for a in self.seen.hosts:
            for b in self.seen.hosts:
                if a is not b:
                    pair = self.seen.pairs[a.name, b.name] = {"addr": None, "at": None}
                    if isinstance(self.listening[b.name], NotChecked):
                        pair["error"] = f"{b.name} cannot listen: {self.listening[b.name]}"

    def ports(self, number: int, name: str, addr: str) -> list[tuple[int, str]]:
        """Ports of a host to dial, and what they stand for."""
        found = self.listening[name]
        ports = found["ports"].get(addr, [])
        if len(self.seen.hosts) > MANY and ports:  # every pair others; together they try all
            ports = [ports[number % len(ports)]]
        kinds = [(p, "range") for p in ports]
        if found["rendezvous"] == "listening":
            kinds.insert(0, (self.seen.endpoint[1], "rendezvous"))
        return kinds

    def dial(self) -> None:
        plans: dict[str, list[tuple[str, str, int, str]]] = {}
        for number, ((a, b), pair) in enumerate(self.seen.pairs.items()):
            for addr in self.listening[b]["ports"] if "error" not in pair else []:
                for port, kind in self.ports(number, b, addr):
                    plans.setdefault(a, []).append((b, addr, port, kind))
        results = self.each("dial", {
            a: {"targets": [[addr, port] for _, addr, port, _ in plan], "timeout": DIAL}
            for a, plan in plans.items()
        })  # fmt: skip
        for a, plan in plans.items():
            answers = results[a]
            if isinstance(answers, NotChecked):
                for b in {b for b, *_ in plan}:
                    self.seen.pairs[a, b]["error"] = str(answers)
                continue
            for (b, addr, port, kind), found in zip(plan, answers):
                if found["result"] == "ok" and found["who"] != b:
                    found["result"] = "another"  # two machines have this address
                row = {"port": port, "kind": kind, **found}
                self.seen.pairs[a, b].setdefault("dialled", {}).setdefault(addr, []).append(row)
        for pair in self.seen.pairs.values():
            dialled = pair.get("dialled", {})
            for addr, rows in dialled.items():
                good = [r["port"] for r in rows if r["result"] == "ok"]
                if good:
                    pair["addr"], pair["port"] = addr, good[-1]
                    break
            pair["at"] = pair["addr"] or next(reversed(dialled), None)

    def towards(self, op: str, key: str, pairs, **args) -> None:
        """Run `op` from every host to its peers of `pairs`, all at once; results under `key`."""
        plans: dict[str, list[str]] = {}
        for a, b in pairs:
            plans.setdefault(a, []).append(b)
        results = self.each(op, {
            a: {"targets": [[self.seen.pairs[a, b][k] for k in ("addr", "port")] for b in peers],
                **args}
            for a, peers in plans.items()
        })  # fmt: skip
        for a, peers in plans.items():
            for i, b in enumerate(peers):
                bad = isinstance(results[a], NotChecked)
                self.seen.pairs[a, b][key] = {"error": str(results[a])} if bad else results[a][i]

    def reached(self) -> list[tuple[str, str]]:
        return [p for p, found in self.seen.pairs.items() if found["addr"]]

    def ping(self) -> None:
        reached = self.reached()
        self.towards("ping", "ping", reached, timeout=PING)
        again = [p for p in far(self.seen) if self.left() > 2 * PING]
        if again:
            before = {p: self.seen.pairs[p]["ping"] for p in again}
            self.towards("ping", "ping", again, timeout=PING, count=30)
            for p, first in before.items():
                both = [x for x in (first, self.seen.pairs[p]["ping"]) if "rtt" in x]
                if both:
                    self.seen.pairs[p]["ping"] = min(both, key=lambda x: x["rtt"])

    def burst(self) -> None:
        if self.left() > BURST:
            self.towards("burst", "burst", self.reached(), timeout=BURST)

    def send(self) -> None:
        """Throughput; who is suspiciously slow is measured twice more, longer, and against hosts
        that are not, before it is called slow."""
        fit = {p for p in self.reached() if self.seen.pairs[p].get("burst", {}).get("passes")}
        names = [h.name for h in self.seen.hosts]
        self._rounds(p for p in partners(names) if p in fit)
        for factor in (2, 3):
            slow = set(suspects(self.seen))
            touched = {h for p in slow for h in p}
            good = [n for n in names if n not in touched and
                    any(self.seen.pairs[p].get("sends") for p in fit if n in p)]  # fmt: skip
            slow |= {p for h in touched for g in good[:1] for p in ((h, g), (g, h)) if slow}
            self._rounds(sorted(slow & fit), factor)

    def _rounds(self, pairs, factor: float = 1) -> None:
        waiting = list(pairs)
        while waiting:
            busy: set[str] = set()
            now = []
            for pair in waiting:
                if not busy & set(pair) and not (self.one and now):
                    now.append(pair)
                    busy |= set(pair)
            waiting = [p for p in waiting if p not in now]
            self._send(now, factor)

    def _send(self, pairs: list[tuple[str, str]], factor: float) -> None:
        asked = {}
        for a, b in pairs:
            pair = self.seen.pairs[a, b]
            rtt = pair["ping"].get("rtt", 0.0)
            seconds = min(LONGEST_SEND, SEND * factor + GROW * rtt)
            if self.left() < seconds + 1:
                pair.setdefault("unsent", "no time was left")
                continue
            asked[a, b] = self.ask(
                self.by_name[a], "send", token=self.token, addr=pair["addr"], port=pair["port"],
                seconds=seconds, timeout=seconds + 1,
            )  # fmt: skip
        for p, answer in asked.items():
            try:
                self.seen.pairs[p].setdefault("sends", []).append(answer.result())
            except NotChecked as e:
                self.seen.pairs[p]["unsent"] = str(e)
