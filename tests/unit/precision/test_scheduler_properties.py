"""What holds of the scheduler whatever signals it sees."""

import json
import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.config import PRESETS
from labkit.precision.levels import LEVELS
from labkit.precision.limits import Limits
from labkit.precision.scheduler import PrecisionScheduler
from labkit.precision.signals import GemmSignal, StepSignals

SHORT = replace(PRESETS["tiny"], n_layers=2)
LIMITS = Limits(n_healthy=2, n_warm_up=3, span=6, cool_down=4, max_flips=3)
MODULES = ("layers.0.attn.wo", "layers.1.ffn.experts", "mtp.0.block.attn.wq_a")

NUMBERS = st.one_of(
    st.floats(0.5, 4.0), st.sampled_from([2.0, 2.0, 2.0, 1e9, math.nan, math.inf])
)
SIGNALS = st.builds(
    GemmSignal,
    st.sampled_from([0.0, 0.001, 0.15, 0.9]),
    st.sampled_from([28.0, 24.0, 10.0, -math.inf, math.inf]),
    st.sampled_from([0, 0, 0, 3]),
)
STEPS = st.builds(
    StepSignals,
    step=st.integers(1, 40),
    loss=NUMBERS,
    grad_norm=NUMBERS,
    gemms=st.dictionaries(
        st.sampled_from(MODULES),
        st.dictionaries(st.sampled_from(["fprop", "dgrad", "wgrad"]), SIGNALS),
    ),
)
CALM = st.builds(
    StepSignals, step=st.integers(1, 40), loss=st.just(2.0), grad_norm=st.just(1.0)
)
RUNS = st.lists(st.one_of(CALM, CALM, STEPS), max_size=60)


def make() -> PrecisionScheduler:
    return PrecisionScheduler(SHORT, limits=LIMITS)


@settings(deadline=None, max_examples=25)
@given(RUNS)
def test_decisions_are_changes_of_levels_within_the_aim(steps):
    scheduler = make()
    levels = scheduler.levels
    for signals in steps:
        verdict = scheduler.observe(signals)
        for decision in verdict.decisions:
            assert levels[decision.module] == decision.before != decision.after
            assert decision.after in LEVELS
            levels[decision.module] = decision.after
        assert levels == scheduler.levels
        assert not verdict.roll_back or verdict.cause
        if not math.isfinite(signals.loss):
            assert verdict.cause


@settings(deadline=None, max_examples=25)
@given(RUNS)
def test_flips_are_bounded_and_nothing_grows_bolder_before_it_has_cooled_down(steps):
    scheduler = make()
    n_flips, cool_until = {}, {}
    for now, signals in enumerate(steps):
        for decision in scheduler.observe(signals).decisions:
            name = decision.module
            is_bolder = LEVELS.index(decision.after) < LEVELS.index(decision.before)
            if is_bolder:
                assert now > cool_until.get(name, -1)
                assert n_flips.get(name, 0) < LIMITS.max_flips
            else:
                n = n_flips[name] = n_flips.get(name, 0) + 1
                cool_until[name] = now + LIMITS.cool_down * 2 ** (n - 1)
    assert all(n <= LIMITS.max_flips for n in n_flips.values())


@settings(deadline=None, max_examples=25)
@given(RUNS, RUNS)
def test_a_state_through_json_goes_on_with_the_same_decisions(before, after):
    scheduler, other = make(), make()
    for signals in before:
        scheduler.observe(signals)
    other.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    assert json.dumps(other.state_dict()) == json.dumps(scheduler.state_dict())
    for signals in after:
        assert repr(other.observe(signals)) == repr(scheduler.observe(signals))


@settings(deadline=None, max_examples=25)
@given(RUNS)
def test_rewinding_never_changes_a_level(steps):
    scheduler = make()
    snapshot = scheduler.statistics
    for signals in steps:
        scheduler.observe(signals)
        levels = scheduler.levels
        scheduler.rewind(snapshot)
        assert scheduler.levels == levels
        assert scheduler.statistics == snapshot
