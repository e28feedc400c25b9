"""The coordinator's side of a shared directory: one host writes and all look, in turn."""

from __future__ import annotations

import secrets
import threading
import time

from .registry import Host, NotChecked, Seen

ENTER = 5.0  # s that a path may take to answer; healthy file servers take milliseconds
WAIT = 3.0  # s for what one host wrote to be seen by another: network file systems cache names
CHURN = 0.3  # s of renaming while others read


def exchange(seen: Seen, ask, deadline: float) -> None:
    """Look at every directory of `seen.shared` from all hosts in turn; facts["shared"] of each host
    becomes {path: what was seen}. `deadline`: time.monotonic() by which to be done. Whatever
    happens, our files are taken away again."""
    results: dict[str, dict[str, dict]] = {h.name: {} for h in seen.hosts}
    token = secrets.token_hex(8)

    def one(path: str) -> None:
        try:
            for name, found in _Walk(seen, ask, deadline, path, token).run().items():
                results[name][path] = found
        except Exception as e:
            seen.broken.append(f"{path}: {type(e).__name__}: {e}")

    threads = [
        threading.Thread(target=one, args=(p,), daemon=True) for p in dict.fromkeys(seen.shared)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.1, deadline + 3 - time.monotonic()))
    for host in seen.hosts:
        host.facts["shared"] = {"value": dict(results[host.name])}


class _Walk:
    """The steps on one path, each by all hosts that are still in it."""

    def __init__(self, seen: Seen, ask, deadline: float, path: str, token: str) -> None:
        self.seen, self.ask, self.deadline, self.path, self.token = seen, ask, deadline, path, token
        self.found: dict[str, dict] = {h.name: {} for h in seen.hosts}

    def run(self) -> dict[str, dict]:
        try:
            self._steps()
        finally:
            self._all(self.seen.hosts, "leave", timeout=2.0)
        return self.found

    def _steps(self) -> None:
        self._all(self.seen.hosts, "enter", timeout=ENTER)
        inside = [h for h in self.seen.hosts if self._of(h, "enter").get("directory")]
        peers = [h.name for h in inside if self._of(h, "enter").get("written")]
        if not peers:
            return
        self._all(inside, "look", timeout=WAIT + ENTER, peers=peers, wait=WAIT)
        # What follows is asked of hosts that share a directory with the first that can write.
        leader = next(h for h in inside if h.name == peers[0])
        inside = [h for h in inside if leader.name in self._of(h, "look").get("seen", ())]
        if leader not in inside:
            return
        for _ in range(3):  # others may be writing here just now
            self._all(inside, "list", timeout=ENTER)
            if len({self._of(h, "list").get("hash") for h in inside}) == 1:
                break
            time.sleep(0.4)
        self._all([leader], "rename", timeout=ENTER, seconds=0)
        others = [h for h in inside if h is not leader]
        if others and "error" not in self._of(leader, "rename"):
            churn = threading.Thread(
                target=self._all, args=([leader], "rename"),
                kwargs={"timeout": ENTER, "seconds": CHURN},
            )  # fmt: skip
            churn.start()
            self._all(others, "read", timeout=ENTER, seconds=CHURN)
            churn.join()
        self._all([leader], "lock", timeout=ENTER)
        writers = [h for h in others if h.name in peers]
        if self._of(leader, "lock").get("got"):
            self._all(writers, "lock", timeout=ENTER)

    def _of(self, host: Host, step: str) -> dict:
        return self.found[host.name].get(step, {})

    def _all(self, hosts: list[Host], step: str, *, timeout: float, **args) -> None:
        """A step by all these hosts at once. One that does not answer is left out from then on."""
        left = self.deadline - time.monotonic()
        if step != "leave":
            timeout = min(timeout, left)
            hosts = [h for h in hosts if not self.found[h.name].get("silent")]
        if timeout <= 0:
            return
        asked = [
            (h, self.ask(h, f"shared_{step}", path=self.path, token=self.token,
                         timeout=timeout, **args))
            for h in hosts
        ]  # fmt: skip
        for host, answer in asked:
            mine = self.found[host.name]
            try:
                mine[step] = answer.result()
            except NotChecked as e:
                mine[step] = {"lost": str(e)}
            if step != "leave" and mine[step].get("silent"):
                mine["silent"] = timeout
