"""The cheapest recompute policy that fits: for each block its own.

Mixtures are searched with times and bytes of single blocks, and then predicted as a
whole, beside every policy by name. So what is returned fits by `predict`, and costs no
more by `recompute_cost` than any of those that fit. In tests it is the cheapest of all
mixtures. Elsewhere a cheaper one may be missed, or the only one: single blocks do not
tell all of a step's bytes, those of pipeline ranks nothing of autocast's copies of
weights, and dozens of blocks on one rank have too many mixtures to follow them all.
"""

from collections.abc import Sequence

from labkit.config import Layout, ModelConfig, TrainConfig
from labkit.config.checks import require_whole
from labkit.memory.cost import BLOCK_POLICIES, step_times
from labkit.memory.places import Place, Step, places
from labkit.memory.recompute import block_policies

EVERY = range(2, 9)
"""The `k` with which "every_k" is tried beside the mixtures."""

N_TRIES = 6
"""How often mixtures are searched again that as a whole are predicted to need more."""


def budget(  # noqa: PLR0913, as `predict`
    n_bytes: int,
    cfg: ModelConfig,
    train: TrainConfig,
    layout: Layout | None = None,
    device: str = "cpu",
    *,
    balance: float | None = None,
    **as_predict: object,
) -> tuple[str, ...]:
    """Return the cheapest policy of each block with which a step fits.

    Args:
        n_bytes: most that a rank may hold at any instant, as `predict` counts: leave
            room for `overheads`, and for the 5 % by which real steps may need more.
        cfg: the model.
        train: batch, sequence and precision.
        layout: degrees of parallelism; None is one rank alone.
        device: as for `predict`.
        balance: as for `recompute_cost`.
        **as_predict: as for `predict`, but for `recompute`.

    >>> from labkit.config import PRESETS
    >>> budget(70 * 2**20, PRESETS["tiny"], TrainConfig(micro_batch=4))
    ('selective', 'none', 'selective', 'selective', 'none')

    Raises:
        ValueError: no mixture needs so little, recompute is given, or as `predict`.
    """
    require_whole({"n_bytes": n_bytes})
    if "recompute" in as_predict:
        raise ValueError(
            "budget chooses recompute itself, for each block; got "
            f"recompute={as_predict['recompute']!r}. Leave it out."
        )
    step = Step(cfg, train, layout or Layout(), device, as_predict)
    if step.report(step.plain).peak <= n_bytes:
        return step.plain
    times = step_times(cfg, train, layout, device, balance=balance, **as_predict)
    ranks = places(step, times)
    found = [_searched(ranks, step, n_bytes), *fixed_policies(cfg)]
    peaks = {policies: step.report(policies).peak for policies in found}
    fitting = [policies for policies, peak in peaks.items() if peak <= n_bytes]
    if not fitting:
        _raise_too_little(n_bytes, min(_least(ranks, step), *peaks.values()))
    return min(fitting, key=lambda policies: (times.total(policies), peaks[policies]))


def fixed_policies(cfg: ModelConfig) -> list[tuple[str, ...]]:
    """Return every policy by name, "every_k" with each k of `EVERY`.

    >>> from labkit.config import PRESETS
    >>> len(fixed_policies(PRESETS["small"]))
    12
    """
    n_blocks = cfg.n_layers + cfg.n_mtp
    names = [name for name in BLOCK_POLICIES if name != "moe" or cfg.moe is not None]
    fixed = [block_policies(name, n_blocks) for name in names]
    return fixed + [block_policies("every_k", n_blocks, k=k) for k in EVERY]


def _searched(ranks: Sequence[Place], step: Step, n_bytes: int) -> tuple[str, ...]:
    """Return the cheapest mixture that fits; "full" where a rank has none."""
    limits = [n_bytes] * len(ranks)
    for _ in range(N_TRIES):
        policies = _joined(ranks, step, limits)
        stages = step.stages(policies)
        excess = [max(stage.peak - n_bytes, 0) for stage in stages[: len(ranks)]]
        if not any(excess):
            break
        limits = [limit - more for limit, more in zip(limits, excess, strict=True)]
    return policies


def _joined(
    ranks: Sequence[Place], step: Step, limits: Sequence[int]
) -> tuple[str, ...]:
    """Return the policy of each block, the cheapest within the limit of its rank."""
    policies = ["full"] * len(step.plain)
    for rank, limit in zip(ranks, limits, strict=True):
        mixture = rank.cheapest(limit)
        if mixture is not None:
            for index, policy in zip(rank.blocks, mixture.policies, strict=True):
                policies[index] = policy
    return tuple(policies)


def _least(ranks: Sequence[Place], step: Step) -> int:
    """Return the peak of the mixture that needs least."""
    low, high = 0, step.report(step.plain).peak
    while low < high:
        middle = (low + high) // 2
        if all(rank.cheapest(middle) is not None for rank in ranks):
            high = middle
        else:
            low = middle + 1
    return step.report(_joined(ranks, step, [low] * len(ranks))).peak


def _raise_too_little(n_bytes: int, least: int) -> None:
    raise ValueError(
        f"n_bytes must be at least {least:,}, which the step needs when it keeps "
        f"least; got {n_bytes:,}. Set n_bytes={least}, or make the step smaller: "
        "micro_batch, seq_len, or more ranks."
    )
