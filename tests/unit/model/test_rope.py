"""Rotary positions and YaRN: by hand, against transformers, and by their symmetry."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from labkit.config import PRESETS, RopeConfig
from labkit.model.rope import (
    correction_pair,
    rope_amplitude,
    rope_frequencies,
    rotate,
    rotations,
)

V3 = PRESETS["v3-671b"]


def rope_of(cfg, **changes):
    return replace(cfg, rope=replace(cfg.rope, **changes))


def scores(q, k):
    return torch.einsum("bshr,bthr->bhst", q, k)


def rotate_half(x, angles):
    """Return `x` turned in the layout of halves: value i belongs to value i + r/2."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def evens_then_odds(x):
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


def test_a_pair_turns_by_its_frequency_times_its_position():
    turns = rotations(torch.tensor([0, 1, 2]), torch.tensor([0.5, math.pi / 2]))
    x = torch.tensor([1.0, 0.0, 0.0, 1.0]).expand(1, 3, 1, 4)
    expected = [
        [1, 0, 0, 1],
        [math.cos(0.5), math.sin(0.5), -1, 0],
        [math.cos(1.0), math.sin(1.0), 0, -1],
    ]
    torch.testing.assert_close(rotate(x, turns)[0, :, 0], torch.tensor(expected))


def test_scores_equal_those_of_halves_if_these_are_permuted_first():
    q, k = torch.randn(2, 2, 9, 3, 8)
    frequencies = torch.rand(4)
    angles = torch.arange(9)[:, None] * frequencies
    turns = rotations(torch.arange(9), frequencies)
    ours = scores(rotate(q, turns), rotate(k, turns))
    halves = [rotate_half(evens_then_odds(x), angles) for x in (q, k)]
    torch.testing.assert_close(ours, scores(*halves))
    unpermuted = scores(rotate_half(q, angles), rotate_half(k, angles))
    assert (ours - unpermuted).abs().max() > 1


@settings(max_examples=20)
@given(shift=st.integers(0, 1000), seed=st.integers(0, 2**31))
def test_scores_depend_on_the_distance_alone(shift, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, 6, 2, 8, generator=generator)
    frequencies = rope_frequencies(PRESETS["tiny"])[:4]
    here, there = (rotations(torch.arange(6) + s, frequencies) for s in (0, shift))
    torch.testing.assert_close(
        scores(rotate(q, here), rotate(k, here)),
        scores(rotate(q, there), rotate(k, there)),
        rtol=1e-3,
        atol=1e-3,
    )


@pytest.mark.parametrize("start", [0, 1, 2, 3])
@pytest.mark.parametrize("width", [7, 8])
def test_parts_of_wider_rows_turn_as_their_copies_do(start, width):
    rows = torch.randn(2, 5, 3, width)
    part = rows[..., start : start + 4]
    turns = rotations(torch.arange(5), torch.tensor([1.0, 0.1]))
    assert torch.equal(rotate(part, turns), rotate(part.clone(), turns))


def test_sequences_of_a_batch_may_stand_at_different_positions():
    positions = torch.tensor([[0, 1], [7, 8]])
    x = torch.randn(2, 2, 3, 4)
    frequencies = torch.tensor([1.0, 0.1])
    together = rotate(x, rotations(positions, frequencies))
    for i in (0, 1):
        alone = rotate(x[i : i + 1], rotations(positions[i], frequencies))
        assert torch.equal(together[i : i + 1], alone)


def test_bf16_is_turned_in_fp32_and_rounded_once():
    x = torch.randn(1, 300, 2, 8).bfloat16()
    turns = rotations(torch.arange(300), torch.rand(4))
    turned = rotate(x, turns)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), turns).bfloat16())


def test_v3_keeps_pairs_up_to_10_and_slows_pairs_from_23_by_40():
    assert math.floor(correction_pair(32.0, V3.rope, 64)) == 10
    assert math.ceil(correction_pair(1.0, V3.rope, 64)) == 23
    plain = rope_frequencies(replace(V3, max_seq_len=4096))
    share = rope_frequencies(V3) / plain
    assert (share[:11] == 1).all()
    torch.testing.assert_close(share[23:], torch.full((9,), 1 / 40))
    assert round(share[16].item(), 2) == 0.55
    assert (share[10:24].diff() < 0).all()


