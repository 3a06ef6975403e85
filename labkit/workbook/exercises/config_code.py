"""A model config as a learner would type it: a preset, and what differs from it."""

from dataclasses import fields, is_dataclass
from typing import Any

from labkit.config import PRESETS, ModelConfig

INDENT = " " * 4


def config_code(cfg: ModelConfig) -> str:
    """Return Python that builds a config from the preset nearest to it.

    >>> from dataclasses import replace
    >>> tiny = PRESETS["tiny"]
    >>> print(config_code(replace(tiny, moe=replace(tiny.moe, moe_inter_dim=32))))
    base = PRESETS["tiny"]
    replace(
        base,
        moe=replace(
            base.moe,
            moe_inter_dim=32,
        ),
    )
    """
    codes = (
        f'base = PRESETS["{name}"]\n{_changed(cfg, base, "base", depth=0)}'
        for name, base in PRESETS.items()
    )
    return min(codes, key=len)


def _changed(new: Any, old: Any, path: str, *, depth: int) -> str:  # noqa: ANN401
    """Return the call that turns the config at `path` into another of its kind."""
    inner = INDENT * (depth + 1)
    lines = [f"{inner}{path},"]
    for field in fields(old):
        value, before = getattr(new, field.name), getattr(old, field.name)
        if value == before:
            continue
        code = repr(value)
        if is_dataclass(value) and type(value) is type(before):
            code = _changed(value, before, f"{path}.{field.name}", depth=depth + 1)
        lines.append(f"{inner}{field.name}={code},")
    return "\n".join(["replace(", *lines, f"{INDENT * depth})"])
