"""A cache changes the cost of a forward pass, not its result."""

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
    RopeConfig,
)
from labkit.model import LatentCache, Transformer
from labkit.model.attention import MLA

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@st.composite
def attentions(draw):
    n_heads = draw(st.integers(1, 4))
    if draw(st.booleans()):
        return MLAConfig(
            n_heads=n_heads,
            q_lora_rank=draw(st.none() | st.integers(1, 9)),
            kv_lora_rank=draw(st.integers(1, 9)),
            qk_nope_head_dim=draw(st.integers(1, 7)),
            qk_rope_head_dim=2 * draw(st.integers(1, 3)),
            v_head_dim=draw(st.integers(1, 9)),
        )
    n_kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4) if n_heads % n == 0]))
    head_dim = 2 * draw(st.integers(1, 4))
    return GQAConfig(n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)


@st.composite
def moes(draw):
    n_groups = draw(st.integers(1, 3))
    per_group = draw(st.integers(2, 3))
    return MoEConfig(
        n_routed_experts=n_groups * per_group,
        n_activated_experts=draw(st.integers(1, 2)),
        moe_inter_dim=draw(st.integers(1, 7)),
        n_shared_experts=draw(st.integers(0, 2)),
        n_expert_groups=n_groups,
        n_limited_groups=draw(st.integers(1, n_groups)),
        score_func=draw(st.sampled_from(["sigmoid", "softmax"])),
    )


@st.composite
def configs(draw):
    is_extended = draw(st.booleans())
    return ModelConfig(
        vocab_size=draw(st.integers(3, 17)),
        dim=draw(st.integers(3, 13)),
        n_layers=2,
        n_dense_layers=draw(st.integers(0, 1)),
        inter_dim=5,
        attention=draw(attentions()),
        moe=draw(st.none() | moes()),
        rope=RopeConfig(rope_factor=4.0, original_seq_len=8 if is_extended else 32),
        max_seq_len=32,
        init_std=0.5,
    )


def build(cfg, seed=0):
    return Transformer(cfg, generator=torch.Generator().manual_seed(seed)).eval()


def draw_tokens(cfg, *shape):
    return torch.randint(0, cfg.vocab_size, shape)


def run(model, cache, chunks):
    with torch.inference_mode():
        return torch.cat([model(chunk, cache) for chunk in chunks], dim=1)


@settings(max_examples=40)
@given(
    cfg=configs(),
    batch=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_cached_logits_equal_uncached_whatever_the_chunks(cfg, batch, sizes):
    model, tokens = build(cfg), draw_tokens(cfg, batch, sum(sizes))
    cache = LatentCache(cfg, batch, sum(sizes), dtype=torch.float32)
    cached = run(model, cache, tokens.split(sizes, dim=1))
    torch.testing.assert_close(cached, model(tokens), **CLOSE)


@settings(max_examples=25)
@given(
    cfg=configs(),
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    n_more=st.integers(1, 3),
)
def test_a_ragged_batch_equals_its_sequences_one_by_one(cfg, lengths, n_more):
    model, batch, longest = build(cfg), len(lengths), max(lengths)
    prompts = draw_tokens(cfg, batch, longest)
    more = draw_tokens(cfg, batch, 1 + n_more)
    cache = LatentCache(cfg, batch, longest + 1 + n_more, dtype=torch.float32)
    run(model, cache, [prompts])
    cache.rewind(lengths)
    together = run(model, cache, more.split([1, n_more], dim=1))
    for row, length in enumerate(lengths):
        alone = torch.cat((prompts[row, :length], more[row])).unsqueeze(0)
        expected = model(alone)[0, length:]
        torch.testing.assert_close(together[row], expected, **CLOSE)


@settings(max_examples=15)
@given(cfg=configs(), kept=st.integers(0, 5), n_more=st.integers(1, 3))
def test_a_rewound_cache_equals_one_that_never_went_on(cfg, kept, n_more):
    model = build(cfg)
    tokens, more = draw_tokens(cfg, 2, 5), draw_tokens(cfg, 2, n_more)
    cache = LatentCache(cfg, 2, 8, dtype=torch.float32)
    run(model, cache, [tokens])
    cache.rewind(kept)
    continued = run(model, cache, [more])
    expected = model(torch.cat((tokens[:, :kept], more), dim=1))[:, kept:]
    torch.testing.assert_close(continued, expected, **CLOSE)


@settings(max_examples=25)
@given(
    attention=attentions().filter(lambda a: isinstance(a, MLAConfig)),
    n_queries=st.integers(1, 5),
    n_earlier=st.integers(0, 4),
)
def test_absorbed_attention_equals_expanded(attention, n_queries, n_earlier):
    mla = MLA(replace(PRESETS["tiny"], dim=8, attention=attention)).double()
    n_keys = n_queries + n_earlier
    sizes = (attention.qk_nope_head_dim, attention.qk_rope_head_dim)
    q_nope, q_pe = (
        torch.randn(2, n_queries, attention.n_heads, size).double() for size in sizes
    )
    entries = torch.randn(2, n_keys, attention.cache_width).double()
    latent, k_pe = entries.split([attention.kv_lora_rank, sizes[1]], dim=-1)
    mask = torch.ones(n_queries, n_keys).tril(n_earlier).bool().expand(2, -1, -1)
    torch.testing.assert_close(
        mla.absorbed(q_nope, q_pe, entries, mask),
        mla.expanded(q_nope, q_pe, latent, k_pe, mask),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_a_bf16_cache_moves_logits_by_its_rounding_only(name):
    cfg = replace(PRESETS[name], moe=None)  # a router could flip an expert instead
    model, tokens = build(cfg), draw_tokens(cfg, 2, 24)
    cache = LatentCache(cfg, 2, 24)
    cached = run(model, cache, tokens.split([12, 1, 11], dim=1))
    with torch.inference_mode():
        exact = model(tokens)
    error = (cached - exact).norm() / exact.norm()
    assert 0 < error < 2**-8  # half a unit in the last place of BF16, per value


def test_a_bf16_cache_gives_equal_logits_whole_and_in_chunks():
    cfg = PRESETS["tiny"]
    model, tokens = build(cfg), draw_tokens(cfg, 2, 24)
    whole = run(model, LatentCache(cfg, 2, 24), [tokens])
    chunked = run(model, LatentCache(cfg, 2, 24), tokens.split([5, 1, 18], dim=1))
    torch.testing.assert_close(chunked, whole, rtol=1e-3, atol=1e-4)


def test_junk_in_stale_rows_never_shows():
    cfg = PRESETS["tiny"]
    model, tokens = build(cfg), draw_tokens(cfg, 2, 6)
    cache = LatentCache(cfg, 2, 8, dtype=torch.float32)
    run(model, cache, [tokens])
    cache.rewind([2, 5])
    clean = run(model, cache, [tokens[:, :1]])
    cache.rewind([2, 5])
    cache.entries[:, 0, 2:] = 1e4
    cache.entries[:, 1, 5:] = -1e4
    torch.testing.assert_close(
        run(model, cache, [tokens[:, :1]]), clean, rtol=0, atol=0
    )
