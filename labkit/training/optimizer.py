"""AdamW as DeepSeek-V3 uses it: which weights decay, and which kernel updates them."""

from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from labkit.config import TrainConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps for each parameter, besides the number of its steps."""


def build_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW over the model's parameters, in FP32 master precision.

    Matrices decay: projections, experts, routers, embedding and head. Norm gains do
    not, because shrinking a gain only rescales what follows it. The report states
    the decay of 0.1 without a list of exceptions, so this choice is ours. Router
    biases are buffers and belong to no optimizer. Its first step makes all moments
    before it changes a weight: where there is no room for them, nothing is changed.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in parameters if p.ndim >= 2],
            "weight_decay": train.weight_decay,
        },
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        fused=has_fused_adamw(parameters),
    )
    optimizer.register_step_pre_hook(_begin_moments)
    return optimizer


def first_state(parameter: nn.Parameter) -> dict[str, Shaped[Tensor, "..."]]:
    """Return what AdamW keeps for a parameter before its first update."""
    moments = {key: torch.zeros_like(parameter) for key in MOMENTS}
    return {"step": torch.zeros(()), **moments}


def _begin_moments(
    optimizer: torch.optim.Optimizer,
    args: Any,  # noqa: ANN401, of the step
    kwargs: Any,  # noqa: ANN401
) -> None:
    """Make the moments that the first step needs: all of them, or none."""
    if optimizer.state:
        return
    try:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = first_state(parameter)
                state["step"] = state["step"].to(parameter.device)
                optimizer.state[parameter] = state
    except BaseException:
        optimizer.state.clear()
        raise


def has_fused_adamw(parameters: list[nn.Parameter]) -> bool:
    """Return whether one kernel can update these parameters (about 6× faster here).

    Fused AdamW exists on CPU and CUDA, for floating point only. On CUDA this has not
    been run.
    """
    return all(
        p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters
    )
