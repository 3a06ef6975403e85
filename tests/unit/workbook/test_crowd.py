"""A crowd of tokens chooses as the model's router does, and a bias steers it."""

import numpy as np
import pytest
import torch

from labkit.config import PRESETS
from labkit.model.moe import Router
from labkit.workbook import crowd
from labkit.workbook.crowd import affinities, busiest, choose, steer


@pytest.mark.parametrize("n_limited", [1, 4, 8])
def test_a_crowd_chooses_as_the_router_of_deepseek_v3(n_limited):
    liked = affinities(1.0)[:200]
    bias = np.linspace(-0.2, 0.2, 256, dtype=np.float32)
    moe = PRESETS["v3-671b"].moe
    with torch.device("meta"):
        router = Router(1, moe)
    router.bias = torch.from_numpy(bias)
    router.moe = type(moe)(
        n_routed_experts=256,
        n_activated_experts=8,
        moe_inter_dim=1,
        n_expert_groups=8,
        n_limited_groups=n_limited,
    )
    expected = router.choose(torch.from_numpy(liked)).sort(dim=-1).values
    found = choose(liked + bias, n_limited)

    assert (found.sum(axis=1) == 8).all()
    assert np.array_equal(found.nonzero()[1].reshape(-1, 8), expected.numpy())


def test_popularity_is_what_makes_loads_differ():
    spread = [busiest(steer(skew, 0, 8, 1).unsteered) for skew in (0, 0.5, 1, 2)]

    assert spread == sorted(spread)
    assert spread[0] < 1.5
    assert spread[-1] > 30  # of 32, the most there is


def test_without_gamma_nothing_changes():
    still = steer(0.5, 0, 4, n_steps=2 * crowd.CYCLE)

    assert not still.bias.any()
    assert np.array_equal(still.load, still.unsteered)
    assert {ratio for _, ratio in still.history} == {busiest(still.load)}


def test_the_first_step_moves_each_bias_by_gamma_towards_the_mean():
    once = steer(1.0, 0.25, 4, n_steps=1)
    (load,) = once.loads

    assert np.array_equal(once.bias, np.float32(0.25) * np.sign(load.mean() - load))


def test_history_begins_before_the_bias_and_then_has_every_token_once():
    steered = steer(1.0, 0.01, 4, n_steps=2 * crowd.CYCLE)
    steps = [step for step, _ in steered.history]
    first_cycle = steered.loads[: crowd.CYCLE].sum(axis=0)

    assert steps == [0, *range(crowd.CYCLE, 2 * crowd.CYCLE + 1)]
    assert steered.history[0][1] == busiest(steered.unsteered)
    assert steered.history[1][1] == busiest(first_cycle)
    assert first_cycle.sum() == pytest.approx(crowd.N_TOKENS * crowd.K, rel=1e-3)


def test_a_small_gamma_is_most_even_at_an_instant_and_a_large_one_is_not():
    small, large = steer(1.0, 0.001, 4), steer(1.0, 0.1, 4)

    assert busiest(small.load) < 1.5 < 5 < busiest(large.load)
    assert large.history[-1][1] < busiest(large.load)
