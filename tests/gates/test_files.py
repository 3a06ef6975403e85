"""What every file of the repository must be, whatever it holds."""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FOLDERS = (".ci", "data", "labkit", "tests")
TOP = ("LICENSE", "Makefile", "README.md", "environment.yml", "pyproject.toml")

MAX_LINES = 400

# Spelled in parts, so that this file does not hold what it looks for.
HOMES = "|".join(("home", "root", "Users", "work", "opt", "mnt"))
MACHINE_PATH = re.compile(rf"""(?<![\w.~/:>)])/(?:{HOMES})/\w|[A-Z]:\\+Users""")
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")

PLANTED = {"tests/notebooks/test_lint.py"}
"""Files that hold such paths as examples of what is refused."""

OWN_FACTS = {"claims.csv"}
"""Tables whose rows are verdicts of this book, with evidence in its notebooks."""


def files_of(*suffixes: str) -> list[Path]:
    found = [ROOT / name for name in TOP]
    for folder in FOLDERS:
        found += (path for path in (ROOT / folder).rglob("*") if path.is_file())
    found = [path for path in found if "__pycache__" not in path.parts]
    return sorted(path for path in found if not suffixes or path.suffix in suffixes)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", files_of(".py"), ids=name_of)
def test_no_module_is_longer_than_400_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


TEXTS = [path for path in files_of() if path.suffix not in {".safetensors", ".png"}]


@pytest.mark.parametrize(
    "path", [path for path in TEXTS if name_of(path) not in PLANTED], ids=name_of
)
def test_no_file_names_a_path_of_one_machine(path):
    assert MACHINE_PATH.findall(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_nothing_is_left_for_later(path):
    assert UNFINISHED.findall(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("folder", ["home/me/labkit", "root/x", "Users/me/data"])
def test_a_path_of_one_machine_is_seen(folder):
    assert MACHINE_PATH.search(f"open('/{folder}')")
    assert not MACHINE_PATH.search(f"https://example.org/{folder}")
    assert not MACHINE_PATH.search(f"./{folder}")


TABLES = [path for path in files_of(".csv") if path.name not in OWN_FACTS]


@pytest.mark.parametrize("path", TABLES, ids=name_of)
def test_every_row_of_a_table_names_its_source(path):
    with path.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))

    assert rows
    assert all(row["source"].strip() and row["read"].strip() for row in rows)
    # A comma too many in a row would shift its source into a column without a name.
    assert all(None not in row and None not in row.values() for row in rows)


FOREIGN = [path for path in files_of() if path.parts[-3:-2] == ("data",)]


@pytest.mark.parametrize(
    "path", [path for path in FOREIGN if path.name != "sources.csv"], ids=name_of
)
def test_every_file_below_data_is_listed_with_its_source(path):
    with (path.parent / "sources.csv").open(newline="", encoding="utf-8") as lines:
        listed = [row["file"] for row in csv.DictReader(lines)]

    assert path.name in listed


def test_data_has_files_to_check():
    assert len(FOREIGN) >= 4
    assert len(TABLES) >= 2
