"""From logits to a token: greedy, by temperature, within a nucleus."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from labkit.config.checks import is_finite, require_instance

LEAST_TEMPERATURE = 1e-4
"""Least above 0: already as good as greedy, and far from the end of FP32's range."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """How the next token is chosen; temperature 0 takes the most likely one."""

    temperature: float = 0.0
    """Divides the logits: below 1 sharpens the distribution, above 1 flattens it."""

    top_p: float = 1.0
    """Mass of the nucleus: the fewest tokens that hold it, the others get 0."""

    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        heat, mass = self.temperature, self.top_p
        if not is_finite(heat) or not (heat == 0 or heat >= LEAST_TEMPERATURE):
            raise ValueError(
                "temperature must be a number, 0 (greedy) or at least "
                f"{LEAST_TEMPERATURE}, and finite; got {heat!r}. "
                "Set temperature=1.0 to sample from the model as it is."
            )
        if not is_finite(mass) or not 0 < mass <= 1:
            raise ValueError(
                f"top_p must be a number above 0 and at most 1; got {mass!r}. "
                "Set top_p=1.0 to sample from all tokens."
            )
        require_instance({"generator": self.generator}, torch.Generator, optional=True)

    def choose(self, logits: Float[Tensor, "b v"]) -> Int[Tensor, "b"]:
        """Return one token per row.

        Raises:
            ValueError: NaN or infinity among the logits; -inf forbids a token.
        """
        if self.temperature == 0:
            return _most_likely(logits)
        return self.draw(self.distribution(logits))

    def distribution(self, logits: Float[Tensor, "*b v"]) -> Float[Tensor, "*b v"]:
        """Return the probabilities that tokens are drawn from, in FP32.

        >>> Sampler().distribution(torch.tensor([1.0, 3.0, 2.0])).tolist()
        [0.0, 1.0, 0.0]
        >>> nucleus = Sampler(temperature=1.0, top_p=0.6)
        >>> nucleus.distribution(torch.tensor([0.5, 0.3, 0.2]).log()).tolist()
        [0.625, 0.375, 0.0]

        Raises:
            ValueError: NaN or infinity among the logits; -inf forbids a token.
        """
        if self.temperature == 0:
            return F.one_hot(_most_likely(logits), logits.shape[-1]).float()
        probabilities = (logits.float() / self.temperature).softmax(dim=-1)
        # One bad logit turns its whole row into NaN, so any value of the row tells.
        _require_finite(probabilities[..., :1], logits)
        if self.top_p == 1:
            return probabilities
        ranked, order = probabilities.sort(dim=-1, descending=True)
        mass_before = ranked.cumsum(dim=-1) - ranked
        ranked = ranked.masked_fill(mass_before >= self.top_p, 0)
        nucleus = torch.zeros_like(ranked).scatter_(-1, order, ranked)
        return nucleus / nucleus.sum(dim=-1, keepdim=True)

    def draw(self, probabilities: Float[Tensor, "b v"]) -> Int[Tensor, "b"]:
        """Return one token per row, by chance; rows need not sum to 1."""
        drawn = probabilities.multinomial(1, generator=self.generator)
        return drawn.squeeze(-1)


def _most_likely(logits: Float[Tensor, "*b v"]) -> Int[Tensor, "*b"]:
    token = logits.argmax(dim=-1, keepdim=True)
    _require_finite(logits.gather(-1, token), logits)  # NaN counts as the largest
    return token.squeeze(-1)


def _require_finite(
    of_rows: Float[Tensor, "*b 1"], logits: Float[Tensor, "*b v"]
) -> None:
    if all(map(math.isfinite, of_rows.flatten().tolist())):
        return
    n_bad = int((~logits.isfinite()).sum())
    raise ValueError(
        f"the logits are not finite: {n_bad} of {logits.numel()} are NaN or infinite, "
        "and no token can be chosen from them. Look for NaN among the weights, as "
        "after training that diverged, or compute in FP32."
    )
