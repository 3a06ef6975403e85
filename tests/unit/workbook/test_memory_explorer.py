"""The memory explorer: its verdicts, its advice, its rules, and its speed."""

import itertools
import time

import pytest

from labkit.config import PRESETS, Layout, TrainConfig
from labkit.memory import STATES, predict
from labkit.workbook.figures.export import LIVE_SCALE, png
from labkit.workbook.widgets.memory_explorer import (
    CARDS,
    MODELS,
    POLICIES,
    PRECISIONS,
    MemoryControls,
    MemoryPlan,
    describe,
    draw,
)

START = MemoryControls().value
LITE = "DeepSeek-V2-Lite (16B)"
PLAIN = {"precision": "BF16, moments in BF16", "recompute": "none"}


def at(**changes):
    return START | changes


def plan(**changes):
    return MemoryPlan(**at(**changes))


def test_it_starts_at_what_deepseek_v3_reports():
    report = predict(
        PRESETS["v3-671b"],
        TrainConfig(micro_batch=1, global_batch=2048, seq_len=4096, precision="bf16"),
        Layout(pp=16, dp=128, ep=64),
        "h800",
        states=STATES["deepseek-v3-fp8"],
        zero=1,
        recompute="selective",
        cached="fp8",
    )

    assert plan().report == report
    assert describe(START).startswith(
        "1 × 4,096 tokens on 2,048 × H800 80 GB (PP 16, DP 128, TP 1, EP 64, ZeRO-1): "
        "stage "
    )


def test_a_plan_between_the_ranges_is_not_promised():
    assert plan().verdict == "uncertain"
    assert "It may fit or not. Biggest: activations" in describe(START)


def test_the_first_remedy_that_fits_is_named():
    text = describe(at(**PLAIN))

    assert "It does not fit. Biggest: activations" in text
    assert plan(**PLAIN | {"recompute": "selective"}).verdict != "fits"
    assert plan(**PLAIN | {"recompute": "full"}).verdict == "fits"
    assert "Try recompute “" in text
    assert text.endswith("it fits.")


def test_states_that_are_too_large_alone_ask_for_more_cards():
    text = describe(at(**PLAIN, model=LITE, n_gpus=1, pp=1, ep=1, zero=0))

    # 14 bytes per parameter, and router scores are no parameters of V2-Lite.
    lasting = 14 * PRESETS["v2-lite-16b"].n_params() / 1e9
    assert f"{lasting:.0f} GB last from step to step: let more GPUs share them" in text


def test_a_plan_that_fits_is_told_whether_a_larger_micro_batch_would():
    roomy = at(**PLAIN, model=LITE, n_gpus=8, pp=1, ep=8, card="B200 180 GB")

    assert "It fits." in describe(roomy)
    assert describe(roomy).endswith("A micro-batch of 2 fits too.")


def test_one_stage_shows_its_instants_and_several_their_fullest():
    one = draw(at(model=LITE, n_gpus=8, pp=1, ep=8)).axes[0]
    many = draw(START).axes[0]

    names = [label.get_text() for label in one.get_xticklabels()]
    assert names[:2] == ["start", "forward"]
    assert [label.get_text() for label in many.get_xticklabels()] == [
        str(stage) for stage in range(16)
    ]


def test_choosing_a_model_loads_its_layout_and_speaks_once():
    explorer, heard = MemoryControls(), []
    explorer.observe(heard.append, "value")
    explorer.controls["model"].value = LITE

    assert [explorer.value[name] for name in ("n_gpus", "pp", "tp", "ep")] == [
        8,
        1,
        1,
        8,
    ]
    assert len(heard) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"n_gpus": 8},
            "PP × TP must be at most the GPUs; 16 × 1 = 16, and there are 8. Set GPUs "
            "to 16, or lower PP or TP.",
        ),
        (
            {"ep": 256},
            "EP must divide the GPUs of one stage, which share its experts; got EP 256 "
            "and 2,048 / 16 = 128. Set EP to 128 or less, or GPUs to 4,096.",
        ),
        (
            {"model": "DeepSeek-V2 (236B)"},
            "EP must divide the routed experts, as each rank holds whole ones; got EP "
            "64 and 160. Set EP to 32.",
        ),
        (
            {"model": LITE, "pp": 32},
            "PP must be at most the layers, as each stage has one; got PP 32 and 27. "
            "Set PP to 16 or less.",
        ),
    ],
)
def test_what_does_not_go_together_names_rule_values_and_fix(changes, says):
    with pytest.raises(ValueError) as error:
        describe(at(**changes))
    assert str(error.value) == says


@pytest.mark.usefixtures("unchecked")  # of many predictions, each would be
def test_extremes_are_answered_by_a_sentence_or_a_rule():
    ends = {
        "model": MODELS,
        "micro_batch": (1, 64),
        "seq_len": (1024, 131_072),
        "n_gpus": (1, 8192),
        "pp": (1, 32),
        "tp": (1, 16),
        "ep": (1, 256),
        "zero": (0, 3),
    }
    assert ends.keys() < START.keys()
    n_answers = 0
    for values in itertools.islice(itertools.product(*ends.values()), 0, None, 13):
        chosen = at(**dict(zip(ends, values, strict=True)))
        try:
            text = describe(chosen)
        except ValueError as error:
            assert " must " in str(error)
            assert "Set " in str(error)
        else:
            n_answers += 1
            assert "fit" in text
            assert "e+" not in text
    assert n_answers > 5


@pytest.mark.parametrize(
    ("name", "options"),
    [("card", CARDS), ("precision", PRECISIONS), ("recompute", POLICIES)],
)
def test_every_choice_changes_the_sentence(name, options):
    assert len({describe(at(**{name: option})) for option in options}) == len(options)


@pytest.mark.usefixtures("unchecked")
def test_a_move_is_answered_within_200_ms():
    seconds = []
    for _ in range(3):
        start = time.process_time()
        describe(START)
        png(draw(START), scale=LIVE_SCALE, palette=False)
        seconds.append(time.process_time() - start)

    assert min(seconds) < 0.2


def test_the_fullest_stage_is_the_one_that_is_told():
    peaks = [stage.peak for stage in plan().stages]

    assert peaks[plan().fullest] == max(peaks) == plan().report.peak
    assert f"stage {plan().fullest} needs" in describe(START)
