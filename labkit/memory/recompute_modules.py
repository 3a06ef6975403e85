"""Modules that keep less for the backward pass, and what they run again for it.

Each class stands for its last base, whose weights and results it has: a policy gives
it to a module, and takes it back.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Complex, Float
from torch import Tensor

from labkit.memory.rebuild import checkpointed, discarding, rebuilt
from labkit.model.attention import GQA, MLA, LayerCache
from labkit.model.attention_core import attend
from labkit.model.linear import Linear
from labkit.model.mlp import MLP
from labkit.model.moe import MoE, Router, Routing
from labkit.model.norm import RMSNorm
from labkit.model.transformer import Block, MTPModule


class Recomputing:
    """Marks a class that a policy gave to a module; the last base is the plain one."""


class Checkpointed(Recomputing):
    """A module of which autograd keeps the inputs alone."""

    def forward(self, *inputs: object, **named: object) -> object:
        given = (*inputs, *named.values())
        if not all(isinstance(x, Tensor | None) for x in given):
            # Running again would write to the cache again.
            return super().forward(*inputs, **named)
        return checkpointed(super().forward, *inputs, **named)


class CheckpointedBlock(Checkpointed, Block):
    """Keeps the residual stream before it."""


class CheckpointedMTPModule(Checkpointed, MTPModule):
    """Keeps the hidden state and the embedding that it joins."""


class CheckpointedMLA(Checkpointed, MLA):
    """Keeps attention's input."""


class CheckpointedGQA(Checkpointed, GQA):
    """Keeps attention's input."""


class CheckpointedMoE(Checkpointed, MoE):
    """Keeps the experts' input, and what the router decided."""


class CheckpointedRouter(Checkpointed, Router):
    """Keeps its input, but neither affinities nor what was chosen by them."""


class RebuiltNorm(Recomputing, RMSNorm):
    """Keeps its input alone; its result is not kept by discarding readers either."""

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return rebuilt(super().forward, x)


class Discarding(Recomputing):
    """A module that keeps no results of `rebuilt`."""

    def forward(self, *inputs: object, **named: object) -> object:
        if not torch.is_grad_enabled():
            return super().forward(*inputs, **named)
        with discarding():
            return super().forward(*inputs, **named)


class DiscardingBlock(Discarding, Block):
    """Keeps no results of the norms in it, if these are `RebuiltNorm`."""


class DiscardingLinear(Discarding, Linear):
    """Keeps no input that a `RebuiltNorm` gives it: the output head."""


class SelectiveMLA(Recomputing, MLA):
    """Keeps the compressed queries and keys, and attention's result.

    All between them, up-projections and rotations, runs again. Without a compression
    of queries it is their only projection that does. On a GPU, where this has not
    been run, PyTorch's kernel keeps a padded copy of the values beside.
    """

    def forward(
        self,
        x: Float[Tensor, "b s d"],
        turns: Complex[Tensor, "*b s r"],
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "b s d"]:
        if cache is not None or not torch.is_grad_enabled():
            return super().forward(x, turns, cache)
        compressed = x if self.mla.q_lora_rank is None else self.wq_a(x)
        q, k, v = rebuilt(self.heads, compressed, self.wkv_a(x), turns)
        out = attend(q, k, v, scale=self.softmax_scale)
        return self.wo(out.transpose(1, 2).flatten(-2))

    def heads(
        self,
        compressed: Float[Tensor, "b s c"],
        entries: Float[Tensor, "b s w"],
        turns: Complex[Tensor, "*b s r"],
    ) -> tuple[
        Float[Tensor, "b h s q"], Float[Tensor, "b h s q"], Float[Tensor, "b h s u"]
    ]:
        """Return each head's queries, keys and values, as the plain layer does."""
        if self.mla.q_lora_rank is None:
            q = self.wq(compressed)
        else:
            q = self.wq_b(self.q_norm(compressed))
        parts = self.split_queries(q, turns) + self.split_latents(entries, turns)
        q, k, v = self.per_head(*parts)
        # Copied here, if the core would: a copy made there would be kept.
        return q, k, v.flatten(0, 1).unflatten(0, q.shape[:2])


class SelectiveMLP(Recomputing, MLP):
    """Keeps its two projections, but not their SwiGLU product."""

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return self.w2(rebuilt(swiglu, self.w1(x), self.w3(x)))


def swiglu(
    gate: Float[Tensor, "*b f"], up: Float[Tensor, "*b f"]
) -> Float[Tensor, "*b f"]:
    """Return silu(gate) · up."""
    return F.silu(gate) * up


class SelectiveMTPModule(Recomputing, MTPModule):
    """Keeps the hidden state and the embedding, but not the row that joins them."""

    def forward(
        self,
        hidden: Float[Tensor, "b s d"],
        embedded: Float[Tensor, "b s d"],
        turns: Complex[Tensor, "*b s r"],
        cache: LayerCache | None = None,
    ) -> tuple[Float[Tensor, "b s d"], Routing | None]:
        if not torch.is_grad_enabled():
            return super().forward(hidden, embedded, turns, cache)
        with discarding():
            x = self.eh_proj(rebuilt(self.joined, hidden, embedded))
        return self.block(x, turns, cache)

    def joined(
        self, hidden: Float[Tensor, "b s d"], embedded: Float[Tensor, "b s d"]
    ) -> Float[Tensor, "b s d2"]:
        """Return the normed embedding and the normed hidden state, side by side."""
        return torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)
