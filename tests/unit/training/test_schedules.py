from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.config import TrainConfig
from labkit.training.recipes import V3
from labkit.training.schedules import bias_update_rate, learning_rate, mtp_weight

TOKENS = 14.8e12


def step_at(tokens: float) -> int:
    return int(tokens / V3.tokens_per_step)


def test_the_learning_rate_is_the_reports_at_its_own_moments():
    # DeepSeek-V3, section 4.2: 2K steps to 2.2e-4, constant to 10T tokens, cosine to
    # 2.2e-5 over 4.3T, 333B there, 167B at 7.3e-6.
    assert learning_rate(V3, 999) == pytest.approx(1.1e-4)
    assert learning_rate(V3, 1999) == learning_rate(V3, step_at(9.99e12)) == 2.2e-4
    assert learning_rate(V3, step_at(12.15e12)) == pytest.approx(1.21e-4, rel=1e-2)
    assert learning_rate(V3, step_at(14.31e12)) == 2.2e-5
    assert learning_rate(V3, step_at(14.62e12)) == 2.2e-5
    assert learning_rate(V3, step_at(14.65e12)) == 7.3e-6


def test_gamma_and_lambda_change_at_the_reports_moments():
    assert bias_update_rate(V3, step_at(14.29e12)) == 0.001
    assert bias_update_rate(V3, step_at(14.31e12)) == 0.0
    assert mtp_weight(V3, 0.3, step_at(9.99e12)) == 0.3
    assert mtp_weight(V3, 0.3, step_at(10.01e12)) == pytest.approx(0.1)


def test_the_cosine_is_pytorchs():
    train = TrainConfig(
        n_steps=100, warmup_steps=0, constant_fraction=0.0, cosine_fraction=0.5
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=train.lr)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50, train.min_lr)
    for step in range(50):
        assert learning_rate(train, step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


trains = st.builds(
    TrainConfig,
    n_steps=st.integers(1, 500),
    warmup_steps=st.integers(0, 50),
    constant_fraction=st.floats(0, 0.6),
    cosine_fraction=st.floats(0, 0.3),
    final_lr=st.sampled_from([None, 1e-4]),
)


@given(trains, st.integers(0, 600))
def test_the_learning_rate_is_positive_and_at_most_its_peak(train, step):
    assert 0 < learning_rate(train, step) <= train.lr


@given(trains)
def test_after_the_warm_up_the_learning_rate_never_rises(train):
    rates = [learning_rate(train, s) for s in range(train.warmup_steps, 600, 7)]
    assert all(
        later <= earlier for earlier, later in zip(rates, rates[1:], strict=False)
    )


def test_the_warm_up_is_linear_and_reaches_the_peak():
    train = TrainConfig(n_steps=100, warmup_steps=4, lr=1e-3, min_lr=1e-4)
    rates = [learning_rate(train, step) for step in range(5)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_a_switched_off_mtp_loss_stays_off():
    assert mtp_weight(replace(V3, mtp_final_scale=0.0), 0.3, V3.n_steps) == 0.0
    assert mtp_weight(V3, 0.0, V3.n_steps) == 0.0
