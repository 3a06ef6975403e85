"""Loss on text that training does not see, in nats and in bits per byte."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from labkit.training.accumulation import autocast
from labkit.training.ranks import Ranks
from labkit.training.windows import Batch, Windows


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Cross-entropy of the next token, without MTP and balance losses."""

    nats: float
    """Per token."""

    n_tokens: int

    @property
    def bits_per_byte(self) -> float:
        """The same in bits; a token of this corpus is a byte.

        >>> Evaluation(nats=math.log(256), n_tokens=1).bits_per_byte
        8.0
        """
        return self.nats / math.log(2)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    dtype: torch.dtype = torch.float32,
    ranks: Ranks | None = None,
) -> Evaluation:
    """Return the mean loss over all targets of all ranks' batches.

    Args:
        model: returns logits for tokens.
        batches: this rank's batches, on the model's device.
        dtype: compute dtype of matrix products.
        ranks: who else has batches; None is a single process.
    """
    ranks = ranks or Ranks()
    device = next(model.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with _evaluation_mode(model), autocast(device, dtype):
        for batch in batches:
            logits = model(batch.tokens).flatten(0, 1).float()
            sums[0] += F.cross_entropy(logits, batch.targets.flatten(), reduction="sum")
            sums[1] += batch.n_targets
    nats, n_tokens = ranks.sum(sums).tolist()
    return Evaluation(nats / n_tokens, int(n_tokens))


def sample_of(
    windows: Windows, size: int, n_batches: int, ranks: Ranks
) -> Iterator[Batch]:
    """Yield this rank's share of the first windows, in batches of a size.

    Args:
        windows: the text.
        size: windows in a batch.
        n_batches: of each rank; fewer if the text has fewer windows.
        ranks: who shares the sample.
    """
    if n_batches < 1:
        raise ValueError(
            f"n_batches must be at least 1; got {n_batches}. Set n_batches=8 or so."
        )
    n_windows = min(ranks.world * n_batches * size, windows.per_epoch)
    first, last = (
        n_windows * rank // ranks.world for rank in (ranks.rank, ranks.rank + 1)
    )
    for start in range(first, last, size):
        yield windows.take(start, min(size, last - start))


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
