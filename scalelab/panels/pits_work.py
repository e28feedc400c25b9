"""What the panel of pits does with a fault, in the thread of one press: hosts up, break, run the
job, ask the doctor, mend, hosts down. Its widgets are in pits.py."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from dataclasses import dataclass, field

from scalelab import cluster as clusters
from scalelab import doctor, drills
from scalelab.panels import pits_view as drawing
from scalelab.panels.base import REFRESH, TICK, Panel, RunFailed

GRACE, LONGEST_GRACE = 4.0, 10.0  # s: once the symptom is seen, others may speak on so long
HEALTHY = 120.0  # s that a job may take where nothing is broken
SILENCE = 3.0  # s without a word after which a screen says so
TO_END = 25.0  # s for what is under way when its hosts are ended
STORY = ("break", "job", "ask", "mend", "job", "close")
READ = ("break", "ask", "mend", "ask", "close")  # where no job can be run
_open: weakref.WeakSet = weakref.WeakSet()  # panels whose hosts are up


class Stopped(RunFailed):
    """Stop was pressed."""


@dataclass(frozen=True)
class Settings:
    """What was asked for: a fault, and what to do with it, in order."""

    fault: drills.Fault
    steps: tuple[str, ...]


@dataclass
class Tried:
    """How one run of the job went. seen: the symptom in words, None where it was not seen; exits:
    by node name, None where it was ended here; seconds: until then."""

    seen: str | None
    exits: dict = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.seen is None and set(self.exits.values()) == {0}


class PitsWork(Panel):
    """A method `_step` for each word of STORY. A subclass adds the widgets, `_fault`, `_secret`
    (its title is not to be told yet), `_plan`, `_tell(status)`, `_title()`,
    `_blank(status)` and `_before_words()`."""

    _view: drawing.View

    def __init__(self, kind: str, why_local: str) -> None:
        super().__init__(kind, why_local)
        self.lab: drills.Lab | None = None  # the hosts, while they are up
        self._local = None  # the cluster of a lab that has no emulated hosts
        self._log: dict = {}  # what a whole STORY has found
        self._table_then = ""  # the doctor's, in that story

    def _settings(self) -> Settings:
        return Settings(self._fault, self._plan)

    def _expected(self) -> tuple:
        return (clusters.UsageError, clusters.ClusterError, OSError)

    def _do(self, settings: Settings) -> None:
        self._view.failed = False
        fault, whole = settings.fault, len(settings.steps) > 1
        if whole:
            self._log = {"fault": fault.id, "title": fault.title, "pit": fault.pit, "lines": {},
                         "symptom": None, "found": None, "passes": None}  # fmt: skip
        try:
            for step in settings.steps:
                if self._stop.is_set():
                    raise Stopped("stopped")
                getattr(self, f"_{step}")(fault)
                if whole:
                    self._check(step, fault)
        except Stopped as error:
            self._error = error
            up = "are still up" if self.lab and not whole else "are ended"
            self._view.status = f"Stopped. The hosts {up}."
        except RunFailed as error:
            self._fail(error, str(error))
        finally:
            if whole:
                self._end_lab()

    def _check(self, step: str, fault: drills.Fault) -> None:
        """Keep what a step of a whole story has found. RunFailed if it is not what was meant."""
        view, log = self._view, self._log
        if step == "break":
            log["lines"] = {s.name: s.line for s in view.screens}
        if step != "ask":
            return
        found = view.found or None
        if view.broken:
            log["found"], self._table_then = found, view.table
        else:
            log["finds_nothing_more"] = found is None
        meant = fault.named if view.broken or fault.stays else ""
        named = found["name"] if found else ""
        if named != meant:
            raise RunFailed(
                f"{fault.id}: the doctor names {named or 'nothing'} first, not {meant or 'nothing'}"
            )

    # The hosts

    def _begin(self, fault: drills.Fault) -> drills.Lab:
        """The hosts; where there are none yet, fresh ones as they are after the cure: that is what
        the drills' own tests know to be good, and a fault also lays out what its lines need."""

        def work() -> None:
            self._start_lab(fault)
            self.lab.inject()
            self.lab.cure()
            self.lab.fixed = True

        if self.lab is None:
            self._tell("Starting the hosts.")
            self._patiently(work)
            self._view.where = self._where(self.lab.cluster)
        return self.lab

    def _start_lab(self, fault: drills.Fault) -> None:
        for other in list(_open):  # one set of hosts at a time
            if other is not self and not other.running:
                other.close()
        if self._why_local:
            self._local = clusters.start("local", fault.nodes)
        self.lab = drills.Lab(fault, cluster=self._local)
        _open.add(self)
        atexit.register(self._end_lab)

    def _end_lab(self) -> None:
        lab, self.lab = self.lab, None
        local, self._local = self._local, None
        _open.discard(self)
        atexit.unregister(self._end_lab)
        self._view.broken = False
        for one in (lab, local):
            if one is not None:
                one.close()

    def _patiently(self, work):
        """work(), which cannot be told to stop: where Stop is pressed, its hosts are ended. They
        are ended too where it fails, for nobody knows what it has left of them."""
        got: dict = {}

        def go() -> None:
            try:
                got["value"] = work()
            except BaseException as error:  # raised below, in the panel's own thread
                got["error"] = error

        thread = threading.Thread(target=go, daemon=True, name="scalelab-pits")
        thread.start()
        while thread.is_alive():
            if self._stop.is_set():
                self._end_lab()
                thread.join(TO_END)
                self._end_lab()  # where they were just being started
                raise Stopped("stopped")
            thread.join(TICK)
        if "error" in got:
            self._end_lab()
            raise got["error"]
        return got["value"]

    # The steps

    def _break(self, fault: drills.Fault) -> None:
        """On fresh hosts: a fault is put into a cluster once."""
        self._end_lab()
        self._tell("Starting the hosts.")
        self._patiently(lambda: self._start_lab(fault))
        self._view.where = self._where(self.lab.cluster)
        self._tell("Breaking it.")
        self._patiently(self.lab.inject)
        self._new_screens()
        self._view.broken = True
        self._tell(f"Broken. Press {'Doctor' if self._why_local else 'Run'}.")

    def _mend(self, fault: drills.Fault) -> None:
        if not self._view.broken:
            raise clusters.UsageError("nothing is broken: break it first")
        self._tell("Mending it.")
        self._patiently(self.lab.cure)
        self._new_screens()
        self._view.broken = False
        self._tell(f"Mended. Press {'Doctor' if self._why_local else 'Run'}.")

    def _close(self, fault: drills.Fault) -> None:
        self._end_lab()
        if len(self._plan) == 1:
            self._blank(f"The hosts are ended. {self._before_words()}")
        else:  # the whole story, for whoever sees only its end
            view, log = self._view, self._log
            view.symptom = f"Seen: {log['symptom']}" if log["symptom"] else ""
            view.passed, view.found, view.table = False, log["found"], self._table_then
            if log["passes"]:
                view.mended = f"Mended: exit code 0 everywhere, {log['passes_seconds']:.0f} s."
            self._tell("Done: broken, mended, and the hosts are ended.")

    def _job(self, fault: drills.Fault) -> None:
        """The job on the cluster as it is. RunFailed where it does what nobody expects."""
        self._begin(fault)
        self._new_screens()
        self._tell("Running.")
        tried = self._follow(self.lab, fault)
        view = self._view
        took = f"after {tried.seconds:.0f} s"
        view.passed = not view.broken and tried.passed
        if tried.seen:
            view.symptom = f"Seen: {tried.seen}"
        elif tried.passed:
            view.symptom = f"Every line has ended with exit code 0 {took}; nothing looks wrong."
        else:
            codes = ", ".join(f"{k} exit {v}" for k, v in tried.exits.items() if v is not None)
            view.symptom = f"The job has not passed {took} ({codes or 'no line has ended'})."
        key = "symptom" if view.broken else "passes"
        self._log[key] = tried.seen if view.broken else view.passed
        self._log[f"{key}_seconds"], self._log[f"{key}_exits"] = tried.seconds, tried.exits
        if view.passed:
            self._tell("Ended: the job passes.")
        elif not view.broken:
            raise RunFailed(f"Nothing is broken, but: {view.symptom}")
        elif tried.seen:
            self._tell(f"Ended {took}: the job does not do what it should. Press Doctor.")
        else:
            raise RunFailed(f"It is broken, but no symptom was seen in {tried.seconds:.0f} s.")

    def _follow(self, lab: drills.Lab, fault: drills.Fault) -> Tried:
        """One run of the job: to its end, or until its symptom is seen, or too late."""
        broken = self._view.broken
        limit = fault.within if broken else HEALTHY
        seen, at, due, asked = None, 0.0, 0.0, 0.0
        with lab.run(timeout=limit + 30) as run:
            while not run.wait(TICK):
                now = time.monotonic()
                if self._stop.is_set():
                    break
                if broken and seen is None and now >= asked:
                    seen, at, asked = fault.symptom(run), run.seconds, now + 0.2
                if seen and run.seconds > min(max(at, last_word(run)) + GRACE, at + LONGEST_GRACE):
                    break
                if run.seconds > limit and not seen:
                    break
                if now >= due:
                    self._read(run)
                    self._view.symptom = f"Seen: {seen}" if seen else ""
                    self._tell(f"Running: {run.seconds:.0f} s.")
                    due = time.monotonic() + max(REFRESH, 3 * (time.monotonic() - now))
            seconds, codes = run.seconds, dict(run.exits)
            seen = seen or fault.symptom(run)
        self._read(run, codes, seconds)
        if self._stop.is_set():
            raise Stopped("stopped while the job was running")
        return Tried(seen, {lab.node(i).name: code for i, code in codes.items()}, seconds)

    def _read(self, run, codes: dict | None = None, seconds: float = 0.0) -> None:
        """What every node has said so far. codes, seconds: as they were when we ended the rest."""
        for screen, index in zip(self._view.screens, sorted(run.lines)):
            screen.said = run.stamped(index)
            code = run.exits[index] if codes is None else codes[index]
            screen.code, screen.clock = code, ""
            if code is not None:
                screen.state = f"exit {code}"
            elif codes is not None:
                screen.state, screen.clock = "ended here", f" after {seconds:.0f} s"
            else:
                quiet = run.seconds - (screen.said[-1][0] if screen.said else 0.0)
                what = "silent for" if screen.said else "not a word for"
                screen.state, screen.clock = "running", f", {run.seconds:.0f} s"
                screen.clock += f"; {what} {quiet:.0f} s" if quiet > SILENCE else ""

    def _ask(self, fault: drills.Fault) -> None:
        """The doctor. What it says lifts the secret."""
        lab = self._begin(fault)
        self._tell("The doctor is at work.")
        if not self._view.screens:
            self._new_screens()
        first, table = self._patiently(
            lambda: examine(lab, fault, lambda words: self._tell(f"The doctor is {words}."))
        )
        view = self._view
        self._secret = view.secret = False
        view.title = self._title()
        view.found, view.table = first, table
        view.nothing = "nothing to mend."
        if view.broken and not fault.named:
            view.nothing += " What is wrong here is what the job does not do: no host shows it."
        self._tell("The doctor has spoken." + (" Press Mend." if view.broken else ""))

    def _new_screens(self) -> None:
        """The lines as they stand now, nothing said yet, and no verdict."""
        view, lab = self._view, self.lab
        lines = sorted(lab.lines().items())
        view.screens = [drawing.Screen(lab.node(i).name, line) for i, line in lines]
        view.symptom, view.passed, view.found, view.table, view.mended = "", False, "", "", ""


def last_word(run) -> float:
    """Seconds from the start of a LinesRun to the last line that any node has printed."""
    said = [run.stamped(index) for index in run.lines]
    return max((lines[-1][0] for lines in said if lines), default=0.0)


def examine(lab: drills.Lab, fault: drills.Fault, progress) -> tuple[dict | None, str]:
    """(first finding, table) of the doctor: of the cluster, or of the lines where those are what
    is wrong. The finding has name, node, status, detail and fix."""
    keys = ("name", "node", "status", "detail", "fix")
    if fault.by == "launch":
        from scalelab.doctor import launch

        text = "\n".join(f"{lab.node(i).name}: {line}" for i, line in sorted(lab.lines().items()))
        result = launch.read_launch(text, base_dir=str(lab.dir))
        first = next((c for c in result["checks"] if c["status"] in ("fail", "warn")), None)
        return first and {key: first[key] for key in keys}, launch.table(result)
    report = doctor.examine(lab.cluster, progress=progress, **lab.asks())
    first = report.first
    return first and {key: getattr(first, key) for key in keys}, report.table()
