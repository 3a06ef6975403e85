"""Every notebook of the book in a real JupyterLab, as a reader uses it."""

import pytest
from playwright.sync_api import expect

from labkit.workbook.exercises import exercises_of
from labkit.workbook.runner import list_notebooks


@pytest.mark.parametrize("path", list_notebooks(), ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_parts_answer(path, open_notebook):
    lab = open_notebook(path)
    alt_texts = lab.stored_figures()
    assert alt_texts
    assert all(alt_texts)
    lab.run_all()

    cells = lab.cells()
    assert [error for _, error in cells if error] == []
    assert [count for count, _ in cells] == list(range(1, len(cells) + 1))
    lab.screenshot_sections()
    move_every_control_of_every_widget(lab)
    enter_a_guess(lab)
    check_the_first_exercise(lab, exercises_of(f"n{path.stem}")[0].name)
    assert lab.errors == []


def move_every_control_of_every_widget(lab):
    """Each control changes what the status line says, or the figure's alt text."""
    bundles = lab.panel.locator(".labkit-explore")
    assert bundles.count() >= 1
    for bundle in bundles.all():
        status = bundle.get_by_role("status")
        for role in ("slider", "checkbox", "radio"):
            for control in bundle.get_by_role(role).all():
                if role == "radio" and control.is_checked():
                    continue
                before = status.inner_text()
                lab.change_by_keyboard(control)
                expect(status).not_to_have_text(before)
                expect(status).not_to_contain_text("✗")


def enter_a_guess(lab):
    """A number typed into the first box is noted."""
    box = lab.panel.get_by_placeholder("a number").first
    if box.count():
        box.fill("1,000")
        box.press("Enter")
        noted = lab.panel.locator(".labkit-guess").filter(has_text="Noted: 1,000")
        expect(noted).to_be_visible()


def check_the_first_exercise(lab, name):
    """The task shows; a right answer gets its tick."""
    task = lab.run_code(f'ex = exercise("{name}")')
    expect(task).to_contain_text("Exercise:")
    expect(lab.run_code("ex.check(ex.spec.solution)")).to_contain_text("✓")
