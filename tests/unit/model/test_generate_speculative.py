"""Speculative decoding: fewer passes, the same tokens, the same distribution."""

from dataclasses import replace

import pytest
import torch

from labkit.config import PRESETS, MTPConfig
from labkit.model import LatentCache, Transformer, generate
from labkit.model.sampling import Sampler
from labkit.model.speculative import Draft, Speculator, accept

VOCAB = 16


def build(depth=1, *, noise=None):
    """Return a model; with `noise`, one that repeats a cycle of tokens, more or less.

    The head then looks up the token after each embedding in a cycle. MTP modules pass
    the embedding on and always draft the cycle's next token; the main layers disturb
    it by an amount that depends on all tokens before.
    """
    cfg = replace(
        PRESETS["tiny"],
        vocab_size=VOCAB,
        mtp=MTPConfig(depth=depth),
        init_std=0.1,
    )
    model = Transformer(cfg, generator=torch.Generator().manual_seed(0)).eval()
    if noise is None:
        return model
    with torch.no_grad():
        embedding = torch.eye(VOCAB, cfg.dim)
        model.embed.weight.copy_(embedding)
        model.head.weight.copy_(embedding.roll(1, dims=0))
        for module in model.mtp:
            module.eh_proj.weight.copy_(torch.eye(cfg.dim, 2 * cfg.dim))
            silence(module.block)
        for layer in model.layers:
            silence(layer, noise)
    return model


def silence(layer, noise=0.0):
    layer.attn.wo.weight.mul_(noise)
    for name, weight in layer.ffn.named_parameters():
        if "w2" in name:
            weight.mul_(noise)


