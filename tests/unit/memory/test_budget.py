"""Budgets are kept, and nothing that fits is cheaper."""

import random
import re
from dataclasses import replace
from itertools import product

import pytest
import torch

from labkit.config import (
    PRESETS,
    GQAConfig,
    Layout,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    TrainConfig,
)
from labkit.memory import STATES, apply_recompute, measure, predict
from labkit.memory.budget import EVERY, budget, fixed_policies
from labkit.memory.cost import BLOCK_POLICIES, step_times
from labkit.memory.recompute import RECOMPUTE_POLICIES, block_policies
from labkit.model import Transformer
from labkit.training import Trainer, corpus

MLA = MLAConfig(
    n_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
DENSE = ModelConfig(
    vocab_size=64,
    dim=64,
    n_layers=3,
    inter_dim=192,
    attention=MLA,
    max_seq_len=256,
    init_std=0.1,
)
MOE = MoEConfig(n_routed_experts=4, n_activated_experts=2, moe_inter_dim=48)
SPARSE = replace(DENSE, moe=MOE, n_dense_layers=1)
GROUPED = GQAConfig(n_heads=4, n_kv_heads=2, head_dim=16)
TRAIN = TrainConfig(micro_batch=2, global_batch=2, seq_len=96)
MIXED = replace(TRAIN, precision="bf16", global_batch=4)

STEPS = {
    "dense": (DENSE, TRAIN, {}),
    "sparse": (SPARSE, TRAIN, {}),
    "sparse, autocast": (SPARSE, MIXED, {}),
    "multi-token": (replace(SPARSE, n_layers=2, mtp=MTPConfig()), TRAIN, {}),
    "grouped-query": (replace(SPARSE, attention=GROUPED), TRAIN, {}),
    "two stages": (
        replace(SPARSE, n_layers=4),
        replace(TRAIN, global_batch=8),
        {"layout": Layout(pp=2)},
    ),
    "two chunks": (
        replace(DENSE, n_layers=4),
        replace(TRAIN, global_batch=8),
        {"layout": Layout(pp=2, vpp=2), "schedule": "dualpipev"},
    ),
    "both ends": (
        replace(DENSE, n_layers=4),
        replace(TRAIN, global_batch=8),
        {"layout": Layout(pp=2), "schedule": "dualpipe", "states": STATES["megatron"]},
    ),
}


def peak(cfg, train, policies, options):
    return predict(cfg, train, recompute=policies, **options).peak


def all_mixtures(cfg):
    names = [name for name in BLOCK_POLICIES if name != "moe" or cfg.moe]
    return product(names, repeat=cfg.n_layers + cfg.n_mtp)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.usefixtures("unchecked")
def test_no_mixture_that_fits_is_cheaper(name):
    cfg, train, options = STEPS[name]
    times = step_times(cfg, train, **options)
    priced = [
        (times.cost(policies), peak(cfg, train, policies, options))
        for policies in all_mixtures(cfg)
    ]
    peaks = [n_bytes for _, n_bytes in priced]
    least, most = min(peaks), max(peaks)
    for share in (0, 0.15, 0.4, 0.7, 0.95):
        n_bytes = int(least + share * (most - least))
        best = min(cost for cost, needed in priced if needed <= n_bytes)
        found = budget(n_bytes, cfg, train, **options)

        assert peak(cfg, train, found, options) <= n_bytes
        assert times.cost(found) == pytest.approx(best, abs=1e-9)


SMALL_STEPS = [
    (PRESETS["tiny"], TrainConfig(micro_batch=4, global_batch=8), {}),
    (PRESETS["small"], TrainConfig(micro_batch=4, global_batch=4), {}),
    (PRESETS["small"], TrainConfig(micro_batch=1, precision="bf16"), {}),
    (replace(DENSE, n_layers=12), TRAIN, {}),
    (replace(SPARSE, n_layers=12, attention=GROUPED), MIXED, {"device": "h100"}),
    (
        replace(SPARSE, n_layers=12, mtp=MTPConfig()),
        replace(TRAIN, global_batch=32),
        {"layout": Layout(pp=4, dp=2, ep=2), "zero": 1, "states": STATES["megatron"]},
    ),
]
DRAWN = random.Random(0)
"""Of 20 budgets, from what the thriftiest policy by name needs to what none does."""

DRAWS = [(DRAWN.randrange(len(SMALL_STEPS)), DRAWN.random()) for _ in range(20)]


@pytest.mark.parametrize(("index", "share"), DRAWS)
@pytest.mark.usefixtures("unchecked")
def test_a_budget_is_kept_and_no_policy_by_name_that_keeps_it_is_cheaper(index, share):
    cfg, train, options = SMALL_STEPS[index]
    n_blocks, times = cfg.n_layers + cfg.n_mtp, step_times(cfg, train, **options)
    fixed = {
        (name, k): block_policies(name, n_blocks, k=k)
        for name in RECOMPUTE_POLICIES
        if name != "moe" or cfg.moe
        for k in (EVERY if name == "every_k" else [4])
    }
    peaks = {
        name: peak(cfg, train, policies, options) for name, policies in fixed.items()
    }
    least, most = min(peaks.values()), peaks["none", 4]
    n_bytes = int(least + share * (most - least))
    found = budget(n_bytes, cfg, train, **options)

    assert peak(cfg, train, found, options) <= n_bytes
    cost = times.cost(found)
    for name, policies in fixed.items():
        assert peaks[name] > n_bytes or cost <= times.cost(policies)


def test_every_policy_by_name_is_tried():
    names = [block_policies("every_k", 8, k=k) for k in EVERY]
    names += [(name,) * 8 for name in BLOCK_POLICIES]

    assert [*EVERY] == [2, 3, 4, 5, 6, 7, 8]
    assert {*BLOCK_POLICIES, "every_k"} == {*RECOMPUTE_POLICIES}
    assert {*fixed_policies(replace(SPARSE, n_layers=8))} == {*names}
    assert ("moe",) * 8 not in fixed_policies(replace(DENSE, n_layers=8))


@pytest.fixture(scope="module")
def text():
    return corpus.standard_library()


@pytest.mark.parametrize("share", [0.2, 0.7])
@pytest.mark.usefixtures("unchecked")
def test_a_trainers_step_keeps_the_budget(share, text):
    cfg = PRESETS["tiny"]
    train = TrainConfig(micro_batch=4, global_batch=4, seq_len=128)
    least, most = (peak(cfg, train, x, {}) for x in ("full", "none"))
    n_bytes = int(least + share * (most - least))
    policies = budget(n_bytes, cfg, train)
    model = Transformer(cfg, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(apply_recompute(model, policies), train, text)
    trainer.step()

    assert len({*policies}) > 1
    assert measure(trainer.step, model).peak <= n_bytes


@pytest.mark.usefixtures("unchecked")
def test_gradients_under_a_budget_are_those_without_to_the_bit():
    cfg, train = PRESETS["tiny"], TrainConfig(micro_batch=2, global_batch=2, seq_len=64)
    least, most = (peak(cfg, train, x, {}) for x in ("full", "none"))
    policies = budget((least + most) // 2, cfg, train)
    tokens = torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(1))

    def gradients(policies):
        model = Transformer(cfg, generator=torch.Generator().manual_seed(0))
        apply_recompute(model, policies)
        model.loss(tokens[:, :-1], tokens[:, 1:]).total.backward()
        return [parameter.grad for parameter in model.parameters()]

    assert len({*policies}) > 1
    pairs = zip(gradients(policies), gradients("none"), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_where_all_fits_nothing_runs_again():
    n_bytes = predict(SPARSE, TRAIN).peak

    assert budget(n_bytes, SPARSE, TRAIN) == ("none",) * 3
    assert budget(n_bytes - 1, SPARSE, TRAIN) != ("none",) * 3


def test_the_least_that_an_error_names_is_enough():
    with pytest.raises(ValueError) as error:
        budget(1000, SPARSE, TRAIN)
    least = int(re.search(r"n_bytes=(\d+)", str(error.value))[1])

    assert str(error.value) == (
        f"n_bytes must be at least {least:,}, which the step needs when it keeps "
        f"least; got 1,000. Set n_bytes={least}, or make the step smaller: "
        "micro_batch, seq_len, or more ranks."
    )
    assert predict(SPARSE, TRAIN, recompute=budget(least, SPARSE, TRAIN)).peak == least
    with pytest.raises(ValueError, match=f"at least {least:,}"):
        budget(least - 1, SPARSE, TRAIN)


@pytest.mark.usefixtures("unchecked")
def test_a_budget_is_a_whole_number():
    with pytest.raises(ValueError) as error:
        budget(0.5, SPARSE, TRAIN)

    assert str(error.value) == (
        "n_bytes must be a whole number of at least 1; got 0.5. Set n_bytes to 1 or "
        "more."
    )


def test_recompute_is_no_argument_but_the_answer():
    with pytest.raises(ValueError) as error:
        budget(2**30, SPARSE, TRAIN, recompute="full")

    assert str(error.value) == (
        "budget chooses recompute itself, for each block; got recompute='full'. "
        "Leave it out."
    )


def test_what_runs_again_depends_on_what_a_byte_costs():
    cfg, train, _ = STEPS["grouped-query"]
    least, most = (peak(cfg, train, x, {}) for x in ("full", "none"))
    dear, free = (
        budget((least + most) // 2, cfg, train, balance=balance)
        for balance in (1e9, 1e-9)
    )
    assert dear == ("selective", "moe", "none")  # scores move many bytes
    assert free == ("selective", "attention", "none")  # and experts have many FLOPs


@pytest.mark.usefixtures("unchecked")
def test_stages_that_keep_fewer_micro_batches_run_less_again():
    cfg, layout = PRESETS["v3-671b"], Layout(pp=16, dp=128, ep=64)
    train = TrainConfig(micro_batch=1, global_batch=15360, seq_len=4096)
    options = {"layout": layout, "device": "h800", "states": STATES["deepseek-v3"]}
    n_bytes = 90 * 2**30
    policies = budget(n_bytes, cfg, train, **options)
    again = [name != "none" for name in policies]

    assert (
        peak(cfg, train, policies, options)
        <= n_bytes
        < peak(cfg, train, "selective", options)
    )
    assert all(again[:8])
    assert not any(again[40:])
