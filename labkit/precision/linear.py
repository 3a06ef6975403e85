"""Linear layers whose three products run in FP8 (DeepSeek-V3, section 3.3).

A transform of a finished model: modules change their class, and nothing else. Weights
stay in high precision and are quantized where they are read. Of a layer's input
autograd keeps FP8 values alone, from which the backward pass makes tiles along the
tokens; gradients of weights are sums in FP32.

Layers that read one tensor share one `QTensor` of it: projections of queries and keys,
gate and up. The first of them leaves it with the tensor itself, so that no module
between has to know of it; it ends with the tensor, or with the backward pass that
needs it.

None of this has been run on a GPU.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from labkit.config.checks import require_choice
from labkit.model.linear import Linear
from labkit.model.mlp import MLP
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Recipe:
    """How a layer multiplies in FP8, and in what it keeps its input."""

    scale: str = "po2"
    """Kind of scales, one of `SCALES`. With "fp32" an input is rounded again when it
    is tiled along the tokens, which costs its weight's gradient a decibel or two."""

    kept: str = "e4m3"
    """Format of the input kept for the backward pass. DeepSeek-V3 takes "e5m6" for
    the attention's output projection. "bf16" keeps a BF16 input itself: without cost
    where another reader keeps it, or recomputation discards it."""

    backend: str = "auto"
    """One of `BACKENDS`, or "auto": that of `choose_backend` on the weight's device."""

    def __post_init__(self) -> None:
        require_choice({"scale": self.scale}, SCALES)
        require_choice({"kept": self.kept}, tuple(FORMATS))
        require_choice({"backend": self.backend}, ("auto", *BACKENDS))

    @property
    def rows(self) -> QuantSpec:
        """How inputs and gradients are quantized."""
        return QuantSpec(tile=ROW, scale=self.scale)

    @property
    def kept_rows(self) -> QuantSpec:
        """How an input is kept."""
        return replace(self.rows, format=self.kept)

    @property
    def squares(self) -> QuantSpec:
        """How weights are quantized."""
        return QuantSpec(tile=SQUARE, scale=self.scale)

    def backend_on(self, device: torch.device) -> Backend:
        """Return what multiplies on a device; ValueError as in `choose_backend`."""
        if self.backend == "auto":
            return choose_backend(device)
        return Backend(self.backend, "the recipe names it")


class Fp8Linear(Linear):
    """A linear layer that multiplies in FP8; its weight is what it was."""

    recipe: Fp8Recipe

    plain: type[nn.Module]
    """The class that it had before."""

    @property
    def backend(self) -> Backend:
        """What computes its products, and why."""
        return self.recipe.backend_on(self.weight.device)

    def forward(self, x: Float[Tensor, "*b i"]) -> Float[Tensor, "*b o"]:
        if not torch.is_grad_enabled():
            return fprop(x, self.weight, self.recipe)
        return _Fp8Linear.apply(x, self.weight, self.recipe)


class Fp8MLP(MLP):
    """A SwiGLU network that multiplies in FP8, and keeps no SwiGLU product.

    What SwiGLU reads is kept in FP8, and the backward pass computes its product from
    that (section 3.3.3), which costs all gradients about a decibel.
    """

    plain: type[nn.Module]
    """The class that it had before."""

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        gate, up = self.w1(x), self.w3(x)
        if not torch.is_grad_enabled() or not isinstance(self.w2, Fp8Linear):
            return self.w2(F.silu(gate) * up)
        return _Fp8SwiGLU.apply(gate, up, self.w2.weight, self.w2.recipe)


def to_fp8(module: nn.Module, recipe: Fp8Recipe | None = None) -> None:
    """Let a linear layer, or the three of an MLP, multiply in FP8.

    A policy of recomputation must have been applied before, not after.

    Args:
        module: a `Linear` or an `MLP`; weights and their names stay.
        recipe: the default one, if None; takes the place of one given before.

    >>> mlp = MLP(256, 512)
    >>> to_fp8(mlp)
    >>> type(mlp).__name__, mlp.w1.backend.name
    ('Fp8MLP', 'emulate')

    Raises:
        ValueError: another module, or a device without a backend.
    """
    recipe = recipe or Fp8Recipe()
    layers = _layers(module)
    for layer in layers:
        recipe.backend_on(layer.weight.device)
    for layer in layers:
        _change_class(layer, Fp8Linear)
        layer.recipe = recipe
    if isinstance(module, MLP):
        _change_class(module, Fp8MLP)


def to_high(module: nn.Module) -> None:
    """Take back what `to_fp8` did to a layer or an MLP, if it did."""
    for changed in (*_layers(module), module):
        if isinstance(changed, Fp8Linear | Fp8MLP):
            changed.__class__ = changed.plain
            del changed.plain
            vars(changed).pop("recipe", None)


def _layers(module: nn.Module) -> tuple[Linear, ...]:
    """Return the layer, or those of an MLP."""
    if isinstance(module, MLP):
        return module.w1, module.w2, module.w3
    if isinstance(module, Linear):
        return (module,)
    raise ValueError(
        "module must be a Linear or an MLP of labkit's model; got a "
        f"{type(module).__name__}. Pass its layers one by one."
    )