def prompts(*shape):
    return torch.randint(0, VOCAB, shape)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_perfect_drafts_are_all_accepted(depth):
    n = 25
    result = generate(build(depth, noise=0.0), prompts(1, 4), n, speculative=True)
    assert result.acceptance_rate == 1.0
    # The first token comes from the prefill; each pass gives depth + 1 more.
    assert result.n_forwards == -(-(n - 1) // (depth + 1))
    steps = (result.tokens[0, 1:] - result.tokens[0, :-1]) % VOCAB
    assert (steps == 1).all()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("noise", [None, 0.2])
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_tokens_are_those_of_plain_decoding(depth, noise, batch):
    model, tokens = build(depth, noise=noise), prompts(batch, 7)
    plain = generate(model, tokens, 30)
    fast = generate(model, tokens, 30, speculative=True)
    assert torch.equal(fast.tokens, plain.tokens)
    assert fast.n_forwards <= plain.n_forwards
    assert 0 <= fast.acceptance_rate <= 1
    # Each pass checks `depth` drafts a sequence, fewer where less is left to do.
    assert (fast.n_forwards - depth) * batch <= fast.n_drafted
    assert fast.n_drafted <= fast.n_forwards * depth * batch


def test_partly_right_drafts_are_partly_accepted():
    result = generate(build(noise=0.2), prompts(1, 7), 60, speculative=True)
    assert 0.2 < result.acceptance_rate < 0.95
    assert 59 / 2 < result.n_forwards < 59
    assert result.n_forwards == 59 - result.n_accepted


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("noise", [None, 0.2])
def test_ragged_prompts_give_the_same_tokens_too(depth, noise):
    model, tokens = build(depth, noise=noise), prompts(3, 8)
    options = {"lengths": [3, 8, 2]}
    plain = generate(model, tokens, 20, **options).tokens
    assert torch.equal(
        generate(model, tokens, 20, speculative=True, **options).tokens, plain
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("noise", [None, 0.2])
def test_drafts_are_those_of_the_modules_without_a_cache(depth, noise):
    model, prompt = build(depth, noise=noise), prompts(1, 5)
    cache = LatentCache(model.cfg, 1, 40, dtype=torch.float32)
    decoder = Speculator(model, cache, Sampler())
    with torch.inference_mode():
        first = decoder.prefill(prompt, torch.tensor([5]))
        tokens = torch.cat((prompt, first), dim=1)
        accepted = set()
        for _ in range(12):
            drafted = record_drafts(decoder)
            new = decoder.step(depth + 1)
            assert torch.equal(drafted[0], uncached_drafts(model, tokens))
            accepted.add(new.shape[1] - 1)
            tokens = torch.cat((tokens, new), dim=1)
    if noise is not None:
        assert {0, depth} <= accepted  # both ways of going on were seen


def record_drafts(decoder):
    drafted, draft = [], type(decoder.drafter).draft

    def recording(*arguments):
        result = draft(decoder.drafter, *arguments)
        drafted.append(result.tokens)
        return result

    decoder.drafter.draft = recording
    return drafted


def uncached_drafts(model, tokens):
    """Return what the modules draft after `tokens`, the last of which is pending."""
    n, known = tokens.shape[1] - 1, tokens
    hidden = model.norm(model.hidden(tokens[:, :n])[0])
    for k, module in enumerate(model.mtp, start=1):
        given = model.embed(known[:, k : k + n])
        hidden = module.norm(module(hidden, given, model.turns(torch.arange(n)))[0])
        best = model.head(hidden[:, -1:]).argmax(dim=-1)
        known = torch.cat((known, best), dim=1)
    return known[:, n + 1 :]


def test_the_main_cache_holds_all_but_the_last_token():
    model = build(2, noise=0.2)
    cache = LatentCache(model.cfg, 2, 5 + 20 - 1, dtype=torch.float32)
    tokens = prompts(2, 5)
    result = generate(model, tokens, 20, cache=cache, speculative=True)
    assert cache.lengths == (24, 24)
    plain = LatentCache(model.cfg, 2, 24, dtype=torch.float32)
    with torch.inference_mode():
        model(torch.cat((tokens, result.tokens[:, :-1]), dim=1), plain)
    torch.testing.assert_close(cache.entries, plain.entries, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("lengths", [[5, 5], [3, 4]])
def test_the_least_cache_that_is_accepted_suffices(depth, noise, lengths):
    model, tokens = build(depth, noise=noise), prompts(2, 5)
    least = max(lengths) + 20 - 1

    def generated(max_seq):
        cache = LatentCache(model.cfg, 2, max_seq, dtype=torch.float32)
        options = {"lengths": lengths, "speculative": True}
        return generate(model, tokens, 20, cache=cache, **options).tokens

    assert generated(least).shape == (2, 20)
    with pytest.raises(ValueError, match=f"need {least} positions, and its max_seq"):
        generated(least - 1)


def test_a_cache_that_holds_tokens_changes_no_output():
    model, tokens, more = build(2, noise=0.2), prompts(1, 6), prompts(1, 3)

    def continued(**options):
        cache = LatentCache(model.cfg, 1, 40, dtype=torch.float32)
        with torch.inference_mode():
            model(tokens, cache)
        return generate(model, more, 20, cache=cache, **options).tokens

    assert torch.equal(continued(speculative=True), continued())


def test_a_stop_token_among_accepted_drafts_ends_the_sequence():
    model, tokens = build(3, noise=0.0), torch.tensor([[15, 0]])
    result = generate(model, tokens, 30, speculative=True, stop=6)
    assert result.tokens.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert result.lengths == (6,)


def random_distributions(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(*shape, 6, generator=generator)).softmax(dim=-1)


def test_accepted_or_replaced_tokens_follow_the_target_exactly():
    n = 30_000
    target = random_distributions(2, seed=0)
    offered = random_distributions(1, seed=1)
    drawn = offered.expand(n, -1).multinomial(1)
    draft = Draft(drawn, offered.expand(n, 1, -1))
    n_accepted, emitted = accept(target.expand(n, -1, -1), draft, Sampler(1.0))

    expected_rate = torch.minimum(target[0], offered[0]).sum()
    assert abs(n_accepted.float().mean() - expected_rate) < 0.01
    counts = torch.bincount(emitted[:, 0], minlength=6)
    expected = target[0] * n
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # 5 degrees, p = 0.001


def test_a_batch_of_equals_is_accepted_whole():
    same = random_distributions(1, seed=2).expand(50, 1, -1)
    draft = Draft(same[:, 0].multinomial(1), same)
    n_accepted, emitted = accept(torch.cat((same, same), 1), draft, Sampler(1.0))
    assert (n_accepted == 1).all()
    assert torch.equal(emitted[:, 0], draft.tokens[:, 0])
    assert emitted.shape == (50, 2)


def test_sampled_pairs_follow_the_models_distribution():
    model, prompt, n = build(noise=0.3), torch.tensor([[3, 9]]), 3000
    with torch.no_grad():
        first = model(prompt)[0, -1].div(0.5).softmax(-1)
        after = torch.cat((prompt.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]), 1)
        second = model(after)[:, -1].div(0.5).softmax(-1)
    expected = n * first.unsqueeze(-1) * second  # (v, v)
    options = {"temperature": 0.5, "speculative": True}
    # In so large a batch some draft is always rejected, so each of the second tokens
    # is a draft kept or its replacement.
    result = generate(model, prompt.expand(n, -1), 3, **options)
    assert 0.1 * n < result.n_accepted < 0.9 * n
    counts = torch.zeros(VOCAB, VOCAB)
    pairs = (result.tokens[:, 0], result.tokens[:, 1])
    counts.index_put_(pairs, torch.ones(n), accumulate=True)
    is_filled = expected >= 5
    counts, expected = counts[is_filled], expected[is_filled]
    assert ((counts - expected) ** 2 / expected).mean() < 1.6


def test_drafts_are_kept_by_chance_too():
    model, options = build(noise=0.3), {"temperature": 0.3, "speculative": True}
    result = generate(model, prompts(1, 5), 40, **options)
    assert 0.1 < result.acceptance_rate < 1
    assert result.n_forwards < 39


def test_a_model_without_modules_is_refused():
    model = Transformer(replace(PRESETS["tiny"], mtp=None))
    with pytest.raises(ValueError) as caught:
        generate(model, torch.tensor([[1]]), 3, speculative=True)
    assert str(caught.value) == (
        "speculative decoding needs MTP modules to draft tokens; this model has none. "
        "Set mtp=MTPConfig() in its config and train it, or pass speculative=False."
    )


def test_prompts_too_short_for_the_chain_of_modules_are_refused():
    with pytest.raises(ValueError) as caught:
        generate(build(3), prompts(2, 4), 3, speculative=True, lengths=[4, 1])
    assert str(caught.value) == (
        "prompts must have at least 2 tokens for a chain of 3 MTP modules; got one of "
        "1. Lengthen the prompt, or pass speculative=False."
    )
