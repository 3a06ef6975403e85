"""The map of the book, and text that varies."""

import nbformat
import pytest
from nbformat.v4 import new_markdown_cell, new_notebook

from labkit.workbook.book import PLAN, book_map, parts
from labkit.workbook.normalise import comparable
from labkit.workbook.runner import list_notebooks
from labkit.workbook.samples import samples

HEADER = "# 02 Bytes & all\n\n**Question.** Where?\n\n**Minutes.** 7 · **Needs.** 01"


@pytest.fixture
def folder(tmp_path):
    """Return a folder with one notebook of the sixteen."""
    notebook = new_notebook(cells=[new_markdown_cell(HEADER)])
    nbformat.write(notebook, tmp_path / "02_memory_anatomy.ipynb")
    return tmp_path


def test_only_what_is_there_is_linked(folder):
    page = book_map(folder).html

    assert page.count("<a href=") == 1
    assert '<a href="02_memory_anatomy.ipynb">Bytes &amp; all</a>' in page
    assert page.count("planned") == 15


def test_a_written_notebook_speaks_for_itself(folder):
    lines = book_map(folder).text.splitlines()

    assert "  02 Bytes & all · Where? · 7 min" in lines
    assert f"  03 Time anatomy · {PLAN['03_time_anatomy']} · planned" in lines


def test_the_plan_has_sixteen_notebooks_in_three_parts():
    assert [int(name[:2]) for name in PLAN] == list(range(16))
    assert [names[0][:2] for names in parts().values()] == ["00", "05", "13"]


def test_no_notebook_of_the_book_is_missing_from_the_plan():
    assert {path.stem for path in list_notebooks()} <= PLAN.keys()


def test_a_sample_is_on_the_page_and_never_compared():
    shown, other = samples({"before": "<a>\x00"}), samples({"before": "def"})

    assert "&lt;a&gt;·" in shown.html
    assert comparable(shown.html) == comparable(other.html)
    assert shown.text == other.text == "before: (text varies)"
    assert shown.varies
