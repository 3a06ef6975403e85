"""Weights as FP8 files store them: E4M3 values, one FP32 scale per block.

A block is 128 × 128; those at the right and lower edge may be smaller. The stored
`weight_scale_inv` is, in spite of its name, the factor that turns stored values back
into weights (DeepSeek-V3, section 3.3, and the README of its weights).

Since DeepSeek-V3.1 scales are powers of two, still in FP32, and `config.json` says so:
`scale_fmt` is "ue8m0", the byte that would hold such an exponent. A weight that is read
from them is exact in BF16. Its `o_proj` are reported to have other scales all the same
(issue 961 of DeepSeek's repository), so that reading takes scales as they are.

Written and read on CPUs only so far: on a GPU, where `load_hf` with a device
dequantises, and `save_hf` quantises a model that is there, it was not run.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

BLOCK = 128
"""Rows and columns of a block."""

LARGEST = torch.finfo(torch.float8_e4m3fn).max

SCALE_SUFFIX = "_scale_inv"

STORED_VALUES, STORED_SCALES = "F8_E4M3", "F8_E8M0"
"""safetensors' names of FP8 dtypes; scales may be floats of any width, too."""

UNQUANTIZED = ("embed_tokens", "lm_head", "shared_head", "gate", "eh_proj")
"""Matrices that stay in BF16, by a word of their name."""

QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
"""How `config.json` announces all this, whatever the scales."""

SCALE_FORMATS: Mapping[str, str | None] = MappingProxyType(
    {"fp32": None, "po2": "ue8m0"}
)
"""What `config.json` calls the scales, by their kind: any number, or powers of two."""

READ_SCALE_FORMATS = (*SCALE_FORMATS.values(), "float")
"""Names that are read: transformers calls any number "float"."""

LEAST = 1e-12
"""Magnitude below which a block counts as zero."""


def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether an FP8 file stores this tensor in FP8.

    >>> is_quantized("model.layers.3.mlp.experts.0.up_proj.weight", (2048, 7168))
    True
    >>> is_quantized("model.layers.3.mlp.gate.weight", (256, 7168))
    False
    """
    words = name.split(".")
    return len(shape) == 2 and not any(word in UNQUANTIZED for word in words)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a matrix's scales, one per block.

    >>> scale_shape((576, 7168))
    (5, 56)
    """
    return tuple(-(-size // BLOCK) for size in shape)


def quantize_blocks(
    weight: Float[Tensor, "o i"], *, scale: str = "fp32"
) -> tuple[Float[Tensor, "o i"], Float[Tensor, "bo bi"]]:
    """Return E4M3 values, and the scales to multiply them by.

    A block's largest value becomes 448, or 240 up to 448 with powers of two. A block
    that holds an infinity or NaN becomes NaN as a whole, scale and values.

    Args:
        weight: the matrix.
        scale: kind of scales, a key of `SCALE_FORMATS`.
    """
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(scale_shape(weight.shape), device=weight.device)
    stripes = zip(weight.split(BLOCK), values.split(BLOCK), scales, strict=True)
    for stripe, stored, factors in stripes:
        largest = stripe.float().abs().amax(dim=0)  # (i,)
        largest = F.pad(largest, (0, -len(largest) % BLOCK)).unflatten(0, (-1, BLOCK))
        largest = largest.amax(dim=-1)  # (bi,)
        factors.copy_(_scales(largest, scale))
        stored.copy_(stripe.float() / _per_column(factors, stripe.shape[1]))
        if scale == "po2":
            _double(stored, factors, is_half=_rounds_to_half(largest / factors))
    return values, scales


def _scales(largest: Float[Tensor, "bi"], kind: str) -> Float[Tensor, "bi"]:
    scales = largest.clamp_min(LEAST) / LARGEST
    if kind == "po2":
        scales = up_to_power_of_two(scales)
    return scales.masked_fill(~largest.isfinite(), torch.nan)


def up_to_power_of_two(values: Float[Tensor, "*t"]) -> Float[Tensor, "*t"]:
    """Return the least powers of two that are not below positive FP32 numbers.

    >>> up_to_power_of_two(torch.tensor([1.0, 1.0000001, 3.0])).tolist()
    [1.0, 2.0, 4.0]
    """
    # With any bit of the mantissa, to the next exponent.
    bits = values.view(torch.int32).add(0x7FFFFF).bitwise_and_(-0x800000)
    return bits.view(torch.float32)


def _rounds_to_half(quotient: Float[Tensor, "bi"]) -> Bool[Tensor, "bi"]:
    return quotient.to(torch.float8_e4m3fn).float() == LARGEST / 2


def _double(
    values: Float[Tensor, "o i"],
    scales: Float[Tensor, "bi"],
    *,
    is_half: Bool[Tensor, "bi"],
) -> None:
    """Double the values of some blocks, and halve their scales.

    A block whose largest value was rounded down to 224 is to have 448 instead, as it
    will when it is read and written again: a file that was not trained stays the same.
    Doubling is exact in E4M3, so that the weights are what they were.
    """
    if is_half.any():
        factors = 1.0 + is_half.float()
        values.copy_(values.float() * _per_column(factors, values.shape[1]))
        scales.div_(factors)


def dequantize_into(
    weight: Float[Tensor, "o i"],
    values: Float[Tensor, "o i"],
    scales: Float[Tensor, "bo bi"],
) -> None:
    """Write the weights that the values and scales stand for into `weight`."""
    stripes = zip(weight.split(BLOCK), values.split(BLOCK), scales, strict=True)
    for stripe, stored, scale in stripes:
        stripe.copy_(stored.float() * _per_column(scale, stripe.shape[1]))


def _per_column(scale: Float[Tensor, "bi"], n_columns: int) -> Float[Tensor, "i"]:
    return scale.repeat_interleave(BLOCK)[:n_columns]
