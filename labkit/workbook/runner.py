"""Finding, executing and storing the notebooks of the book.

    for path in list_notebooks():
        run = execute(path)          # in a fresh kernel; `run.error` says what failed
        save(run)                    # writes the normalised form if it changed
    print(table_markdown())          # what README shows

The header cell of a notebook is the one source of its title, question, minutes and
needs.
"""

import asyncio
import atexit
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import (
    CellExecutionError,
    CellTimeoutError,
    DeadKernelError,
)
from nbformat import NotebookNode

from labkit.workbook.normalise import normalise, to_text

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"

CELL_SECONDS = 180
"""Time a cell may take before its kernel is interrupted."""

PARTS = ((5, "Diagnose"), (13, "Tune"), (16, "Validate"))
"""The parts of the book, each with the first number after it."""

HEADER = re.compile(
    r"# (?P<number>\d\d) (?P<title>.+)\n\n"
    r"\*\*Question\.\*\* (?P<question>.+)\n\n"
    r"\*\*Minutes\.\*\* (?P<minutes>\d+) · \*\*Needs\.\*\* (?P<needs>.+)"
)
"""How the first cell of every notebook begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What the first cell of a notebook says about it."""

    name: str
    number: int
    title: str
    question: str
    minutes: int
    needs: str

    @property
    def part(self) -> str:
        """The part of the book this notebook belongs to."""
        return next(part for end, part in PARTS if self.number < end)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One execution of a notebook from a fresh kernel."""

    path: Path
    seconds: float
    """Wall time, the start of the kernel included."""

    notebook: NotebookNode
    """Executed and normalised, as far as it came."""

    error: str = ""
    """The cell that failed and how, in one line; "" if all went well."""


def list_notebooks(folder: Path = NOTEBOOKS) -> list[Path]:
    """Return the notebooks of the book, in reading order."""
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))


def read(path: Path) -> NotebookNode:
    """Return a notebook from its file.

    Raises:
        ValueError: the file is no notebook of format 4.
    """
    try:
        return nbformat.read(path, as_version=4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
        raise ValueError(
            f"{path.name} is not a notebook ({type(error).__name__}). "
            "Restore it with `git checkout`, or write it again with jupytext."
        ) from error


def execute(
    path: Path, *, cell_seconds: float = CELL_SECONDS, fresh: bool = False
) -> Run:
    """Run a notebook from top to bottom in a kernel of its own.

    Nothing is written: `save` does that.

    Args:
        path: the notebook; its folder is where the kernel starts.
        cell_seconds: time a cell may take.
        fresh: take measured numbers and figures from this run; by default those that
            are stored stay while everything around them is equal.
    """
    stored = read(path)
    notebook = read(path)
    client = _Client(
        notebook,
        timeout=cell_seconds,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    start = time.monotonic()
    error = _execute(client, path)
    return Run(
        path=path,
        seconds=time.monotonic() - start,
        notebook=normalise(notebook, None if fresh else stored),
        error=error,
    )


class _Loop(asyncio.SelectorEventLoop):
    """Leaves Ctrl-C to `asyncio.Runner`, which cancels; nbclient's handler fails."""

    def add_signal_handler(self, *_: object) -> None:
        raise RuntimeError("signals are handled outside")


class _Client(NotebookClient):
    """Kills the kernel at an interrupt: asked to end in a cell, it would complain."""

    async def _async_cleanup_kernel(self) -> None:
        if asyncio.current_task().cancelling():
            self.shutdown_kernel = "immediate"
        await super()._async_cleanup_kernel()


async def _run_cells(client: NotebookClient) -> None:
    """Run all cells and end the kernel, also where it was still starting."""
    try:
        await client.async_execute()
    except DeadKernelError:  # so nbclient calls a cell that was cancelled as well
        if asyncio.current_task().cancelling():
            raise asyncio.CancelledError from None
        raise
    finally:
        atexit.unregister(client._cleanup_kernel)
        if client.km is not None:
            await client._async_cleanup_kernel()


def _execute(client: NotebookClient, path: Path) -> str:
    """Run all cells; return the failure in one line, or ""."""
    try:
        if _is_in_a_loop():
            with ThreadPoolExecutor(max_workers=1) as beside:
                beside.submit(_run_in_a_loop, client).result()
        else:
            _run_in_a_loop(client)
    except CellExecutionError as error:
        return f"{path.name}: {error.ename}: {_first_line(error.evalue)}"
    except CellTimeoutError as error:
        return f"{path.name}: {_first_line(str(error))}"
    except DeadKernelError:
        return f"{path.name}: the kernel died (out of memory?)"
    return ""


def _run_in_a_loop(client: NotebookClient) -> None:
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(_run_cells(client))


def _is_in_a_loop() -> bool:
    """Return whether this thread runs one already, as a notebook's does."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0]


def save(run: Run) -> bool:
    """Store an executed notebook; return whether its file changed.

    Raises:
        ValueError: the run failed: half a notebook is not stored.
    """
    if run.error:
        raise ValueError(f"a notebook that failed is not stored: {run.error}")
    text = to_text(run.notebook)
    if run.path.read_text(encoding="utf-8") == text:
        return False
    draft = run.path.with_suffix(".part")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, run.path)
    return True


def header(path: Path) -> Header:
    """Return what a notebook's first cell says about it.

    Raises:
        ValueError: the first cell does not begin as `HEADER` says.
    """
    cells = read(path).cells
    found = HEADER.match(cells[0].source) if cells else None
    if found is None:
        raise ValueError(
            f"the first cell of {path.name} must begin with '# NN Title', "
            "'**Question.** …' and '**Minutes.** N · **Needs.** …', with empty lines "
            "between. Write it so."
        )
    fields = found.groupdict()
    return Header(
        name=path.stem,
        number=int(fields["number"]),
        title=fields["title"].strip(),
        question=fields["question"].strip(),
        minutes=int(fields["minutes"]),
        needs=fields["needs"].strip(),
    )


def table(folder: Path = NOTEBOOKS) -> list[Header]:
    """Return the headers of all notebooks, in reading order."""
    return [header(path) for path in list_notebooks(folder)]


def table_markdown(folder: Path = NOTEBOOKS) -> str:
    """Return the table of notebooks as README shows it."""
    lines = ["| part | notebook | question | minutes |", "|---|---|---|---|"]
    for row in table(folder):
        link = f"[{row.number:02d} {row.title}](notebooks/{row.name}.ipynb)"
        lines.append(f"| {row.part} | {link} | {row.question} | {row.minutes} |")
    return "\n".join(lines)
