"""The counts of DeepSeek-V2-Lite, V2 and V3, against numbers worked out by hand."""

from dataclasses import replace

import pytest

from labkit.config import PRESETS, GQAConfig
from labkit.config.counts import (
    attention_flops_per_token,
    attention_params,
    ffn_params,
    moe_params,
)

LITE, V2, V3 = (PRESETS[name] for name in ("v2-lite-16b", "v2-236b", "v3-671b"))


def by_model(lite, v2, v3):
    return pytest.mark.parametrize(
        ("cfg", "expected"),
        [(LITE, lite), (V2, v2), (V3, v3)],
        ids=["v2-lite", "v2", "v3"],
    )


@by_model(13_763_072, 149_227_520, 187_107_328)
def test_one_attention_layer(cfg, expected):
    assert attention_params(cfg.attention, cfg.dim) == expected


def test_v3_attention_is_the_sum_of_its_matrices():
    parts = {
        "wq_a": 7168 * 1536,
        "q_norm": 1536,
        "wq_b": 1536 * 128 * 192,
        "wkv_a": 7168 * 576,
        "kv_norm": 512,
        "wkv_b": 512 * 128 * 256,
        "wo": 128 * 128 * 7168,
    }
    assert parts["wq_b"] == 37_748_736
    assert parts["wo"] == 117_440_512
    assert attention_params(V3.attention, V3.dim) == sum(parts.values())


@by_model(8_650_752, 23_592_960, 44_040_192)
def test_one_expert(cfg, expected):
    assert ffn_params(cfg.dim, cfg.moe.moe_inter_dim) == expected


@by_model(67_239_936, 188_743_680, 396_361_728)
def test_one_dense_feed_forward_network(cfg, expected):
    assert ffn_params(cfg.dim, cfg.inter_dim) == expected


@by_model(571_080_704, 3_822_878_720, 11_320_164_608)
def test_one_moe_layer(cfg, expected):
    assert moe_params(cfg.moe, cfg.dim) == expected


@by_model(209_715_200, 524_288_000, 926_679_040)
def test_embedding_and_head_are_equal_and_untied(cfg, expected):
    counts = cfg.parameter_counts()

    assert counts.embedding == counts.head == expected


@by_model(15_706_484_224, 235_741_434_880, 671_026_419_200)
def test_the_whole_model(cfg, expected):
    assert cfg.n_params() == expected


@by_model(2.451e9, 20.852e9, 36.626e9)
def test_active_parameters_with_the_head_only_are_the_published_ones(cfg, expected):
    assert cfg.n_active_params() == pytest.approx(expected, rel=5e-4)


@by_model(2.661e9, 21.376e9, 37.552e9)
def test_active_parameters_with_the_embedding(cfg, expected):
    assert cfg.n_active_params(include_embedding=True) == pytest.approx(
        expected, rel=5e-4
    )


def test_routed_experts_are_nearly_all_of_v3():
    share = V3.parameter_counts().routed_experts / V3.n_params()

    assert round(100 * share, 2) == 97.45


def test_the_mtp_module_of_v3():
    block = 187_107_328 + 11_320_164_608 + 2 * 7168
    projection, norms = 2 * 7168**2, 3 * 7168

    assert V3.parameter_counts().mtp == block + projection + norms
    assert V3.parameter_counts().mtp == 11_610_068_224
    assert V3.n_params(include_mtp=True) == 671_026_419_200 + 11_610_068_224


def test_v3_with_the_copies_in_its_mtp_module_is_the_published_685b():
    copies = 2 * V3.parameter_counts().embedding  # embedding and head, stored again

    total = V3.n_params(include_mtp=True) + copies
    assert round(total / 1e9, 2) == 684.49


def test_v2_has_no_mtp_module():
    assert V2.parameter_counts().mtp == 0
    assert V2.n_params(include_mtp=True) == V2.n_params()


def test_v31_counts_as_v3():
    assert PRESETS["v3.1-671b"] == V3


@by_model(31_104, 69_120, 70_272)
def test_cache_bytes_per_token(cfg, expected):
    assert cfg.kv_bytes_per_token() == expected
    assert cfg.kv_bytes_per_token("float32") == 2 * expected


@by_model(276_480, 4_915_200, 4_997_120)
def test_cache_bytes_per_token_if_decompressed(cfg, expected):
    assert 2 * cfg.n_layers * cfg.attention.decompressed_cache_width == expected


@by_model(221_184, 3_932_160, 3_997_696)
def test_cache_bytes_per_token_of_multi_head_attention(cfg, expected):
    n_heads = cfg.attention.n_heads
    mha = replace(cfg, attention=GQAConfig(n_heads=n_heads, n_kv_heads=n_heads))

    assert mha.attention.kind == "mha"
    assert mha.kv_bytes_per_token() == expected


@by_model(110_592, 245_760, 249_856)
def test_cache_bytes_per_token_of_eight_groups(cfg, expected):
    n_heads = cfg.attention.n_heads
    gqa = replace(cfg, attention=GQAConfig(n_heads=n_heads, n_kv_heads=8))

    assert gqa.attention.kind == "gqa"
    assert gqa.kv_bytes_per_token() == expected


def test_the_latent_is_as_wide_as_two_and_a_quarter_groups():
    one_group = GQAConfig(n_heads=128, n_kv_heads=1).cache_width

    assert V3.attention.cache_width / one_group == 2.25


def test_the_cache_of_v3_at_its_full_context():
    n_bytes = V3.kv_bytes_per_token() * 131_072

    assert round(n_bytes / 1e9, 2) == 9.21
    assert round(n_bytes / 2**30, 2) == 8.58


@pytest.mark.parametrize(
    ("cfg", "causal", "gflops"),
    [(V3, True, 250.5), (V2, True, 155.3), (V3, False, 281.2)],
    ids=["v3", "v2", "v3-non-causal"],
)
def test_training_flops_per_token_at_4096(cfg, causal, gflops):
    flops = cfg.flops_per_token(4096, causal=causal)

    assert round(flops / 1e9, 1) == gflops


def test_attention_is_30_of_the_250_gflops_of_v3():
    attention = 3 * attention_flops_per_token(V3, 4096)

    assert round(attention / 1e9, 1) == 30.7
    assert round((V3.flops_per_token(4096) - attention) / 1e9, 1) == 219.8


def test_the_softmax_scale_of_v3_without_and_with_yarn():
    short = replace(V3, max_seq_len=4096)

    assert short.softmax_scale == pytest.approx(0.0721688, abs=5e-8)
    assert V3.softmax_scale == pytest.approx(0.13523378, abs=5e-9)


def test_v2_lite_scales_its_softmax_by_its_own_mscale():
    ratio = LITE.softmax_scale * LITE.attention.qk_head_dim**0.5

    assert ratio == pytest.approx(1.589626, abs=5e-7)


def test_tiny_and_small_stay_small_enough_for_a_cpu():
    assert 0.5e6 < PRESETS["tiny"].n_params() < 2e6
    assert 5e6 < PRESETS["small"].n_params() < 20e6
