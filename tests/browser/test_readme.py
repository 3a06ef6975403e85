"""The picture in README is a widget of the book, as a browser shows it.

To take it anew after the widget has changed, and then mend the words beside it:

    .venv/bin/python -m pytest tests/browser/test_readme.py
    cp test-artifacts/browser/readme-explorer.png notebooks/explorer.png
"""

import re
from pathlib import Path

from playwright.sync_api import expect

from labkit.workbook.widgets.config_explorer import RANGES

ROOT = Path(__file__).resolve().parents[2]

ALT, PICTURE = re.search(
    r"!\[([^\]]+)\]\(([^)]+\.png)\)", (ROOT / "README.md").read_text(encoding="utf-8")
).groups()

EXPLORE = """from labkit.workbook import widgets
from labkit.workbook.widgets import config_explorer
widgets.explore(
    config_explorer.draw,
    config_explorer.describe,
    caption="Yours beside real models. V2-Lite, V2 and V3 are computed, Qwen and "
    "Llama as published.",
    sizes=config_explorer.ConfigControls("v3-671b"),
)"""

MAX_BYTES = 150_000


def test_the_words_beside_the_picture_are_those_of_the_widget(
    tmp_path, notebook_of, open_notebook
):
    lab = open_notebook(notebook_of(tmp_path / "readme.ipynb", EXPLORE))
    lab.run_all()
    bundle = lab.panel.locator(".labkit-explore")
    status = bundle.get_by_role("status")
    before = status.inner_text()
    routed_experts = list(RANGES).index("n_routed_experts")
    lab.change_by_keyboard(bundle.get_by_role("slider").nth(routed_experts))
    expect(status).not_to_have_text(before)
    picture = lab.screenshot("-explorer", of=bundle)

    assert status.inner_text() in " ".join(ALT.split())
    assert picture.stat().st_size <= MAX_BYTES


def test_the_picture_is_small_enough_for_a_slow_line():
    assert (ROOT / PICTURE).stat().st_size <= MAX_BYTES
