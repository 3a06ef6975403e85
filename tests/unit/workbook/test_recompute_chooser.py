"""The recompute chooser: its numbers, its extremes, and its figure."""

import itertools
import time

import pytest

from labkit.config import PRESETS, Layout, TrainConfig
from labkit.memory import STATES, predict
from labkit.memory.cost import recompute_cost
from labkit.workbook.recompute import kept_bytes
from labkit.workbook.recompute_plans import (
    EVERY,
    MACHINES,
    OTHERS,
    WHAT,
    RecomputePlan,
)
from labkit.workbook.widgets.recompute_chooser import RecomputeControls, describe, draw

START = RecomputeControls().value
V3, LITE, SMALL = MACHINES
CAPACITY = 81_559 * 2**20
"""Of an H800."""


def at(**changes):
    return START | changes


def small(**changes):
    return at(model=SMALL, micro_batch=4, seq_len=256, **changes)


def test_it_starts_at_deepseek_v3_with_deepseek_s_own_policy():
    plan = RecomputePlan(**START)

    assert plan.machine.cfg == PRESETS["v3-671b"]
    assert plan.machine.layout == Layout(pp=16, dp=128, ep=64)
    assert plan.policies == ("selective",) * 62
    assert describe(START).startswith("“selective” in all 62 blocks, 1 × 4,096 tokens")


def test_prices_are_those_of_the_predictor():
    plan = RecomputePlan(**small(what="attention", k=2, others="whole blocks"))
    price, fixed = plan.prices()
    policies = ("attention", "full") * 3 + ("attention",)
    recipe = TrainConfig(micro_batch=4, global_batch=4, seq_len=256)
    report = predict(PRESETS["small"], recipe, recompute=policies)

    assert plan.policies == policies
    assert (price.peak, price.kept) == (report.peak, kept_bytes(report))
    assert price.lasting == report.persistent
    assert price.time == recompute_cost(PRESETS["small"], recipe, policies)
    assert fixed["none"].time == 0
    assert fixed["full"].time == recompute_cost(PRESETS["small"], recipe, "full")


def test_prices_on_gpus_are_those_of_the_fullest_rank():
    price, fixed = RecomputePlan(**START).prices()
    report = predict(
        PRESETS["v3-671b"],
        TrainConfig(
            micro_batch=1, global_batch=128 * 64, seq_len=4096, precision="bf16"
        ),
        Layout(pp=16, dp=128, ep=64),
        "gpu",
        recompute="selective",
        zero=1,
        states=STATES["deepseek-v3"],
    )

    assert price == fixed["selective"]
    assert price.peak == report.peak == max(stage.peak for stage in report.by_stage)


def test_choosing_a_model_loads_its_sizes_and_speaks_once():
    chooser, heard = RecomputeControls(), []
    chooser.controls["seq_len"].value = 8192
    chooser.observe(heard.append, "value")
    chooser.controls["model"].value = SMALL

    sizes = ("micro_batch", "seq_len")
    assert [chooser.value[name] for name in sizes] == [4, 256]
    assert len(heard) == 1


def test_a_rank_that_does_not_fit_is_told_what_would():
    price, fixed = RecomputePlan(**START).prices()
    fitting = {name: x for name, x in fixed.items() if x.peak <= CAPACITY}
    name = min(fitting, key=lambda name: fitting[name].time)

    assert price.peak > CAPACITY
    hint = f"more than an H800 (85.5 GB); “{name}” would stay below it for "
    assert hint in describe(START)


def test_a_rank_below_the_limit_is_told_what_is_left_for_what_nobody_predicts():
    _, fixed = RecomputePlan(**START).prices()
    left = (CAPACITY - fixed["full"].peak) / 1e9
    text = describe(at(what="whole blocks"))

    assert (
        f"leaves {left:.0f} GB of an H800 (85.5 GB) to what is not predicted." in text
    )


def test_where_nothing_fits_the_remedy_is_not_a_policy():
    text = describe(at(what="whole blocks", micro_batch=16, seq_len=32_768))

    remedy = "shorten the sequence or lower the micro-batch."
    assert f"no policy saves enough: {remedy}" in text


def test_where_all_blocks_are_chosen_a_policy_for_the_others_is_said_to_be_of_none():
    assert describe(START | {"others": "attention"}).startswith(
        "“selective” in all 62 blocks (there are no others), 1 × 4,096 tokens"
    )


def test_a_choice_that_is_beaten_in_both_is_told_by_what():
    price, fixed = RecomputePlan(**at(what="experts")).prices()
    beating = {name: x.peak for name, x in fixed.items() if x.beats(price)}

    assert "selective" in beating
    best = min(beating, key=beating.get)
    assert f"“{best}” is better: a lower peak" in describe(at(what="experts"))
    assert "is better" not in describe(START)


def test_fp8_copies_lower_what_is_kept_and_cost_nothing():
    plain, fp8 = (
        RecomputePlan(**at(is_fp8=value)).prices()[0] for value in (False, True)
    )

    assert fp8.kept < plain.kept
    assert fp8.time == plain.time
    assert ", FP8 copies: " in describe(at(is_fp8=True))


def test_in_fp32_training_there_are_no_fp8_copies():
    prices = [
        RecomputePlan(**small(is_fp8=value)).prices()[0] for value in (False, True)
    ]

    assert prices[0] == prices[1]
    assert "no FP8 copies in FP32 training" in describe(small(is_fp8=True))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("model", MACHINES)
def test_every_control_changes_the_sentence(model):
    start = at(model=model, k=2)
    values = {
        "what": list(WHAT),
        "k": EVERY[:4],
        "others": list(OTHERS),
        "micro_batch": (1, 2, 4),
        "seq_len": (256, 512),
        "is_fp8": (False, True),
        "is_kept": (False, True),
    }
    assert values.keys() == START.keys() - {"model"}
    for name, several in values.items():
        texts = {describe(start | {name: value}) for value in several}
        assert len(texts) == len(several), name


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("model", MACHINES)
def test_no_combination_of_extremes_is_an_error(model):
    ends = {
        "what": ("norms, up-projections, SwiGLU", "whole blocks"),
        "k": (1, 16),
        "others": ("nothing", "attention"),
        "micro_batch": (1, 16),
        "seq_len": (256, 32_768),
    }
    for values in itertools.product(*ends.values()):
        plan = at(model=model, is_fp8=True) | dict(zip(ends, values, strict=True))
        text = describe(plan)
        assert "more time" in text
        assert "e+" not in text
    draw(plan)


@pytest.mark.usefixtures("unchecked")
def test_a_move_is_answered_at_once():
    for model in MACHINES:
        seconds = []
        for _ in range(3):
            start = time.process_time()
            describe(at(model=model)), draw(at(model=model))
            seconds.append(time.process_time() - start)
        assert min(seconds) < 0.15, model
