"""What must hold for every config, and transformers as the judge of the counts."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.config import (
    PRESETS,
    GQAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    RopeConfig,
    model_from_dict,
    model_to_dict,
)
from labkit.config.counts import attention_flops_per_token, ffn_params

SIZES = st.integers(1, 40)
EVEN = st.integers(1, 8).map(lambda n: 2 * n)

ATTENTION = st.builds(
    MLAConfig,
    n_heads=st.integers(1, 6),
    q_lora_rank=st.none() | SIZES,
    kv_lora_rank=SIZES,
    qk_nope_head_dim=SIZES,
    qk_rope_head_dim=EVEN,
    v_head_dim=SIZES,
)


@st.composite
def experts(draw):
    n_groups, per_group = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    n_limited = draw(st.integers(1, n_groups))
    is_v3 = draw(st.booleans())
    return MoEConfig(
        n_routed_experts=n_groups * per_group,
        n_activated_experts=draw(st.integers(1, n_limited * per_group)),
        moe_inter_dim=draw(SIZES),
        n_shared_experts=draw(st.integers(0, 2)),
        n_expert_groups=n_groups,
        n_limited_groups=n_limited,
        score_func="sigmoid" if is_v3 else "softmax",
        group_score="top2" if is_v3 else "max",
        has_bias=is_v3,
        norm_topk_prob=draw(st.booleans()),
        route_scale=draw(st.sampled_from([1.0, 2.5, 16.0])),
        balance_loss_weight=draw(st.sampled_from([0.0, 1e-4, 1e-3])),
    )


@st.composite
def models(draw, moe=st.none() | experts()):  # noqa: B008 (strategies are values)
    n_layers = draw(st.integers(1, 5))
    rope = RopeConfig(
        rope_theta=draw(st.sampled_from([1e4, 5e5])),
        rope_factor=draw(st.sampled_from([1.0, 4.0, 40.0])),
        original_seq_len=draw(st.sampled_from([64, 4096])),
        mscale=draw(st.sampled_from([0.707, 1.0])),
        mscale_all_dim=draw(st.sampled_from([0.0, 0.707, 1.0])),
    )
    return ModelConfig(
        vocab_size=draw(st.integers(2, 300)),
        dim=draw(st.integers(1, 64)),
        n_layers=n_layers,
        inter_dim=draw(st.integers(1, 80)),
        attention=draw(ATTENTION),
        moe=draw(moe),
        n_dense_layers=draw(st.integers(0, n_layers)),
        rope=rope,
        mtp=draw(st.none() | st.builds(MTPConfig, depth=st.integers(1, 2))),
        max_seq_len=rope.original_seq_len * draw(st.sampled_from([1, 4])),
        norm_eps=draw(st.sampled_from([1e-6, 1e-5])),
        init_std=draw(st.sampled_from([0.006, 0.02])),
    )


def transformers_count(cfg: ModelConfig) -> int:
    """Parameters of transformers' own model; its balancing bias is a buffer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**cfg.to_hf()))
    biases = [b for name, b in model.named_buffers() if name.endswith("bias")]
    return sum(tensor.numel() for tensor in [*model.parameters(), *biases])


@given(cfg=models(moe=experts()))
@settings(max_examples=12)
def test_transformers_builds_as_many_parameters(cfg):
    # Its config of V2 refuses widths that the heads do not divide.
    cfg = replace(cfg, dim=cfg.dim * cfg.attention.n_heads)

    assert transformers_count(cfg) == cfg.n_params()


@pytest.mark.parametrize("name", ["v2-lite-16b", "v2-236b", "v3-671b"])
def test_transformers_builds_the_published_models_as_large(name):
    assert transformers_count(PRESETS[name]) == PRESETS[name].n_params()


@given(cfg=models())
def test_the_parts_sum_to_the_total(cfg):
    counts = cfg.parameter_counts()
    parts = {name: getattr(counts, name) for name in counts.__dataclass_fields__}
    mtp = parts.pop("mtp")

    assert all(part >= 0 for part in parts.values())
    assert sum(parts.values()) == counts.total == cfg.n_params()
    assert cfg.n_params(include_mtp=True) == counts.total + mtp
    assert (mtp > 0) == (cfg.mtp is not None)


