"""One update of the weights from gradients that are already summed."""

import math

import torch
from jaxtyping import Int
from torch import Tensor, nn

from labkit.config import TrainConfig
from labkit.model import Transformer
from labkit.training import schedules


def update_weights(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    train: TrainConfig,
    n_steps_done: int,
    load: Int[Tensor, "l e"],
) -> float:
    """Clip, step and move the router biases; return the norm before clipping.

    Gradients that are not finite would ruin weights and moments, so they change
    nothing.
    """
    for group in optimizer.param_groups:
        group["lr"] = schedules.learning_rate(train, n_steps_done)
    norm = nn.utils.clip_grad_norm_(model.parameters(), train.grad_clip).item()
    if not math.isfinite(norm):
        return norm
    optimizer.step()
    rate = schedules.bias_update_rate(train, n_steps_done)
    if rate > 0 and load.numel():
        model.update_router_bias(load, rate)
    return norm
