"""The notebooks of the book keep the rules of the book."""

import re

import pytest

from labkit.workbook import normalise
from labkit.workbook.lint import complaints
from labkit.workbook.runner import NOTEBOOKS, list_notebooks, table

CONFIG = NOTEBOOKS.parent / "tests" / "notebooks" / "sanitize.cfg"


@pytest.mark.parametrize("path", list_notebooks(), ids=lambda path: path.stem)
def test_a_notebook_keeps_every_rule(path):
    assert complaints(path) == []


def test_the_folder_holds_notebooks_and_the_picture_of_readme_only():
    found = {path.name for path in NOTEBOOKS.iterdir()} - {".ipynb_checkpoints"}

    assert found == {path.name for path in list_notebooks()} | {"explorer.png"}


def test_the_whole_book_fits_a_day_and_numbers_are_unique():
    rows = table()

    assert sum(row.minutes for row in rows) <= 16 * 60
    assert len({row.number for row in rows}) == len(rows)


def test_what_the_runner_lets_vary_the_comparison_leaves_out():
    patterns = re.findall(r"^regex: (.*)$", CONFIG.read_text("utf-8"), re.MULTILINE)
    page = (
        '<data class="varies">3 ms</data><img alt="a" '
        'src="data:image/png;base64,iVBORw0KGgo="> /tmp/ipykernel_71/99.py:1: Warn'
    )
    other = (
        '<data class="varies">4 ms</data><img alt="a" '
        'src="data:image/png;base64,AAAA+/=="> /tmp/ipykernel/cell.py:1: Warn'
    )
    for pattern in patterns:
        page, other = re.sub(pattern, "", page), re.sub(pattern, "", other)

    assert page == other
    assert 'alt="a"' in page
    assert normalise.comparable("3 ms") == "3 ms"
