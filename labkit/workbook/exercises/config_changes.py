"""Which fields of a config differ from another's, for tasks that free only one part."""

from dataclasses import fields

from labkit.config import ModelConfig


def changed_fields(cfg: ModelConfig, original: ModelConfig, *, but: str) -> str:
    """Return the names of the fields that differ, except one; "nothing" if none does.

    >>> from dataclasses import replace
    >>> from labkit.config import PRESETS
    >>> tiny = PRESETS["tiny"]
    >>> changed_fields(replace(tiny, n_layers=2, moe=None), tiny, but="moe")
    'n_layers'
    """
    names = (field.name for field in fields(original) if field.name != but)
    changed = [name for name in names if getattr(cfg, name) != getattr(original, name)]
    return ", ".join(changed) or "nothing"