@given(cfg=models(moe=experts()))
def test_one_more_expert_adds_its_width_and_its_row_of_the_router(cfg):
    # One group, so that any number of experts can be divided.
    moe = replace(cfg.moe, n_expert_groups=1, n_limited_groups=1)
    fewer = replace(cfg, moe=moe)
    more = replace(cfg, moe=replace(moe, n_routed_experts=moe.n_routed_experts + 1))
    row = cfg.dim + moe.has_bias
    added = ffn_params(cfg.dim, moe.moe_inter_dim) + row

    assert more.n_params() - fewer.n_params() == cfg.n_moe_layers * added
    assert more.n_active_params() - fewer.n_active_params() == cfg.n_moe_layers * row


@given(cfg=models())
def test_every_parameter_is_active_when_every_expert_is(cfg):
    if cfg.moe is not None:
        moe = cfg.moe
        everything = replace(
            moe,
            n_limited_groups=moe.n_expert_groups,
            n_activated_experts=moe.n_routed_experts,
        )
        cfg = replace(cfg, moe=everything)

    assert cfg.n_active_params(include_embedding=True) == cfg.n_params()
    assert cfg.n_active_params() == cfg.n_params() - cfg.vocab_size * cfg.dim


@given(cfg=models(), n_layers=st.integers(1, 9))
def test_the_cache_grows_with_the_layers_and_the_dtype_only(cfg, n_layers):
    deeper = replace(cfg, n_layers=n_layers, n_dense_layers=0)
    width = cfg.attention.kv_lora_rank + cfg.attention.qk_rope_head_dim

    assert deeper.kv_bytes_per_token() == 2 * n_layers * width
    assert deeper.kv_bytes_per_token("float32") == 4 * n_layers * width


@given(n_groups=st.integers(1, 8), per_group=st.integers(1, 8), half=st.integers(1, 64))
def test_query_heads_do_not_enlarge_the_cache_of_grouped_attention(
    n_groups, per_group, half
):
    gqa = GQAConfig(
        n_heads=n_groups * per_group, n_kv_heads=n_groups, head_dim=2 * half
    )
    assert gqa.cache_width == 2 * n_groups * 2 * half
    assert gqa.kind == ("mha" if per_group == 1 else "gqa")


@given(cfg=models(), seq_len=st.integers(1, 4096).map(lambda n: 2 * n))
def test_training_takes_three_times_the_flops_of_a_forward_pass(cfg, seq_len):
    forward = cfg.flops_per_token(seq_len, training=False)

    assert cfg.flops_per_token(seq_len) == 3 * forward
    assert forward == 2 * cfg.n_active_params() + attention_flops_per_token(
        cfg, seq_len
    )


@given(cfg=models(), seq_len=st.integers(1, 4096).map(lambda n: 2 * n))
def test_a_causal_mask_halves_the_attention(cfg, seq_len):
    full = attention_flops_per_token(cfg, seq_len, causal=False)

    assert 2 * attention_flops_per_token(cfg, seq_len) == full
    assert attention_flops_per_token(cfg, 2 * seq_len) == full


@given(cfg=models())
def test_yarn_changes_the_softmax_only_beyond_the_original_context(cfg):
    plain = cfg.attention.qk_head_dim**-0.5
    within = replace(cfg, max_seq_len=cfg.rope.original_seq_len)

    assert within.softmax_scale == plain
    assert cfg.softmax_scale >= plain
    if not cfg.is_extended:
        assert cfg.softmax_scale == plain


@given(cfg=models())
def test_a_config_survives_hugging_faces_format(cfg):
    assert ModelConfig.from_hf(json.loads(json.dumps(cfg.to_hf()))) == cfg


@given(cfg=models())
def test_a_config_survives_json(cfg):
    assert model_from_dict(json.loads(json.dumps(model_to_dict(cfg)))) == cfg


def test_a_grouped_config_survives_json():
    cfg = replace(PRESETS["tiny"], attention=GQAConfig(n_heads=8, n_kv_heads=2))

    assert model_from_dict(json.loads(json.dumps(model_to_dict(cfg)))) == cfg
