"""The doctor's hand on a host: runs probes there and answers in JSON, one line each.

    {"id": 1, "op": "probe", "args": {"name": "disk"}}  →  {"id": 1, "result": {"value": …}}

Standard library only, so that it starts where torch does not, and a thread a request, so that one
that hangs holds up no other. It obeys whoever is at the other end, and can do no more than look:
there is no request that runs a command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from .registry import PROBES, NotChecked

LINE_BYTES = 8 << 20  # a longer line is no doctor's
ROOT = str(Path(__file__).resolve().parents[2])


class Agent:
    """Answers the requests that come on `lines` by writing to `out` (both binary files)."""

    def __init__(self, lines, out) -> None:
        self.lines, self.out = lines, out
        self.lock = threading.Lock()
        self.context: dict = {}
        self.parts: list = []  # objects whose op_… methods are requests too
        self.child: subprocess.Popen | None = None
        self.last: dict | None = None  # what the coordinator said at the end

    def serve(self) -> dict | None:
        """Until the other end says "end" or goes. Returns what it said with "end", else None."""
        try:
            while line := self.lines.readline(LINE_BYTES):
                request = json.loads(line)
                if request["op"] == "end":
                    self.last = request.get("args") or {}
                    break
                threading.Thread(target=self._answer, args=(request,), daemon=True).start()
        except (OSError, ValueError, KeyError, TypeError):
            pass  # the other end is gone, or is not a doctor
        finally:
            self.close()
        return self.last

    def close(self) -> None:
        """Leave nothing: no socket, no child, no file."""
        for part in self.parts:
            part.close()
        if self.child and self.child.poll() is None:
            self.child.kill()
            self.child.wait()

    def _answer(self, request: dict) -> None:
        reply: dict = {"id": request["id"]}
        try:
            reply["result"] = self._find(request["op"])(**request.get("args", {}))
        except NotChecked as e:
            reply["error"] = str(e)
        except Exception as e:
            reply["error"] = f"{type(e).__name__}: {e}"
        try:
            self.send(reply)
        except OSError:
            pass  # nobody wants to know any more

    def send(self, message: dict) -> None:
        with self.lock:
            self.out.write(json.dumps(message).encode() + b"\n")
            self.out.flush()

    def _find(self, op: str):
        for part in (self, *self.parts):
            found = getattr(part, f"op_{op}", None)
            if found:
                return found
        raise NotChecked(f"this doctor does not know {op!r}: is it of another version?")

    def op_begin(self, context: dict) -> dict:
        """The first request: what the job is to be. See `examine._begin`."""
        from .checks import PARTS  # declares all probes

        self.context = context
        self.parts = [part(context) for part in PARTS]
        return {"pid": os.getpid()}

    def op_probe(self, name: str) -> dict:
        """{"value": what a probe found} or {"not_checked": why it found nothing}."""
        probe = PROBES.get(name)
        if probe is None:
            raise NotChecked(f"this doctor has no probe {name!r}: is it of another version?")
        answer: dict = {}

        def run() -> None:
            try:
                answer["value"] = probe.run(self.context)
            except NotChecked as e:
                answer["not_checked"] = str(e)
            except Exception as e:
                answer["not_checked"] = f"{type(e).__name__}: {e}"

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(probe.limit)  # a path that hangs cannot be interrupted, only left
        return dict(answer) or {"not_checked": f"no answer within {probe.limit:g} s"}

    def op_matmul_start(self) -> None:
        """Begin to import torch, in a process of its own, while other things are looked at."""
        path = [ROOT, os.environ.get("PYTHONPATH", "")]
        self.child = subprocess.Popen(
            [sys.executable, "-m", "scalelab.doctor.matmul"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1",
                 "PYTHONPATH": os.pathsep.join(filter(None, path))},
        )  # fmt: skip

    def op_matmul(self, timeout: float) -> dict:
        """What that process printed: {"devices": [one JSON object each]}."""
        if self.child is None:
            raise NotChecked("not started")
        try:
            out, err = self.child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise NotChecked(f"no result within {timeout:.0f} s") from None
        if self.child.returncode:
            words = err.decode(errors="replace").strip().splitlines()
            return {"error": words[-1] if words else f"exit status {self.child.returncode}"}
        return {"devices": [json.loads(line) for line in out.splitlines()]}


def main() -> None:
    """An agent on standard input and output."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a probe prints must not be taken for an answer
    Agent(sys.stdin.buffer, out).serve()
    out.flush()
    os._exit(0)  # a thread that hangs in a dead file system would not let us go


if __name__ == "__main__":
    main()
