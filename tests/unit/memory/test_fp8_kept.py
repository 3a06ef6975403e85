"""Predicted bytes of models in FP8 against those that autograd really keeps."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from labkit.config import PRESETS, GQAConfig, MLAConfig, ModelConfig, TrainConfig
from labkit.memory import (
    AllocationCount,
    MemoryReport,
    apply_recompute,
    measure,
    predict,
)
from labkit.memory.formats import converted_formats, formats_of
from labkit.memory.persistent import STATES, States, states_of
from labkit.model import Transformer
from labkit.precision.convert import convert
from labkit.precision.kept_formats import kept_formats

TINY = PRESETS["tiny"]
BATCH, SEQ = 2, 24

V3_SHAPED = replace(
    TINY,
    n_layers=2,
    inter_dim=200,
    attention=MLAConfig(
        n_heads=4,
        q_lora_rank=128,
        kv_lora_rank=144,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
    ),
    moe=replace(
        TINY.moe,
        n_routed_experts=4,
        n_expert_groups=2,
        n_limited_groups=1,
        moe_inter_dim=136,
    ),
)
"""All parts of DeepSeek-V3, a dense layer first; widths are no multiples of 128, but
none is below it."""

MODELS = {
    "V3": V3_SHAPED,
    "dense": replace(V3_SHAPED, moe=None, n_dense_layers=2, mtp=None),
    "GQA": replace(
        V3_SHAPED, attention=GQAConfig(n_heads=4, n_kv_heads=2, head_dim=64)
    ),
    "narrow": TINY,
}


def both(
    cfg: ModelConfig, policy: str, recompute: str, weights: torch.dtype
) -> tuple[MemoryReport, MemoryReport]:
    """Return what a converted model is predicted to keep of a forward, and keeps."""
    model = Transformer(cfg, dtype=weights, generator=torch.Generator().manual_seed(0))
    convert(apply_recompute(model, recompute), policy)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(cfg.vocab_size, (BATCH, SEQ + 1), generator=generator)
    counts, losses = {"n_tokens": BATCH * SEQ, "n_sequences": BATCH}, []
    is_mixed = weights == torch.float32

    def forward() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            losses.append(model.loss(tokens[:, :-1], tokens[:, 1:], **counts))

    measured = measure(forward, model)
    predicted = predict(
        cfg,
        TrainConfig(
            micro_batch=BATCH,
            global_batch=BATCH,
            seq_len=SEQ,
            precision="fp8",
            fp8_policy=policy,
        ),
        recompute=recompute,
        load=losses[0].load.tolist() if cfg.moe else None,
        cached=kept_formats(cfg, policy),
        states=None if is_mixed else States(weights="bfloat16"),
    )
    return predicted, measured


def kept(report: MemoryReport, instant: str) -> Mapping[str, int]:
    by_part = next(x.by_part for x in report.timeline if x.name == instant)
    return {part: by_part[part] for part in ("activations", "logits")}


@pytest.mark.parametrize(
    ("name", "policy", "recompute", "weights"),
    [
        ("V3", "deepseek-v3", "none", torch.float32),
        ("V3", "deepseek-v3", "none", torch.bfloat16),
        ("V3", "deepseek-v3", "selective", torch.float32),
        ("V3", "aggressive", "selective", torch.bfloat16),
        ("V3", "aggressive", "none", torch.float32),
        ("V3", "article-1", "moe", torch.float32),
        ("dense", "deepseek-v3", "none", torch.float32),
        ("dense", "article-1", "selective", torch.float32),
        ("GQA", "aggressive", "attention", torch.float32),
        ("narrow", "conservative", "none", torch.float32),
        ("narrow", "conservative", "selective", torch.float32),
    ],
)
def test_a_converted_model_keeps_the_predicted_bytes(name, policy, recompute, weights):
    predicted, measured = both(MODELS[name], policy, recompute, weights)

    assert kept(predicted, "end of forward") == kept(measured, "end")


@pytest.mark.parametrize("policy", ["conservative", "deepseek-v3", "aggressive"])
@pytest.mark.parametrize("name", MODELS)
def test_a_policy_keeps_in_formats_what_models_it_converted_do(name, policy):
    cfg = MODELS[name]
    model = Transformer(cfg, device="meta")
    convert(model, policy)

    assert formats_of(cfg, kept_formats(cfg, policy)) == formats_of(
        cfg, converted_formats(model)
    )


def test_a_model_that_was_not_converted_has_no_formats():
    assert converted_formats(Transformer(TINY, device="meta")) == {}


def test_a_recipe_in_fp8_must_come_with_its_formats():
    with pytest.raises(ValueError) as error:
        predict(TINY, TrainConfig(precision="fp8", fp8_policy="aggressive"))

    assert str(error.value) == (
        "cached must say what layers keep in FP8 if precision='fp8', because policies "
        "are not known here; got 'compute'. Set cached=labkit.precision.kept_formats("
        "cfg, 'aggressive')."
    )


@pytest.mark.parametrize("moments", ["fp32", "bf16", "bf16-stochastic"])
def test_what_lasts_has_the_moments_of_the_recipe(moments):
    train = TrainConfig(moments=moments, beta1=0.9, beta2=0.95)
    wide = predict(TINY, TrainConfig()).by_part["moments"]
    n_params = sum(p.numel() for p in Transformer(TINY, device="meta").parameters())
    narrower = 0 if moments == "fp32" else 2 * 2 * n_params

    assert predict(TINY, train).by_part["moments"] == wide - narrower
    assert predict(TINY, train, states=STATES["trainer"]).by_part["moments"] == wide
    assert states_of(train).weights == "float32"


def test_nothing_lives_with_a_kept_tensor_that_was_left_with_it():
    model = Transformer(V3_SHAPED, dtype=torch.bfloat16)
    convert(model, "article-1")  # shared experts in FP8, and routed ones not
    layer = model.layers[1].ffn
    x = torch.randn(1, SEQ, V3_SHAPED.dim).bfloat16().requires_grad_()
    layer(x)  # for what kernels make once
    with AllocationCount() as alive:
        out = layer(x)
    results = []
    measured = measure(lambda: results.append(layer(x)), layer)

    assert alive.live_bytes == measured.timeline[-1].total - measured.timeline[0].total
    assert out[0].shape == x.shape
