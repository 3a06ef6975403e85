"""Plain generation: what it equals, what it draws, and what it refuses."""

from dataclasses import replace

import pytest
import torch

from labkit.config import PRESETS, GQAConfig
from labkit.model import LatentCache, Transformer, generate
from labkit.model.sampling import LEAST_TEMPERATURE, Sampler

TINY = PRESETS["tiny"]
GROUPED = replace(
    TINY, attention=GQAConfig(n_heads=4, n_kv_heads=2, head_dim=16), moe=None
)


def build(cfg=TINY, *, init_std=0.1, **options):
    generator = torch.Generator().manual_seed(0)
    return Transformer(replace(cfg, init_std=init_std), generator=generator, **options)


def prompts(*shape):
    return torch.randint(0, 256, shape)


def most_likely(model, tokens, n_new):
    """Return the greedy continuation, each token from an uncached pass over all."""
    for _ in range(n_new):
        with torch.no_grad():
            best = model(tokens)[:, -1:].argmax(dim=-1)
        tokens = torch.cat((tokens, best), dim=1)
    return tokens[:, -n_new:]


@pytest.mark.parametrize("cfg", [TINY, GROUPED], ids=["mla", "gqa"])
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_tokens_are_those_of_uncached_passes(cfg, batch):
    model, tokens = build(cfg), prompts(batch, 5)
    result = generate(model, tokens, 12)
    assert torch.equal(result.tokens, most_likely(model, tokens, 12))
    assert result.lengths == (12,) * batch
    assert result.n_forwards == 11
    assert result.acceptance_rate is None


def test_ragged_prompts_continue_as_each_would_alone():
    model, tokens = build(), prompts(3, 9)
    together = generate(model, tokens, 8, lengths=[4, 9, 1]).tokens
    for row, length in enumerate([4, 9, 1]):
        alone = generate(model, tokens[row : row + 1, :length], 8).tokens
        assert torch.equal(together[row : row + 1], alone)


def test_padding_may_hold_any_token():
    model, tokens = build(), prompts(2, 6)
    first = generate(model, tokens, 5, lengths=[2, 6]).tokens
    tokens[0, 2:] = 255
    assert torch.equal(generate(model, tokens, 5, lengths=[2, 6]).tokens, first)


def test_a_cache_continues_what_it_holds():
    model, tokens = build(), prompts(1, 4)
    cache = LatentCache(TINY, 1, 20, dtype=torch.float32)
    first = generate(model, tokens, 5, cache=cache).tokens
    assert cache.lengths == (4 + 5 - 1,)
    more = prompts(1, 3)
    second = generate(model, torch.cat((first[:, -1:], more), dim=1), 4, cache=cache)
    whole = torch.cat((tokens, first, more), dim=1)
    assert torch.equal(second.tokens, most_likely(model, whole, 4))


def test_the_default_cache_has_room_for_exactly_what_was_asked():
    model = build()
    assert generate(model, prompts(1, 1), 1).tokens.shape == (1, 1)
    cache = LatentCache(TINY, 1, 4 + 5 - 1, dtype=torch.float32)
    assert generate(model, prompts(1, 4), 5, cache=cache).tokens.shape == (1, 5)


def test_a_stop_token_ends_its_sequence_only():
    model, tokens = build(), prompts(2, 5)
    free = generate(model, tokens, 12).tokens
    stop = int(free[0, 3])
    result = generate(model, tokens, 12, stop=stop)
    expected = [(row == stop).nonzero() for row in free]
    expected = tuple(int(at[0]) + 1 if len(at) else 12 for at in expected)
    assert result.lengths == expected
    for row, n in enumerate(expected):
        assert torch.equal(result.tokens[row, :n], free[row, :n])
        assert (result.tokens[row, n:] == stop).all()


def test_generation_ends_when_every_sequence_has_stopped():
    model, tokens = build(), prompts(1, 5)
    stop = int(generate(model, tokens, 3).tokens[0, 2])
    result = generate(model, tokens, 100, stop=stop)
    assert result.lengths[0] <= 3
    assert result.n_forwards == result.tokens.shape[1] - 1


def test_every_module_keeps_its_mode():
    model = build().train()
    model.layers[1].eval()
    before = [module.training for module in model.modules()]
    generate(model, prompts(1, 3), 2)
    assert [module.training for module in model.modules()] == before


