"""The form for one token equals the model, weight by weight and logit by logit."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from labkit.config import PRESETS, GQAConfig, MLAConfig
from labkit.model import LatentCache, Transformer, generate
from labkit.model.absorbed import AbsorbedModel, can_absorb
from labkit.model.experts import Experts, all_pairs_at_once, pair_by_pair
from labkit.model.norm import RMSNorm

TINY = PRESETS["tiny"]
VARIANTS = {
    "tiny": TINY,
    "small": PRESETS["small"],
    "plain queries": replace(TINY, attention=replace(TINY.attention, q_lora_rank=None)),
    "dense": replace(TINY, moe=None),
    "no shared expert": replace(TINY, moe=replace(TINY.moe, n_shared_experts=0)),
    "softmax": replace(TINY, moe=replace(TINY.moe, score_func="softmax")),
    "extended": replace(TINY, max_seq_len=2048),
    "odd": replace(
        TINY,
        attention=MLAConfig(
            n_heads=3,
            q_lora_rank=7,
            kv_lora_rank=13,
            qk_nope_head_dim=9,
            qk_rope_head_dim=6,
            v_head_dim=11,
        ),
    ),
}


def build(cfg, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    model = Transformer(replace(cfg, init_std=0.1), generator=generator)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.to(dtype)


def both(model, dtype):
    """Return logits and cached rows of three more tokens, absorbed and by modules."""
    chance = torch.Generator().manual_seed(1)
    tokens, results = torch.randint(0, 256, (1, 9), generator=chance), []
    for forward in (AbsorbedModel(model), model):
        cache = LatentCache(model.cfg, 1, 9, dtype=dtype)
        with torch.inference_mode():
            model(tokens[:, :6], cache)
            steps = [forward(tokens[:, at : at + 1], cache) for at in (6, 7, 8)]
        assert cache.lengths == (9,)
        results.append((torch.cat(steps, dim=1), cache.entries))
    return results


@pytest.mark.parametrize("name", VARIANTS)
def test_absorbed_logits_and_cache_equal_the_modules(name):
    model = build(VARIANTS[name])
    assert can_absorb(model)
    absorbed, by_modules = both(model, torch.float32)
    torch.testing.assert_close(absorbed, by_modules, rtol=1e-4, atol=1e-5)


def test_a_bf16_model_is_absorbed_with_less_rounding():
    model = build(replace(TINY, moe=None), torch.bfloat16)
    absorbed, by_modules = both(model, torch.bfloat16)
    exact, _ = both(model.float(), torch.float32)
    error, usual = (
        (logits.float() - exact[0]).norm() for logits in (absorbed[0], by_modules[0])
    )
    assert 0 < error < usual


def test_what_the_form_cannot_stand_for_runs_by_modules():
    assert not can_absorb(
        build(replace(TINY, attention=GQAConfig(n_heads=4, n_kv_heads=2, head_dim=8)))
    )
    wide = replace(TINY, attention=replace(TINY.attention, kv_lora_rank=256))
    assert not can_absorb(build(wide))
    transformed = build(TINY)
    transformed.layers[0].attn.wo = nn.Identity()
    assert not can_absorb(transformed)
    assert not can_absorb(build(TINY, torch.float64))
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_absorb(build(TINY))


def test_hooks_see_every_token():
    model, seen = build(TINY), []
    model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    generate(model, torch.tensor([[1, 2]]), 5)
    assert len(seen) == 5


def test_weights_changed_between_calls_are_used():
    model, tokens = build(TINY), torch.tensor([[1, 2, 3]])
    before = generate(model, tokens, 8).tokens
    with torch.no_grad():
        for layer in model.layers:
            layer.attn.wkv_b.weight.normal_()
    after = generate(model, tokens, 8).tokens
    assert not torch.equal(after, before)


@pytest.mark.parametrize("few", [pair_by_pair, all_pairs_at_once])
@pytest.mark.parametrize("n_tokens", [1, 3])
@pytest.mark.parametrize("sizes", [(10, 7), (256, 64)])
def test_experts_of_few_tokens_equal_sorted_ones(few, n_tokens, sizes):
    layer = Experts(6, *sizes)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.1)
    x, weights = torch.randn(n_tokens, sizes[0]), torch.rand(n_tokens, 2)
    chosen = torch.stack([torch.randperm(6)[:2] for _ in range(n_tokens)])
    by_sorting = layer(x, weights, chosen)  # gradients are on, so tokens are sorted
    result = few(x, weights, chosen, layer.w13, layer.w2)
    torch.testing.assert_close(result, by_sorting, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        unsorted = layer(x, weights, chosen)
    torch.testing.assert_close(unsorted, by_sorting, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_the_norm_of_one_vector_is_that_of_one_among_many(dtype, scale):
    norm = RMSNorm(33, eps=1e-6)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    norm.to(dtype)
    x = (scale * torch.randn(2, 33)).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(norm(x[:1]), norm(x)[:1])
