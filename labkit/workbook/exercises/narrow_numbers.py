"""Answers to the exercises of notebook 05, right and wrong, and how to measure them."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from labkit.config import PRESETS
from labkit.precision import (
    Operator,
    QTensor,
    QuantSpec,
    fp8_mm,
    operators,
    quantize,
)

LARGEST = 448.0
"""Largest value of E4M3."""

V3 = PRESETS["v3-671b"]

SQUARES = QuantSpec(tile=(128, 128))


def scale_of(largest: float) -> float:
    """Return the smallest power of two that brings a tile's largest value to 448."""
    return 2.0 ** math.ceil(math.log2(largest / 448))


Quantizer = Callable[[Tensor], tuple[Tensor, Tensor]]
"""What the exercise on the stored scale asks for."""


def quantize_row(
    x: Float[Tensor, "128"],
) -> tuple[Float[Tensor, "128"], Float[Tensor, ""]]:
    """Return the E4M3 values of a row, and its scale, a power of two."""
    exact = x.abs().max().clamp_min(1e-12) / 448
    scale = 2 ** torch.ceil(torch.log2(exact))
    values = (x / scale).to(torch.float8_e4m3fn)
    return values.float(), scale


def exact_scale(
    x: Float[Tensor, "128"],
) -> tuple[Float[Tensor, "128"], Float[Tensor, ""]]:
    """Divide by a scale that is no power of two."""
    scale = x.abs().max().clamp_min(1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn).float(), scale


def nearest_power(
    x: Float[Tensor, "128"],
) -> tuple[Float[Tensor, "128"], Float[Tensor, ""]]:
    """Round the scale to the nearest power of two."""
    exact = x.abs().max().clamp_min(1e-12) / 448
    scale = 2 ** torch.round(torch.log2(exact))
    return (x / scale).to(torch.float8_e4m3fn).float(), scale


def no_floor(
    x: Float[Tensor, "128"],
) -> tuple[Float[Tensor, "128"], Float[Tensor, ""]]:
    """Divide a row of zeros by zero."""
    scale = 2 ** torch.ceil(torch.log2(x.abs().max() / 448))
    return (x / scale).to(torch.float8_e4m3fn).float(), scale


def without_sign(
    x: Float[Tensor, "128"],
) -> tuple[Float[Tensor, "128"], Float[Tensor, ""]]:
    """Look at positive values only."""
    exact = x.max().clamp_min(1e-12) / 448
    scale = 2 ** torch.ceil(torch.log2(exact))
    return (x / scale).to(torch.float8_e4m3fn).float(), scale


def row_of(*values: float) -> Float[Tensor, "128"]:
    """Return a row that begins with these values; the others are zero."""
    return torch.tensor([*values, *[0.0] * (128 - len(values))])


def scale_of_hundred(quantizer: Quantizer) -> float:
    """Return the scale of a row whose largest value is 100."""
    return float(quantizer(row_of(100.0, -7.0))[1])


def restored(*values: float) -> Callable[[Quantizer], list[float]]:
    """Return what gives the first values of a row after quantizing and back."""

    def measure(quantizer: Quantizer) -> list[float]:
        kept, scale = quantizer(row_of(*values))
        return (kept * scale)[: len(values)].tolist()

    return measure


def growth(share: float, factor: float) -> float:
    """Return by how much throughput grows, 0.2 for 20 per cent."""
    return 1 / ((1 - share) + share / factor) - 1


Projection = Callable[
    [Tensor, Sequence[Tensor]], tuple[Sequence[Tensor], Sequence[Tensor | QTensor]]
]
"""What the exercise on shared inputs asks for."""


def project(
    x: Float[Tensor, "n i"], weights: Sequence[Float[Tensor, "o i"]]
) -> tuple[list[Float[Tensor, "n o"]], list[QTensor]]:
    """Return x times each weight, and what is kept for the backward pass."""
    rows = quantize(x, QuantSpec())
    squares = (quantize(weight, QuantSpec(tile=(128, 128))) for weight in weights)
    return [fp8_mm(rows, square) for square in squares], [rows]