def _change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    if type(module) is not cls:
        module.plain = type(module)
        module.__class__ = cls


def fprop(
    x: Float[Tensor, "*b i"], weight: Float[Tensor, "o i"], recipe: Fp8Recipe
) -> Float[Tensor, "*b o"]:
    """Return x wᵀ in the dtype that the plain layer answers in."""
    w = quantize(weight, recipe.squares)
    y = _product(shared_rows(x, recipe.rows), w, recipe, compute_dtype(x))
    return y.view(*x.shape[:-1], -1)


def dgrad(
    grad: Float[Tensor, "n o"], weight: Float[Tensor, "o i"], recipe: Fp8Recipe
) -> Float[Tensor, "n i"]:
    """Return the gradient of a layer's input."""
    w = transposed(quantize(weight, recipe.squares))
    return _product(quantize(grad, recipe.rows), w, recipe, grad.dtype)


def wgrad(
    grad: Float[Tensor, "n o"], x: Float[Tensor, "n i"], recipe: Fp8Recipe
) -> Float[Tensor, "o i"]:
    """Return the gradient of a layer's weight, in FP32; tiles lie along the tokens."""
    along_tokens = (quantize(y.T.contiguous(), recipe.rows) for y in (grad, x))
    return _product(*along_tokens, recipe, torch.float32)


def _product(
    a: QTensor, b: QTensor, recipe: Fp8Recipe, dtype: torch.dtype
) -> Float[Tensor, "m n"]:
    return fp8_mm(a, b, backend=recipe.backend, out_dtype=dtype)


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
        return quantize(_rows(x), spec)
    carried = getattr(x, "fp8_rows", None)
    if carried is None or carried.version != x._version:
        carried = x.fp8_rows = _Carried(x._version, {})
    if spec not in carried.by_spec:
        carried.by_spec[spec] = quantize(_rows(x.detach()), spec)
    return carried.by_spec[spec]


def _rows(x: Float[Tensor, "*b c"]) -> Float[Tensor, "n c"]:
    return x.reshape(-1, x.shape[-1])


class _Fp8Linear(torch.autograd.Function):
    """The three products of a layer; kept are the weight and the input in FP8."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, recipe: Fp8Recipe
    ) -> Tensor:
        y = fprop(x, weight, recipe)
        kept = shared_rows(x, recipe.kept_rows) if ctx.needs_input_grad[1] else None
        _keep(ctx, weight, *([] if kept is None else [kept]))
        ctx.recipe = recipe
        return y

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        weight, *kept = _kept(ctx)
        rows, grad_x, grad_weight = _rows(grad), None, None
        if ctx.needs_input_grad[0]:
            grad_x = dgrad(rows, weight, ctx.recipe).view(*grad.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            grad_weight = wgrad(rows, kept[0].dequantize(), ctx.recipe)
            grad_weight = grad_weight.type_as(weight)
        return grad_x, grad_weight, None


class _Fp8SwiGLU(torch.autograd.Function):
    """silu(gate) · up, and the layer that reads it; kept are gate and up in FP8."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, gate: Tensor, up: Tensor, weight: Tensor, recipe: Fp8Recipe
    ) -> Tensor:
        _keep(ctx, weight, *(quantize(_rows(x), recipe.rows) for x in (gate, up)))
        ctx.recipe = recipe
        return fprop(F.silu(gate) * up, weight, recipe)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, None]:
        weight, *kept = _kept(ctx)
        gate, up = (q.dequantize() for q in kept)
        rows, silu, grad_weight = _rows(grad), F.silu(gate), None
        if ctx.needs_input_grad[2]:
            grad_weight = wgrad(rows, silu * up, ctx.recipe).type_as(weight)
        grad_product = dgrad(rows, weight, ctx.recipe).float()
        grad_gate = torch.ops.aten.silu_backward(grad_product * up, gate)
        both = (grad_gate, grad_product.mul_(silu))
        shape = (*grad.shape[:-1], -1)
        grad_gate, grad_up = (x.to(grad.dtype).view(shape) for x in both)
        return grad_gate, grad_up, grad_weight, None


def _keep(ctx: FunctionCtx, weight: Tensor, *quantized: QTensor) -> None:
    """Keep a weight and quantized tensors for the backward pass."""
    tensors = [x for q in quantized for x in (q.data, q.scale)]
    ctx.save_for_backward(weight, *tensors)
    ctx.kinds = [(q.spec, q.n_columns) for q in quantized]


def _kept(ctx: FunctionCtx) -> tuple[Tensor | QTensor, ...]:
    """Return what `_keep` kept."""
    weight, *tensors = ctx.saved_tensors
    pairs = zip(tensors[::2], tensors[1::2], ctx.kinds, strict=True)
    return weight, *(QTensor(data, scale, *kind) for data, scale, kind in pairs)
