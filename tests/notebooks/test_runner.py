"""Executing and storing notebooks: the same bytes each time, nothing that varies."""

import asyncio
import json
import re
import shutil

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from labkit.workbook.normalise import normalise, to_text
from labkit.workbook.runner import (
    Run,
    execute,
    header,
    list_notebooks,
    save,
    table_markdown,
)


def test_executing_twice_gives_the_same_bytes(sample, tmp_path):
    path = tmp_path / sample.name
    shutil.copy(sample, path)
    before = path.read_bytes()

    assert not save(execute(path))
    assert path.read_bytes() == before


def test_a_notebook_executes_beside_a_running_loop(tmp_path):
    path = tmp_path / "one.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("1 + 1")]), path)

    async def run() -> Run:
        return execute(path)

    done = asyncio.run(run())

    assert done.error == ""
    assert done.notebook.cells[0].outputs[0].data["text/plain"] == "2"


def test_a_stored_notebook_holds_nothing_of_its_run(sample):
    text = sample.read_text(encoding="utf-8")
    stored = json.loads(text)

    assert stored["metadata"]["language_info"] == {"name": "python"}
    assert "widgets" not in stored["metadata"]
    assert "widget-view" not in text
    assert "ipykernel_" not in text
    assert text.endswith("}\n")
    assert all(set(cell["metadata"]) <= {"tags"} for cell in stored["cells"])


def test_exercises_answer_in_a_fresh_run(sample):
    text = sample.read_text(encoding="utf-8")

    assert text.count("○ not attempted") == 10  # five checks: text and page


def with_output(output, source="run()", **metadata):
    cell = new_code_cell(source, outputs=[output], execution_count=1, metadata=metadata)
    return new_notebook(cells=[cell])


def varying(html, *, varies=True):
    metadata = {"labkit": {"varies": True}} if varies else {}
    data = {"text/plain": "time: (measured)", "text/html": html}
    return with_output(new_output("display_data", data=data, metadata=metadata))


def stored_html(new, old):
    return normalise(new, old).cells[0].outputs[0].data["text/html"]


def test_a_measured_number_stays_as_stored_while_the_rest_is_equal():
    old, new = (f'<p><data class="varies">{n}</data></p>' for n in ("3", "4"))

    assert stored_html(varying(new), varying(old)) == old


def test_a_measured_number_is_replaced_when_words_around_it_change():
    old = '<p>old <data class="varies">3</data></p>'
    new = '<p>new <data class="varies">4</data></p>'

    assert stored_html(varying(new), varying(old)) == new


def test_an_unmarked_number_is_never_kept_from_an_earlier_run():
    old, new = (f'<p><data class="varies">{n}</data></p>' for n in ("3", "4"))

    assert stored_html(varying(new, varies=False), varying(old, varies=False)) == new


def test_an_ignored_cell_keeps_its_output_while_code_and_kind_are_equal():
    tags = {"tags": ["nbval-ignore-output"]}
    old, new = (
        with_output(new_output("stream", name="stdout", text=text), **tags)
        for text in ("12 ms", "15 ms")
    )

    assert normalise(new, old).cells[0].outputs[0].text == "12 ms"
    new.cells[0].source = "changed()"
    assert normalise(new, old).cells[0].outputs[0].text == "15 ms"


def test_process_numbers_and_pieces_of_streams_vanish():
    notebook = with_output(
        new_output("stream", name="stderr", text="/tmp/ipykernel_71/99.py:1: Warn")
    )
    notebook.cells[0].outputs += [
        new_output("stream", name="stdout", text="a"),
        new_output("stream", name="stderr", text="ing\n"),
        new_output("stream", name="stdout", text="b"),
    ]

    outputs = normalise(notebook).cells[0].outputs
    assert [output.text for output in outputs] == [
        "/tmp/ipykernel/cell.py:1: Warning\n",
        "ab",
    ]


def test_cell_ids_follow_the_text_and_are_unique():
    cells = [new_code_cell(source) for source in ("a", "a", "b")]
    first, again = (normalise(new_notebook(cells=cells)) for _ in range(2))
    ids = [cell.id for cell in first.cells]

    assert ids == [cell.id for cell in again.cells]
    assert len(set(ids)) == 3
    assert ids[1] == f"{ids[0]}-1"
    nbformat.validate(first)


def test_storing_is_idempotent(sample):
    stored = nbformat.read(sample, as_version=4)

    assert to_text(normalise(stored)) == sample.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "the kernel died"),
    ],
)
def test_a_failing_notebook_is_named_and_not_stored(tmp_path, source, says):
    path = tmp_path / "07_recompute.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell(source)]), path)
    before = path.read_bytes()
    run = execute(path)

    assert run.error.startswith("07_recompute.ipynb: ")
    assert says in run.error
    with pytest.raises(ValueError, match="a notebook that failed is not stored"):
        save(run)
    assert path.read_bytes() == before


def test_a_cell_without_end_is_stopped_and_named(tmp_path):
    path = tmp_path / "07_recompute.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("while True: pass")]), path)

    run = execute(path, cell_seconds=1)
    assert "timed out" in run.error


def test_a_file_that_is_no_notebook_is_named(tmp_path):
    path = tmp_path / "07_recompute.ipynb"
    path.write_text("{", encoding="utf-8")

    with pytest.raises(ValueError, match="07_recompute.ipynb is not a notebook"):
        execute(path)


def test_the_header_is_read_from_the_first_cell(sample):
    found = header(sample)

    assert (found.number, found.title) == (6, "Attention and cache")
    assert found.question == "What does a past token cost?"
    assert (found.minutes, found.needs, found.part) == (30, "01", "Tune")


def test_a_header_without_minutes_is_refused(planted):
    def forget(notebook):
        notebook.cells[0].source = "# 06 Attention and cache"

    with pytest.raises(ValueError, match="the first cell of 06_.* must begin with"):
        header(planted(forget))


def test_readme_gets_one_row_per_notebook(sample):
    assert table_markdown(sample.parent).splitlines()[2] == (
        "| Tune | [06 Attention and cache](notebooks/06_attention_and_cache.ipynb) "
        "| What does a past token cost? | 30 |"
    )


def test_notebooks_are_listed_in_reading_order(tmp_path):
    for name in ("10_b.ipynb", "02_a.ipynb", "notes.ipynb", "03_c.txt"):
        (tmp_path / name).touch()

    names = [path.name for path in list_notebooks(tmp_path)]
    assert names == ["02_a.ipynb", "10_b.ipynb"]


def test_a_run_that_changes_nothing_leaves_the_file_alone(sample):
    notebook = nbformat.read(sample, as_version=4)
    run = Run(path=sample, seconds=0.0, notebook=normalise(notebook))
    before = sample.stat().st_mtime_ns

    assert not save(run)
    assert sample.stat().st_mtime_ns == before


def test_figures_in_a_stored_notebook_are_small(sample):
    text = sample.read_text(encoding="utf-8")
    sizes = [len(data) * 3 // 4 for data in re.findall(r"base64,([\w+/=]+)", text)]

    assert len(sizes) == 2
    assert max(sizes) < 100_000
