"""Lesson 00 in a real JupyterLab, in a real browser, with the panel's buttons pressed; and the
bandwidth panel, in a notebook of its own.

Screenshots are written to build/screenshots, for a person to look at.
"""

import contextlib
import ctypes
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT / "build" / "screenshots"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
LESSON = "00_start_here.ipynb"
MARK = "SCALELAB_BROWSER_TEST"  # set in the server, so in all that comes from it

# Errors that JupyterLab's page always writes and that say nothing about the lesson. Each with why.
BENIGN = ()

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine"),
]


def end_with_me():
    """In the server, before it starts: it ends with this process, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def until(true, timeout, what):
    """Wait for `true()`, and return what it gave."""
    end = time.monotonic() + timeout
    while True:
        value = true()
        if value:
            return value
        assert time.monotonic() < end, f"not within {timeout} s: {what}"
        time.sleep(0.1)


class Server:
    """A JupyterLab on a copy of notebooks/, with directories of its own."""

    def __init__(self, home: Path):
        self.home, self.token, self.mark = home, secrets.token_hex(16), secrets.token_hex(8)
        self.folder = home / "notebooks"
        shutil.copytree(ROOT / "notebooks", self.folder)
        self.pristine = (self.folder / LESSON).read_bytes()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        settings = home / "config" / "labconfig"
        settings.mkdir(parents=True)
        (settings / "page_config.json").write_text(
            # It asks a server on the internet for news, and then the learner whether it may.
            json.dumps(
                {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
            )
        )
        (home / "config" / "jupyter_lab_config.py").write_text(
            "c.LabApp.expose_app_in_browser = True\n"
        )
        env = dict(
            os.environ,
            JUPYTER_CONFIG_DIR=str(home / "config"),
            JUPYTER_RUNTIME_DIR=str(home / "runtime"),
            JUPYTER_DATA_DIR=str(home / "data"),
            JUPYTERLAB_SETTINGS_DIR=str(home / "settings"),
            JUPYTERLAB_WORKSPACES_DIR=str(home / "workspaces"),
            IPYTHONDIR=str(home / "ipython"),
            SCALELAB_HOME=str(home / "scalelab"),
            PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            **{MARK: self.mark},
        )
        env.pop("PYTEST_CURRENT_TEST", None)
        self.log = open(home / "server.log", "wb")
        self.process = subprocess.Popen(
            # The program itself: the `jupyter lab` wrapper would be another process to end.
            [str(Path(sys.executable).parent / "jupyter-lab"), "--no-browser", "--allow-root"]
            + [f"--ServerApp.port={self.port}", "--ServerApp.port_retries=0"]
            + [f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.folder}"],
            env=env,
            cwd=self.folder,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
            preexec_fn=end_with_me,
        )
        until(self.answers, 60, "JupyterLab answers")

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def answers(self):
        assert self.process.poll() is None, (self.home / "server.log").read_text()[-2000:]
        with contextlib.suppress(OSError):
            return self.api("/api/status")

    def api(self, path, method="GET"):
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(self.url + path, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or b"null")

    def kernels(self):
        return [kernel["id"] for kernel in self.api("/api/kernels")]

    def running(self):
        """Process ids of all that came from this server, other than itself and its kernels."""
        mine = f"{MARK}={self.mark}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == self.process.pid:
                continue
            with contextlib.suppress(OSError):
                if mine in (entry / "environ").read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if words and "ipykernel_launcher" not in words:
                        found[int(entry.name)] = words
        return found

    def close(self):
        for kernel in self.kernels():
            self.api(f"/api/kernels/{kernel}", "DELETE")
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


class Page:
    """A browser page on one notebook, with everything that its console said."""

    def __init__(self, browser, server, notebook=LESSON, panel="scalelab-run-panel"):
        self.server, self.errors, self.console = server, [], []
        self.notebook, self.panel_class = notebook, panel
        self.page = browser.new_page(viewport={"width": 1280, "height": 1000})
        self.page.on("pageerror", lambda error: self.errors.append(f"exception: {error}"))
        self.page.on("console", self._heard)

    def _heard(self, message):
        line = f"{message.type}: {message.text} ({message.location.get('url', '')})"
        self.console.append(line)
        if message.type == "error" and not any(re.search(b, line) for b in BENIGN):
            self.errors.append(line)

    def open(self):
        self.page.goto(f"{self.server.url}/lab/tree/{self.notebook}?token={self.server.token}")
        self.ready()

    def ready(self):
        """Wait for the notebook and its kernel."""
        self.page.wait_for_function(
            """name => {
                const notebook = window.jupyterapp?.shell?.currentWidget;
                const kernel = notebook?.context?.sessionContext?.session?.kernel;
                return notebook?.context?.path === name && notebook.context.isReady
                    && kernel?.connectionStatus === 'connected'
                    && document.querySelectorAll('.jp-Notebook .jp-Cell').length > 0;
            }""",
            arg=self.notebook,  # the one that was open before may come up first
            timeout=90_000,
        )

    def command(self, name, wait=True, timeout=60):
        """Run a command of JupyterLab's. A dialog in its way is an error, and no endless wait."""
        self.page.evaluate(
            """name => {
                window.commandDone = false;
                window.jupyterapp.commands.execute(name).then(() => { window.commandDone = true; });
            }""",
            name,
        )
        if wait:
            dialog = self.page.locator(".jp-Dialog")

            def done():
                assert not dialog.count(), f"{name}: a dialog came up: {dialog.inner_text()}"
                return self.page.evaluate("() => window.commandDone")

            until(done, timeout, f"{name} is done")

    def trust(self):
        """File, Trust Notebook: as the lesson says, or a reload shows the panel's picture only."""
        self.command("notebook:trust", wait=False)
        self.page.locator(".jp-Dialog").get_by_role("button", name="Trust").click(timeout=20_000)
        until(lambda: self.page.evaluate("() => window.commandDone"), 30, "it is trusted")

    def cells(self):
        """[{source, outputs}] of the notebook's code cells, from JupyterLab's own model."""
        return self.page.evaluate(
            """() => window.jupyterapp.shell.currentWidget.content.model.toJSON().cells
                .filter(cell => cell.cell_type === 'code')"""
        )

    def show(self, text):
        """Scroll to the code cell that holds `text`: those far away are not on the page at all."""
        self.page.evaluate(
            """async text => {
                const content = window.jupyterapp.shell.currentWidget.content;
                const cells = content.model.toJSON().cells;
                const index = cells.findIndex(
                    c => c.cell_type === 'code' && [c.source].flat().join('').includes(text));
                content.activeCellIndex = index;
                await content.scrollToItem(index, 'start');
            }""",
            text,
        )

    @property
    def panel(self):
        return self.page.locator(f".{self.panel_class}").first

    def button(self, name):
        return self.panel.get_by_role("button", name=name)

    def status(self):
        return self.panel.locator(".scalelab-status").inner_text().strip()

    def step(self):
        """The step that the panel shows."""
        return int(re.search(r"step (\d+) of", self.panel.inner_text())[1])

    def picture(self):
        """The bytes of the curve that is on the screen, as one string."""
        return self.panel.locator("img.scalelab-curve, .scalelab-curve img").first.evaluate(
            """async image => {
                const bytes = new Uint8Array(await (await fetch(image.src)).arrayBuffer());
                const digest = await crypto.subtle.digest('SHA-256', bytes);
                return Array.from(new Uint8Array(digest)).join() + ':' + bytes.length;
            }"""
        )

    def moves(self, times=4, timeout=60):
        """Wait until the curve has changed `times` times while the step went up."""
        pictures, steps = [self.picture()], [self.step()]

        def changed():
            with contextlib.suppress(sync_api.Error):  # the image was replaced under our hands
                picture = self.picture()
                if picture != pictures[-1]:
                    pictures.append(picture)
                    steps.append(self.step())
            return len(pictures) > times and steps[-1] > steps[0]

        until(changed, timeout, f"{times} changes of the curve; seen {len(pictures) - 1}")

    def over(self, word, timeout=60):
        """Wait until Launch can be pressed again and the status holds `word`."""

        def seen():
            return self.button("Launch").is_enabled() and word.lower() in self.status().lower()

        until(seen, timeout, f"{word!r} in the status, which is {self.status()!r}")

    def fill(self, label, value):
        field = self.panel.get_by_label(label, exact=True)
        field.fill(str(value))
        field.press("Tab")

    def shot(self, name):
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(SHOTS / f"{name}.png"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("lab"))
    try:
        yield server
    finally:
        server.close()
        until(lambda: not server.running(), 20, f"all ended with the server: {server.running()}")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def lab(server, browser):
    """A page on the lesson as a fresh clone has it. Afterwards: no error, nothing left running."""
    (server.folder / LESSON).write_bytes(server.pristine)
    yield from page_on(server, Page(browser, server))


