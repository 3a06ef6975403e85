"""Each rule of the book catches the notebook that breaks it, and no other."""

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

from labkit.workbook import claims
from labkit.workbook.lint import complaints


def test_the_sample_keeps_every_rule(sample, monkeypatch):
    monkeypatch.setattr(claims, "ledger", lambda: [])  # it settles none

    assert complaints(sample) == []


def code(notebook, number):
    return [cell for cell in notebook.cells if cell.cell_type == "code"][number - 1]


def add(notebook, source):
    count = sum(cell.cell_type == "code" for cell in notebook.cells) + 1
    notebook.cells.append(new_code_cell(source, execution_count=count))


def forget_to_run(notebook):
    code(notebook, 3).execution_count = None


def keep_timings(notebook):
    code(notebook, 3).metadata["execution"] = {"iopub.status.busy": "today"}


def write_a_long_cell(notebook):
    add(notebook, "\n".join(f"x{n} = {n}" for n in range(21)))


def write_long_cells(notebook):
    for _ in range(25):
        add(notebook, "\n".join(f"x{n} = {n}" for n in range(9)))


def name_a_home_folder(notebook):
    add(notebook, 'folder = "/home/someone/models"')


def show_a_home_folder(notebook):
    code(notebook, 3).outputs = [
        new_output("stream", name="stdout", text="read /Users/someone/x.json")
    ]


def change_the_path(notebook):
    add(notebook, "sys.path.append('..')")


def call_the_shell(notebook):
    add(notebook, "!pip install torch")


def import_all(notebook):
    code(notebook, 1).source += "\nfrom torch import *"


def import_late(notebook):
    add(notebook, "import torch")


def break_the_syntax(notebook):
    add(notebook, "def f(:")


def drop_alt_text(notebook):
    data = code(notebook, 4).outputs[0].data
    data["text/html"] = data["text/html"].replace("alt=", "title=")


def show_a_bare_image(notebook):
    code(notebook, 3).outputs = [
        new_output("display_data", data={"image/png": "iVBORw0KGgo="})
    ]


def store_a_large_figure(notebook):
    page = f'<img alt="a" src="data:image/png;base64,{"A" * 140_000}">'
    code(notebook, 3).outputs = [
        new_output("display_data", data={"text/html": page, "text/plain": "a"})
    ]


def drop_the_widget(notebook):
    cell = code(notebook, 4)
    cell.source = cell.source.replace("widgets.explore", "print")


def drop_a_section(notebook):
    notebook.cells.remove(
        next(cell for cell in notebook.cells if cell.source == "## Next")
    )


def drop_the_question(notebook):
    notebook.cells[0] = new_markdown_cell("# 06 Attention and cache")


def point_to_a_notebook_to_come(notebook):
    notebook.cells.append(new_markdown_cell("Notebook 07 computes them again."))


def link_to_a_notebook_to_come(notebook):
    notebook.cells.append(new_markdown_cell("Next is [07](07_recompute.ipynb)."))


def drop_an_exercise(notebook):
    code(notebook, 7).source = "pass"


def invent_an_exercise(notebook):
    add(notebook, 'ex = exercise("nothing")')


def change_a_stub(notebook):
    cell = code(notebook, 8)
    cell.source = cell.source.replace("...", "return 1")


def drop_a_check(notebook):
    code(notebook, 9).source = "pass"


def settle_what_is_not_in_the_ledger(notebook):
    add(notebook, 'lab.settle("scores", "right", "90.2")')


def skip_a_cell(notebook):
    code(notebook, 3).metadata["tags"] = ["nbval-skip"]


def ignore_outputs(notebook):
    for number in (2, 3, 4):
        code(notebook, number).metadata["tags"] = ["nbval-ignore-output"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (forget_to_run, "were not run in order from a fresh kernel"),
        (keep_timings, "is not in the stored form"),
        (write_a_long_cell, "has 21 lines, at most 20"),
        (write_long_cells, "half of its code cells have over 8 lines (9)"),
        (name_a_home_folder, "absolute path: /home/someone/models"),
        (show_a_home_folder, "absolute path: /Users/someone/x.json"),
        (change_the_path, "uses sys.path"),
        (call_the_shell, "uses !"),
        (import_all, "code cell 1 has a star import"),
        (import_late, "imports: the first code cell does that"),
        (break_the_syntax, "is not Python"),
        (drop_alt_text, "code cell 4 shows a figure without alt text"),
        (show_a_bare_image, "code cell 3 shows a bare image"),
        (store_a_large_figure, "code cell 3 stores a figure of 105,000 bytes"),
        (drop_the_widget, "it has no widget"),
        (drop_a_section, "it has no section '## Next'"),
        (drop_the_question, "the first cell of 06_attention_and_cache.ipynb must"),
        (point_to_a_notebook_to_come, "it points to notebook 07, which is not in"),
        (link_to_a_notebook_to_come, "it points to notebook 07, which is not in"),
        (drop_an_exercise, "'kv_bytes_per_token' is in n06_"),
        (invent_an_exercise, "exercise 'nothing' is not in n06_"),
        (change_a_stub, "the stub of 'kv_bytes_per_token' is no cell of its own"),
        (drop_a_check, "it shows 5 exercises and checks 4"),
        (settle_what_is_not_in_the_ledger, "it settles 'scores', which data/claims"),
        (skip_a_cell, "a cell has the tag nbval-skip"),
        (ignore_outputs, "3 cells are not compared, at most 2"),
    ],
)
def test_a_broken_rule_is_named(planted, change, says):
    assert says in "; ".join(complaints(planted(change)))


def test_a_claim_the_ledger_gives_the_notebook_must_be_settled(sample, monkeypatch):
    due = claims.Claim(
        id="kv-93",
        claim="",
        notebook=sample.stem,
        verdict="wrong",
        figure="82 %",
        evidence="",
    )
    monkeypatch.setattr(claims, "ledger", lambda: [due])

    assert complaints(sample) == [
        "data/claims.csv says that it settles 'kv-93': it does not"
    ]


def test_a_notebook_without_a_module_of_exercises_is_named(planted):
    path = planted(lambda notebook: None, name="99_nothing.ipynb")

    assert "labkit/workbook/exercises/n99_nothing.py does not exist" in (
        complaints(path)
    )
