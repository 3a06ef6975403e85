"""nbval with the repairs: what is sick fails, in seconds; what is well passes."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

ROOT = Path(__file__).resolve().parents[2]

COMMAND = [
    *(sys.executable, "-m", "pytest", "-q", "-rA", "--color=no"),
    *("-c", "pyproject.toml", "-p", "no:cacheprovider", "-p", "late_output"),
    *("--nbval", "--nbval-current-env", "--nbval-cell-timeout=60"),
    "--nbval-sanitize-with=tests/notebooks/sanitize.cfg",
    # The folder is named so that its conftest is loaded; its tests are left out.
    *("--ignore-glob=**/test_*.py", "tests/notebooks"),
]
"""What runs the book (see conftest.py), on other notebooks."""

LATE_OUTPUT = '''
"""Makes the first message with output of every cell come seven seconds late."""

import time
from nbval.plugin import IPyNbFile

get = IPyNbFile.get_kernel_message

def late(self, timeout=None, stream="iopub"):
    if "late" in self.path.name and not getattr(self, "has_waited", False):
        self.has_waited = True
        if timeout < 7:
            from queue import Empty
            raise Empty
    return get(self, timeout=timeout, stream=stream)

IPyNbFile.get_kernel_message = late
'''

CAPTURE = """import ipywidgets
out = ipywidgets.Output()
with out:
    print("inside the widget")
print("outside")"""


def executed(*sources, text=None):
    """Return cells that look executed, with `text` as their output on stdout."""
    outputs = [] if text is None else [new_output("stream", name="stdout", text=text)]
    return [
        new_code_cell(source, execution_count=number, outputs=outputs)
        for number, source in enumerate(sources, start=1)
    ]


SICK_AND_WELL = {
    "never_executed": [new_code_cell("print('hello')")],
    "wrong_output": executed("print(41 + 1)", text="41\n"),
    "wrong_alt_text": executed(
        "from IPython.display import HTML, display\n"
        'display(HTML(\'<img alt="new" src="data:image/png;base64,AA==">\'))'
    ),
    "missing_output": executed("6 * 7"),
    "raises": executed("1 / 0"),
    "dead_kernel": executed("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
    "well_captured": executed(CAPTURE, text="outside\n"),
    "well_late": executed("print('hello')", text="hello\n"),
    "well_warning": [
        new_code_cell(
            "import warnings; warnings.warn('careful')",
            execution_count=1,
            outputs=[
                new_output(
                    "stream",
                    name="stderr",
                    text="/tmp/ipykernel/cell.py:1: UserWarning: careful\n"
                    "  import warnings; warnings.warn('careful')\n",
                )
            ],
        )
    ],
}
SICK_AND_WELL["wrong_alt_text"][0].outputs = [
    new_output(
        "display_data",
        data={
            "text/plain": "<IPython.core.display.HTML object>",
            "text/html": '<img alt="old" src="data:image/png;base64,BB==">',
        },
    )
]


@pytest.fixture(scope="module")
def result(sample, tmp_path_factory):
    """Run nbval once over all planted notebooks; return its text and seconds."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "late_output.py").write_text(LATE_OUTPUT)
    for name, cells in SICK_AND_WELL.items():
        nbformat.write(new_notebook(cells=cells), folder / f"{name}.ipynb")
    paths = [str(folder / f"{name}.ipynb") for name in SICK_AND_WELL]
    start = time.monotonic()
    done = subprocess.run(
        [*COMMAND, f"--rootdir={folder.parent}", *paths, str(sample)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    return done.stdout + done.stderr, time.monotonic() - start


def verdicts(text, name):
    """Return how the cells of a notebook went, from pytest's summary."""
    return re.findall(rf"^(PASSED|FAILED|ERROR|XFAIL) \S*{name}\S*", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("never_executed", "this cell was never executed: make notebooks"),
        ("wrong_output", "Cell outputs differ"),
        ("wrong_alt_text", 'alt="new"'),
        ("missing_output", "Unexpected output fields from running code"),
        ("raises", "ZeroDivisionError"),
        ("dead_kernel", "the kernel died in this cell"),
    ],
)
def test_a_sick_notebook_fails_and_says_why(result, name, says):
    text, _ = result

    assert verdicts(text, name) == ["FAILED"]
    assert says in text


@pytest.mark.parametrize("name", ["well_captured", "well_late", "well_warning"])
def test_a_healthy_notebook_passes(result, name):
    text, _ = result

    assert verdicts(text, name) == ["PASSED"], text


def test_a_whole_notebook_of_the_book_compares_equal(result):
    text, _ = result
    cells = verdicts(text, "06_attention_and_cache")

    assert cells.count("PASSED") == len(cells) >= 20


def test_a_dead_kernel_does_not_wait_for_the_end_of_its_time(result):
    _, seconds = result

    assert seconds < 60
