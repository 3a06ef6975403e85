"""What rounding its operands does to each product of a model, measured on a sample."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from labkit.config import PRESETS
from labkit.model import Transformer
from labkit.model.experts import Experts
from labkit.precision import QuantSpec, quantize

N_TOKENS = 128

LIKE: Mapping[str, str] = {"wq": "wq_a", "wk": "wkv_a", "wv": "wkv_a"}
"""Parts that another one stands for, where the sample has none of them."""


@dataclass(frozen=True, kw_only=True)
class ProductSample:
    """Inputs and weights of one product of each kind, as a model has them."""

    operands: Mapping[str, tuple[Float[Tensor, "n i"], Float[Tensor, "o i"]]]
    """By the last word of an operator's name."""

    _known: dict[tuple[str, QuantSpec, QuantSpec], float] = field(default_factory=dict)

    def error(self, part: str, inputs: QuantSpec, weights: QuantSpec) -> float | None:
        """Return what a product is off by, by its norm; None of one that is not here.

        Args:
            part: the last word of an operator's name.
            inputs: in what its input is rounded.
            weights: in what its weight is.
        """
        name = part if part in self.operands else LIKE.get(part, part)
        if name not in self.operands:
            return None
        key = (name, inputs, weights)
        if key not in self._known:
            x, w = self.operands[name]
            exact = x @ w.T
            rounded = _rounded(x, inputs) @ _rounded(w, weights).T
            off = (rounded - exact).norm() / exact.norm()
            self._known[key] = off.item()
        return self._known[key]


def _rounded(x: Float[Tensor, "r c"], spec: QuantSpec) -> Float[Tensor, "r c"]:
    return quantize(x, spec).dequantize()


def sample_of(model: Transformer, tokens: Int[Tensor, "b s"]) -> ProductSample:
    """Return inputs and weights of a model's products, of the first layer with each.

    Args:
        model: it is run once.
        tokens: what it reads.
    """
    operands: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(part: str, x: Float[Tensor, "*b i"], weight: Float[Tensor, "o i"]) -> None:
        rows = x.detach().flatten(0, -2).float()
        operands.setdefault(part, (rows, weight.detach().float()))

    handles = []
    for name, module in model.named_modules():
        part = name.rpartition(".")[2]
        if isinstance(module, nn.Linear):
            handles.append(
                module.register_forward_pre_hook(
                    lambda module, args, part=part: keep(part, args[0], module.weight)
                )
            )
        elif isinstance(module, Experts):
            handles.append(
                module.register_forward_pre_hook(
                    lambda module, args, part=part: keep(part, args[0], module.w13[0])
                )
            )
    try:
        with torch.no_grad():
            model.loss(tokens, tokens)
    finally:
        for handle in handles:
            handle.remove()
    return ProductSample(operands=operands)


def untrained_sample() -> ProductSample:
    """Return the sample of the book's "tiny" as it is born, on drawn tokens."""
    cfg = PRESETS["tiny"]
    generator = torch.Generator().manual_seed(0)
    model = Transformer(cfg, generator=generator)
    tokens = torch.randint(cfg.vocab_size, (1, N_TOKENS), generator=generator)
    return sample_of(model, tokens)
