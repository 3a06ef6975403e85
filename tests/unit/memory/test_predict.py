"""Predicted steps against steps of a real Trainer, and what follows from arithmetic."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from labkit.config import (
    PRESETS,
    GQAConfig,
    Layout,
    MLAConfig,
    MoEConfig,
    MTPConfig,
    TrainConfig,
)
from labkit.memory import STATES, apply_recompute, measure
from labkit.memory.gathered import gathered_weights
from labkit.memory.persistent import persistent_by_stage
from labkit.memory.predict import predict
from labkit.memory.recompute import RECOMPUTE_POLICIES
from labkit.memory.shards import whole
from labkit.memory.stages import stage_layers
from labkit.model import Transformer
from labkit.training import Trainer, corpus

MLA = MLAConfig(
    n_heads=3,
    q_lora_rank=20,
    kv_lora_rank=24,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=14,
)
ATTENTION = {
    "mla": MLA,
    "mla-direct": replace(MLA, q_lora_rank=None),
    "gqa": GQAConfig(n_heads=6, n_kv_heads=2, head_dim=8),
    "mha": GQAConfig(n_heads=4, n_kv_heads=4, head_dim=12),
}
EXPERTS = MoEConfig(n_routed_experts=4, n_activated_experts=2, moe_inter_dim=44)
KEPT = ("activations", "logits", "dispatch")
LASTING = ("weights", "gradients", "moments")


@pytest.fixture(scope="module")
def text():
    return corpus.standard_library()


@st.composite
def models(draw):
    is_sparse = draw(st.booleans())
    return replace(
        PRESETS["tiny"],
        dim=draw(st.sampled_from([32, 40, 64])),
        inter_dim=draw(st.sampled_from([24, 120])),
        n_layers=draw(st.integers(1, 3)),
        n_dense_layers=1 if is_sparse else 0,
        attention=ATTENTION[draw(st.sampled_from(sorted(ATTENTION)))],
        moe=EXPERTS if is_sparse else None,
        mtp=draw(st.sampled_from([None, MTPConfig()])),
    )


@st.composite
def recipes(draw):
    micro_batch = draw(st.integers(1, 3))
    return TrainConfig(
        micro_batch=micro_batch,
        global_batch=micro_batch * draw(st.integers(1, 2)),
        seq_len=draw(st.sampled_from([24, 70, 160])),
        precision=draw(st.sampled_from(["fp32", "bf16"])),
    )


def second_step(cfg, train, policy, text):
    """Return the report of a Trainer's second step, and its last micro-batch's load."""
    model = Transformer(cfg, generator=torch.Generator().manual_seed(0))
    apply_recompute(model, policy)
    trainer = Trainer(model, train, text)
    trainer.step()
    loads, plain_loss = [], model.loss

    def loss(*args, **kwargs):
        parts = plain_loss(*args, **kwargs)
        loads.append(parts.load.tolist())
        return parts

    model.loss = loss
    return measure(trainer.step, model), loads[-1]


def last(report, name):
    return [x.by_part for x in report.timeline if x.name == name][-1]


@given(
    cfg=models(), train=recipes(), policy=st.sampled_from(sorted(RECOMPUTE_POLICIES))
)
@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink takes minutes
    deadline=None,
)
@pytest.mark.usefixtures("unchecked")  # each of very many operators would be
def test_a_trainers_step_is_predicted(cfg, train, policy, text):
    if policy == "moe" and cfg.n_moe_layers + cfg.n_mtp * (cfg.moe is not None) == 0:
        policy = "attention"
    measured, load = second_step(cfg, train, policy, text)
    predicted = predict(cfg, train, recompute=policy, load=load)

    for part in LASTING:
        assert last(predicted, "optimizer")[part] == last(measured, "optimizer")[part]
    kept, expected = (
        sum(last(report, "end of forward").get(part, 0) for part in KEPT)
        for report in (predicted, measured)
    )
    assert kept == expected
    assert predicted.peak == pytest.approx(measured.peak, rel=0.05)


@pytest.mark.usefixtures("unchecked")
def test_even_routing_stands_in_for_a_load_that_is_not_known(text):
    cfg, train = PRESETS["tiny"], TrainConfig(micro_batch=2, seq_len=64)
    measured, _ = second_step(cfg, train, "none", text)

    assert predict(cfg, train).peak == pytest.approx(measured.peak, rel=0.05)


def test_activations_of_the_timeline_are_those_by_module():
    train = TrainConfig(micro_batch=2, seq_len=64, precision="bf16")
    for policy in RECOMPUTE_POLICIES:
        report = predict(PRESETS["tiny"], train, recompute=policy)
        kept = last(report, "end of forward")["activations"]

        assert sum(report.by_module.values()) == kept


TINY = PRESETS["tiny"]
TRAIN = TrainConfig(micro_batch=1, global_batch=8, seq_len=64)


def test_stages_name_the_modules_that_keep_their_bytes():
    train = replace(TRAIN, global_batch=1)
    whole = predict(TINY, train).by_module
    first, last_stage = (
        report.by_module for report in predict(TINY, train, Layout(pp=2)).by_stage
    )
    turns = 64 * 8 * 8  # of RoPE, which every stage keeps
    whole["layers.3.attn"] += turns

    assert {**first, **last_stage, "loss": whole["loss"]} == whole
    assert first["loss"] + last_stage["loss"] == whole["loss"]


@pytest.mark.parametrize("policy", [*RECOMPUTE_POLICIES])
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_activations_of_each_stage_are_those_by_module(policy, schedule):
    train = replace(TRAIN, micro_batch=2, precision="bf16")
    layout = Layout(pp=2, dp=2, vpp=2, tp=2, ep=2)
    report = predict(TINY, train, layout, recompute=policy, schedule=schedule)

    for stage in report.by_stage:
        kept = last(stage, "end of forward")["activations"]
        assert sum(stage.by_module.values()) == kept


def test_the_first_stage_keeps_a_micro_batch_for_each_stage():
    layout = Layout(pp=2)
    one = predict(TINY, replace(TRAIN, global_batch=1), layout).by_stage
    many = predict(TINY, TRAIN, layout).by_stage
    kept, kept_of_many = (
        [last(stage, "end of forward")["activations"] for stage in stages]
        for stages in (one, many)
    )

    assert kept_of_many == [2 * kept[0], kept[1]]


def test_stages_hold_what_lasts_of_each():
    layout = Layout(pp=2, dp=2)
    report = predict(TINY, TRAIN, layout, zero=1)
    stages = stage_layers(TINY, layout)

    assert [last(stage, "optimizer")["moments"] for stage in report.by_stage] == [
        held["moments"] for held in persistent_by_stage(TINY, layout, stages, zero=1)
    ]
    assert report.peak == max(stage.peak for stage in report.by_stage)


def test_tensor_parallel_ranks_share_all_but_latents_and_what_each_computes_whole():
    cfg = replace(TINY, moe=None, n_dense_layers=0, mtp=None)
    one, two = (predict(cfg, TRAIN, Layout(tp=tp)).by_part for tp in (1, 2))

    assert one["activations"] / 2 < two["activations"] < one["activations"]
    assert two["logits"] == one["logits"] / 2


def test_busier_experts_receive_and_keep_more():
    layout = Layout(dp=2, ep=2)
    even, busy = (predict(TINY, TRAIN, layout, imbalance=x) for x in (1, 1.5))

    assert busy.by_part["dispatch"] == 1.5 * even.by_part["dispatch"]
    assert busy.by_part["activations"] > even.by_part["activations"]
    paper = predict(TINY, TRAIN, layout, routing="paper")
    assert paper.by_part["dispatch"] == even.by_part["dispatch"] / 2


def test_a_load_is_refused_for_several_ranks():
    with pytest.raises(ValueError) as error:
        predict(TINY, TRAIN, Layout(dp=2), load=[[1]])

    assert str(error.value) == (
        "load is that of one rank alone; got a layout of 2 ranks. Leave load out, and "
        "give imbalance instead."
    )


V3 = PRESETS["v3-671b"]
MANY = Layout(pp=16, dp=128, ep=64)
PRETRAIN = TrainConfig(
    global_batch=15_360, micro_batch=1, seq_len=4096, precision="bf16"
)


E4M3, E5M6 = 2 - 33 / 32, 2 - 49 / 32
"""Bytes a value that a copy in tiles takes less than one in BF16."""

IN_FP8 = {
    "queries and latents": (7168 + 1536 + 512) * E4M3,
    "output": 128 * 128 * E5M6,
    "SwiGLU reads": (8 + 1) * 2 * 2048 * E4M3,
    "SwiGLU makes": 2 * 2048 * 2,
}
"""Bytes that a token of a layer with experts takes less, where all of it is kept."""

SENT = 8 * 7168 * E4M3


@pytest.mark.parametrize(
    ("policy", "saved", "sent"),
    [
        ("none", sum(IN_FP8.values()), SENT),
        ("full", 0, 0),
        ("every_k", 3 / 4 * sum(IN_FP8.values()), 3 / 4 * SENT),
        ("selective", IN_FP8["output"] + IN_FP8["SwiGLU reads"], SENT),
        (
            "attention",
            sum(IN_FP8.values()) - IN_FP8["queries and latents"] - IN_FP8["output"],
            SENT,
        ),
        ("moe", IN_FP8["queries and latents"] + IN_FP8["output"], 0),
    ],
)
def test_fp8_saves_of_what_each_policy_keeps(policy, saved, sent):
    options = {"recompute": policy, "states": STATES["deepseek-v3-fp8"]}
    plain, narrow = (
        predict(V3, PRETRAIN, MANY, "h800", cached=cached, **options)
        for cached in ("compute", "fp8")
    )
    before, after = (
        last(report.by_stage[1], "end of forward") for report in (plain, narrow)
    )
    n = 15 * 4 * 4096  # micro-batches of the second stage, its layers, tokens

    assert before["activations"] - after["activations"] == n * saved
    assert before.get("dispatch", 0) - after.get("dispatch", 0) == n * sent
    assert last(plain, "optimizer") == last(narrow, "optimizer")


def test_full_recompute_in_fp8_brings_back_what_is_kept_without():
    def first_stage(policy):
        report = predict(
            V3,
            replace(PRETRAIN, global_batch=1),
            Layout(pp=16),
            "gpu",
            recompute=policy,
            states=STATES["deepseek-v3-fp8"],
            cached="fp8",
        )
        return last(report.by_stage[1], "backward")

    none, full = first_stage("none"), first_stage("full")
    inputs = 3 * 2 * 4096 * 7168  # of the layers that the backward has not reached

    assert full["activations"] < none["activations"] / 3.5 + inputs
    assert full["temporaries"] == none["temporaries"]


def test_an_accelerator_runs_the_kernels_of_a_gpu():
    assert predict(TINY, TRAIN, device="H800") == predict(TINY, TRAIN, device="gpu")


def test_an_unknown_device_is_named():
    message = "device must be 'cpu', 'gpu' or one of v100, .*; got 'tpu'. Set device='g"
    with pytest.raises(ValueError, match=message):
        predict(TINY, TRAIN, device="tpu")


def test_context_ranks_take_equal_parts_of_the_sequence():
    with pytest.raises(ValueError) as error:
        predict(TINY, TRAIN, Layout(cp=6))

    assert str(error.value) == (
        "cp must divide seq_len, because each rank takes an equal part; got cp=6 and "
        "64. Set seq_len=66."
    )


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            Layout(dp=3),
            "dp must divide global_batch, because each rank takes an equal part; got "
            "dp=3 and 8. Set global_batch=9.",
        ),
        (
            Layout(cp=32, tp=4),
            "cp * tp must divide seq_len, because each rank takes an equal part; got "
            "cp * tp=128 and 64. Set seq_len=128.",
        ),
    ],
)
def test_ranks_take_equal_parts(layout, message):
    with pytest.raises(ValueError) as error:
        predict(TINY, TRAIN, layout)

    assert str(error.value) == message


def test_a_rank_has_no_micro_batch_above_its_share():
    layout = Layout(dp=4)
    few, many = (
        predict(TINY, replace(TRAIN, micro_batch=n), layout).by_part for n in (2, 8)
    )

    assert few == many


def test_a_dense_model_runs_no_experts_again():
    with pytest.raises(ValueError, match="policy 'moe' runs experts again, so the mo"):
        predict(replace(TINY, moe=None), TRAIN, recompute="moe")


def test_a_split_of_layers_is_read_also_where_one_rank_has_all():
    assert predict(TINY, TRAIN, layers_per_stage=[4]) == predict(TINY, TRAIN)
    with pytest.raises(ValueError) as error:
        predict(TINY, TRAIN, layers_per_stage=[2, 2])

    assert str(error.value) == (
        "layers_per_stage must name the layers of each virtual stage, which are "
        "pp * vpp = 1, and sum to n_layers=4; got 2 numbers that sum to 4. Correct it, "
        "or leave it out for an even split."
    )


def test_an_unknown_schedule_is_named_also_without_stages():
    with pytest.raises(ValueError, match="schedule must be one of '1f1b', .*; got 'r"):
        predict(TINY, TRAIN, schedule="ring")


def test_gathered_weights_live_until_the_backward_has_ended():
    layout = Layout(dp=4)
    shared, gathered = (
        predict(TINY, TRAIN, layout, states=STATES["megatron"], zero=zero)
        for zero in (2, 3)
    )
    extra = [
        more.by_part.get("communication", 0) - less.by_part.get("communication", 0)
        for less, more in zip(shared.timeline, gathered.timeline, strict=True)
    ]
    outside, blocks = gathered_weights(TINY, layout, whole(TINY), STATES["megatron"])

    assert extra == [0, outside + blocks, outside, outside + blocks, 0, 0]
