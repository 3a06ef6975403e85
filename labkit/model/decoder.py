"""Decoding: the prompt in one forward pass, then one pass per token."""

from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from labkit.model.absorbed import AbsorbedModel, can_absorb
from labkit.model.cache import LatentCache
from labkit.model.sampling import Sampler
from labkit.model.transformer import Transformer


class Decoder:
    """A model, the cache of its sequences, and the token it reads next."""

    def __init__(
        self, model: Transformer, cache: LatentCache, sampler: Sampler
    ) -> None:
        self.model = model
        self.cache = cache
        self.sampler = sampler
        self.n_forwards = 0
        """Forward passes of the model, the prefill not counted."""
        self.n_drafted = 0
        self.n_accepted = 0

    def prefill(
        self, tokens: Int[Tensor, "b s"], lengths: Int[Tensor, "b"]
    ) -> Int[Tensor, "b 1"]:
        """Read the prompts, right-padded to one length; return each one's next token.

        Padding needs no mask: no prompt token sees what follows it, and the cache
        forgets the padding before anything else does.
        """
        hidden = self._read_prompts(tokens, lengths)
        self.pending = self._choose_after(hidden, lengths)
        return self.pending

    def step(self, n_wanted: int) -> Int[Tensor, "b new"]:
        """Return the next tokens of every sequence, at most `n_wanted`: here one."""
        logits = self._advance(self.pending, self.cache)
        self.n_forwards += 1
        self.pending = self.sampler.choose(logits[:, -1]).unsqueeze(-1)
        return self.pending

    @cached_property
    def _advance(self) -> Transformer | AbsorbedModel:
        is_alone = self.cache.batch == 1 and can_absorb(self.model)
        return AbsorbedModel(self.model) if is_alone else self.model

    def _read_prompts(
        self, tokens: Int[Tensor, "b s"], lengths: Int[Tensor, "b"]
    ) -> Float[Tensor, "b s d"]:
        held = self.cache.lengths
        hidden, _ = self.model.hidden(tokens, self.cache)
        self.cache.rewind(
            [start + n for start, n in zip(held, lengths.tolist(), strict=True)]
        )
        return hidden

    def _choose_after(
        self, hidden: Float[Tensor, "b s d"], lengths: Int[Tensor, "b"]
    ) -> Int[Tensor, "b 1"]:
        rows = torch.arange(len(hidden), device=hidden.device)
        # Only these rows: the head on every prompt token is the widest product of all.
        last = self.model.norm(hidden[rows, lengths - 1])
        return self.sampler.choose(self.model.head(last)).unsqueeze(-1)
