"""Rotary positions in the checkpoint's layout, and YaRN.

Pairs are adjacent values (2i, 2i+1), rotated by a complex factor, as in DeepSeek's
own code; its Hugging Face port permutes queries and keys first, which leaves every
score unchanged. YaRN (DeepSeek-V3, section 4.3) slows the slow pairs down by the
extension factor, keeps the fast ones, and ramps linearly between.
"""

import math

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from labkit.config import ModelConfig, RopeConfig


def correction_pair(n_rotations: float, rope: RopeConfig, dim: int) -> float:
    """Return the (fractional) pair that turns `n_rotations` times in one context.

    >>> v3 = RopeConfig(rope_factor=40.0, original_seq_len=4096)
    >>> round(correction_pair(32.0, v3, 64), 2), round(correction_pair(1.0, v3, 64), 2)
    (10.47, 22.51)
    """
    wavelength = rope.original_seq_len / (n_rotations * 2 * math.pi)
    return dim * math.log(wavelength) / (2 * math.log(rope.rope_theta))


def yarn_ramp(rope: RopeConfig, dim: int) -> Float[Tensor, "r"]:
    """Return each pair's share of slowing down: 0 keeps it, 1 divides it fully.

    >>> v3 = RopeConfig(rope_factor=40.0, original_seq_len=4096)
    >>> [round(yarn_ramp(v3, 64)[pair].item(), 2) for pair in (10, 16, 23)]
    [0.0, 0.46, 1.0]
    """
    low = max(math.floor(correction_pair(rope.beta_fast, rope, dim)), 0)
    high = min(math.ceil(correction_pair(rope.beta_slow, rope, dim)), dim - 1)
    width = max(high - low, 0.001)
    return ((torch.arange(dim // 2) - low) / width).clamp(0, 1)


def rope_frequencies(cfg: ModelConfig) -> Float[Tensor, "r"]:
    """Return the angle per position of each pair, in radians, YaRN included."""
    dim, rope = cfg.attention.rope_dim, cfg.rope
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / rope.rope_theta**exponent
    if not cfg.is_extended:
        return frequencies
    ramp = yarn_ramp(rope, dim)
    return frequencies * (1 - ramp) + frequencies / rope.rope_factor * ramp


def rope_amplitude(cfg: ModelConfig) -> float:
    """Return YaRN's factor on cosine and sine; 1 for every published config."""
    rope = cfg.rope
    if not cfg.is_extended or rope.mscale == rope.mscale_all_dim:
        return 1.0
    log_factor = 0.1 * math.log(rope.rope_factor)
    return (log_factor * rope.mscale + 1) / (log_factor * rope.mscale_all_dim + 1)


def rotations(
    positions: Int[Tensor, "*b s"],
    frequencies: Float[Tensor, "r"],
    *,
    amplitude: float = 1.0,
) -> Complex[Tensor, "*b s r"]:
    """Return the complex factor that turns each pair at each position."""
    angles = positions.unsqueeze(-1) * frequencies
    return torch.polar(torch.full_like(angles, amplitude), angles)


def rotate(
    x: Float[Tensor, "b s h r2"], turns: Complex[Tensor, "*b s r"]
) -> Float[Tensor, "b s h r2"]:
    """Return `x` with its adjacent pairs turned, in the dtype of `x`.

    The turn itself is in FP32: positions of some thousands need its mantissa.
    """
    # A copy, because a part of a row may start at an odd offset, complex values not.
    x32 = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    pairs = torch.view_as_complex(x32.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns.unsqueeze(-2)).flatten(-2).type_as(x)
