"""The rules of a training recipe, and DeepSeek-V3's own numbers in it."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import TrainConfig

BROKEN = [
    (
        {"n_steps": 0},
        "n_steps must be a whole number of at least 1; got 0. Set n_steps to 1 or "
        "more.",
    ),
    (
        {"global_batch": 8, "micro_batch": 3},
        "micro_batch must divide global_batch; got 3 and 8. Set global_batch=9.",
    ),
    (
        {"precision": "fp4"},
        "precision must be one of 'fp32', 'bf16', 'fp8'; got 'fp4'. Set "
        "precision='fp32' or another of these.",
    ),
    (
        {"fp8_policy": ""},
        "fp8_policy must be a name; got ''. Set fp8_policy to a text that is not "
        "empty.",
    ),
    (
        {"moments": "fp8"},
        "moments must be one of 'fp32', 'bf16', 'bf16-stochastic'; got 'fp8'. Set "
        "moments='fp32' or another of these.",
    ),
    (
        {"moments": "bf16", "beta2": 0.999},
        "beta2 must be at most 257/258 = 0.9961 with moments='bf16', or a rounded "
        "moment never falls; got 0.999. Set beta2=0.95 or moments='bf16-stochastic'.",
    ),
    (
        {"moments": "bf16", "beta1": 0.9962},
        "beta1 must be at most 257/258 = 0.9961 with moments='bf16', or a rounded "
        "moment never falls; got 0.9962. Set beta1=0.95 or moments='bf16-stochastic'.",
    ),
    (
        {"beta2": 1.0},
        "beta2 must be at least 0 and below 1; got 1.0. Set beta2 to a number in [0, "
        "1).",
    ),
    (
        {"constant_fraction": -0.1},
        "constant_fraction must be at least 0 and below 1; got -0.1. Set "
        "constant_fraction to a number in [0, 1).",
    ),
    (
        {"lr": 0.0},
        "lr must be above 0 and finite; got 0.0. Set lr to a number above 0.",
    ),
    (
        {"grad_clip": float("nan")},
        "grad_clip must be above 0 and finite; got nan. Set grad_clip to a number "
        "above 0.",
    ),
    (
        {"weight_decay": -0.1},
        "weight_decay must be at least 0 and finite; got -0.1. Set "
        "weight_decay to 0 or more.",
    ),
    (
        {"bias_update_rate": -1e-3},
        "bias_update_rate must be at least 0 and finite; got -0.001. Set "
        "bias_update_rate to 0 or more.",
    ),
    (
        {"mtp_final_scale": -1.0},
        "mtp_final_scale must be at least 0 and finite; got -1.0. Set "
        "mtp_final_scale to 0 or more.",
    ),
    (
        {"constant_fraction": 0.7, "cosine_fraction": 0.4, "final_fraction": 0.0},
        "constant_fraction, cosine_fraction and final_fraction share the steps and "
        "must sum to at most 1; got 1.1. Lower one of them by 0.1.",
    ),
    (
        {"min_lr": 1e-4, "final_lr": 1e-3},
        "final_lr must be at most min_lr; got 0.001 and 0.0001. Set final_lr=None to "
        "keep min_lr.",
    ),
    (
        {"final_lr": 0.0},
        "final_lr must be above 0 and finite; got 0.0. Set final_lr to a number above "
        "0.",
    ),
    (
        {"warmup_steps": 2.5},
        "warmup_steps must be a whole number of at least 0; got 2.5. Set warmup_steps "
        "to 0 or more.",
    ),
    (
        {"seed": -1},
        "seed must be a whole number of at least 0; got -1. Set seed to 0 or more.",
    ),
    (
        {"seed": 2**63},
        "seed must be below 2**63; got 9223372036854775808. Set seed=0 or another.",
    ),
    (
        {"lr": 1e-4, "min_lr": 1e-3},
        "min_lr must be at most lr; got 0.001 and 0.0001. Set min_lr=1e-05.",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), BROKEN, ids=["-".join(change) for change, _ in BROKEN]
)
def test_a_broken_rule_says_the_value_and_the_fix(unchecked, change, message):
    with pytest.raises(ValueError) as caught:
        TrainConfig(**change)
    assert str(caught.value) == message


def test_deepseek_v3_sees_62_9_million_tokens_a_step():
    v3 = TrainConfig(global_batch=15_360, micro_batch=1, seq_len=4096)

    assert v3.tokens_per_step == 62_914_560


@given(constant=st.integers(1, 98), data=st.data())
def test_decimal_fractions_that_sum_to_one_are_accepted(constant, data):
    # As binary fractions some of these sum to a little more than 1.
    cosine = data.draw(st.integers(1, 99 - constant))
    final = 100 - constant - cosine
    TrainConfig(
        constant_fraction=constant / 100,
        cosine_fraction=cosine / 100,
        final_fraction=final / 100,
    )


def test_the_phases_of_deepseek_v3_are_the_default_ones():
    phases = TrainConfig()

    assert round(10 / 14.8, 3) == phases.constant_fraction
    assert round(4.3 / 14.8, 2) == phases.cosine_fraction
    assert round(0.167 / 14.8, 3) == phases.final_fraction
    assert round(0.5 / 14.8, 3) == phases.bias_freeze_fraction


@given(micro=st.integers(1, 64), n=st.integers(1, 64), seq_len=st.integers(1, 8192))
def test_micro_batches_make_up_the_global_batch(micro, n, seq_len):
    train = TrainConfig(global_batch=micro * n, micro_batch=micro, seq_len=seq_len)

    assert train.n_micro_batches == n
    assert train.tokens_per_step == n * micro * seq_len


@given(batch=st.integers(1, 100), micro=st.integers(1, 100))
def test_the_global_batch_that_the_error_proposes_works(batch, micro):
    try:
        TrainConfig(global_batch=batch, micro_batch=micro)
    except ValueError as error:
        fix = int(re.search(r"Set global_batch=(\d+)\.", str(error))[1])
        assert batch < TrainConfig(global_batch=fix, micro_batch=micro).global_batch
    else:
        assert batch % micro == 0


@pytest.mark.parametrize("moments", ["fp32", "bf16-stochastic"])
def test_a_slow_second_moment_is_refused_only_where_it_would_stall(moments):
    assert TrainConfig(moments=moments, beta2=0.999).beta2 == 0.999
    assert TrainConfig(moments="bf16", beta2=257 / 258).moments == "bf16"


def test_a_recipe_is_varied_by_replacing_fields():
    assert replace(TrainConfig(), seed=7).seed == 7
