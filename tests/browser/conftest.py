"""JupyterLab with a browser in front of it, both ended and forgotten after the tests.

The server gets a free port, a token, and folders of its own for settings, history and
notebooks, so that a test leaves nothing behind and sees no one's preferences.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Error, expect, sync_playwright

from labkit.workbook.normalise import METADATA

ROOT = Path(__file__).resolve().parents[2]
ARTIFACTS = ROOT / "test-artifacts" / "browser"

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REMEDY = (
    "no Chromium found, so notebooks are not driven in a browser; install it with "
    "`apt-get install chromium`, or your system's own way"
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

DEFAULTS = ROOT / ".ci" / "jupyter"
"""Settings that `make lab` gives JupyterLab: no pop-up covers the page."""

SETTINGS = {
    # Every cell is in the page, not only those in sight.
    "notebook-extension/tracker": {"windowingMode": "none"},
}

VIEWPORT = {"width": 1280, "height": 1000}

SECTIONS = """() => {
    const page = document.querySelector('.jp-NotebookPanel:not(.lm-mod-hidden)');
    const cells = [...page.querySelectorAll('.jp-Cell')];
    const heads = [...page.querySelectorAll('.jp-RenderedMarkdown h2')];
    window.sections = [cells[0], ...heads];
    const tops = window.sections.map(node => node.getBoundingClientRect().top);
    const end = cells.at(-1).getBoundingClientRect().bottom;
    return [...tops.slice(1), end].map((bottom, i) => bottom - tops[i]);
}"""
"""Finds where the sections of a notebook begin, and returns their heights."""

START_SECONDS = 60
RUN_SECONDS = 150


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running JupyterLab."""

    port: int
    token: str
    folder: Path
    """The notebooks it serves: copies, free to be changed."""

    def address(self, name):
        return f"http://127.0.0.1:{self.port}/lab/tree/{name}?token={self.token}&reset"


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Serve an empty folder; on leaving, no process of the server is left."""
    home = tmp_path_factory.mktemp("jupyter")
    folder = tmp_path_factory.mktemp("served") / "notebooks"
    folder.mkdir()
    write_settings(home / "settings")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    log = home / "lab.log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            command(port, token, folder),
            env=environment(home),
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    try:
        await_answer(process, port, token, log)
        yield Server(port=port, token=token, folder=folder)
    finally:
        end_with_children(process)


def command(port, token, folder):
    root = ["--allow-root"] if hasattr(os, "getuid") and os.getuid() == 0 else []
    return [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", *root),
        *(f"--port={port}", "--ServerApp.port_retries=0"),
        *(f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"),
        *("--ServerApp.terminals_enabled=False", "--LabApp.news_url=None"),
        "--LabApp.expose_app_in_browser=True",
    ]


def environment(home):
    folders = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
        "XDG_CACHE_HOME": "cache",
    }
    folders = {name: str(home / part) for name, part in folders.items()}
    return os.environ | folders | {"JUPYTER_CONFIG_PATH": str(DEFAULTS)}


def write_settings(folder):
    for name, values in SETTINGS.items():
        path = folder / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values), encoding="utf-8")


def await_answer(process, port, token, log):
    address = f"http://127.0.0.1:{port}/api/status?token={token}"
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            pytest.fail(f"JupyterLab ended at once:\n{log.read_text()}")
        try:
            urllib.request.urlopen(address, timeout=1).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    pytest.fail(f"JupyterLab gave no answer in {START_SECONDS} s:\n{log.read_text()}")


def end_with_children(process):
    """End the server; its kernels end with it, or are ended one by one."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
    _, alive = psutil.wait_procs(children, timeout=5)
    for child in alive:
        child.kill()
    assert not alive, f"the server left processes behind: {alive}"


