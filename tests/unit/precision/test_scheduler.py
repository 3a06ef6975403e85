"""Decisions of the scheduler: who is guilty, where it goes, and when it comes back."""

import json
import math
import re
from dataclasses import replace

import pytest

from labkit.config import PRESETS
from labkit.precision.limits import Limits
from labkit.precision.scheduler import Decision, PrecisionScheduler, Verdict
from labkit.precision.signals import GemmSignal, StepSignals

TINY = PRESETS["tiny"]
QUICK = Limits(n_healthy=3, n_warm_up=4, span=10, cool_down=6)
FINE = GemmSignal(0.001, 28.0, 0)
WO, EXPERTS = "layers.1.attn.wo", "layers.1.ffn.experts"


def make(limits: Limits = QUICK, **options: str) -> PrecisionScheduler:
    options = {"start": "deepseek-v3"} | options
    return PrecisionScheduler(TINY, limits=limits, **options)


def step(number: int, loss: float = 2.0, norm: float = 1.0, **gemms) -> StepSignals:
    """Return signals of a step, with a slight wave in the loss."""
    wave = 0.01 * (-1) ** number
    given = {name: {"fprop": FINE} | own for name, own in gemms.items()}
    return StepSignals(step=number, loss=loss + wave, grad_norm=norm, gemms=given)


def run(scheduler: PrecisionScheduler, n_steps: int, first: int = 1) -> list[Verdict]:
    """Let a scheduler observe healthy steps."""
    return [scheduler.observe(step(n)) for n in range(first, first + n_steps)]


def changes(verdict: Verdict) -> dict[str, tuple[str, str]]:
    return {d.module: (d.before, d.after) for d in verdict.decisions}


def test_the_start_is_what_both_policies_have_in_fp8():
    v3 = PrecisionScheduler(PRESETS["v3-671b"]).levels
    assert v3["layers.9.attn.wq_a"] == v3["layers.9.ffn.shared_experts.w1"] == "fp8"
    assert v3["layers.9.attn.wo"] == v3["layers.0.attn.wq_a"] == "high"
    assert "head" not in v3
    assert set(make(start="aggressive").levels.values()) == {"fp8"}
    assert set(make(start="conservative").levels.values()) == {"high"}


def test_healthy_steps_make_one_group_bolder_by_one_level_then_the_next():
    scheduler = make(start="conservative")
    verdicts = run(scheduler, 12)
    grown = [v for v in verdicts if v.decisions]
    assert [v.decisions[0].step for v in grown] == [4, 7, 10]
    experts = ["layers.1.ffn.experts", "layers.2.ffn.experts"]
    assert changes(grown[0]) == dict.fromkeys(experts, ("high", "fp8-high-wgrad"))
    assert changes(grown[1]) == dict.fromkeys(experts, ("fp8-high-wgrad", "fp8"))
    assert all(".experts" not in name for name in changes(grown[2]))
    assert {name.split(".")[1] for name in changes(grown[2])} == {"1", "2"}
    assert grown[0].decisions[0] == Decision(
        step=4,
        module=experts[0],
        signal="healthy",
        value=4.0,
        before="high",
        after="fp8-high-wgrad",
    )
    assert not any(v.roll_back for v in verdicts)


def test_at_the_aim_nothing_is_decided_any_more():
    scheduler = make(start="conservative")
    run(scheduler, 100)
    assert set(scheduler.levels.values()) == {"fp8"}
    assert not any(v.decisions for v in run(scheduler, 20, first=101))


def test_tiles_that_are_not_finite_are_the_fault_of_the_first_module_of_the_forward():
    scheduler = make()
    run(scheduler, 5)
    backward = {"dgrad": GemmSignal(0.0, -math.inf, 9)}
    both = {"fprop": GemmSignal(0.0, -math.inf, 2)} | backward
    order = list(scheduler.levels)
    given = {
        name: backward if order.index(name) < order.index(EXPERTS) else both
        for name in order
    }
    verdict = scheduler.observe(step(6, math.nan, math.nan, **given))
    assert changes(verdict) == {EXPERTS: ("fp8", "high")}
    assert verdict.roll_back
    assert verdict.since == 6
    assert verdict.cause == f"{EXPERTS}: 2 tiles of fprop are not finite"


def test_in_the_backward_it_is_the_last_module_of_the_forward():
    scheduler = make()
    bad = {"dgrad": GemmSignal(0.0, 0.0, 1)}
    verdict = scheduler.observe(step(1, 2.0, math.inf, **{WO: bad, EXPERTS: bad}))
    assert changes(verdict) == {EXPERTS: ("fp8", "high")}


def test_a_lossy_weight_gradient_alone_becomes_high_after_some_patience():
    scheduler = make()
    run(scheduler, 5)
    bad = {"wgrad": GemmSignal(0.7, 25.0, 0)}
    assert scheduler.observe(step(6, **{WO: bad})) == Verdict()
    verdict = scheduler.observe(step(7, **{WO: bad}))
    assert changes(verdict) == {WO: ("fp8", "fp8-high-wgrad")}
    assert verdict.decisions[0].signal == "wgrad underflow"
    assert verdict.decisions[0].value == 0.7
    assert verdict.since == 6
    assert verdict.roll_back
    assert verdict.cause == f"{WO}: 70% of an operand of wgrad became zero"


def test_an_underflow_that_rises_at_once_is_out_of_limits_before_a_steady_one_is():
    rising, steady = make(), make()
    for n in range(1, 31):
        for scheduler, usual in ((rising, 0.001), (steady, 0.2)):
            shown = {"wgrad": GemmSignal(usual, 28.0, 0)}
            assert scheduler.observe(step(n, **{WO: shown})) == Verdict()
    lossy = {WO: {"wgrad": GemmSignal(0.25, 28.0, 0)}}
    steps = [step(n, **lossy) for n in (31, 32)]
    verdict = [rising.observe(each) for each in steps][1]
    assert changes(verdict) == {WO: ("fp8", "fp8-high-wgrad")}
    assert [steady.observe(each) for each in steps] == [Verdict(), Verdict()]


