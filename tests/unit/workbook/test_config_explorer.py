"""The config explorer: presets, sliders, contradictions, and what it says."""

import re
from itertools import combinations

import pytest
from ipywidgets import HTML

from labkit.config import PRESETS
from labkit.workbook import widgets
from labkit.workbook.widgets.config_explorer import (
    RANGES,
    STARTS,
    ConfigControls,
    build,
    describe,
    doublings,
    draw,
    sizes_of,
)

V3 = {"base": "v3-671b", **sizes_of("v3-671b")}


@pytest.mark.parametrize("preset", STARTS)
def test_a_preset_lies_on_the_stops_and_keeps_its_counts(preset):
    controls = ConfigControls(preset)
    cfg, real = build(controls.value), PRESETS[preset]

    assert cfg.parameter_counts() == real.parameter_counts()
    assert cfg.n_active_params() == real.n_active_params()
    assert cfg.kv_bytes_per_token() == real.kv_bytes_per_token()
    assert cfg.flops_per_token(4096) == real.flops_per_token(4096)


def test_choosing_a_preset_moves_all_sliders_and_speaks_once():
    controls, heard = ConfigControls("v3-671b"), []
    controls.observe(heard.append, "value")
    controls.start.value = "v2-lite-16b"

    assert len(heard) == 1
    assert controls.value == {"base": "v2-lite-16b", **sizes_of("v2-lite-16b")}
    assert controls.sliders["q_lora_rank"].value == 0


def test_a_moved_slider_is_no_preset_any_more_and_can_go_back():
    controls = ConfigControls("v3-671b")
    controls.sliders["n_heads"].value = 64

    assert controls.start.value is None
    assert controls.value == V3 | {"n_heads": 64}
    controls.start.value = "v3-671b"
    assert controls.value == V3


def test_the_sentence_has_the_four_numbers_beside_v3():
    # 512 more latents cost 512·(7168 + 1 + 32,768) parameters in each of 61 layers.
    assert describe(V3 | {"kv_lora_rank": 1024}) == (
        "672,273,731,584 parameters (100 % of DeepSeek-V3's), 37,872,930,816 of them "
        "per token (103 %); a token keeps 132,736 bytes of cache (189 %) and takes "
        "257.9 GFLOP to train (103 %)."
    )


def test_a_query_rank_of_zero_projects_directly():
    cfg = build(V3 | {"q_lora_rank": 0})

    assert cfg.attention.q_lora_rank is None
    # A layer exchanges 7168·1536 + 1536 + 1536·24576 for 7168·24576.
    assert cfg.n_params() - PRESETS["v3-671b"].n_params() == 61 * 127_400_448


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"n_activated_experts": 16, "n_routed_experts": 8},
            "“activated experts” must be at most “routed experts”; got 16 of 8. Set "
            "“activated experts” to 8 or less.",
        ),
        (
            {"n_layers": 1, "n_dense_layers": 2},
            "“first dense layers” must lie between 0 and “layers” (1); got 2. Set "
            "“first dense layers” to 1 or less.",
        ),
    ],
)
def test_a_contradiction_names_the_rule_and_the_fix_by_the_sliders(change, says):
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        describe(V3 | change)


@pytest.mark.parametrize("name", RANGES)
def test_both_ends_of_a_slider_are_drawn_or_refused_in_words(name):
    stops = RANGES[name][1]
    for size in (stops[0], stops[-1]):
        sizes = V3 | {name: size}
        try:
            text = describe(sizes)
        except ValueError as error:
            assert "Set " in str(error)
        else:
            draw(sizes)
            assert "bytes of cache" in text


def test_all_sliders_at_their_ends_still_draw():
    largest = {name: stops[-1] for name, (_, stops) in RANGES.items()}
    fig = draw({"base": "v3-671b", **largest})
    fig.draw_without_rendering()
    right = fig.get_window_extent().x1
    boxes = [text.get_window_extent() for text in fig.axes[0].texts]
    lines = [line.get_window_extent() for line in fig.axes[0].lines]

    assert all(box.x1 < right for box in boxes)
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    assert not any(box.overlaps(line) for box in boxes for line in lines)


def test_the_figure_says_what_its_positions_mean():
    texts = [text.get_text() for text in draw(V3).axes[0].texts]

    assert texts[-1].startswith("Positions are logarithmic.")


def test_the_explorer_shows_a_contradiction_and_keeps_the_figure(monkeypatch):
    outputs = []
    monkeypatch.setattr("labkit.workbook.widgets.bundle.show", outputs.append)
    controls = ConfigControls("v3-671b")
    widgets.explore(draw, describe, caption="", sizes=controls)
    boxes = outputs[0].live.children
    status, image = [box for box in boxes if isinstance(box, HTML) and box.value][:2]
    before = image.value
    controls.sliders["n_routed_experts"].value = 1

    assert "✗ “activated experts” must be at most “routed experts”" in status.value
    assert image.value == before


def test_doubling_the_routed_experts_moves_the_total_alone():
    rows = {row["twice the"]: row for row in doublings("v3-671b")}

    assert rows["routed experts"]["total (×)"] == 1.97
    assert rows["routed experts"]["per token (×)"] == 1.0
    assert rows["activated experts"]["total (×)"] == 1.0
    assert rows["KV rank"]["cache (×)"] == round((1024 + 64) / (512 + 64), 2)
    assert rows["heads"]["cache (×)"] == 1.0
    assert rows["width"]["cache (×)"] == 1.0
    assert rows["expert's width"]["cache (×)"] == 1.0
    spends_all = [name for name, row in rows.items() if min([*row.values()][1:]) > 1]
    assert spends_all == ["layers"]
    assert len(rows) == len(RANGES)