@pytest.fixture
def bandwidth(server, browser):
    """A page on a notebook that shows a bandwidth panel; afterwards as above."""
    name = "bandwidth.ipynb"
    cell = nbformat.v4.new_code_cell(
        "from scalelab.panels import BandwidthPanel\n"
        "panel = BandwidthPanel('1gbit', rate_b='200mbit', delay_b='5ms', sizes='4K:4M:4')\n"
        "panel"
    )
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata=kernel)
    nbformat.write(notebook, server.folder / name)
    yield from page_on(server, Page(browser, server, name, "scalelab-bandwidth-panel"))


def page_on(server, page):
    page.open()
    yield page
    page.page.close()
    for kernel in server.kernels():
        server.api(f"/api/kernels/{kernel}", "DELETE")
    until(lambda: not server.running(), 20, f"nothing left running: {server.running()}")
    assert page.errors == []


def run_up_to(lab, text):
    """Run the lesson's code cells up to the first that holds `text`, in a fresh kernel."""
    lab.show(text)
    lab.command("notebook:run-all-above")
    lab.command("notebook:run-cell")
    until(lambda: lab.panel.count(), 90, "the panel is on the page")
    lab.show(text)


def test_the_button_trains_on_two_hosts(lab, server):
    run_up_to(lab, "panel = RunPanel(")
    until(lambda: "Not started" in lab.status(), 30, "the panel waits for Launch")
    lab.shot("1-before-launch")
    with pytest.raises(AssertionError, match="changes of the curve; seen 0"):
        lab.moves(times=1, timeout=2)  # this check fails where nothing runs
    assert lab.button("Stop").is_disabled()

    lab.fill("steps", 5000)
    lab.button("Launch").click()
    until(lambda: lab.button("Launch").is_disabled(), 5, "Launch is closed while a run is on")
    lab.moves()
    assert server.running(), "a run has processes"
    lab.shot("2-running")
    for host in ("rank 0 on node0", "rank 1 on node1"):
        assert host in lab.panel.inner_text() or host in lab.panel.inner_html()

    lab.button("Stop").click()
    lab.over("Stopped")
    until(lambda: not server.running(), 20, "no process of the run is left")
    still = lab.picture()
    time.sleep(1.5)
    assert lab.picture() == still
    lab.shot("3-stopped")

    lab.fill("rate", "fast")
    lab.button("Launch").click()
    lab.over("fast")
    assert not server.running()
    lab.shot("4-bad-rate")
    lab.fill("rate", "1gbit")

    lab.trust()
    lab.button("Launch").click()
    lab.moves()
    lab.command("docmanager:save")
    lab.page.reload()
    lab.ready()
    lab.show("panel = RunPanel(")
    until(lambda: lab.panel.count(), 60, "the panel is back after the reload")
    until(lambda: lab.picture(), 30, "the curve is back")
    before = lab.step()
    lab.moves()
    assert lab.step() > before > 0, "the same run goes on"
    lab.shot("5-after-reload")

    lab.button("Stop").click()
    lab.over("Stopped")
    lab.fill("steps", 40)
    lab.button("Launch").click()
    lab.over("Succeeded")
    assert lab.step() == 40
    lab.panel.screenshot(path=str(SHOTS / "6-finished.png"))


