"""From logits to a token: greedy, by temperature, within a nucleus."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampler:
    """How the next token is chosen; temperature 0 takes the most likely one."""

    temperature: float = 0.0
    """Divides the logits: below 1 sharpens the distribution, above 1 flattens it."""

    top_p: float = 1.0
    """Mass of the nucleus: the fewest tokens that hold it, the others get 0."""

    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(
                f"temperature must be 0 (greedy) or above; got {self.temperature}. "
                "Set temperature=1.0 to sample from the model as it is."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p must be above 0 and at most 1; got {self.top_p}. "
                "Set top_p=1.0 to sample from all tokens."
            )

    def choose(self, logits: Float[Tensor, "b v"]) -> Int[Tensor, "b"]:
        """Return one token per row."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        return self.draw(self.distribution(logits))

    def distribution(self, logits: Float[Tensor, "*b v"]) -> Float[Tensor, "*b v"]:
        """Return the probabilities that tokens are drawn from, in FP32.

        >>> Sampler().distribution(torch.tensor([1.0, 3.0, 2.0])).tolist()
        [0.0, 1.0, 0.0]
        >>> nucleus = Sampler(temperature=1.0, top_p=0.6)
        >>> nucleus.distribution(torch.tensor([0.5, 0.3, 0.2]).log()).tolist()
        [0.625, 0.375, 0.0]
        """
        if self.temperature == 0:
            return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
        probabilities = (logits.float() / self.temperature).softmax(dim=-1)
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