def test_tokens_may_be_trained_on():
    model = build()
    tokens = generate(model, prompts(1, 3), 4).tokens
    model.loss(tokens[:, :-1], tokens[:, 1:]).total.backward()


def test_a_seed_fixes_the_sample():
    model, tokens = build(), prompts(2, 3)

    def sample(seed):
        generator = torch.Generator().manual_seed(seed)
        return generate(model, tokens, 20, temperature=1.0, generator=generator).tokens

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))


def test_the_first_token_follows_the_models_distribution():
    model, tokens = build(), prompts(1, 4)
    n = 4_000
    with torch.no_grad():
        expected = (model(tokens)[0, -1] / 0.7).softmax(dim=-1)
    drawn = generate(model, tokens.expand(n, -1), 1, temperature=0.7).tokens
    counts = torch.bincount(drawn.flatten(), minlength=256)
    assert chi_square_per_degree(counts, expected * n) < 1.4


def test_a_nucleus_keeps_the_fewest_tokens_that_hold_its_mass():
    probabilities = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.97, 0.01, 0.01, 0.01]])
    kept = Sampler(temperature=1.0, top_p=0.65).distribution(probabilities.log())
    expected = torch.tensor([[0, 4 / 7, 3 / 7, 0], [1.0, 0, 0, 0]])
    torch.testing.assert_close(kept, expected)


def test_a_nucleus_is_never_empty_and_a_full_one_keeps_all():
    logits = torch.randn(5, 7)
    tiny = Sampler(temperature=1.0, top_p=1e-9).distribution(logits)
    assert torch.equal(tiny.argmax(-1), logits.argmax(-1))
    assert (tiny > 0).sum() == 5
    full = Sampler(temperature=2.0).distribution(logits)
    torch.testing.assert_close(full, (logits / 2).softmax(-1))


def test_draws_follow_the_nucleus():
    logits = torch.randn(7)
    sampler = Sampler(temperature=0.9, top_p=0.8)
    expected = sampler.distribution(logits)
    drawn = sampler.choose(logits.expand(20_000, -1))
    counts = torch.bincount(drawn, minlength=7)
    assert not counts[expected == 0].any()
    is_kept = expected > 0
    assert chi_square_per_degree(counts[is_kept], expected[is_kept] * 20_000) < 2.5


def chi_square_per_degree(counts, expected):
    """Return chi² over its degrees of freedom, cells below 5 left out: about 1."""
    is_filled = expected >= 5
    counts, expected = counts[is_filled], expected[is_filled]
    return float(((counts - expected) ** 2 / expected).sum() / (len(counts) - 1))


