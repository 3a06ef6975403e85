"""The residual stream of ranks that share one cut of a model, and its ways in and out.

Heads, hidden units and the vocabulary are cut over `tp` ranks: each sees all positions
and adds its part to the result. Between them lies the residual stream. Either every
rank holds all of it, or, with sequence parallelism, a share of its positions
(arXiv 2205.05198, section 4.2.2). Per cut module that costs

    stream    into the module            out of the module
    whole     nothing (all-reduce)       all-reduce (nothing)
    shared    all-gather (its reverse)   reduce-scatter (its reverse)

in the forward pass, in parentheses in the backward one. As many bytes move in both, for
an all-reduce is a reduce-scatter and an all-gather. What is shared is kept as a share:
that is what norms, routers and projections to latents read. What was gathered is kept
whole for the backward pass, where Megatron-LM gathers it again.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

from labkit.model.moe import Routing


def moved(
    x: Float[Tensor, "..."],
    mesh: DeviceMesh,
    before: Placement,
    after: Placement,
    *,
    gradient: Placement | None = None,
) -> Float[Tensor, "..."]:
    """Return this rank's part of `x` in another placement, differentiably.

    Args:
        x: its part as it is; the same shape on every rank.
        mesh: the ranks.
        before: how the parts make up the whole.
        after: how they shall.
        gradient: how the gradients of the result make up that of the whole. None takes
            `after`: then each rank's gradient of a whole is complete by itself.
    """
    parts = DTensor.from_local(x, mesh, [before], run_check=False)
    gradient = after if gradient is None else gradient
    return parts.redistribute(placements=[after]).to_local(grad_placements=[gradient])


@dataclass(frozen=True, slots=True)
class Stream:
    """How ranks hold the residual stream."""

    mesh: DeviceMesh
    """The tensor-parallel ranks."""

    is_shared: bool
    """Whether each rank holds a share of the positions, else all of them."""

    def enter(self, x: Float[Tensor, "*b s d"]) -> Float[Tensor, "*b t d"]:
        """Return all positions, for a module of which this rank has a part."""
        before = Shard(x.ndim - 2) if self.is_shared else Replicate()
        return moved(x, self.mesh, before, Replicate(), gradient=Partial())

    def leave(self, parts: Float[Tensor, "*b t d"]) -> Float[Tensor, "*b s d"]:
        """Return the sum of all ranks' parts, as the stream is held."""
        after = Shard(parts.ndim - 2) if self.is_shared else Replicate()
        return moved(parts, self.mesh, Partial(), after)

    def share(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b t d"]:
        """Return this rank's share of the positions."""
        if self.is_shared:
            return x
        return moved(x, self.mesh, Replicate(), Shard(1))

    def unshare(self, x: Float[Tensor, "b t d"]) -> Float[Tensor, "b s d"]:
        """Return, of each rank's share, what the stream holds."""
        return x if self.is_shared else moved(x, self.mesh, Shard(1), Replicate())

    def whole_routing(self, routing: Routing) -> Routing:
        """Return what routers decided on all positions, from their own shares.

        All ranks compute the same balance loss from it. One message carries both
        parts: numbers of experts are exact in FP32.
        """
        affinity, experts = routing
        widths = [affinity.shape[-1], experts.shape[-1]]
        both = torch.cat((affinity, experts.type_as(affinity)), dim=-1)
        both = moved(both, self.mesh, Shard(1), Replicate())
        affinity, experts = (part.contiguous() for part in both.split(widths, dim=-1))
        return Routing(affinity, experts.detach().long())

    def own_part(self, x: Float[Tensor, "*b s w"]) -> Float[Tensor, "*b t v"]:
        """Return this rank's part of the features, of all positions."""
        start, size = self.cut(x.shape[-1])
        return self.enter(x).narrow(-1, start, size)

    def cut(self, size: int) -> tuple[int, int]:
        """Return where this rank's part of something cut begins, and its size.

        Parts are `torch.chunk`'s, as in every DTensor: the last may be smaller.
        """
        longest = -(-size // self.mesh.size())
        start = min(self.mesh.get_local_rank() * longest, size)
        return start, min(longest, size - start)

    def padded_tokens(self, tokens: Int[Tensor, "b s"]) -> Int[Tensor, "b t"]:
        """Return sequences that all ranks have an equal share of.

        What is added stands behind all that is read of a sequence, so that nothing
        ever sees it.
        """
        return F.pad(tokens, (0, -tokens.shape[1] % self.mesh.size()))

    def padded_turns(
        self, turns: Complex[Tensor, "*b s r"], n_positions: int
    ) -> Complex[Tensor, "*b t r"]:
        """Return rotations of all positions of the stream, of which a rank holds n."""
        length = n_positions * self.mesh.size() if self.is_shared else n_positions
        return F.pad(turns, (0, 0, 0, length - turns.shape[-2]))
