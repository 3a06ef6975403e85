"""How boldly each module of a model computes, from FP8 throughout to none of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from labkit.config import ModelConfig
from labkit.model import Transformer
from labkit.precision.convert import convert
from labkit.precision.plan import plan
from labkit.precision.policies import PrecisionPolicy
from labkit.precision.transform import to_fp8

LEVELS = ("fp8", "fp8-high-wgrad", "high")
"""From bold to safe: all three products in FP8; all but that of the weight's gradient;
none. The second keeps for the backward pass what the first does, and so takes no more
memory: what an input lost as it was kept is lost to the gradient, but not what tiles
along the tokens would lose."""


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


def set_levels(
    model: Transformer,
    levels: Mapping[str, str],
    *,
    policy: str | PrecisionPolicy = "deepseek-v3",
    hardware: str = "cpu",
) -> None:
    """Give modules their levels, in place; weights, names and hooks stay.

    Args:
        model: as for `convert`, whose conversions this takes the place of.
        levels: by module, as in `PrecisionScheduler.levels`; all others are "high".
        policy: what formats inputs are kept in; it may have more in FP8, not less.
        hardware: as in `convert`.

    >>> from labkit.config import PRESETS
    >>> model = Transformer(PRESETS["tiny"], device="meta")
    >>> set_levels(model, {"layers.1.attn.wo": "fp8-high-wgrad"})
    >>> model.layers[1].attn.wo.recipe.wgrad, type(model.layers[2].attn.wo).__name__
    ('high', 'Linear')

    Raises:
        ValueError: no level, not a module that the policy has in FP8, or as in
            `convert`. The model is as before.
    """
    known = modules_in_fp8(model.cfg, policy, hardware)
    require_levels(levels, known)
    high = {name for name in known if levels.get(name, "high") == "high"}
    convert(model, policy, lambda _, name: name in high, hardware=hardware)
    for name, level in levels.items():
        if level == "fp8-high-wgrad":
            module = model.get_submodule(name)
            to_fp8(module, replace(module.recipe, wgrad="high"))


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