def test_plain_frequencies_fall_from_1_by_the_base():
    plain = rope_frequencies(replace(V3, max_seq_len=4096))
    assert plain[0] == 1
    torch.testing.assert_close(plain[16], torch.tensor(0.01))
    torch.testing.assert_close(
        plain[1:] / plain[:-1], torch.full((31,), 1e4 ** (-1 / 32))
    )


@pytest.mark.parametrize("name", ["v2-lite-16b", "v2-236b", "v3-671b", "tiny"])
def test_yarn_changes_frequencies_and_softmax_together_and_only_when_extended(name):
    cfg = PRESETS[name]
    original = replace(cfg, max_seq_len=cfg.rope.original_seq_len)
    longer = replace(cfg, max_seq_len=cfg.rope.original_seq_len + 1)
    without = rope_of(longer, rope_factor=1.0)
    plain = cfg.attention.qk_head_dim**-0.5
    for off in (original, without):
        assert not off.is_extended
        assert torch.equal(rope_frequencies(off), rope_frequencies(original))
        assert off.softmax_scale == plain
        assert rope_amplitude(off) == 1
    assert longer.is_extended
    assert not torch.equal(rope_frequencies(longer), rope_frequencies(original))
    assert longer.softmax_scale > plain


def test_the_softmax_factors_are_those_of_the_published_models():
    assert round(V3.softmax_scale, 8) == 0.13523378
    assert round(V3.softmax_scale / 192**-0.5, 6) == 1.873854
    lite = PRESETS["v2-lite-16b"]
    assert round(lite.softmax_scale / 192**-0.5, 6) == 1.589626


@pytest.mark.parametrize("name", ["v2-lite-16b", "v2-236b", "v3-671b"])
def test_published_models_leave_the_amplitude_alone(name):
    assert rope_amplitude(PRESETS[name]) == 1


def test_amplitude_is_the_quotient_of_the_two_factors():
    log = 0.1 * math.log(40)
    unequal = rope_of(V3, mscale=0.8, mscale_all_dim=1.2)
    expected = (log * 0.8 + 1) / (log * 1.2 + 1)
    assert rope_amplitude(unequal) == pytest.approx(expected)
    # transformers ignores mscale where mscale_all_dim is 0; DeepSeek's code does not.
    one_sided = rope_of(V3, mscale=0.8, mscale_all_dim=0.0)
    assert rope_amplitude(one_sided) == pytest.approx(log * 0.8 + 1)
    assert one_sided.softmax_scale == pytest.approx(192**-0.5)


def test_amplitude_scales_every_turned_value():
    x = torch.randn(1, 4, 1, 6)
    once = rotations(torch.arange(4), torch.rand(3), amplitude=1.0)
    torch.testing.assert_close(rotate(x, once * 1.5), rotate(x, once) * 1.5)
    longer = rotations(torch.arange(4), torch.rand(3), amplitude=1.5)
    torch.testing.assert_close(longer.abs(), torch.full((4, 3), 1.5))


@settings(max_examples=30)
@given(
    pairs=st.integers(1, 64),
    theta=st.sampled_from([500.0, 1e4, 5e5]),
    factor=st.sampled_from([1.5, 4.0, 40.0]),
    original=st.integers(64, 8192),
    betas=st.sampled_from([(32.0, 1.0), (8.0, 2.0)]),
)
def test_frequencies_and_amplitude_agree_with_transformers(
    pairs, theta, factor, original, betas
):
    rope = RopeConfig(
        rope_theta=theta,
        rope_factor=factor,
        original_seq_len=original,
        beta_fast=betas[0],
        beta_slow=betas[1],
        mscale=0.8,
        mscale_all_dim=1.2,
    )
    attention = replace(V3.attention, qk_rope_head_dim=2 * pairs)
    cfg = replace(V3, attention=attention, rope=rope, max_seq_len=2 * original)
    hf = DeepseekV3Config(
        qk_rope_head_dim=2 * pairs,
        max_position_embeddings=2 * original,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": betas[0],
            "beta_slow": betas[1],
            "mscale": 0.8,
            "mscale_all_dim": 1.2,
        },
    )
    expected, amplitude = ROPE_INIT_FUNCTIONS["yarn"](hf)
    torch.testing.assert_close(rope_frequencies(cfg), expected)
    assert rope_amplitude(cfg) == pytest.approx(amplitude)
