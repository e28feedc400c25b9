"""The panel of pits: a fault put into emulated hosts, the job's lines typed on each, the doctor's
verdict, the cure, and the job once more."""

from __future__ import annotations

import random
from html import escape

import ipywidgets as w

from scalelab import cluster as clusters
from scalelab import drills
from scalelab.cluster.units import parse_rate
from scalelab.panels import pits_picture
from scalelab.panels import pits_view as drawing
from scalelab.panels.base import ROW, gently
from scalelab.panels.pits_work import READ, STORY, TO_END, PitsWork

WHICH = "?"  # in the list of faults: one of them, which the learner is to find


class PitsPanel(PitsWork):
    """A panel on the faults of `scalelab.drills`, beginning with the one of this `fault` id (or
    with the first of `pit`).

    Break it puts the fault into a cluster of emulated hosts; Run types the job's lines on all of
    them; Doctor examines the cluster, or reads the lines; Mend does what the doctor's fix says.
    Between presses the hosts stay up, as `panel.lab` (so `panel.lab.node(0).sh("ss -ltn")` looks
    around on one), until End hosts, another fault, or the kernel's end. Show the panel as the last
    line of a cell, or call `run()`, which does all of it and returns a dict. `cluster` is "auto",
    "virtual" or "local"; on local only launch lines can be read. Raises UsageError for a pit or a
    fault there is not.
    """

    def __init__(self, pit=None, fault=None, cluster="auto"):
        why = "This panel was asked for a local cluster." if cluster == "local" else ""
        super().__init__(cluster, why or (clusters.virtual_problem() if cluster == "auto" else ""))
        chosen = drills.by_id(fault) if fault else None
        pits = list(dict.fromkeys(f.pit for f in drills.FAULTS))
        if pit is not None and pit not in pits:
            raise clusters.UsageError(f"pit {pit!r}: use one of {', '.join(pits)}")
        if chosen and pit not in (None, chosen.pit):
            raise clusters.UsageError(f"fault {fault!r} is of the pit {chosen.pit}, not {pit}")
        self._plan: tuple[str, ...] = ("job",)
        self._drawn = None  # what the picture on show was made from
        self._view: drawing.View = drawing.View()
        self._build(pits)
        self._pit.value = chosen.pit if chosen else pit or pits[0]
        self._list_faults(chosen.id if chosen else None)

    def __repr__(self) -> str:
        return f"PitsPanel: {self._view.title}"

    # What a notebook calls

    def launch(self) -> None:
        """Run the job on the cluster as it is."""
        self.press("job")

    def press(self, *steps: str) -> None:
        """Do one or more of break, job, ask (the doctor), mend, close, in a thread."""
        if not self.running:
            self._plan = steps
            super().launch()

    def run(self) -> dict:
        """Break, run until the symptom is seen, ask the doctor, mend, run until it passes, and end
        the hosts. Where there are no emulated hosts, the lines are read, wrong and right.

        Raises RunFailed if the symptom is not seen, the doctor names something else, or the job
        does not pass in the end; ClusterError if the fault cannot be had here.
        """
        try:
            self.wait()
            why = self._why_not()
            if why:
                raise clusters.ClusterError(why)
            self.press(*(READ if self._why_local else STORY))
            self.wait()
        except BaseException:  # the learner interrupts the cell
            self.stop()
            self.wait(30)
            raise
        if self._error is not None:
            raise self._error
        return dict(self._log)

    def close(self) -> None:
        """End the hosts, and what is on."""
        self.stop()
        self.wait(TO_END)
        self._end_lab()
        self._busy(False)

    def _picture(self) -> bytes:
        return pits_picture.picture(self._view)

    # The view and the widgets

    def _why_not(self) -> str:
        """Why the chosen fault cannot be had here; "" where it can."""
        if self._why_local and self._fault.by != "launch":
            return f"This fault needs emulated hosts. {self._why_local}"
        return self._fault.unless()

    def _before_words(self) -> str:
        why = self._not_here
        return f"Not here: {why}" if why else "Press Break it."

    def _before(self) -> str:
        if self._why_local:
            return (f"Cluster: local. {self._why_local} So no job can be run on several hosts; "
                    "faults of launch lines are found by reading them.")  # fmt: skip
        return super()._before()

    def _title(self) -> str:
        if self._secret:
            return f"Which is it? A fault of the pit: {self._fault.pit}"
        return f"{self._fault.pit}: {self._fault.title}"

    def _list_faults(self, chosen: str | None = None) -> None:
        """The faults of the chosen pit, by their titles."""
        mine = [f for f in drills.FAULTS if f.pit == self._pit.value]
        options = [(f.title, f.id) for f in mine]
        if len(mine) > 1:
            options.append(("Which is it? (one of these, unnamed)", WHICH))
        self._listing = True
        self._which.options = options
        self._which.value = chosen or mine[0].id
        self._listing = False
        self._choose()

    def _choose(self) -> None:
        """Another fault: a cluster of its own, not broken yet."""
        if self._listing:
            return
        mine = [f for f in drills.FAULTS if f.pit == self._pit.value]
        self._secret = self._which.value == WHICH
        if self._secret:
            random.shuffle(mine)
            self._fault = mine[0]
            for self._fault in mine:
                if not self._why_not():
                    break
        else:
            self._fault = drills.by_id(self._which.value)
        self._not_here = self._why_not()
        if self.lab is not None and not self.running:
            return self.press("close")
        self._blank(f"Not broken. {self._before_words()}")
        self._busy(self.running)
        self._show()

    def _blank(self, status: str) -> None:
        """The view before anything was done."""
        self._view = drawing.View(
            title=self._title(),
            status=status,
            where=self._before(),
            kind="local" if self._why_local else "virtual",
            hint=drawing.HINTS.get(self._fault.id),
            secret=self._secret,
        )

    def _hosts(self) -> list:
        """The boxes of the picture: what the cluster says of itself, or what it will be."""
        lab, asked = self.lab, self._fault.cluster
        if lab is None or not lab.cluster.nodes:
            rate, mtu = parse_rate(asked.get("rate")), int(asked.get("mtu", 1500))
            return [
                drawing.Host(f"node{i}", rate=rate, mtu=mtu) for i in range(self._fault.nodes)
            ]  # fmt: skip
        hosts = []
        for node in lab.cluster.nodes:
            host = drawing.Host(node.name, node.addr)
            if node.nics:
                link = lab.cluster.links[node.nics[0]["port"]]
                host.nic, host.rate, host.mtu = node.nics[0]["nic"], link.rate, link.mtu
            hosts.append(host)
        return hosts

    def _build(self, pits: list) -> None:
        wide = w.Layout(width="640px", max_width="100%")
        self._pit = w.Dropdown(
            options=[(f"{i}. {pit}", pit) for i, pit in enumerate(pits, 1)], description="pit"
        )
        self._which = w.Dropdown(description="fault", layout=wide)
        for one in (self._pit, self._which):
            one.style.description_width = "40px"
        self._pit.observe(lambda _: self._list_faults(), names="value")
        self._which.observe(lambda _: self._choose(), names="value")
        self._fields, self._links = (self._pit, self._which), ()
        small = {"width": "110px"}

        def button(text, icon, step, style=""):
            one = w.Button(
                description=text, icon=icon, button_style=style, layout=w.Layout(**small)
            )
            one.on_click(lambda _: self.press(step))
            return one

        self._break_button = button("Break it", "bolt", "break", "danger")
        self._doctor_button = button("Doctor", "stethoscope", "ask")
        self._mend_button = button("Mend", "wrench", "mend", "success")
        self._close_button = button("End hosts", "power-off", "close")
        self._launch_button.description = "Run"
        self._buttons = w.HBox(
            [self._break_button, self._launch_button, self._doctor_button, self._mend_button,
             self._stop_button, self._close_button],
            layout=w.Layout(**ROW),
        )  # fmt: skip
        self._screens = w.HBox(layout=w.Layout(width="100%", align_items="flex-start"))
        self._symptom, self._verdict = w.HTML(), w.HTML(layout=w.Layout(width="100%"))
        self._symptom.add_class("scalelab-symptom")
        self._verdict.add_class("scalelab-verdict")
        self._screens.add_class("scalelab-screens")
        self.box = w.VBox(
            [self._pit, self._which, self._buttons, self._status, self._place, self._image,
             self._screens, self._symptom, self._verdict]
        )  # fmt: skip
        self.box.add_class("scalelab-pits-panel")

    def _busy(self, on: bool) -> None:
        super()._busy(on)
        can, broken = not self._not_here, self._view.broken
        self._break_button.disabled = on or broken or not can
        self._launch_button.disabled = self._doctor_button.disabled = on or not can
        self._mend_button.disabled = on or not broken or not can
        self._close_button.disabled = on or self.lab is None
        for one in (self._break_button, self._doctor_button, self._mend_button,
                    self._stop_button, self._close_button):  # fmt: skip
            one.layout.display = "" if can else "none"
        runs = can and not self._why_local
        self._launch_button.layout.display = "" if runs else "none"

    def _tell(self, status: str) -> None:
        self._view.status = status
        self._show()

    def _show(self) -> None:
        """Send the view to the browser."""
        view = self._view
        if self.lab or not view.screens:  # else they are ended, and drawn as they were
            view.hosts = self._hosts()
        self._say(view.status)
        told = self._which.value == WHICH  # else the title is in the list of faults, above
        title = f"<b>{escape(view.title)}</b><br>" if told else ""
        self._place.value = f"{title}<span>{escape(view.where)}</span>"
        if len(self._screens.children) != len(view.screens):
            self._screens.children = [
                w.HTML(layout=w.Layout(flex="1 1 0", min_width="0", margin="0 8px 0 0"))
                for _ in view.screens
            ]
        for one, screen in zip(self._screens.children, view.screens):
            one.value = drawing.screen_html(screen)
        self._symptom.value = drawing.symptom_html(view)
        self._verdict.value = drawing.verdict_html(view)
        states = [(s.name, s.state) for s in view.screens]
        drawn = (view.kind, repr(view.hosts), view.drawn, repr(states))
        if drawn != self._drawn:  # a picture takes longer than all the rest
            self._drawn = drawn
            self._image.value = gently(pits_picture.cluster, view)
