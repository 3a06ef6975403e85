"""Gradients of a large batch from small ones, equal to the large batch's own.

Every micro-batch divides its loss by the token count of the *whole* step, so the
gradients of all micro-batches add up to the gradient of the one large batch, also
where some targets are ignored. Averaging the micro-batches' own means would weigh
tokens of sparse micro-batches too heavily.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from labkit.config import MTPConfig, TrainConfig
from labkit.training import schedules
from labkit.training.stopwatch import Stopwatch
from labkit.training.windows import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """What all micro-batches and ranks of one step have in common."""

    n_tokens: int
    """Targets of the whole step, over all ranks, without the ignored ones."""

    n_sequences: int
    """Sequences of the whole step, over all ranks."""

    mtp_weight: float | None = None
    """Lambda of this step; None keeps the model's own."""


def loss_scale(
    train: TrainConfig, mtp: MTPConfig | None, n_steps_done: int, *, n_tokens: int
) -> LossScale:
    """Return the scale of the next step, whose targets on all ranks are `n_tokens`."""
    return LossScale(
        n_tokens=max(n_tokens, 1),
        n_sequences=train.global_batch,
        mtp_weight=None
        if mtp is None
        else schedules.mtp_weight(train, mtp.loss_weight, n_steps_done),
    )


@dataclass(slots=True)
class StepLoss:
    """Losses and expert load of a step, summed over micro-batches."""

    parts: Float[Tensor, "4"]
    """Total, main, MTP and balance."""

    load: Int[Tensor, "l e"]
    """Tokens routed to each expert, one row per router."""

    def named(self) -> dict[str, float]:
        """Return the losses by their names in `StepMetrics`."""
        names = ("loss", "loss_main", "loss_mtp", "loss_balance")
        return dict(zip(names, self.parts.tolist(), strict=True))


def accumulate(
    model: nn.Module,
    micro_batches: Sequence[Batch],
    scale: LossScale,
    *,
    dtype: torch.dtype = torch.float32,
    stopwatch: Stopwatch | None = None,
) -> StepLoss:
    """Add the gradients of all micro-batches to `parameter.grad`; return the losses.

    Args:
        model: has `loss(tokens, targets, n_tokens=…, n_sequences=…, mtp_weight=…)`.
        micro_batches: this rank's sequences.
        scale: the step's normalisers.
        dtype: compute dtype of matrix products; weights keep theirs.
        stopwatch: takes the laps "forward" and "backward".
    """
    stopwatch = stopwatch or Stopwatch(torch.device("cpu"))
    losses = []
    for batch in micro_batches:
        with autocast(batch.tokens.device, dtype):
            loss = model.loss(
                batch.tokens,
                batch.targets,
                n_tokens=scale.n_tokens,
                n_sequences=scale.n_sequences,
                mtp_weight=scale.mtp_weight,
            )
        stopwatch.lap("forward")
        loss.total.backward()
        stopwatch.lap("backward")
        parts = torch.stack([loss.total, loss.main, loss.mtp, loss.balance])
        losses.append(StepLoss(parts.detach().float(), loss.load))
    return StepLoss(
        torch.stack([loss.parts for loss in losses]).sum(dim=0),
        torch.stack([loss.load for loss in losses]).sum(dim=0),
    )


def autocast(
    device: torch.device, dtype: torch.dtype
) -> contextlib.AbstractContextManager:
    """Return a context in which matrix products run in `dtype`; FP32 is left alone.

    On a GPU this has not been run.
    """
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def busiest_by_mean(load: Int[Tensor, "l e"]) -> tuple[float, ...]:
    """Return the load of each router's busiest expert, by the mean load.

    >>> busiest_by_mean(torch.tensor([[2, 2, 2, 2], [8, 0, 0, 0]]))
    (1.0, 4.0)
    """
    if not load.numel():
        return ()
    load = load.double()
    return tuple((load.amax(dim=-1) / load.mean(dim=-1)).tolist())
