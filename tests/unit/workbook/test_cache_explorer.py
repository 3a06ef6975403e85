"""The cache explorer: its numbers by hand, its extremes, and its figure."""

import itertools
import time

import matplotlib as mpl
import pytest

from labkit.config import PRESETS, GQAConfig
from labkit.workbook import figures
from labkit.workbook.figures.cache import mark_place
from labkit.workbook.widgets.cache import (
    KINDS,
    MODELS,
    CacheControls,
    CachePlan,
    describe,
    draw,
    published_bytes_per_token,
)

START = CacheControls().value
V2_LITE = "DeepSeek-V2-Lite (16B, BF16 weights)"


def at(**changes):
    return START | changes


def test_it_starts_at_deepseek_v3_with_one_sequence_of_128k():
    assert describe(START) == (
        "MLA (latent 512) keeps 70,272 bytes per token, GQA (8 KV heads) would keep "
        "249,856, MHA (128 heads) 3,997,696. 1 × 131,072 tokens take 9.21 GB, which an "
        "H800 reads in 2.75 ms per decoding step; beside its 41.9 GB share of the "
        "weights 620,185 tokens fit."
    )


def test_cache_weights_and_what_fits_agree_by_hand():
    plan = CachePlan(**at(batch=2, context=1024, n_gpus=32))

    assert plan.cache_bytes == 2 * 1024 * 61 * 576 * 2
    assert plan.weight_bytes == 671_026_419_200 / 32
    free = 81_559 * 2**20 - 671_026_419_200 / 32
    assert plan.n_tokens_that_fit == int(free // 70_272)
    assert plan.read_seconds == pytest.approx(2 * 1024 * 70_272 / 3.35e12)


def test_choosing_a_model_loads_it_and_speaks_once():
    explorer, heard = CacheControls(), []
    explorer.observe(heard.append, "value")
    explorer.controls["n_heads"].value = 64
    explorer.controls["kv_lora_rank"].value = 1024
    explorer.controls["model"].value = V2_LITE

    sizes = ("n_heads", "n_kv_heads", "kv_lora_rank")
    assert [explorer.value[name] for name in sizes] == [16, 8, 512]
    assert len(heard) == 3
    plan = CachePlan(**explorer.value)
    assert plan.config("MLA") == PRESETS["v2-lite-16b"]
    assert plan.weight_bytes * plan.n_gpus == 2 * 15_706_484_224


def test_there_are_at_most_as_many_kv_heads_as_heads():
    explorer = CacheControls()
    explorer.controls["n_kv_heads"].value = 128
    as_many = CachePlan(**explorer.value)
    explorer.controls["n_heads"].value = 16

    assert as_many.bytes_per_token("GQA") == as_many.bytes_per_token("MHA")
    assert explorer.value["n_kv_heads"] == 16
    assert explorer.controls["n_kv_heads"].options[-1] == ("16", 16)
    explorer.controls["n_heads"].value = 256
    assert explorer.value["n_kv_heads"] == 16
    assert explorer.controls["n_kv_heads"].options[-1] == ("256", 256)


def test_large_numbers_are_told_in_larger_units():
    text = describe(at(kind="MHA", n_heads=256, context=2**20, batch=256))

    # 2²⁸ tokens of 61 layers, 256 heads, a key and a value of 128, two bytes each.
    assert "256 × 1,048,576 tokens take 2,146 TB, which an H800 reads in 641 s" in text


def test_fp32_doubles_a_cache_and_leaves_the_weights():
    plan, wide = (CachePlan(**at(is_fp32=value)) for value in (False, True))

    assert wide.cache_bytes == 2 * plan.cache_bytes
    assert wide.weight_bytes == plan.weight_bytes


def test_published_caches_follow_from_layers_and_key_heads():
    gqa_8 = GQAConfig(n_heads=64, n_kv_heads=8).cache_width * 2

    assert published_bytes_per_token() == {
        "DeepSeek-V3": 61 * 576 * 2,
        "Qwen2.5-72B": 80 * gqa_8,
        "Llama-3.1-405B": 126 * gqa_8,
    }


def test_weights_that_do_not_fit_are_told_with_the_remedy():
    assert describe(at(n_gpus=1)).endswith(
        "The weights alone (671 GB on 1 GPU) exceed an H800's 85.5 GB: share them "
        "among 8 or more. The cache of 1 × 131,072 tokens takes 9.21 GB."
    )


def test_a_cache_that_does_not_fit_is_told_with_the_remedy():
    assert describe(at(kind="MHA")).endswith(
        "tokens fit: too few, so shorten the context or lower the batch."
    )


def test_every_control_changes_the_sentence():
    for name, control in CacheControls().controls.items():
        values = getattr(control, "options", None)
        if values is None:
            values = {"is_fp32": [False, True]}.get(name, [512, 576])
        values = [v[1] if isinstance(v, tuple) else v for v in values]
        assert len({describe(at(**{name: v})) for v in values}) == len(values)


def test_no_combination_of_extremes_is_an_error():
    ends = {
        "model": list(MODELS),
        "kind": KINDS,
        "n_heads": (8, 256),
        "n_kv_heads": (1, 8),  # more only if there are more heads
        "kv_lora_rank": (64, 1024),
        "context": (1024, 2**20),
        "batch": (1, 256),
        "n_gpus": (1, 128),
        "is_fp32": (False, True),
    }
    assert ends.keys() == START.keys()
    for values in itertools.product(*ends.values()):
        text = describe(dict(zip(ends, values, strict=True)))
        assert "bytes per token" in text
        assert "e+" not in text


def texts(fig):
    fig.draw_without_rendering()
    return [text.get_text() for text in fig.findobj(mpl.text.Text) if text.get_text()]


def test_the_figure_marks_the_choice_and_names_published_models():
    shown = texts(draw(at(kind="GQA")))

    assert {"▶ GQA (8 KV heads)", "MLA (latent 512)", "249,856", "327,680"} <= set(
        shown
    )
    assert "MHA would keep 16 times the cache of GQA" in shown
    assert {"Qwen2.5-72B, published", "weights 42.2 GB", "free 10.6 GB"} <= set(shown)


def test_no_name_is_cut_off_at_the_left_and_no_amount_at_the_right():
    fig = draw(at(kind="MHA", n_heads=256, is_fp32=True, context=2**20, batch=256))
    fig.draw_without_rendering()
    for axes in fig.axes:
        labels = [*axes.get_yticklabels(), *axes.texts, axes.xaxis.label]
        boxes = [label.get_window_extent() for label in labels]
        assert min(box.x0 for box in boxes) >= 0
        assert max(box.x1 for box in boxes) <= fig.bbox.width


def test_small_amounts_are_not_cut_off_in_the_legend():
    fig = draw(at(model=V2_LITE, n_heads=16, context=1024, n_gpus=128))
    legend = fig.axes[-1].get_legend()
    fig.draw_without_rendering()

    assert "weights 0.245 GB" in [text.get_text() for text in legend.get_texts()]
    assert legend.get_window_extent().x1 <= fig.bbox.width


def test_beside_a_cache_in_fp32_published_ones_are_said_to_be_in_bf16():
    shown = texts(draw(at(is_fp32=True)))

    assert {"Llama-3.1-405B in BF16", "516,096"} <= set(shown)


def test_a_bar_far_over_the_limit_is_cut_and_says_how_far_it_goes():
    fig = draw(at(kind="MHA", context=2**20, batch=256))
    shown, memory = texts(fig), fig.axes[-1]

    assert memory.get_xlim()[1] == pytest.approx(3 * 85.5, rel=1e-3)
    assert max(bar.get_x() + bar.get_width() for bar in memory.patches) <= 3 * 85.53
    assert any(text.endswith("; the bar goes on to 1,073 TB") for text in shown)
    assert "cache 1,073 TB" in shown


def test_a_bar_a_little_over_the_limit_is_drawn_whole():
    memory = draw(at(context=2**20)).axes[-1]

    assert memory.get_xlim()[1] > 41.9 + 73.6
    assert "goes on" not in memory.get_xlabel()


def test_a_place_on_an_axis_is_marked_and_named():
    fig = figures.lines({"a": [(1, 1), (3, 9)]}, title="t", x="x", y="y")
    mark_place(fig, 2, "here")

    assert fig.axes[0].lines[-1].get_xdata()[0] == 2
    assert "here" in texts(fig)


def test_a_move_is_answered_at_once():
    seconds = []
    for _ in range(3):
        start = time.process_time()
        describe(START), draw(START)
        seconds.append(time.process_time() - start)

    assert min(seconds) < 0.1
