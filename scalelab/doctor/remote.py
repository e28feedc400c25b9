"""The coordinator's end of one agent: requests out, answers in, over a pipe or a socket."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from .agent import LINE_BYTES
from .registry import NotChecked

SILENT = 6.0  # seconds without a word, beyond those that a very busy machine may take


class Answer(Future):
    """What a request will be answered with, waited for until `until` (time.monotonic()) at most."""

    def __init__(self, host: str, op: str, limit: float) -> None:
        super().__init__()
        self.host, self.op, self.asked = host, op, time.monotonic()
        self.until = self.asked + limit

    def result(self, timeout: float | None = None):
        """The answer. Raises NotChecked, with the reason, if there is none in time."""
        left = max(0.0, self.until - time.monotonic())
        try:
            return super().result(left if timeout is None else min(timeout, left))
        except FutureTimeout:
            raise NotChecked(f"{self.host} did not answer in time") from None


class Remote:
    """One agent, written to on `out` and read from `lines` (both binary files)."""

    def __init__(self, name: str, lines, out, end=None) -> None:
        self.name, self.lines, self.out, self._end = name, lines, out, end
        self.lock = threading.Lock()
        self.counter = 0
        self.waiting: dict[int, Answer] = {}
        self.gone = ""
        self.heard = time.monotonic()  # when it last said anything
        threading.Thread(target=self._read, name=f"doctor-{name}", daemon=True).start()

    def ask(self, op: str, limit: float, **args) -> Answer:
        """Send a request; it is answered within `limit` seconds or not at all."""
        answer = Answer(self.name, op, limit)
        with self.lock:
            self.counter += 1
            request = {"id": self.counter, "op": op, "args": args}
            if not self.gone:
                self.waiting[self.counter] = answer
                try:
                    self.out.write(json.dumps(request).encode() + b"\n")
                    self.out.flush()
                except (OSError, ValueError):
                    self.gone = "its doctor has gone"
                    self.waiting.pop(self.counter, None)
            if self.gone:
                answer.set_exception(NotChecked(f"{self.name}: {self.gone}"))
        return answer

    def _read(self) -> None:
        why = "its doctor has gone"
        try:
            while line := self.lines.readline(LINE_BYTES):
                reply = json.loads(line)
                self.heard = time.monotonic()
                with self.lock:
                    answer = self.waiting.pop(reply["id"], None)
                if answer is None:
                    continue
                if "error" in reply:
                    answer.set_exception(NotChecked(str(reply["error"])))
                else:
                    answer.set_result(reply.get("result"))
        except (OSError, ValueError, KeyError, TypeError) as e:
            why = f"its doctor's answer cannot be read: {e}"
        with self.lock:
            self.gone = self.gone or why
            left, self.waiting = list(self.waiting.values()), {}
        for answer in left:
            answer.set_exception(NotChecked(f"{self.name}: {self.gone}"))

    def lost(self) -> str:
        """Why this host is taken to be down or stopped, or "". A matrix product may take long."""
        now = time.monotonic()
        with self.lock:
            waiting = [
                now - a.asked for a in self.waiting.values()
                if a.op != "matmul" and self.heard < a.asked and a.until < now
            ]  # fmt: skip
            gone = self.gone
        if gone or max(waiting, default=0) > SILENT:
            return gone or f"has answered nothing for {now - self.heard:.0f} s"
        return ""

    def end(self, **said) -> None:
        """Send it off, with what it is to know at the end."""
        with self.lock:
            try:
                self.out.write(json.dumps({"id": 0, "op": "end", "args": said}).encode() + b"\n")
                self.out.flush()
            except (OSError, ValueError):
                pass
            self.gone = self.gone or "was sent off"
        if self._end:
            self._end()
