"""What every panel does: Launch and Stop, one thread a launch, errors in one line, a picture.

The widgets live in the kernel, so a reloaded page finds them again. All work is done by one daemon
thread a launch: it starts the cluster, launches, follows, and closes the cluster whatever happens.
Callbacks only start that thread or set an event, so Stop answers at any time. A kernel that dies
takes the thread with it, and the cluster ends with the process that started it.
"""

from __future__ import annotations

import base64
import contextlib
import os
import sys
import threading
from html import escape

import ipywidgets as w

from scalelab.panels.live import capital, count
from scalelab.runs import who

TICK = 0.1  # seconds between looks at the Stop event
REFRESH = 0.4  # seconds between pictures, or longer where drawing is slow
WORDS = {
    "succeeded": "Succeeded",
    "failed": "Failed",
    "stopped": "Stopped",
    "timed_out": "Ended: over its time limit",
}
ROW = {"flex_flow": "row wrap", "align_items": "center", "grid_gap": "2px 10px"}


class RunFailed(RuntimeError):
    """A run did not do what was asked: which rank failed first, where, and its own traceback."""


class Panel:
    """A subclass makes `_view` (with title, status, where, failed), `_fields`, `_links` (fields
    of `_fields` that only emulated hosts have) and `box`, and says:

    `_settings()` what the fields hold; `_do(settings)` the work of one launch, which looks at
    `_stop` every TICK; `_expected()` the errors whose message is one line for the learner;
    `_show()` the view sent to the browser; `_picture()` the view as PNG; `_found()` what `run`
    returns.
    """

    def __init__(self, kind: str, why_local: str) -> None:
        """kind: of cluster. why_local: why link settings cannot be applied; "" where they can."""
        self.kind, self._why_local = kind, why_local
        # An event, not Thread.join: once interrupted, that takes a live thread for a dead one.
        self._idle = threading.Event()
        self._idle.set()
        self._stop = threading.Event()
        self._error = None  # why the last launch did not succeed
        small = w.Layout(width="100px")
        self._launch_button = w.Button(
            description="Launch", button_style="primary", icon="play", layout=small
        )
        self._stop_button = w.Button(description="Stop", icon="stop", disabled=True, layout=small)
        self._launch_button.on_click(lambda _: self.launch())
        self._stop_button.on_click(lambda _: self.stop())
        self._bar = w.IntProgress(0, 0, 1, layout=w.Layout(width="200px"))
        self._count = w.HTML()
        self._buttons = w.HBox(
            [self._launch_button, self._stop_button, self._bar, self._count], layout=w.Layout(**ROW)
        )
        self._status = w.HTML()
        self._status.add_class("scalelab-status")
        self._place = w.HTML()
        self._image = w.Image(format="png", layout=w.Layout(width="800px", max_width="100%"))
        self._image.add_class("scalelab-curve")
        self._table = w.HTML()

    # What a notebook calls

    def launch(self) -> None:
        """Start with the fields' settings and return at once; nothing while something is on."""
        if self.running:
            return
        self._idle.clear()
        self._stop.clear()
        self._error = None
        settings = self._settings()
        self._busy(True)
        threading.Thread(
            target=self._work, args=(settings,), daemon=True, name="scalelab-panel"
        ).start()

    def stop(self) -> None:
        """End what is on now. Returns at once; the status says when it is over."""
        if self.running:
            self._stop.set()
            self._stop_button.disabled = True
            self._say("Stopping.")

    def wait(self, timeout=None) -> bool:
        """Block until nothing is on, or `timeout` seconds. True when nothing is on."""
        return self._idle.wait(timeout)

    def run(self):
        """Launch, wait for the end and return what was found: the panel without a mouse.

        What is on already is waited for instead. Raises RunFailed if a run did not succeed or did
        less than was asked, and the cluster's own error if it could not start.
        """
        self.launch()
        try:
            self.wait()
        except BaseException:  # the learner interrupts the cell: nothing may go on without it
            self.stop()
            self.wait(30)
            raise
        if self._error is not None:
            raise self._error
        return self._found()

    @property
    def running(self) -> bool:
        """Whether a run, or the building or closing of its cluster, is going on."""
        return not self._idle.is_set()

    @property
    def status(self) -> str:
        """The status line, in words."""
        return self._view.status

    def picture(self):
        """The panel as a picture: settings, status, what was measured."""
        from IPython.display import Image

        return Image(data=self._picture(), format="png")

    def _repr_mimebundle_(self, **kwargs):
        """The widgets; a picture of them where no widget can be shown; and a line of text."""
        bundle = dict(self.box._repr_mimebundle_(**kwargs) or {})
        bundle["image/png"] = base64.b64encode(self._picture()).decode()
        bundle["text/plain"] = repr(self)
        return bundle

    # The thread of one launch

    def _work(self, settings) -> None:
        try:
            self._do(settings)
        except self._expected() as error:
            self._fail(error, f"Not started: {error}")
        except Exception as error:  # a fault of ours must not leave the panel in "running"
            self._fail(error, f"Not finished: {type(error).__name__}: {error}")
        finally:
            self._show()
            self._busy(False)
            self._idle.set()

    def _fail(self, error: BaseException, words: str) -> None:
        self._error = error
        self._view.failed = True
        self._view.status = words

    # The widgets

    def _before(self) -> str:
        """Which cluster a launch will use."""
        if self._why_local:
            return (
                "Cluster: local. Every node is this host, on its loopback address. "
                f"{self._why_local} Rate and delay cannot be set here."
            )
        return "Cluster: virtual. Every node is an emulated host with its own name and address."

    def _where(self, cluster) -> str:
        """Which cluster the run is on."""
        if cluster.kind == "local":
            self._why_local = self._why_local or cluster.why or "It was asked for."
            self._lock_links()
            return self._before()
        hosts = ", ".join(f"{node.name} ({node.addr})" for node in cluster.nodes)
        return f"Cluster: {cluster.kind}. {count(len(cluster.nodes), 'emulated host')}: {hosts}."

    def _lock_links(self) -> None:
        """Where links cannot be shaped, say so in the fields themselves."""
        if self._why_local:
            for link in self._links:
                link.disabled = True
                link.tooltip = f"Cannot be set here: {self._why_local}"

    def _busy(self, on: bool) -> None:
        self._launch_button.disabled = on
        self._stop_button.disabled = not on
        for one in self._fields:
            one.disabled = on
        self._lock_links()

    def _say(self, status: str) -> None:
        self._view.status = status
        colour = "var(--jp-error-color0,#b00020)" if self._view.failed else "inherit"
        self._status.value = f'<span style="font-weight:600;color:{colour}">{escape(status)}</span>'


