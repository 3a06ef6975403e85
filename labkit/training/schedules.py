"""What changes during a run, as pure functions of the step (DeepSeek-V3, section 4.2).

`step` counts the steps already done, so the first step is step 0. The report states
its phases in tokens of 14.8T; here they are shares of `TrainConfig.n_steps`, and the
phases of all schedules meet where the report's do: at 10T the cosine begins and the
MTP weight falls, at 14.3T the cosine ends and the balancing bias is frozen.
"""

import math

from labkit.config import TrainConfig


def learning_rate(train: TrainConfig, step: int) -> float:
    """Return the learning rate: warm-up, constant, cosine, `min_lr`, `final_lr`.

    The warm-up is linear and reaches its end after `warmup_steps` steps.

    >>> train = TrainConfig(n_steps=1000, lr=1e-3, min_lr=1e-4, warmup_steps=10)
    >>> [f"{learning_rate(train, step):.2e}" for step in (0, 9, 675, 821, 966, 999)]
    ['1.00e-04', '1.00e-03', '1.00e-03', '5.50e-04', '1.00e-04', '1.00e-04']
    """
    warmup = min(1.0, (step + 1) / max(train.warmup_steps, 1))
    return warmup * _decayed(train, step)


def _decayed(train: TrainConfig, step: int) -> float:
    is_final = step >= (1 - train.final_fraction) * train.n_steps
    if is_final and train.final_lr is not None:
        return train.final_lr
    begin = train.constant_fraction * train.n_steps
    length = train.cosine_fraction * train.n_steps
    if step < begin:
        return train.lr
    if step >= begin + length:
        return train.min_lr
    cosine = 0.5 * (1 + math.cos(math.pi * (step - begin) / length))
    return train.min_lr + (train.lr - train.min_lr) * cosine


def bias_update_rate(train: TrainConfig, step: int) -> float:
    """Return gamma, the step of the routers' balancing bias; 0 at the end of the run.

    >>> train = TrainConfig(n_steps=1000)
    >>> bias_update_rate(train, 965), bias_update_rate(train, 966)
    (0.001, 0.0)
    """
    is_frozen = step >= (1 - train.bias_freeze_fraction) * train.n_steps
    return 0.0 if is_frozen else train.bias_update_rate


def mtp_weight(train: TrainConfig, initial: float, step: int) -> float:
    """Return lambda, the weight of the MTP loss: `initial` until the cosine begins.

    >>> train = TrainConfig(n_steps=1000)
    >>> [round(mtp_weight(train, 0.3, step), 3) for step in (675, 676)]
    [0.3, 0.1]
    """
    is_late = step >= train.constant_fraction * train.n_steps
    return initial * train.mtp_final_scale if is_late else initial
