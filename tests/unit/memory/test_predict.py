"""Predicted steps against steps of a real Trainer, and what follows from arithmetic."""

from collections import Counter
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
from labkit.memory.persistent import persistent_by_stage
from labkit.memory.pipeline import ChunkPrices
from labkit.memory.playback import fullest_instant, kept_by_part
from labkit.memory.predict import predict
from labkit.memory.recompute import RECOMPUTE_POLICIES, block_policies
from labkit.memory.replay import replay_tape
from labkit.memory.stages import Chunk, stage_layers
from labkit.memory.tape import Pass
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


@pytest.mark.parametrize("policy", [*RECOMPUTE_POLICIES])
@pytest.mark.parametrize("mtp", [None, MTPConfig()], ids=["", "mtp"])
def test_chunks_priced_by_kind_are_the_whole_tape(policy, mtp):
    cfg = replace(TINY, mtp=mtp, n_layers=6)
    step, layout = Pass(batch=1, seq_len=64), Layout(dp=2, tp=2, ep=2)
    prices = ChunkPrices(
        cfg=cfg,
        step=step,
        layout=layout,
        policies=block_policies(policy, 6 + cfg.n_mtp),
        has_gradients=False,
        has_buffer=False,
    )
    chunk = prices.of(Chunk(layers=range(6), is_first=True, is_last=True))
    tape = replay_tape(cfg, step, policy, layout=layout)

    assert chunk.kept == +Counter(kept_by_part(tape))
    if mtp is None:  # else embedding and head are used twice, in one tape
        assert chunk.fullest.total() == Counter(fullest_instant(tape)).total()


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


def test_gradients_in_fp32_beside_bf16_weights_lie_in_a_buffer_throughout():
    for layout in (None, Layout(pp=2)):
        report = predict(TINY, TRAIN, layout, states=STATES["megatron"])

        assert len({instant.by_part["gradients"] for instant in report.timeline}) == 1


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


def test_gradients_are_copied_into_a_message_when_ranks_sum_them():
    def message(**options):
        report = predict(TINY, TRAIN, **options)
        return last(report, "after backward").get("communication", 0)

    model = Transformer(TINY, device="meta")
    n_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert message() == 0
    assert message(layout=Layout(dp=2)) == n_bytes


def test_a_load_is_refused_for_several_ranks():
    with pytest.raises(ValueError) as error:
        predict(TINY, TRAIN, Layout(dp=2), load=[[1]])

    assert str(error.value) == (
        "load is that of one rank alone; got a layout of 2 ranks. Leave load out, and "
        "give imbalance instead."
    )


def test_context_ranks_take_equal_parts_of_the_sequence():
    with pytest.raises(ValueError) as error:
        predict(TINY, TRAIN, Layout(cp=6))

    assert str(error.value) == (
        "cp must divide seq_len, because each rank takes an equal part; got cp=6 and "
        "64. Set cp=2."
    )