def test_losses_in_other_products_too_make_the_whole_module_high():
    scheduler = make()
    bad = {"wgrad": GemmSignal(0.7, 25.0, 0), "fprop": GemmSignal(0.0, 12.0, 0)}
    scheduler.observe(step(1, **{WO: bad}))
    verdict = scheduler.observe(step(2, **{WO: bad}))
    assert changes(verdict) == {WO: ("fp8", "high")}


def test_a_single_step_out_of_limits_is_no_alarm_but_not_healthy():
    scheduler = make(start="conservative")
    run(scheduler, 6)
    level = scheduler.levels[EXPERTS]
    assert level == "fp8-high-wgrad"
    scheduler.observe(step(7, **{EXPERTS: {"fprop": GemmSignal(0.9, 5.0, 0)}}))
    assert not any(v.decisions for v in run(scheduler, 2, first=8))
    assert scheduler.observe(step(10)).decisions


def test_what_is_near_its_limit_keeps_all_from_growing_bolder():
    scheduler = make(start="conservative")
    run(scheduler, 4)
    near = {EXPERTS: {"dgrad": GemmSignal(0.6 * QUICK.most_gradient_underflow, 28, 0)}}
    verdicts = [scheduler.observe(step(n, **near)) for n in range(5, 30)]
    assert all(v == Verdict() for v in verdicts)


def test_a_loss_that_jumps_soon_after_a_change_is_the_fault_of_that_change():
    scheduler = make(start="conservative")
    run(scheduler, 7)
    before = scheduler.levels
    assert before[EXPERTS] == "fp8"
    assert scheduler.observe(step(8, loss=4.0)) == Verdict()
    verdict = scheduler.observe(step(9, loss=4.0))
    assert set(changes(verdict)) == {EXPERTS, "layers.2.ffn.experts"}
    assert changes(verdict)[EXPERTS] == ("fp8", "fp8-high-wgrad")
    assert verdict.decisions[0].signal == "loss"
    assert verdict.since == 8
    assert "standard deviations above its mean" in verdict.cause


def test_a_loss_that_jumps_later_is_the_fault_of_all_that_is_in_fp8():
    scheduler = make()
    run(scheduler, 20)
    scheduler.observe(step(21, norm=60.0))
    verdict = scheduler.observe(step(22, norm=60.0))
    assert set(changes(verdict)) == set(scheduler.levels)
    assert set(scheduler.levels.values()) == {"high"}
    assert verdict.decisions[0].signal == "grad_norm"


def test_a_loss_that_is_not_finite_is_taken_back_at_once_even_on_the_first_step():
    scheduler = make()
    verdict = scheduler.observe(step(1, loss=math.nan))
    assert verdict.roll_back
    assert verdict.cause == "the loss is not finite"
    assert set(scheduler.levels.values()) == {"high"}


def test_a_module_comes_back_after_its_cool_down_which_doubles_and_at_last_never():
    scheduler = make()
    bad = {WO: {"fprop": GemmSignal(0.0, -math.inf, 1)}}
    waits, n = [], 5
    run(scheduler, n)
    for _ in range(QUICK.max_flips - 1):
        n += 1
        assert changes(scheduler.observe(step(n, **bad)))[WO][1] == "high"
        waited = 0
        while scheduler.levels[WO] == "high":
            n, waited = n + 1, waited + 1
            scheduler.observe(step(n))
        waits.append(waited)
    assert waits == [7, 13]  # cool-downs of 6 and 12, and the step after
    scheduler.observe(step(n + 1, **bad))
    assert scheduler.pinned == (WO,)
    run(scheduler, 200, first=n + 2)
    assert scheduler.levels[WO] == "high"


def test_a_trouble_that_no_level_mends_is_not_rolled_back_for_ever():
    scheduler = make(start="bf16")
    run(scheduler, 3)
    asked = [scheduler.observe(step(4, loss=math.inf)).roll_back for _ in range(5)]
    assert asked == [True, True, True, False, False]
    scheduler.observe(step(5))
    assert scheduler.observe(step(6, loss=math.inf)).roll_back


def test_rewinding_takes_statistics_back_and_leaves_levels():
    scheduler = make()
    run(scheduler, 8)
    kept = json.loads(json.dumps(scheduler.statistics))
    run(scheduler, 3, first=9)
    bad = {WO: {"fprop": GemmSignal(0.0, -math.inf, 1)}}
    scheduler.observe(step(12, **bad))
    levels = scheduler.levels
    scheduler.rewind(kept)
    assert scheduler.statistics == kept
    assert scheduler.levels == levels
    assert levels[WO] == "high"


def test_a_state_of_other_modules_is_refused():
    state = make(aim="conservative").state_dict()
    message = (
        "state must be of a scheduler with the same modules; got one that differs in "
        "'layers.0.attn.wkv_a', 'layers.0.attn.wkv_b', 'layers.0.attn.wo'. Make the "
        "scheduler with the model, aim and hardware it was saved with."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make().load_state_dict(state)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"patience": 0},
            "patience must be a whole number of at least 1; got 0. Set patience to 1 "
            "or more.",
        ),
        (
            {"most_underflow": 1.5},
            "most_underflow must be at least 0 and below 1; got 1.5. Set "
            "most_underflow to a number in [0, 1).",
        ),
    ],
)
def test_limits_say_what_they_must_be(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        replace(QUICK, **fields)