def test_a_kernel_restart_in_mid_run_leaves_nothing(lab, server):
    run_up_to(lab, "panel = RunPanel(")
    lab.fill("steps", 5000)
    lab.button("Launch").click()
    lab.moves(times=2)
    assert server.running()
    (kernel,) = server.kernels()
    server.api(f"/api/kernels/{kernel}/restart", "POST")
    until(lambda: not server.running(), 20, "the run ended with its kernel")


def test_the_whole_lesson_runs(lab):
    lab.command("notebook:run-all-cells", wait=False)
    until(
        lambda: all(cell["execution_count"] for cell in lab.cells() if "".join(cell["source"])),
        170,
        "every cell has run",
    )
    wrong = [o for cell in lab.cells() for o in cell["outputs"] if o["output_type"] == "error"]
    assert wrong == []


def test_a_fresh_clone_shows_pictures(lab):
    """Nothing has run and the notebook is not trusted: the panel shows as an image."""
    lab.show("panel = RunPanel(")
    image = lab.page.locator(".jp-OutputArea-output img").first
    image.wait_for(timeout=20_000)
    assert image.evaluate("i => i.complete && i.naturalWidth") >= 700
    assert "Error displaying widget" not in lab.page.locator(".jp-Notebook").inner_text()
    lab.shot("7-fresh-clone")


