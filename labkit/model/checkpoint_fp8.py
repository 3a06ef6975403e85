"""Weights as FP8 files store them: E4M3 values, one FP32 scale per block.

A block is 128 × 128; those at the right and lower edge may be smaller. The stored
`weight_scale_inv` is, in spite of its name, the factor that turns stored values back
into weights (DeepSeek-V3, section 3.3, and the README of its weights).

Written and read on CPUs only so far: on a GPU, where `load_hf` with a device
dequantises, and `save_hf` quantises a model that is there, it was not run.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
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
"""How `config.json` announces all this."""


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
    weight: Float[Tensor, "o i"],
) -> tuple[Float[Tensor, "o i"], Float[Tensor, "bo bi"]]:
    """Return E4M3 values and scales that map each block's largest value to 448."""
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(scale_shape(weight.shape), device=weight.device)
    stripes = zip(weight.split(BLOCK), values.split(BLOCK), scales, strict=True)
    for stripe, stored, scale in stripes:
        largest = stripe.float().abs().amax(dim=0)  # (i,)
        largest = F.pad(largest, (0, -len(largest) % BLOCK)).unflatten(0, (-1, BLOCK))
        scale.copy_(largest.amax(dim=-1) / LARGEST)
        # A block of zeros has no scale of its own; any will do.
        scale.masked_fill_(scale == 0, 1.0)
        stored.copy_(stripe.float() / _per_column(scale, stripe.shape[1]))
    return values, scales


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
