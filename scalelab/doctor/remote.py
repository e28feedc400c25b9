"""The coordinator's end of one agent: requests out, answers in, over a pipe or a socket."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from .agent import LINE_BYTES
from .registry import NotChecked


class Answer(Future):
    """What a request will be answered with, waited for until `until` (time.monotonic()) at most."""

    def __init__(self, host: str, until: float) -> None:
        super().__init__()
        self.host, self.until = host, until

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
        threading.Thread(target=self._read, name=f"doctor-{name}", daemon=True).start()

    def ask(self, op: str, limit: float, **args) -> Answer:
        """Send a request; it is answered within `limit` seconds or not at all."""
        answer = Answer(self.name, time.monotonic() + limit)
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
