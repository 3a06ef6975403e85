"""One rank's share of the weights: the model's own list, and arXiv 2502.07846."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.config import PRESETS, GQAConfig, Layout, MLAConfig, MoEConfig, MTPConfig
from labkit.memory.shards import local_shape, shard_params
from labkit.memory.stages import Chunk, Stage, stage_layers
from labkit.memory.weights import (
    Weight,
    embedding_weights,
    head_weights,
    layer_weights,
    mtp_weights,
)
from labkit.model import Transformer

TINY, V3 = PRESETS["tiny"], PRESETS["v3-671b"]

PAPER_LAYOUT = Layout(pp=16, dp=32, tp=2, ep=8)
"""Of arXiv 2502.07846; its ETP of 1 is the only one here."""

PAPER_SPLIT = (4,) * 15 + (1,)
FOUR_MOE_LAYERS = Stage(chunks=(Chunk(layers=range(4, 8)),))
"""A stage in the middle, without embedding and head."""

SIZES = st.integers(1, 4).map(lambda n: 4 * n)
"""What 1, 2 and 4 divide."""

MLA = st.builds(
    MLAConfig,
    n_heads=SIZES,
    q_lora_rank=st.none() | SIZES,
    kv_lora_rank=SIZES,
    qk_nope_head_dim=SIZES,
    qk_rope_head_dim=SIZES,
    v_head_dim=SIZES,
)
GQA = st.integers(1, 3).flatmap(
    lambda group: st.builds(
        lambda n, width: GQAConfig(n_heads=group * n, n_kv_heads=n, head_dim=width),
        SIZES,
        SIZES,
    )
)
MOE = st.builds(
    MoEConfig,
    n_routed_experts=SIZES,
    n_activated_experts=st.just(2),
    moe_inter_dim=SIZES,
    n_shared_experts=st.integers(0, 2),
    has_bias=st.booleans(),
)


@st.composite
def models(draw):
    return replace(
        TINY,
        vocab_size=draw(SIZES),
        dim=draw(SIZES),
        n_layers=draw(st.integers(2, 6)),
        n_dense_layers=draw(st.integers(0, 2)),
        inter_dim=draw(SIZES),
        attention=draw(MLA | GQA),
        moe=draw(st.none() | MOE),
        mtp=draw(st.none() | st.builds(MTPConfig, depth=st.integers(1, 2))),
    )


def biases_of(cfg):
    """Return the router biases, which `n_params` counts as parameters."""
    if cfg.moe is None or not cfg.moe.has_bias:
        return 0
    return (cfg.n_moe_layers + cfg.n_mtp) * cfg.moe.n_routed_experts


@given(models())
@settings(max_examples=15)
def test_the_list_of_weights_is_the_models_own(cfg):
    listed = {w.name: w.shape for w in embedding_weights(cfg) + head_weights(cfg)}
    for i in range(cfg.n_layers):
        for w in layer_weights(cfg, is_dense=i < cfg.n_dense_layers):
            listed[f"layers.{i}.{w.name}"] = w.shape
    for k in range(cfg.n_mtp):
        listed |= {f"mtp.{k}.{w.name}": w.shape for w in mtp_weights(cfg)}

    model = Transformer(cfg, device="meta")

    assert listed == {name: tuple(p.shape) for name, p in model.named_parameters()}
    shards = shard_params(cfg, Layout())
    assert shards.n_params == sum(p.numel() for p in model.parameters())
    assert sum(b.n_tensors for b in shards.buckets) == len(listed)
    assert shards.n_biases == sum(b.numel() for b in model.buffers())


@given(models(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_the_shares_of_all_ranks_and_stages_are_the_model(cfg, tp, ep):
    layout = Layout(pp=2, dp=4, tp=tp, ep=ep if cfg.moe else 1)
    stages = stage_layers(cfg, layout)

    total = n_biases = 0
    for stage in stages:
        shards = shard_params(cfg, layout, stage)
        total += shards.split.n_params * tp + shards.replicated.n_params
        total += shards.expert.n_params * layout.ep
        n_biases += shards.n_biases

    mtp_embedding = stages[1].contents(cfg).n_embeddings * cfg.vocab_size * cfg.dim
    expected = cfg.n_params(include_mtp=True) - biases_of(cfg)
    assert total - mtp_embedding == expected
    assert n_biases == biases_of(cfg)


def test_each_share_is_held_by_as_many_ranks_as_the_stage_has():
    layout = Layout(pp=2, dp=8, cp=2, tp=4, ep=16)
    shards = shard_params(V3, layout, FOUR_MOE_LAYERS)

    n_ranks = layout.n_ranks // layout.pp
    assert shards.split.n_holders * layout.tp == n_ranks
    assert shards.replicated.n_holders == shards.split.n_holders == 16
    assert shards.expert.n_holders * layout.ep == n_ranks


def test_dualpipe_doubles_the_layers_of_a_rank_and_the_holders():
    layout = Layout(pp=2, dp=4)
    cfg = replace(TINY, n_layers=4, n_dense_layers=0, mtp=None)
    once = [shard_params(cfg, layout, stage) for stage in stage_layers(cfg, layout)]
    both = [
        shard_params(cfg, layout, stage)
        for stage in stage_layers(cfg, layout, schedule="dualpipe")
    ]

    assert both[0] == both[1]
    assert both[0].n_params == sum(shards.n_params for shards in once)
    assert both[0].split.n_holders == 2 * once[0].split.n_holders == 8


# arXiv 2502.07846, recomputed to the rounding in which it is printed


def test_the_stages_of_the_paper():
    cfg, layout = replace(V3, mtp=None), Layout(pp=16)
    stages = stage_layers(cfg, layout, layers_per_stage=PAPER_SPLIT)
    n_params = [shard_params(cfg, layout, stage).n_params for stage in stages]

    assert [f"{n / 1e9:.3g}" for n in n_params] == ["14.2", *["46"] * 14, "12.4"]
    assert [round(2 * n / 2**30) for n in n_params] == [26, *[86] * 14, 23]
    assert round(sum(n_params) / 1e9) == 671
    assert round(2 * sum(n_params) / 2**30, -1) == 1250


def test_the_first_stage_of_the_paper_is_a_sum_of_rounded_layers():
    cfg, one = replace(V3, mtp=None), Layout()
    chunks = [Chunk(layers=range(1), is_first=True)]
    chunks += [Chunk(layers=range(i, i + 1)) for i in (1, 2, 3)]
    layers = [shard_params(cfg, one, Stage(chunks=(c,))).n_params for c in chunks]

    digits = (1, 2, 2, 1)
    rounded = [round(n / 1e9, d) for n, d in zip(layers, digits, strict=True)]
    assert rounded == [1.5, 0.58, 0.58, 11.5]
    assert f"{sum(rounded):.2f}" == "14.16"
    assert f"{sum(layers) / 1e9:.2f}" == "14.18"


def test_the_device_of_the_paper():
    shards = shard_params(V3, PAPER_LAYOUT, FOUR_MOE_LAYERS, convention="paper")
    n_norms = 4 * (2 * 7168 + 1536 + 512)

    assert n_norms == 65_536
    assert shards.split.n_params == 318_767_104
    assert shards.replicated.n_params - n_norms == 110_886_912
    assert shards.split.n_params + shards.replicated.n_params == 429_719_552
    assert shards.expert.n_params == 5_820_645_376
    assert shards.n_params == 6_250_364_928
    assert 2 * shards.n_params == 12_500_729_856


def test_the_rotary_rows_and_the_shared_experts_are_all_that_megatron_cuts_more():
    paper = shard_params(V3, PAPER_LAYOUT, FOUR_MOE_LAYERS, convention="paper")
    megatron = shard_params(V3, PAPER_LAYOUT, FOUR_MOE_LAYERS)

    rotary, shared = 4 * 128 * 64 * 1536, 4 * 3 * 7168 * 2048
    assert paper.n_params - rotary // 2 == 6_225_199_104  # 11.60 GiB in BF16
    assert megatron.n_params == paper.n_params - rotary // 2 - shared // 2


def test_without_cuts_the_conventions_agree():
    one = Layout()

    paper = shard_params(V3, one, convention="paper")
    assert paper.n_params == shard_params(V3, one).n_params


# Cuts, worked out by hand


def test_more_ranks_than_kv_heads_share_a_head():
    attention = GQAConfig(n_heads=8, n_kv_heads=2, head_dim=16)
    cfg = replace(TINY, attention=attention, moe=None, mtp=None)
    keys = {w.name: w for w in layer_weights(cfg, is_dense=True)}["attn.wk.weight"]

    assert keys.shape == (32, 128)
    assert [local_shape(keys, Layout(tp=tp)) for tp in (1, 2, 4, 8)] == [
        (32, 128),
        (16, 128),
        (16, 128),
        (16, 128),
    ]


def test_the_rank_with_a_row_more_of_the_vocabulary_counts():
    (embed,) = embedding_weights(replace(TINY, vocab_size=258))

    assert local_shape(embed, Layout(tp=4)) == (65, 128)


def test_a_scale_belongs_to_every_block_that_is_begun():
    shards = shard_params(TINY, Layout(), Stage(chunks=(Chunk(layers=range(1, 2)),)))

    # wq_a 48 x 128 and wkv_a 48 x 128 are whole: a block each.
    assert shards.replicated.n_fp8_blocks == 2
    # wq_b 192 x 48: 2; wkv_b 256 x 32: 2; wo 128 x 128: 1; the shared expert's: 3.
    assert shards.split.n_fp8_blocks == 2 + 2 + 1 + 3
    # Of each expert w13 192 x 128: 2; w2 128 x 96: 1.
    assert shards.expert.n_fp8_blocks == 8 * (2 + 1)


def test_outputs_of_the_first_projections_are_cut_and_inputs_of_the_last():
    dense_layer = Stage(chunks=(Chunk(layers=range(1)),))
    shards = shard_params(TINY, Layout(tp=2), dense_layer)

    # wq_b 96 x 48, wkv_b 128 x 32 and wo 128 x 64: a block each.
    # w1 and w3 192 x 128, w2 128 x 192: two each. Cut by rows, w2 would have three.
    assert shards.split.n_fp8_blocks == 3 + 3 * 2


def test_norms_routers_and_both_ends_stay_out_of_fp8():
    kept = [
        w.name
        for weights in (
            embedding_weights(V3),
            head_weights(V3),
            layer_weights(V3, is_dense=False),
            mtp_weights(V3),
        )
        for w in weights
        if not w.is_fp8 and "block." not in w.name and "norm" not in w.name
    ]

    assert kept == ["embed.weight", "head.weight", "ffn.gate.weight", "eh_proj.weight"]


def test_a_whole_weight_has_one_shape_on_every_rank():
    router = Weight("gate.weight", (8, 128))

    assert local_shape(router, Layout(tp=4, ep=4)) == (8, 128)


DENSE_GQA = replace(
    TINY, attention=GQAConfig(n_heads=12, n_kv_heads=4, head_dim=8), moe=None
)


@pytest.mark.parametrize(
    ("cfg", "layout", "message"),
    [
        (
            TINY,
            Layout(tp=8),
            "tp must divide n_heads, because each rank takes an equal part; got tp=8 "
            "and 4. Set tp=4.",
        ),
        (
            replace(TINY, inter_dim=383),
            Layout(tp=2),
            "tp must divide inter_dim, .*; got tp=2 and 383. Set tp=1.",
        ),
        (
            replace(TINY, moe=replace(TINY.moe, moe_inter_dim=97)),
            Layout(tp=4),
            r"tp must divide n_shared_experts \* moe_inter_dim, .* and 97. Set tp=1.",
        ),
        (
            DENSE_GQA,
            Layout(tp=6),
            "tp must divide n_kv_heads, or be a multiple of it so that ranks share a "
            "head; got tp=6 and 4. Set tp=2.",
        ),
        (
            TINY,
            Layout(dp=3, ep=3),
            "ep must divide n_routed_experts, because each rank takes as many whole "
            "experts; got ep=3 and 8. Set ep=1.",
        ),
        (
            DENSE_GQA,
            Layout(dp=2, ep=2),
            "ep must be 1 for a model without experts; got ep=2. Set ep=1.",
        ),
    ],
)
def test_a_cut_through_a_part_is_refused_in_a_sentence(cfg, layout, message):
    with pytest.raises(ValueError, match=message):
        shard_params(cfg, layout)


def test_an_unknown_convention_is_refused():
    with pytest.raises(ValueError, match="convention must be one of 'megatron', 'pap"):
        shard_params(TINY, Layout(), convention="deepspeed")