def test_a_low_temperature_is_nearly_greedy():
    model, tokens = build(), prompts(2, 5)
    cold = generate(model, tokens, 10, temperature=1e-4).tokens
    assert torch.equal(cold, generate(model, tokens, 10).tokens)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"temperature": -1.0},
            "temperature must be a number, 0 (greedy) or at least 0.0001, and "
            "finite; got -1.0. Set temperature=1.0 to sample from the model as it is.",
        ),
        (
            {"top_p": 0.0},
            "top_p must be a number above 0 and at most 1; got 0.0. "
            "Set top_p=1.0 to sample from all tokens.",
        ),
        (
            {"lengths": [3]},
            "lengths must give each of 2 prompts 1 to 4 tokens; got [3]. "
            "Pad prompts on the right and count without padding.",
        ),
        (
            {"lengths": [0, 4]},
            "lengths must give each of 2 prompts 1 to 4 tokens; got [0, 4]. "
            "Pad prompts on the right and count without padding.",
        ),
        (
            {"max_new_tokens": 0},
            "max_new_tokens must be a whole number of at least 1; got 0. "
            "Set max_new_tokens to 1 or more.",
        ),
        (
            {"max_new_tokens": 254},
            "prompts and new tokens must fit in the model, after those that a cache "
            "holds; they need 257 positions, and its max_seq_len is 256. Ask for 1 "
            "fewer, or build the model with max_seq_len=257.",
        ),
        (
            {"stop": 256},
            "stop must be a token, 0 to 255; got 256. "
            "Leave it out to generate all tokens.",
        ),
        (
            {"top_k": 5},
            "options must be among top_p, generator, lengths, stop, speculative; got "
            "top_k. Correct the name.",
        ),
        (
            {"cache": LatentCache(TINY, 1, 8)},
            "there must be one row per sequence of the cache; got 2 for a cache of 1. "
            "Build LatentCache(cfg, 2, max_seq), or pass 1.",
        ),
    ],
)
def test_bad_arguments_are_refused_with_their_remedy(options, expected):
    arguments = {"max_new_tokens": 3} | options
    with pytest.raises(ValueError) as caught:
        generate(build(), prompts(2, 4), **arguments)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("temperature", "hot", "be a number, 0 (greedy) or at least 0.0001"),
        ("temperature", None, "be a number, 0 (greedy) or at least 0.0001"),
        ("temperature", True, "be a number, 0 (greedy) or at least 0.0001"),
        ("top_p", "half", "be a number above 0 and at most 1"),
        ("top_p", True, "be a number above 0 and at most 1"),
        ("lengths", 5, "give each of 2 prompts 1 to 4 tokens"),
        ("lengths", [True, 4], "give each of 2 prompts 1 to 4 tokens"),
        ("stop", True, "be a token, 0 to 255"),
        ("cache", 3, "be of type LatentCache or None"),
        ("generator", 3, "be of type Generator or None"),
        ("speculative", "no", "be True or False"),
    ],
)
def test_arguments_of_another_type_are_refused(unchecked, name, value, rule):
    with pytest.raises(ValueError) as caught:
        generate(build(), prompts(2, 4), 3, **{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} must {rule}")
    assert f"; got {value!r}. " in message


@pytest.mark.parametrize("options", [{"stop": 1.5}, {"lengths": [2.0, 4]}])
def test_parts_of_tokens_are_refused(unchecked, options):
    with pytest.raises(ValueError, match="must .* got .*1.5|must .* got .*2.0"):
        generate(build(), prompts(2, 4), 3, **options)


@pytest.mark.parametrize("token", [-1, 256])
def test_tokens_that_the_vocabulary_lacks_are_refused(token):
    tokens = prompts(2, 4)
    tokens[1, 3] = token
    with pytest.raises(ValueError) as caught:
        generate(build(), tokens, 3, lengths=[4, 2])
    assert str(caught.value) == (
        f"tokens must lie between 0 and 255, padding too; got {token}. "
        "Encode the text for this model's vocabulary of 256."
    )


@pytest.mark.parametrize("temperature", [1e-40, 1e-5, float("nan"), float("inf")])
def test_temperatures_that_leave_the_range_of_floats_are_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be a number, 0 .greedy. or"):
        Sampler(temperature)


def test_the_least_temperature_takes_large_logits():
    logits = torch.tensor([[3e30, 1e30, -3e30]])
    coldest = Sampler(temperature=LEAST_TEMPERATURE)
    assert coldest.distribution(logits).tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_token_is_chosen_from_logits_that_are_not_finite(temperature, value):
    logits = torch.randn(3, 5)
    logits[1, 2:4] = value
    sampler = Sampler(temperature)
    for choice in (sampler.choose, sampler.distribution):
        with pytest.raises(ValueError) as caught:
            choice(logits)
        assert str(caught.value) == (
            "the logits are not finite: 2 of 15 are NaN or infinite, and no token can "
            "be chosen from them. Look for NaN among the weights, as after training "
            "that diverged, or compute in FP32."
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_of_minus_infinity_forbids_its_token(temperature):
    logits = torch.full((200, 4), -torch.inf)
    logits[:, 2] = 0.5
    assert (Sampler(temperature).choose(logits) == 2).all()


def test_a_cache_without_room_is_refused_before_anything_is_read():
    model = build()
    cache = LatentCache(TINY, 1, 13, dtype=torch.float32)
    generate(model, prompts(1, 2), 1, cache=cache)
    with pytest.raises(ValueError) as caught:
        generate(model, prompts(1, 4), 9, cache=cache)
    assert str(caught.value) == (
        "prompts and new tokens must fit in the cache, after those that a cache "
        "holds; they need 14 positions, and its max_seq is 13. Ask for 1 fewer, or "
        "build the cache with max_seq=14."
    )
    assert cache.lengths == (2,)


def test_padding_needs_room_too():
    cache = LatentCache(TINY, 2, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match="they need 9 positions"):
        generate(build(), prompts(2, 9), 2, cache=cache, lengths=[3, 1])


def test_modes_are_restored_after_an_error():
    model = build().train()
    model.head.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="the logits are not finite: 256 of 256"):
        generate(model, prompts(1, 4), 3)
    assert all(module.training for module in model.modules())
