import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit import __main__ as entry
from labkit.commands import notebooks

HEADER = "# {} Title\n\n**Question.** Why?\n\n**Minutes.** 20 · **Needs.** nothing"

MARKS = ("<!-- notebooks -->", "<!-- end of notebooks -->")


@pytest.fixture
def book(tmp_path, monkeypatch) -> Path:
    """A book of two notebooks, the second of which fails."""
    for name, source in {"00_good": "6 * 7", "01_bad": "1 / 0"}.items():
        cells = [new_markdown_cell(HEADER.format(name[:2])), new_code_cell(source)]
        nbformat.write(new_notebook(cells=cells), tmp_path / f"{name}.ipynb")
    paths = sorted(tmp_path.glob("*.ipynb"))
    (tmp_path / "README.md").write_text(f"{MARKS[0]}\nold\n{MARKS[1]}\n")
    monkeypatch.setattr(notebooks, "list_notebooks", lambda: paths)
    monkeypatch.setattr(notebooks, "table_markdown", lambda: "the new table")
    monkeypatch.setattr(notebooks, "README", tmp_path / "README.md")
    return tmp_path


def test_the_list_shows_number_title_minutes_and_question(book, capsys):
    assert entry.main(["notebooks"]) == 0

    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["00", "Title", "20", "min", "Why?"]
    assert second.split() == ["01", "Title", "20", "min", "Why?"]


def test_executing_stores_the_outputs_and_leaves_what_failed(book, capsys):
    before = (book / "01_bad.ipynb").read_bytes()

    assert entry.main(["notebooks", "--execute"]) == 1
    good, bad = capsys.readouterr().out.splitlines()
    assert good.endswith("s  stored")
    assert bad.endswith("FAILED  01_bad.ipynb: ZeroDivisionError: division by zero")
    cell = json.loads((book / "00_good.ipynb").read_text())["cells"][1]
    assert cell["outputs"][0]["data"]["text/plain"] == ["42"]
    assert (book / "01_bad.ipynb").read_bytes() == before
    assert "\nthe new table\n" in (book / "README.md").read_text()


def test_the_table_of_a_readme_is_written_between_its_marks(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{MARKS[0]}\n| a |\n| b |\n{MARKS[1]}\nbelow\n")
    notebooks.refresh_table(readme, "| \\1 |")

    assert readme.read_text() == f"above\n{MARKS[0]}\n| \\1 |\n{MARKS[1]}\nbelow\n"


def test_a_readme_without_marks_is_refused(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("no marks\n")

    with pytest.raises(ValueError) as caught:
        notebooks.refresh_table(readme, "| a |")
    assert str(caught.value) == (
        "the table of notebooks stands between '<!-- notebooks -->' and "
        "'<!-- end of notebooks -->'; README.md has 0 such places. Put the two marks "
        "on lines of their own, once."
    )


def test_only_the_named_notebooks_are_chosen(book):
    paths = notebooks.list_notebooks()

    assert notebooks.choose(paths, ["01"]) == [book / "01_bad.ipynb"]
    assert notebooks.choose(paths, []) == paths


def test_an_unknown_number_is_answered_with_the_known_ones(book, capsys):
    assert entry.main(["notebooks", "--execute", "07"]) == 2
    assert capsys.readouterr().err == (
        "labkit notebooks: a notebook is named by its number, one of 00, 01; got '07'. "
        "Give one of these.\n"
    )


def test_testing_compares_the_whole_book_or_nothing(book, capsys):
    assert entry.main(["notebooks", "--test", "00"]) == 2
    assert capsys.readouterr().err == (
        "labkit notebooks: --test compares all notebooks; got 00. Leave the numbers "
        "out.\n"
    )


@pytest.mark.parametrize("others", [[], ["--list"], ["--test"]])
def test_fresh_outputs_need_executing(book, capsys, others):
    assert entry.main(["notebooks", "--fresh", *others]) == 2
    assert capsys.readouterr().err == (
        "labkit notebooks: --fresh says how to execute and needs --execute. Add "
        "--execute, or leave --fresh out.\n"
    )


@pytest.mark.parametrize("status", [0, 1])
def test_testing_has_the_exit_status_of_the_step(monkeypatch, status):
    commands = []

    class Done:
        returncode = status

    monkeypatch.setattr(
        notebooks.subprocess, "run", lambda command: commands.append(command) or Done
    )
    assert entry.main(["notebooks", "--test"]) == status
    assert commands[0][1:] == [notebooks.RUN_ALL, "notebooks"]
    assert notebooks.RUN_ALL.is_file()


@pytest.mark.parametrize("wait", ["starting", "running"])
def test_an_interrupt_ends_quietly_and_leaves_no_kernel_and_the_notebook(
    book, wait, tmp_path
):
    path, mark = book / "00_good.ipynb", tmp_path / "mark"
    notebook = nbformat.read(path, as_version=4)
    source = "import os, time, pathlib\n"
    source += f"pathlib.Path({str(mark)!r}).write_text('x')\ntime.sleep(100)"
    notebook.cells[1].source = source
    nbformat.write(notebook, path)
    before = path.read_bytes()
    program = f"""
import pathlib, sys
from labkit import __main__ as entry
from labkit.commands import notebooks
notebooks.list_notebooks = lambda: [pathlib.Path({str(path)!r})]
print("ready", flush=True)
sys.exit(entry.main(["notebooks", "--execute"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.readline()
    while not (mark.exists() if wait == "running" else kernels_of(process)):
        time.sleep(0.02)
    kernels = kernels_of(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err  # besides what a kernel says when it starts
    assert kernels and not any(kernel.is_running() for kernel in kernels)
    assert path.read_bytes() == before


def kernels_of(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)
