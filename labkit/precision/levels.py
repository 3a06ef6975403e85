"""How boldly each module of a model computes, from FP8 throughout to none of it."""

from collections.abc import Mapping, Sequence

from labkit.config import ModelConfig
from labkit.precision.plan import plan
from labkit.precision.policies import PrecisionPolicy

LEVELS = ("fp8", "fp8-high-wgrad", "high")
"""From bold to safe: all three products in FP8; those of the weight's gradient as
without conversion; all as without it."""


def modules_in_fp8(
    cfg: ModelConfig, policy: str | PrecisionPolicy, hardware: str = "cpu"
) -> tuple[str, ...]:
    """Return the modules that a policy has in FP8, in the order of the forward.

    Each is a linear layer, or the routed experts of a layer; MTP's come last.

    >>> from labkit.config import PRESETS
    >>> modules_in_fp8(PRESETS["tiny"], "deepseek-v3")[:3]
    ('layers.0.attn.wq_a', 'layers.0.attn.wq_b', 'layers.0.attn.wkv_a')

    Raises:
        ValueError: no policy or no device has this name.
    """
    rows = plan(cfg, policy, hardware).rows
    return tuple(
        row.operator.name
        for row in rows
        if row.weight == "e4m3" and not row.operator.is_shared
    )


def safer(level: str, n: int = 1) -> str:
    """Return the level so many steps safer, "high" at most.

    >>> safer("fp8"), safer("fp8", 2), safer("high")
    ('fp8-high-wgrad', 'high', 'high')
    """
    return LEVELS[min(LEVELS.index(level) + n, len(LEVELS) - 1)]


def bolder(level: str) -> str:
    """Return the next bolder level, "fp8" at most.

    >>> bolder("high"), bolder("fp8")
    ('fp8-high-wgrad', 'fp8')
    """
    return LEVELS[max(LEVELS.index(level) - 1, 0)]


def safest(levels: Sequence[str]) -> str:
    """Return the safest of several levels.

    >>> safest(["fp8", "high", "fp8-high-wgrad"])
    'high'
    """
    return max(levels, key=LEVELS.index)


def require_levels(levels: Mapping[str, str], modules: Sequence[str]) -> None:
    """Raise ValueError unless each is a level, of a module that may be in FP8."""
    for name, level in levels.items():
        if level not in LEVELS:
            raise ValueError(
                f"the level of {name!r} must be one of "
                f"{', '.join(map(repr, LEVELS))}; got {level!r}. Set {name!r} to one "
                "of these."
            )
        if level != "high" and name not in modules:
            raise ValueError(
                "levels other than 'high' must be of modules that the policy has in "
                f"FP8; got {level!r} for {name!r}. Set it to 'high', or choose a "
                "bolder policy."
            )
