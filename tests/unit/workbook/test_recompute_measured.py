"""What the notebook on recompute measures: steps that can be done again, and costs."""

import pytest
import torch

from labkit.config import PRESETS, TrainConfig
from labkit.memory import predict
from labkit.model import Transformer
from labkit.training import corpus
from labkit.training.windows import Windows
from labkit.workbook.recompute import (
    CONTENTS,
    RepeatedStep,
    are_equal,
    block_bytes,
    every,
    forward_flops,
    gradients_and_load,
    kept_bytes,
    outcome,
    seconds_per_step,
    value_costs,
)

TINY = PRESETS["tiny"]
RECIPE = TrainConfig(micro_batch=2, global_batch=2, seq_len=32)
N_BLOCKS = 5


@pytest.fixture(scope="module")
def step():
    batch = Windows(corpus.standard_library().train, 32).take(0, 2)
    model = Transformer(TINY, generator=torch.Generator().manual_seed(0))
    return RepeatedStep(model, batch)


@pytest.mark.usefixtures("unchecked")
def test_steps_change_no_weight_though_the_optimizer_holds_all_its_bytes(step):
    before = [parameter.clone() for parameter in step.model.parameters()]
    report = outcome(step, "none").report

    assert are_equal(list(step.model.parameters()), before)
    n = sum(parameter.numel() for parameter in before)
    assert report.by_part["moments"] >= 8 * n


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("policies", ["none", "selective", "full", every(2, N_BLOCKS)])
def test_kept_bytes_are_those_predicted(step, policies):
    found = outcome(step, policies)
    load = step.backward().load.tolist()
    predicted = predict(TINY, RECIPE, recompute=policies, load=load)

    assert found.kept_bytes == kept_bytes(predicted)
    assert found.peak_bytes == pytest.approx(predicted.peak, rel=0.05)


@pytest.mark.usefixtures("unchecked")
def test_full_runs_less_than_the_forward_again_and_keeps_least(step):
    none, full = outcome(step, "none"), outcome(step, "full")
    again, forward = full.flops - none.flops, forward_flops(step)

    assert 0.6 * forward < again < forward
    assert none.flops == pytest.approx(3 * forward, rel=0.05)
    assert full.kept_bytes < 0.2 * none.kept_bytes


@pytest.mark.usefixtures("unchecked")
def test_what_a_block_keeps_is_named_for_readers(step):
    report = outcome(step, "none").report
    kept = block_bytes(report, layer=2)

    assert list(kept) == list(CONTENTS)
    row = 4 * 2 * 32
    assert kept["attn.wo"] == row * 4 * 32  # four heads of 32
    assert kept["attn.wkv_b"] == row * 32
    assert kept["attn.kv_norm"] == row * (32 + 16 + 1)


def test_gradients_are_equal_and_tokens_counted_once(step):
    gradients, load = gradients_and_load(step, "none")
    for policies in ("full", "moe", every(4, N_BLOCKS)):
        found, counted = gradients_and_load(step, policies)
        assert are_equal(found, gradients)
        assert torch.equal(counted, load)
    # Two experts for each of 2 · 32 tokens, 2 · 31 in the MTP module.
    assert load.sum(dim=1).tolist() == [128, 128, 128, 124]


def test_a_gradient_that_differs_in_a_bit_is_not_equal():
    one = torch.ones(3)

    assert are_equal([one], [one.clone()])
    assert not are_equal([one], [one + 2**-23])


def test_each_policy_is_timed(step):
    seconds = seconds_per_step(step, {"a": "none", "b": every(4, N_BLOCKS)}, n_rounds=1)

    assert seconds.keys() == {"a", "b"}
    assert all(0 < each < 60 for each in seconds.values())


def test_costs_of_values_follow_from_the_widths_they_are_made_from():
    costs = {cost.name: cost for cost in value_costs(PRESETS["v3-671b"], 4096)}

    assert costs["keys, values"].flops == 2 * 512
    assert costs["queries"].flops == 2 * 1536
    assert costs["gates and ups"].flops == costs["latents"].flops == 2 * 7168
    # Of one query: 2048.5 keys of 192 and as many values of 128, for 128 results.
    assert costs["what attention found"].flops == 2 * 2048.5 * (192 + 128) / 128
    assert costs["keys, values"].per_token == 128 * (192 + 128)
    assert costs["gates and ups"].per_token == 2 * 9 * 2048


def test_the_cheap_values_are_those_that_deepseek_makes_again():
    order = [cost.is_selective for cost in value_costs(PRESETS["v3-671b"], 4096)]

    assert order == sorted(order, reverse=True)
