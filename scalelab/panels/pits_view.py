"""What the panel of pits shows, as plain data and as HTML: the cluster, each node's screen, the
doctor's verdict. What a fault is and does is known to scalelab.drills; here is only where in the
picture it sits, and in which words. pits_picture.py draws it.

Nothing here knows widgets, threads or clusters: see live.py, of which this is a sibling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

BROKEN, WELL, GREY, INK = "#B00020", "#00704A", "0.45", "0.15"
SCROLL = 200  # last lines of a node's output that the page keeps
ALL = None  # every host


@dataclass(frozen=True)
class Hint:
    """Where a fault is drawn. part: a row of a host's box (name, nic, firewall, settings, memory,
    port, line, script), "link", "switch", "join" (of a host to the shared disk), "own disk" or
    "shared disk"; hosts: whose, by index."""

    part: str
    words: str
    hosts: tuple[int, ...] | None = ALL


HINTS = {
    "data-on-one-host": Hint("join", "data/ is not there", (1,)),
    "fewer-files": Hint("own disk", "data/ is its own copy: 5 of 8 files", (1,)),
    "listing-order": Hint("own disk", "data/ is its own copy, in an order of its own"),
    "checkpoint-on-own-disk": Hint("own disk", "checkpoints/ is its own", (1,)),
    "read-only": Hint("join", "checkpoints/: may only read", (0,)),
    "another-uid": Hint("shared disk", "checkpoints/ belongs to another uid"),
    "small-shm": Hint("memory", "/dev/shm holds 8 MB", (1,)),
    "name-is-loopback": Hint("name", "own name means 127.0.1.1"),
    "name-unknown": Hint("name", "does not know its own name", (1,)),
    "name-falls-back": Hint("name", "own name unknown: loopback instead"),
    "endpoint-alias": Hint("name", "called head-ib: not known as itself", (0,)),
    "wrong-interface": Hint("nic", "told to use enp5s0: not there", (1,)),
    "behind-a-bridge": Hint("name", "own name means docker0, 172.17.0.2"),
    "rendezvous-port-closed": Hint("firewall", "firewall drops port 29400", (0,)),
    "only-rendezvous-port": Hint("firewall", "firewall: only port 29400 comes in"),
    "mtu-black-hole": Hint("switch", "a port carries 1500 bytes, hosts send 9000"),
    "slow-link": Hint("link", "a tenth of its rate", (1,)),
    "another-version": Hint("settings", "a package is older than node0's", (1,)),
    "another-setting": Hint("settings", "ATEN_CPU_CAPABILITY=default", (1,)),
    "two-nodes-zero": Hint("line", "told: node rank 0, like the other"),
    "node-rank-from-one": Hint("line", "told: node rank 2 of 2", (1,)),
    "nnodes-disagree": Hint("line", "told: 3 nodes", (1,)),
    "nproc-disagree": Hint("line", "told: 2 ranks, node0 has 1", (1,)),
    "address-without-endpoint": Hint("line", "told no endpoint, which c10d reads"),
    "two-ids": Hint("line", "told an id that the other is not"),
    "localhost-everywhere": Hint("line", "told: the rendezvous is here"),
    "port-taken": Hint("port", "port 29500: another program's", (0,)),
    "ephemeral-port": Hint("port", "port 40000: given to a connection", (0,)),
    "address-in-script": Hint("script", "script: rendezvous at 127.0.0.1"),
    "set-epoch-forgotten": Hint("script", "script: sampler.set_epoch is missing"),
    "no-checkpoint": Hint("shared disk", "checkpoints/ stays empty"),
}  # fmt: skip


@dataclass
class Host:
    """One box. addr: "" before it is started. rate: bits/s of its link, None where nothing limits
    it; mtu: bytes."""

    name: str
    addr: str = ""
    nic: str = "eth0"
    rate: float | None = None
    mtu: int = 1500


@dataclass
class Screen:
    """One node's: the line that is typed, what came of it (seconds, text), its state ("running",
    "exit 1", "ended here") and what its clock says."""

    name: str
    line: str = ""
    said: list = field(default_factory=list)
    state: str = ""
    clock: str = ""
    code: int | None = None  # its exit code; None while it runs, and where we ended it


@dataclass
class View:
    """One moment of the panel. hint: of the chosen fault; it is drawn while `broken`, unless the
    learner is to find it. found: the doctor's first finding (name, node, status, detail, fix), ""
    before it was asked, None where it has nothing to say."""

    title: str = ""
    status: str = ""
    where: str = ""
    failed: bool = False
    kind: str = "virtual"
    hosts: list = field(default_factory=list)
    hint: Hint | None = None
    broken: bool = False
    secret: bool = False
    screens: list = field(default_factory=list)
    symptom: str = ""
    passed: bool = False  # the symptom line tells of a job that ended as it should
    found: dict | str | None = ""
    nothing: str = ""  # what to say where `found` is None
    table: str = ""
    mended: str = ""  # how the job went in the end, once all is told

    @property
    def drawn(self) -> Hint | None:
        """What is drawn broken now."""
        return self.hint if self.broken and not self.secret else None

    def hit(self, part: str, index: int | None = None) -> str:
        """The words of what is broken in this part (of this host); "" where nothing is."""
        hint = self.drawn
        if hint is None or hint.part != part:
            return ""
        return hint.words if index is None or hint.hosts is ALL or index in hint.hosts else ""


def state_colour(screen: Screen) -> str:
    if screen.code is None:
        return INK
    return BROKEN if screen.code else WELL


def verdict_lines(view: View) -> list[tuple[str, str]]:
    """The doctor's first finding in words, each with its colour."""
    if view.found == "":
        return []
    mended = [(view.mended, WELL)] if view.mended else []
    if view.found is None:
        lines = [(f"Doctor: {view.nothing}", INK if view.broken or view.mended else WELL)]
        return lines + mended
    found = view.found
    where = f" ({found['node']})" if found["node"] else ""
    lines = [(f"Doctor: {found['name']}{where}: {found['detail']}", BROKEN)]
    return lines + ([(f"fix: {found['fix']}", INK)] if found["fix"] else []) + mended


