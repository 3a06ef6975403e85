"""Recompute's predicted price: FLOPs against a counter, and what follows from bytes."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from labkit.config import PRESETS, GQAConfig, Layout, MTPConfig, TrainConfig
from labkit.memory.cost import (
    BLOCK_POLICIES,
    CPU_BALANCE,
    device_balance,
    recompute_cost,
    step_times,
)
from labkit.memory.persistent import STATES
from labkit.memory.predict import predict
from labkit.memory.recompute import (
    RECOMPUTE_POLICIES,
    apply_recompute,
    block_policies,
)
from labkit.model import Transformer

TRAIN = TrainConfig(micro_batch=2, global_batch=2, seq_len=16)

FLOPS_ALONE = 1e-12
"""A balance at which no byte takes time."""


def counted_flops(cfg, train, policy):
    model = Transformer(cfg, generator=torch.Generator().manual_seed(0))
    apply_recompute(model, policy)
    tokens = torch.zeros(train.micro_batch, train.seq_len, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model.loss(tokens, tokens).total.backward()
    return counter.get_total_flops()


def predicted_flops(cfg, train, policy):
    times = step_times(cfg, train, balance=FLOPS_ALONE)
    return times.total(block_policies(policy, cfg.n_layers + cfg.n_mtp))


@pytest.mark.usefixtures("unchecked")
def test_flops_of_every_policy_are_those_that_a_counter_sees(small_model):
    cfg = small_model
    for policy in RECOMPUTE_POLICIES:
        if policy == "moe" and cfg.moe is None:
            continue
        expected = counted_flops(cfg, TRAIN, policy)
        assert predicted_flops(cfg, TRAIN, policy) == pytest.approx(expected, rel=1e-9)


@pytest.mark.usefixtures("unchecked")
def test_a_cpus_attention_computes_no_block_of_later_keys(dense):
    train = replace(TRAIN, seq_len=300)
    for policy in ("none", "full"):
        expected = counted_flops(dense, train, policy)
        assert predicted_flops(dense, train, policy) == pytest.approx(
            expected, rel=1e-9
        )


def test_the_cost_of_full_by_hand(dense):
    gqa = GQAConfig(n_heads=1, n_kv_heads=1, head_dim=16)
    cfg = replace(dense, attention=gqa, vocab_size=1)
    n, width, hidden = 32, 16, 24
    weights, last = 4 * width**2 + 3 * width * hidden, width * hidden
    scores = 2 * n * 16 * width  # of every query with 16 keys
    forward = 2 * n * weights + 2 * scores
    # The backward takes each product twice, and the scores once more.
    step = 2 * (3 * forward + scores) + 6 * n * width
    again = 2 * (forward - 2 * n * last)

    cost = recompute_cost(cfg, TRAIN, "full", balance=FLOPS_ALONE)
    assert cost == pytest.approx(again / step)


def test_no_recompute_costs_nothing_and_a_mixture_the_sum_of_its_blocks(sparse):
    cfg = replace(sparse, n_layers=3)
    mixture = ["attention", "moe", "full"]
    alone = [
        ["none"] * index + [policy] + ["none"] * (2 - index)
        for index, policy in enumerate(mixture)
    ]
    costs = [recompute_cost(cfg, TRAIN, policies) for policies in alone]

    assert recompute_cost(cfg, TRAIN, "none") == 0
    assert recompute_cost(cfg, TRAIN, mixture) == pytest.approx(sum(costs))
    assert min(costs) > 0


def test_experts_of_a_dense_layer_cost_nothing(sparse):
    assert recompute_cost(sparse, TRAIN, ["moe", "none"]) == 0


@pytest.mark.parametrize("preset", ["small", "v3-671b"])
def test_policies_that_run_more_again_cost_more(preset):
    train = TrainConfig(micro_batch=4, precision="bf16")
    cost = {p: recompute_cost(PRESETS[preset], train, p) for p in RECOMPUTE_POLICIES}

    assert max(cost, key=cost.get) == "full"
    assert 0 < cost["every_k"] < cost["full"] < 1 / 3
    assert cost["selective"] < cost["attention"] + cost["moe"] < cost["full"]


def test_norms_and_products_of_values_cost_more_where_bytes_are_dear(sparse):
    cheap, dear = (
        recompute_cost(sparse, TRAIN, "selective", balance=balance)
        for balance in (FLOPS_ALONE, 1e3)
    )
    assert 0 < cheap < dear


def test_a_pipeline_waits_for_its_slowest_stage_alone(dense):
    cfg = replace(dense, n_layers=8)
    layout = Layout(pp=2)
    train = replace(TRAIN, global_batch=2000)  # the fill of the pipeline is short
    first, last = (
        recompute_cost(
            cfg, train, policies, layout, layers_per_stage=[6, 2], balance=6.3
        )
        for policies in (["full"] * 6 + ["none"] * 2, ["none"] * 6 + ["full"] * 2)
    )
    assert last < 1e-3 < 0.1 < first


def test_replicas_and_accumulation_change_no_more_than_the_optimizers_share(dense):
    one = recompute_cost(dense, TRAIN, "full", balance=FLOPS_ALONE)
    many = replace(TRAIN, global_batch=16)

    for layout in (None, Layout(dp=2)):
        cost = recompute_cost(dense, many, "full", layout, balance=FLOPS_ALONE)
        assert cost == pytest.approx(one)
    assert recompute_cost(dense, TRAIN, "full") < recompute_cost(dense, many, "full")


def test_tensor_parallel_ranks_share_all_products_but_those_of_latents(dense):
    def flops(tp):
        cfg = replace(dense, n_layers=1)
        times = step_times(cfg, TRAIN, Layout(tp=tp), balance=FLOPS_ALONE)
        return times.blocks[0].plain

    latents = dense.attention.q_lora_rank + dense.attention.cache_width
    whole = 6 * 32 * dense.dim * latents
    assert flops(2) - whole == pytest.approx((flops(1) - whole) / 2)


def test_a_stage_that_lies_on_two_ranks_feeds_half_of_the_micro_batches_to_each(dense):
    layout = Layout(pp=2)
    times = step_times(dense, TRAIN, layout, schedule="dualpipe", balance=1.0)

    assert [stage.share for stage in times.stages] == [0.5, 0.5]
    assert [set(stage.blocks) for stage in times.stages] == [{0, 1}, {0, 1}]


def test_a_devices_balance_is_its_data_sheets_rate_over_its_bandwidth():
    assert device_balance("A100-80g", torch.bfloat16) == pytest.approx(312e12 / 2039e9)
    assert device_balance("gpu", torch.bfloat16) == device_balance(
        "h800", torch.bfloat16
    )
    assert device_balance("cpu", torch.float32) == CPU_BALANCE[torch.float32]


def test_arguments_of_predict_that_decide_no_time_change_nothing(sparse):
    def cost(**options):
        layout, states = Layout(dp=2, ep=2), STATES["deepseek-v3"]
        return recompute_cost(sparse, TRAIN, "full", layout, states=states, **options)

    assert cost(cached="fp8") == cost()
    assert cost(imbalance=2.0) != cost()


def test_every_block_policy_has_a_price(small_models):
    times = step_times(small_models["multi-token"], TRAIN)

    assert all(block.again.keys() == {*BLOCK_POLICIES} for block in times.blocks)


def test_a_balance_must_be_above_zero(dense):
    with pytest.raises(ValueError) as error:
        recompute_cost(dense, TRAIN, "full", balance=0.0)

    assert str(error.value) == (
        "balance must be above 0 and finite; got 0.0. Set balance to a number above 0."
    )


@pytest.mark.parametrize(
    ("policy", "train", "options"),
    [
        ("moe", TRAIN, {}),
        ("full", TRAIN, {"schedule": "2f2b"}),
        ("full", TRAIN, {"layers_per_stage": [1]}),
        ("full", TRAIN, {"layout": Layout(dp=2), "load": [[1]]}),
        ("full", TRAIN, {"load": 7}),
        ("full", TRAIN, {"cached": "fp8"}),
        ("full", replace(TRAIN, seq_len=1), {}),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_predict_refuses_has_no_cost_either(dense, policy, train, options):
    cfg = replace(dense, mtp=MTPConfig())
    refused = pytest.raises((ValueError, TypeError))
    with refused as expected:
        predict(cfg, train, recompute=policy, **options)
    with refused as error:
        recompute_cost(cfg, train, policy, **options)

    assert (error.type, str(error.value)) == (expected.type, str(expected.value))


def test_a_split_of_layers_is_read_also_where_one_rank_has_all(dense):
    with pytest.raises(
        ValueError, match=r"sum to n_layers=2; got 1 numbers .* sum to 9"
    ):
        step_times(dense, TRAIN, layers_per_stage=[9])


def test_a_misspelt_argument_is_refused(dense):
    with pytest.raises(TypeError, match="predict.. has no keyword argument 'states_'"):
        recompute_cost(dense, TRAIN, "full", states_=None)
