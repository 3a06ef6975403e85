"""The embedding, which the first stage reads, and the MTP modules on the last.

Where both stages lie on one rank, as V-shaped schedules have it (DeepSeek-V3, section
3.2.1), the last one borrows it. Elsewhere the last rank has a copy. Both begin alike,
and get the sum of both gradients, so that optimizers keep them so.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labkit.parallel.pipeline.stage import Stage

NAME = "embed.weight"


class TiedEmbedding:
    """What this rank's stages have to do with an embedding that two stages read.

    Args:
        stages: of this rank, in the order of the model.
        embedding: the whole model's.
        group: the ranks of the pipeline.
        reader: the one of them with the last stage.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        embedding: nn.Embedding,
        group: dist.ProcessGroup,
        *,
        reader: int,
    ) -> None:
        first, last = stages[0], stages[-1]
        self.group, self.reader = group, reader
        self.is_owner = first.is_first
        self.holder: Stage | None = None
        """The stage here whose embedding another rank has as well."""
        if not first.cfg.n_mtp:
            return
        if self.is_owner and last.is_last:
            last.borrow_embedding(first)
        elif last.is_last:
            last.embed = copy.deepcopy(embedding)
            self.holder = last
        elif self.is_owner and reader != 0:
            self.holder = first

    @property
    def copies(self) -> frozenset[str]:
        """Names of parameters here that another rank owns."""
        is_copy = self.holder is not None and not self.is_owner
        return frozenset({NAME}) if is_copy else frozenset()

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Sum over both ranks what gradients get in this context."""
        if self.holder is None:
            yield
            return
        weight = self.holder.embed.weight
        earlier, weight.grad = weight.grad, None
        yield
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        own = weight.grad.to_local() if isinstance(weight, DTensor) else weight.grad
        own += self._of_other(own)
        if earlier is not None:
            weight.grad += earlier

    def _of_other(self, own: Float[Tensor, "v d"]) -> Float[Tensor, "v d"]:
        peer = dist.get_global_rank(self.group, self.reader if self.is_owner else 0)
        own, other = own.contiguous(), torch.empty_like(own)
        swap = [
            dist.P2POp(dist.isend, own, peer, self.group),
            dist.P2POp(dist.irecv, other, peer, self.group),
        ]
        for work in dist.batch_isend_irecv(swap):
            work.wait()
        return other