# The same in the page


def screen_html(screen: Screen) -> str:
    """A node's screen: the line as typed, and what came of it with seconds, scrolled to its end."""
    colour = {INK: "inherit", BROKEN: "var(--jp-error-color0,#b00020)"}.get(
        state_colour(screen), "var(--jp-success-color0,#00704a)"
    )
    said = screen.said[-SCROLL:]
    body = "\n".join(f"{at:6.1f} s  {text[:500]}" for at, text in said)
    pre = (
        "margin:0;white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere;"
        "line-height:1.35;font-size:11px"
    )
    return (
        f"<div><b>{escape(screen.name)}</b> "
        f'<span style="color:{colour}">{escape(screen.state + screen.clock)}</span></div>'
        f'<pre style="{pre};font-weight:600">{escape(screen.name)}$ {escape(screen.line)}</pre>'
        '<div style="height:18em;overflow:auto;display:flex;flex-direction:column-reverse;'
        'border:1px solid var(--jp-border-color2,#ccc)">'
        f'<pre style="{pre};flex:none;margin:0 0 auto;padding:4px">{escape(body)}</pre></div>'
    )


def symptom_html(view: View) -> str:
    if not view.symptom:
        return ""
    colour = "--jp-success-color0,#00704a" if view.passed else "--jp-error-color0,#b00020"
    return f'<div style="color:var({colour});font-weight:600">{escape(view.symptom)}</div>'


def verdict_html(view: View) -> str:
    """The doctor's first finding, large, and all of its table below."""
    if view.found == "":
        return ""
    colours = {BROKEN: "var(--jp-error-color0,#b00020)", WELL: "var(--jp-success-color0,#00704a)"}
    lines = "".join(
        f'<div style="font-size:1.25em;line-height:1.4;color:{colours.get(colour, "inherit")}">'
        f"{escape(text)}</div>"
        for text, colour in verdict_lines(view)
    )
    return (
        f'{lines}<pre style="font-size:11px;line-height:1.35;overflow:auto;max-height:24em;'
        f'margin:4px 0">{escape(view.table)}</pre>'
    )