@pytest.fixture(scope="session")
def chromium():
    """Start the system's Chromium, or skip."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(REMEDY)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        except Error as error:
            pytest.skip(f"{found} does not start ({str(error).splitlines()[0]})")
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def notebook_of():
    """Return a function that writes a notebook with a code cell for each source."""

    def write(path, *sources):
        cells = [new_code_cell(source) for source in sources]
        nbformat.write(new_notebook(cells=cells, metadata=METADATA), path)
        return path

    return write


@pytest.fixture
def open_notebook(chromium, server):
    """Return a function that opens a copy of a notebook; closes all of them later."""
    opened = []

    def open_(path, **context):
        shutil.copy(path, server.folder)
        page = chromium.new_context(viewport=VIEWPORT, **context).new_page()
        opened.append(Driver(page=page, name=path.stem))
        opened[-1].open(server.address(path.name))
        return opened[-1]

    yield open_
    for driver in opened:
        driver.close()


class Driver:
    """A notebook in a browser, and what a reader does with it."""

    def __init__(self, *, page, name):
        self.page, self.name = page, name
        self.errors = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    @property
    def panel(self):
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")

    def open(self, address):
        """Open the page and wait for the kernel: "idle" shows before it is attached."""
        self.page.goto(address)
        self.panel.locator(".jp-Notebook").wait_for(timeout=60_000)
        self.page.wait_for_function("window.jupyterapp !== undefined", timeout=60_000)
        self.do(
            """const app = window.jupyterapp;
            await app.restored;
            const panel = app.shell.currentWidget;
            await panel.context.ready;
            await panel.sessionContext.ready;
            app.shell.collapseLeft();"""
        )

    def do(self, script, argument=None, *, seconds=60):
        """Run asynchronous JavaScript in the page, for a bounded time."""
        return self.page.evaluate(
            f"""(argument) => Promise.race([
                (async () => {{ {script} }})(),
                new Promise((_, fail) => setTimeout(
                    () => fail(new Error("no answer in {seconds} s")), {seconds}000)),
            ])""",
            argument,
        )

    def stored_figures(self):
        """Return the alt texts of the figures that are on the page and have loaded."""
        return self.page.evaluate(
            """async () => {
                const found = [...document.querySelectorAll('.jp-Notebook figure img')];
                await Promise.all(found.map(image => image.decode()));
                return found.filter(image => image.naturalWidth > 0)
                    .map(image => image.alt);
            }"""
        )

    def start_all(self):
        """Start Run All and return at once."""
        self.page.evaluate(
            """() => {
                window.done = false;
                window.jupyterapp.commands.execute('notebook:run-all-cells')
                    .finally(() => { window.done = true; });
            }"""
        )

    def await_end(self, seconds=RUN_SECONDS):
        """Wait for Run All to end."""
        self.page.wait_for_function("window.done", timeout=seconds * 1000)

    def run_all(self, seconds=RUN_SECONDS):
        """Do Run All and wait for its end."""
        self.start_all()
        self.await_end(seconds)

    def cells(self):
        """Return (execution count, error) of every code cell that holds code."""
        return self.page.evaluate(
            """() => {
                const cells = window.jupyterapp.shell.currentWidget.content.widgets;
                return cells.filter(c => c.model.type === 'code')
                    .map(c => c.model.toJSON())
                    .filter(c => [c.source].flat().join('').trim())
                    .map(c => [c.execution_count, c.outputs.filter(
                        o => o.output_type === 'error').map(o => o.evalue).join()]);
            }"""
        )

    def run_code(self, source):
        """Type a new last cell and run it, as a reader would; return its output."""
        self.start_code(source)
        self.await_end()
        return self.panel.locator(".jp-Cell").last.locator(".jp-OutputArea-output").last

    def start_code(self, source):
        """Type a new last cell, start it and return at once."""
        self.do(
            """const app = window.jupyterapp;
            const notebook = app.shell.currentWidget.content;
            notebook.activeCellIndex = notebook.widgets.length - 1;
            await app.commands.execute('notebook:insert-cell-below');
            notebook.activeCell.model.sharedModel.setSource(argument);
            window.done = false;
            app.commands.execute('notebook:run-cell')
                .finally(() => { window.done = true; });""",
            source,
        )

    def change_by_keyboard(self, control):
        """Focus a control and change it: a slider by an arrow, others by Space."""
        control.scroll_into_view_if_needed()
        control.focus()
        key = "Space"
        if control.get_attribute("role") == "slider":
            now, end = (control.get_attribute(f"aria-value{x}") for x in ("now", "max"))
            key = "ArrowLeft" if now == end else "ArrowRight"
        self.page.keyboard.press(key)

    def screenshot(self, part, *, of):
        """Keep a picture of one part of the notebook, outside git; return its path."""
        of.scroll_into_view_if_needed()
        self.page.wait_for_timeout(300)  # images decode after they are inserted
        box, edge = of.bounding_box(), 4
        frame = {side: box[side] - edge for side in ("x", "y")}
        frame |= {side: box[side] + 2 * edge for side in ("width", "height")}
        path = self.artifact(part)
        self.page.screenshot(path=path, clip=frame)
        return path

    def screenshot_sections(self, part=""):
        """Keep a picture of each section of the notebook, outside git."""
        for old in ARTIFACTS.glob(f"{self.name}{part}-[0-9][0-9].png"):
            old.unlink()
        heights = self.page.evaluate(SECTIONS)
        room = int(max(heights)) + 300  # for the menus above and the edge below
        self.page.set_viewport_size({"width": VIEWPORT["width"], "height": room})
        self.page.wait_for_timeout(300)
        left = self.panel.bounding_box()["x"]
        for number, height in enumerate(heights):
            top = self.page.evaluate(
                """number => {
                    window.sections[number].scrollIntoView({block: "start"});
                    return window.sections[number].getBoundingClientRect().top;
                }""",
                number,
            )
            frame = {"x": left, "y": top, "width": VIEWPORT["width"] - left}
            self.page.screenshot(
                path=self.artifact(f"{part}-{number:02d}"),
                clip=frame | {"height": min(height, room - top)},
            )
        self.page.set_viewport_size(VIEWPORT)

    def artifact(self, part):
        """Return where a picture of this notebook is kept."""
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        return ARTIFACTS / f"{self.name}{part}.png"

    def close(self):
        """Shut the kernel down and close the page."""
        self.do("await window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        self.page.context.close()


__all__ = ["Driver", "expect"]