def gently(draw, *args):
    """draw(*args), in a thread that gives way to all else: what is being measured at this moment
    must not be slower for its own picture."""
    drawn = []

    def work():
        if sys.platform == "linux":  # there a priority is a thread's own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
        drawn.append(draw(*args))

    thread = threading.Thread(target=work, daemon=True, name="scalelab-drawing")
    thread.start()
    thread.join()
    if not drawn:
        raise RuntimeError("the picture could not be drawn; the error is printed above")
    return drawn[0]


def number(value: int, text: str) -> w.IntText:
    return w.IntText(value, description=text, layout=w.Layout(width="150px"), style=_wide())


def words(value: str | None, text: str) -> w.Text:
    return w.Text(value or "", description=text, layout=w.Layout(width="150px"), style=_wide())


def _wide() -> dict:
    return {"description_width": "initial"}


def failed_rank(run) -> RunFailed | None:
    """None if the run succeeded, else the error that says which rank failed first, and how."""
    if run.status == "succeeded":
        return None
    first = run.first_failure
    if first:
        return RunFailed(
            f"the run {run.status.replace('_', ' ')}: {who(first)} failed first\n\n"
            f"{first['error'] or '(it left no traceback)'}"
        )
    return RunFailed(f"the run did not succeed: {run.words()}")


def failure_in_one_line(run, error: BaseException) -> str:
    """How a run that failed ended: which rank, and the last line of its traceback."""
    first = run.first_failure
    if not first:
        # Also where torchrun was content and less was reported than asked for.
        status = "failed" if run.status == "succeeded" else run.status
        return f"{WORDS[status]}: {str(error).splitlines()[0]}"
    lines = (first["error"] or "").strip().splitlines()
    why = f": {lines[-1]}" if lines else ", without a traceback"
    return f"{WORDS[run.status]}. {capital(who(first))} failed first{why}"
