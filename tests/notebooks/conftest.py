"""Repairs to nbval 0.11, and a small notebook of the book to test the machinery on.

The notebooks are run with this file loaded:

    pytest --nbval --nbval-current-env --nbval-cell-timeout=180 \
        --nbval-sanitize-with=tests/notebooks/sanitize.cfg \
        tests/notebooks notebooks/*.ipynb

Without the repairs a cell that was never executed passes, a dead kernel is waited for
until the cell's time is up, output that is five seconds late fails, and output that an
Output widget has captured is compared as if the cell had shown it.
"""

import time
from pathlib import Path
from queue import Empty

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell

ROOT = Path(__file__).resolve().parents[2]

OUTPUT_SECONDS = 60
"""How late output may be after a cell has ended: the machine may be busy."""

ALIVE_SECONDS = 2
"""How often to look whether the kernel still lives."""

SHOWN = {"stream", "display_data", "execute_result", "error", "clear_output"}
"""Messages with output; an Output widget takes them out of the cell."""


def pytest_configure():
    RunningKernel.get_message = without_captured_output(RunningKernel.get_message)
    RunningKernel.await_reply = await_reply_of_a_living_kernel
    IPyNbCell.runtest = run_if_stored_output_exists(IPyNbCell.runtest)


def without_captured_output(get_message):
    """Leave out output that an Output widget shows, as JupyterLab and nbclient do."""

    def get(self, stream, timeout=None):
        while True:
            message = get_message(self, stream, timeout=timeout)
            if stream != "iopub" or not is_captured(self, message):
                return message

    return get


def is_captured(kernel, message):
    """Tell whether an Output widget takes the message; remember what they take."""
    # msg_id that each Output widget captures, by the widget's comm
    taken = kernel.__dict__.setdefault("captured_by_widget", {})
    kind, content = message["msg_type"], message["content"]
    state = content.get("data", {}).get("state", {}) if "comm" in kind else {}
    if kind == "comm_open" and state.get("_model_name") == "OutputModel":
        taken[content["comm_id"]] = state.get("msg_id", "")
    elif kind == "comm_msg" and content["comm_id"] in taken and "msg_id" in state:
        taken[content["comm_id"]] = state["msg_id"]
    parent = message["parent_header"].get("msg_id")
    return kind in SHOWN and parent in {name for name in taken.values() if name}


def await_reply_of_a_living_kernel(self, msg_id, timeout=None):
    """Wait for the reply, but not for that of a kernel that has died."""
    end = time.monotonic() + (1e9 if timeout is None else timeout)
    while True:
        left = end - time.monotonic()
        try:
            message = self.get_message(
                "shell", timeout=min(ALIVE_SECONDS, max(left, 0))
            )
        except Empty:
            if not self.is_alive():
                text = "the kernel died in this cell (out of memory?)"
                raise RuntimeError(text) from None
            if left <= 0:
                raise
            continue
        if message["parent_header"].get("msg_id") == msg_id:
            if message["content"]["status"] == "aborted":
                raise RuntimeError("the kernel aborted the execution of this cell")
            return


def run_if_stored_output_exists(runtest):
    """Fail a cell that was never executed: there is nothing to compare with."""

    def run(self):
        self.output_timeout = OUTPUT_SECONDS
        has_code = bool(self.cell.source.strip())
        if has_code and self.cell.execution_count is None and not self.options["skip"]:
            pytest.fail("this cell was never executed: make notebooks", pytrace=False)
        runtest(self)

    return run


HEADER = """# 06 Attention and cache

**Question.** What does a past token cost?

**Minutes.** 30 · **Needs.** 01"""

SETUP = """from labkit.config import PRESETS
from labkit.workbook import exercise, figures, lab, widgets"""

GUESS = 'guess = lab.guess("bytes that one token keeps", unit="bytes")'

REVEAL = 'lab.reveal(guess, PRESETS["v3-671b"].kv_bytes_per_token())'

EXPLORE = """def draw(rank):
    parts = [figures.Part(name="latent", amount=rank, meaning="cache")]
    return figures.bars(parts, title="The latent is the cache", x="values per token")

def describe(rank):
    return f"a latent of {rank} keeps {rank + 64} values per token and layer"

widgets.explore(draw, describe, caption="Move the rank.",
                rank=widgets.slider("latent rank", (64, 1024), value=512, step=64))"""

FIGURE = """parts = [figures.Part(name="MLA", amount=70272, meaning="cache"),
         figures.Part(name="MHA", amount=4997120, meaning="cache")]
fig = figures.bars(parts, title="71 times fewer bytes", x="bytes per token")
figures.figure(fig, alt="MLA keeps 70,272 bytes, MHA 4,997,120", caption="BF16.",
               measured="3.2 ms")"""


def sample_cells():
    """Return the cells of a notebook that has what a notebook of the book must have."""
    from labkit.workbook.exercises import exercises_of

    cells = [
        new_markdown_cell(HEADER),
        new_code_cell(SETUP),
        new_code_cell(GUESS),
        new_code_cell(REVEAL),
        new_code_cell(EXPLORE),
        new_code_cell(FIGURE),
        new_code_cell('lab.measured("one product", "81 GFLOP/s")'),
        new_markdown_cell("## Exercises"),
    ]
    for number, spec in enumerate(exercises_of("n06_attention_and_cache")):
        stub = spec.stub
        name = stub.split("(")[0].removeprefix("def ") if "def " in stub else stub
        cells += [
            new_code_cell(f'ex{number} = exercise("{spec.name}")'),
            new_code_cell(stub),
            new_code_cell(f"ex{number}.check({name.split(' =')[0]})"),
        ]
    closing = ["## What is really true", "## Next"]
    return cells + [new_markdown_cell(text) for text in closing]


@pytest.fixture(scope="session")
def sample(tmp_path_factory):
    """Return the path of a small notebook, executed and stored once."""
    from labkit.workbook.runner import execute, save

    path = tmp_path_factory.mktemp("book") / "06_attention_and_cache.ipynb"
    nbformat.write(new_notebook(cells=sample_cells()), path)
    run = execute(path)
    assert run.error == ""
    save(run)
    return path


@pytest.fixture
def planted(sample, tmp_path):
    """Return a function that stores the sample with one thing changed."""

    def plant(change, name=sample.name):
        notebook = nbformat.read(sample, as_version=4)
        change(notebook)
        path = tmp_path / name
        path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
        return path

    return plant