def test_the_bandwidth_panel_measures_two_links_and_its_numbers_copy(bandwidth, server):
    lab = bandwidth
    run_up_to(lab, "BandwidthPanel(")
    lab.panel.screenshot(path=str(SHOTS / "8-bandwidth-empty.png"))

    rate = lab.panel.get_by_label("rate", exact=True).first
    rate.fill("fast")
    rate.press("Tab")
    hint = lab.panel.locator(".scalelab-hint")
    until(lambda: "link A: rate 'fast'" in hint.inner_text(), 10, "the bad rate is told at once")
    lab.panel.screenshot(path=str(SHOTS / "9-bandwidth-bad-rate.png"))
    rate.fill("1gbit")
    rate.press("Tab")
    until(lambda: not hint.is_visible(), 10, "the hint is gone")

    lab.button("Launch").click()
    until(lambda: "Link A (1 gbit, 0 ms): all-reduce" in lab.status(), 60, "link A is measured")
    lab.button("Stop").click()
    lab.over("Stopped")
    until(lambda: not server.running(), 20, "no process of the sweep is left")

    lab.button("Launch").click()
    until(lambda: "Link B" in lab.status(), 90, "link B comes after link A")
    lab.panel.screenshot(path=str(SHOTS / "10-bandwidth-one-link.png"))
    lab.over("Measured", 90)
    lab.panel.screenshot(path=str(SHOTS / "11-bandwidth-both-links.png"))

    # By hand: a click into the box, all selected, copied, and pasted into a field.
    box = lab.panel.locator(".scalelab-copy textarea")
    box.click()
    lab.page.keyboard.press("Control+a")
    selected = lab.page.evaluate(
        "() => { const t = document.activeElement;"
        " return t.value.slice(t.selectionStart, t.selectionEnd); }"
    )
    rows = [line.split("\t") for line in selected.split("\n\n")[0].split("\n")]
    assert len(rows) == 13 and "busbw_GBps" in rows[0] and {len(row) for row in rows} == {11}
    lab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    lab.page.keyboard.press("Control+c")
    assert lab.page.evaluate("() => navigator.clipboard.readText()") == selected
