"""Which compute dtype trains a model faster on this machine, by trying both."""

import time

import torch
from torch import nn

from labkit.memory.predict import COMPUTE_DTYPES
from labkit.training.accumulation import LossScale, accumulate
from labkit.training.windows import Batch


def step_seconds(
    model: nn.Module, batch: Batch, *, dtype: torch.dtype, n_trials: int = 3
) -> float:
    """Return the shortest time of a forward and backward pass, after one to warm up.

    The shortest counts, because other work on the machine can only add time. The
    model's gradients are cleared. On CUDA this has not been run.
    """
    scale = LossScale(n_tokens=batch.n_targets, n_sequences=batch.n_sequences)
    trials = []
    for _ in range(n_trials + 1):
        start = time.perf_counter()
        accumulate(model, [batch], scale, dtype=dtype)
        if batch.tokens.is_cuda:
            torch.cuda.synchronize(batch.tokens.device)
        trials.append(time.perf_counter() - start)
    model.zero_grad(set_to_none=True)
    return min(trials[1:])


def faster_precision(model: nn.Module, batch: Batch) -> str:
    """Return "bf16" if autocast to BF16 makes this model's step faster, else "fp32".

    A machine with fast BF16 products can still lose on a narrow model, where casts
    outweigh them; so the step itself is timed.
    """
    seconds = {
        precision: step_seconds(model, batch, dtype=COMPUTE_DTYPES[precision])
        for precision in ("fp32", "bf16")
    }
    return min(seconds, key=seconds.__getitem__)
