"""Predicted steps against steps of a real Trainer, and what follows from arithmetic."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from labkit.config import (
    PRESETS,
    GQAConfig,
    MLAConfig,
    MoEConfig,
    MTPConfig,
    TrainConfig,
)
from labkit.memory import apply_recompute, measure
from labkit.memory.predict import predict
from labkit.memory.recompute import RECOMPUTE_POLICIES
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