def project_in_bf16(
    x: Float[Tensor, "n i"], weights: Sequence[Float[Tensor, "o i"]]
) -> tuple[list, list]:
    """Keep the input as it came."""
    return project(x, weights)[0], [x.bfloat16()]


def project_and_forget(
    x: Float[Tensor, "n i"], weights: Sequence[Float[Tensor, "o i"]]
) -> tuple[list, list]:
    """Keep nothing."""
    return project(x, weights)[0], []


def project_and_keep_weights(
    x: Float[Tensor, "n i"], weights: Sequence[Float[Tensor, "o i"]]
) -> tuple[list, list]:
    """Keep the weights in FP8 too."""
    outputs, kept = project(x, weights)
    return outputs, kept + [quantize(weight, SQUARES) for weight in weights]


def project_coarsely(
    x: Float[Tensor, "n i"], weights: Sequence[Float[Tensor, "o i"]]
) -> tuple[list, list]:
    """Take one scale for all tokens."""
    rows = quantize(x, QuantSpec(tile="tensor"))
    squares = (quantize(weight, SQUARES) for weight in weights)
    return [fp8_mm(rows, square) for square in squares], [rows]


def _inputs() -> tuple[Float[Tensor, "n i"], list[Float[Tensor, "o i"]]]:
    """Return 64 tokens of 256 channels, the first token tiny, and three weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator)
    x[0] *= 1e-6
    return x, [torch.randn(128, 256, generator=generator) for _ in range(3)]


def bytes_kept(projection: Projection) -> int:
    """Return the bytes of all storages that are kept, each counted once."""
    _, kept = projection(*_inputs())
    storages = {
        (part.data_ptr(), part.nbytes)
        for x in kept
        for part in ((x.data, x.scale) if isinstance(x, QTensor) else (x,))
    }
    return sum(n_bytes for _, n_bytes in storages)


def error_of_tiny_token(projection: Projection) -> float:
    """Return the relative error of the tiny token's results, in per cent."""
    x, weights = _inputs()
    results = projection(x, weights)[0]
    exact = [x[0] @ weight.T for weight in weights]
    lost = [got[0] - want for got, want in zip(results, exact, strict=True)]
    return 100 * float(torch.stack(lost).norm() / torch.stack(exact).norm())


PARTS = (
    *("embed", "norms", "wq_a", "wq_b", "wkv_a", "wkv_b", "core", "wo", "gate"),
    *("dispatch", "experts", "combine", "shared_experts", "w1", "w3", "w2", "head"),
)
"""Words that an answer may hold."""

TO_STAY = ("embed", "norms", "core", "gate", "combine", "head")
"""What DeepSeek-V3 leaves in BF16 or FP32, of these words."""


def unknown(words: Iterable[str]) -> str:
    """Return which words name no part."""
    return _listed(set(words) - {*PARTS})


def dispatched(words: Iterable[str]) -> str:
    """Return in what tokens are sent to their experts."""
    return "BF16" if "dispatch" in words else "FP8"


def too_narrow(words: Iterable[str]) -> str:
    """Return which parts would be FP8 that DeepSeek-V3 leaves high."""
    return _listed({*TO_STAY} - set(words))


def fp8_share(words: Iterable[str]) -> float:
    """Return the share of V3's FLOPs that is left for FP8, in per cent."""
    high = set(words)
    ops = operators(V3)
    in_fp8 = (op.flops_per_token for op in ops if high.isdisjoint(_parts_of(op)))
    return 100 * sum(in_fp8) / sum(op.flops_per_token for op in ops)


def _parts_of(op: Operator) -> Iterator[str]:
    """Yield the words of an operator, with one word for all norms."""
    yield from op.words
    if op.kind == "norm":
        yield "norms"
    if op.part in ("swiglu", "eh_proj"):
        yield "norms"  # what else stays, whatever is answered


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(words)) or "none"
