"""`python -m labkit notebooks`: list, execute and test the notebooks of the book.

python -m labkit notebooks                     # the table of contents
python -m labkit notebooks --execute           # run all, store outputs, normalised
python -m labkit notebooks --execute 01 06     # the same for two of them
python -m labkit notebooks --test              # compare all with their stored outputs
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from labkit.workbook.runner import (
    NOTEBOOKS,
    execute,
    header,
    list_notebooks,
    save,
    table_markdown,
)

README = NOTEBOOKS.parent / "README.md"
RUN_ALL = NOTEBOOKS.parent / "tests" / "run_all.py"

TERMS: dict[str, str] = {}

TABLE = re.compile(
    r"(?<=<!-- notebooks -->\n).*?(?=\n<!-- end of notebooks -->)", re.DOTALL
)
"""Where README shows the table of notebooks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `notebooks`."""
    action = parser.add_mutually_exclusive_group()
    text = "print number, title, minutes and question of each (the default)"
    action.add_argument("--list", action="store_true", help=text)
    text = "run each in a fresh kernel and store its outputs"
    action.add_argument("--execute", action="store_true", help=text)
    text = "run all and compare with the stored outputs, as make test does"
    action.add_argument("--test", action="store_true", help=text)
    text = "with --execute: also take measured numbers and figures anew"
    parser.add_argument("--fresh", action="store_true", help=text)
    text = "numbers of notebooks, such as 01; all if none is given"
    parser.add_argument("numbers", nargs="*", metavar="NN", help=text)


def run(options: argparse.Namespace) -> int:
    """Do what was asked; return 1 if a notebook failed or differs."""
    if options.fresh and not options.execute:
        raise ValueError(
            "--fresh says how to execute and needs --execute. "
            "Add --execute, or leave --fresh out."
        )
    if options.test:
        if options.numbers:
            raise ValueError(
                f"--test compares all notebooks; got {' '.join(options.numbers)}. "
                "Leave the numbers out."
            )
        return subprocess.run([sys.executable, RUN_ALL, "notebooks"]).returncode
    paths = choose(list_notebooks(), options.numbers)
    if options.execute:
        status = _execute(paths, fresh=options.fresh)
        refresh_table(README, table_markdown())
        return status
    for path in paths:
        row = header(path)
        title = f"{row.number:02d}  {row.title}"
        print(f"{title:<32} {row.minutes:>3} min  {row.question}")
    return 0


def choose(paths: Sequence[Path], numbers: Sequence[str]) -> list[Path]:
    """Return the notebooks whose names begin with the numbers; all without any.

    >>> paths = [Path("00_start_here.ipynb"), Path("06_attention.ipynb")]
    >>> [path.name for path in choose(paths, ["06"])]
    ['06_attention.ipynb']

    Raises:
        ValueError: there is no such notebook, or none at all.
    """
    known = {path.name[:2]: path for path in paths}
    if not known:
        raise ValueError(f"there is no notebook in {NOTEBOOKS}. Restore the checkout.")
    for number in numbers:
        if number not in known:
            raise ValueError(
                f"a notebook is named by its number, one of {', '.join(known)}; got "
                f"{number!r}. Give one of these."
            )
    return [known[number] for number in numbers] if numbers else list(paths)


def refresh_table(readme: Path, table: str) -> None:
    """Write the table of notebooks into a README, between its two marks.

    Raises:
        ValueError: the marks are not there.
    """
    text = readme.read_text(encoding="utf-8")
    refreshed, n_places = TABLE.subn(lambda _: table, text)
    if n_places != 1:
        raise ValueError(
            "the table of notebooks stands between '<!-- notebooks -->' and "
            f"'<!-- end of notebooks -->'; {readme.name} has {n_places} such places. "
            "Put the two marks on lines of their own, once."
        )
    if refreshed != text:
        readme.write_text(refreshed, encoding="utf-8")


def _execute(paths: Sequence[Path], *, fresh: bool) -> int:
    failures = []
    for path in paths:
        result = execute(path, fresh=fresh)
        if result.error:
            outcome = f"FAILED  {result.error}"
            failures.append(path.name)
        else:
            outcome = "stored" if save(result) else "unchanged"
        print(f"{path.name:<32} {result.seconds:5.0f} s  {outcome}", flush=True)
    if failures:
        print(f"failed, and left as they were: {', '.join(failures)}", file=sys.stderr)
    return 1 if failures else 0
