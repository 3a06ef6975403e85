"""Linear layers whose three products run in FP8 (DeepSeek-V3, section 3.3).

Weights stay in high precision and are quantized where they are read. Of a layer's
input autograd keeps FP8 values alone, from which the backward pass makes tiles along
the tokens; gradients of weights are sums in FP32.

Layers that read one tensor share one `QTensor` of it: projections of queries and keys,
gate and up. The first of them leaves it with the tensor itself, so that no module
between has to know of it; it ends with the tensor, or with the backward pass that
needs it.

None of this has been run on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from labkit.config.checks import require_above, require_choice
from labkit.model.linear import Linear
from labkit.model.norm import compute_dtype
from labkit.precision.formats import FORMATS
from labkit.precision.products import (
    BACKENDS,
    ROW,
    SQUARE,
    Backend,
    choose_backend,
    fp8_mm,
    transposed,
)
from labkit.precision.quantize import SCALES, QTensor, QuantSpec, quantize

WGRADS = ("fp8", "high")

Observer = Callable[..., None]
"""Called with the name of a product, and with the matrix and its `QTensor` of each
operand; by experts with `is_sampled` too: whether it is to look at values closely."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Recipe:
    """How a layer multiplies in FP8, and in what it keeps its input."""

    scale: str = "po2"
    """Kind of scales, one of `SCALES`. With "fp32" an input is rounded again when it
    is tiled along the tokens: its weight's gradient passes 27 dB, not 28."""

    kept: str = "e4m3"
    """Format of the input kept for the backward pass. DeepSeek-V3 takes "e5m6" for
    the attention's output projection. "bf16" keeps a BF16 input itself: without cost
    where another reader keeps it, or recomputation discards it."""

    wgrad: str = "fp8"
    """One of `WGRADS`. "high" multiplies the weight's gradient as a plain layer does,
    from the gradient that came and the input that is kept, in whatever format: no
    tiles along the tokens, and not a byte more."""

    least: float = 1e-12
    """Magnitude below which a tile counts as zero, as in `QuantSpec`."""

    backend: str = "auto"
    """One of `BACKENDS`, or "auto": that of `choose_backend` on the weight's device."""

    def __post_init__(self) -> None:
        require_choice({"scale": self.scale}, SCALES)
        require_choice({"kept": self.kept}, tuple(FORMATS))
        require_choice({"wgrad": self.wgrad}, WGRADS)
        require_above({"least": self.least}, 1e-30)
        require_choice({"backend": self.backend}, ("auto", *BACKENDS))

    @property
    def rows(self) -> QuantSpec:
        """How inputs and gradients are quantized."""
        return QuantSpec(tile=ROW, scale=self.scale, least=self.least)

    @property
    def kept_rows(self) -> QuantSpec:
        """How an input is kept."""
        return replace(self.rows, format=self.kept)

    @property
    def squares(self) -> QuantSpec:
        """How weights are quantized."""
        return QuantSpec(tile=SQUARE, scale=self.scale, least=self.least)

    def backend_on(self, device: torch.device) -> Backend:
        """Return what multiplies on a device; ValueError as in `choose_backend`."""
        if self.backend == "auto":
            return choose_backend(device)
        return Backend(self.backend, "the recipe names it")

    def product(
        self, a: QTensor, b: QTensor, dtype: torch.dtype
    ) -> Float[Tensor, "m n"]:
        """Return a bᵀ."""
        return fp8_mm(a, b, backend=self.backend, out_dtype=dtype)


class _Carried(NamedTuple):
    """What readers of a tensor leave with it for the others."""

    version: int
    """Of the tensor's values: counted up when they are written to."""

    by_spec: dict[QuantSpec, QTensor]


def shared_rows(x: Float[Tensor, "*b c"], spec: QuantSpec) -> QTensor:
    """Return the rows of a tensor, quantized once for all who read it alike.

    >>> x = torch.randn(2, 3, 128)
    >>> shared_rows(x, QuantSpec()) is shared_rows(x, QuantSpec())
    True
    """
    if x.is_inference():  # and so has no version
        return quantize(flat_rows(x), spec)
    carried = getattr(x, "fp8_rows", None)
    if carried is None or carried.version != x._version:
        carried = x.fp8_rows = _Carried(x._version, {})
    if spec not in carried.by_spec:
        carried.by_spec[spec] = quantize(flat_rows(x.detach()), spec)
    return carried.by_spec[spec]


def flat_rows(x: Float[Tensor, "*b c"]) -> Float[Tensor, "n c"]:
    """Return all vectors of a tensor, one below the other."""
    return x.reshape(-1, x.shape[-1])


def fprop(
    x: Float[Tensor, "*b i"],
    weight: Float[Tensor, "o i"],
    recipe: Fp8Recipe,
    observer: Observer | None = None,
) -> Float[Tensor, "*b o"]:
    """Return x wᵀ in the dtype that the plain layer answers in."""
    rows, w = shared_rows(x, recipe.rows), quantize(weight, recipe.squares)
    if observer is not None:
        observer("fprop", (flat_rows(x), rows), (weight, w))
    y = recipe.product(rows, w, compute_dtype(x))
    return y.view(*x.shape[:-1], -1)


def dgrad(
    grad: Float[Tensor, "n o"],
    weight: Float[Tensor, "o i"],
    recipe: Fp8Recipe,
    observer: Observer | None = None,
) -> Float[Tensor, "n i"]:
    """Return the gradient of a layer's input."""
    rows, w = quantize(grad, recipe.rows), quantize(weight, recipe.squares)
    if observer is not None:
        observer("dgrad", (grad, rows))
    return recipe.product(rows, transposed(w), grad.dtype)


def wgrad(
    grad: Float[Tensor, "n o"],
    x: Float[Tensor, "n i"],
    recipe: Fp8Recipe,
    observer: Observer | None = None,
) -> Float[Tensor, "o i"]:
    """Return the gradient of a layer's weight, in FP32.

    Tiles lie along the tokens. The gradient is still there in high precision, and so
    is rounded once; an input that was kept in FP8 may be rounded again.
    """
    if recipe.wgrad == "high":
        return torch.mm(grad.T, x.type_as(grad)).float()
    matrices = [y.T.contiguous() for y in (grad, x)]
    along_tokens = [quantize(y, recipe.rows) for y in matrices]
    if observer is not None:
        observer("wgrad", *zip(matrices, along_tokens, strict=True))
    return recipe.product(*along_tokens, torch.float32)


def keep(ctx: FunctionCtx, *values: Shaped[Tensor, "..."] | QTensor) -> None:
    """Keep values for the backward pass."""
    pairs = [(x.data, x.scale) if isinstance(x, QTensor) else (x,) for x in values]
    ctx.save_for_backward(*(tensor for pair in pairs for tensor in pair))
    ctx.kinds = [
        (x.spec, x.n_columns) if isinstance(x, QTensor) else None for x in values
    ]


def kept_by(ctx: FunctionCtx) -> tuple[Shaped[Tensor, "..."] | QTensor, ...]:
    """Return what `keep` kept."""
    tensors = iter(ctx.saved_tensors)
    return tuple(
        QTensor(next(tensors), next(tensors), *kind) if kind else next(tensors)
        for kind in ctx.kinds
    )


class _Fp8Linear(torch.autograd.Function):
    """The three products of a layer; kept are the weight and the input in FP8."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        recipe: Fp8Recipe,
        observer: Observer | None,
    ) -> Tensor:
        y = fprop(x, weight, recipe, observer)
        kept = shared_rows(x, recipe.kept_rows) if ctx.needs_input_grad[1] else None
        keep(ctx, weight, *([] if kept is None else [kept]))
        ctx.recipe, ctx.observer = recipe, observer
        return y

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight, *kept = kept_by(ctx)
        how = ctx.recipe, ctx.observer
        rows, grad_x, grad_weight = flat_rows(grad), None, None
        if ctx.needs_input_grad[0]:
            grad_x = dgrad(rows, weight, *how).view(*grad.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            grad_weight = wgrad(rows, kept[0].dequantize(), *how).type_as(weight)
        return grad_x, grad_weight, None, None


class InFp8:
    """Marks a class that `to_fp8` gave to a module."""

    recipe: Fp8Recipe

    plain: type[nn.Module]
    """The class that the module had before."""

    observer: Observer | None = None
    """Sees what passes with gradients quantize."""

    @property
    def backend(self) -> Backend:
        """What computes its products, and why."""
        return self.recipe.backend_on(next(self.parameters()).device)


class Fp8Linear(InFp8, Linear):
    """A linear layer that multiplies in FP8; its weight is what it was."""

    def forward(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        if not torch.is_grad_enabled():
            return fprop(x, self.weight, self.recipe)
        return _Fp8Linear.apply(x, self.weight, self.recipe, self.observer)
