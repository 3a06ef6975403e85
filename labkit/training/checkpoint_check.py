"""Whether a checkpoint is whole: every fault by name, before anything is changed.

A file can be readable and yet lack a moment, hold NaN, or come from configs with
other fields. To go on from it would be another run, without a word.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

from labkit.config import (
    GQAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    RopeConfig,
    TrainConfig,
    model_from_dict,
)
from labkit.model.checkpoint_files import named
from labkit.precision.limits import Limits

Tensors = dict[str, Shaped[Tensor, "..."]]

REMEDY = "Take a whole copy of the checkpoint, or start a new run."

ATTENTIONS = {"mla": MLAConfig, "gqa": GQAConfig}
OPTIONAL_PARTS = {"moe": MoEConfig, "mtp": MTPConfig}

RANDOM_STATE = "random.cpu"

OPTIONAL_TENSORS = ("random.cuda",)
"""Written on machines with CUDA only."""

LATER_FIELDS = ("fp8_policy", "moments")
"""Of `TrainConfig`: files written before they existed mean their defaults."""

Wanted = Mapping[str, Any]
"""The names of a JSON object, each with a test of its value or names of its own."""


def read_configs(values: dict[str, Any]) -> tuple[ModelConfig, TrainConfig]:
    """Return the configs among the plain values of a checkpoint.

    Raises:
        ValueError: something that `Trainer.save` writes is missing or of another
            kind, or there is more.
    """
    values = _completed(values)
    faults = list(_faults(values, _wanted(values)))
    if faults:
        raise ValueError(f"the checkpoint is not whole: {named(faults)}. {REMEDY}")
    try:
        return model_from_dict(values["model"]), TrainConfig(**values["train"])
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the checkpoint holds a config that is not valid ({error}). {REMEDY}"
        ) from error


def _completed(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with what earlier versions did not write."""
    values = {"scheduler": None} | values
    if not isinstance(values.get("train"), dict):
        return values
    later = {f.name: f.default for f in fields(TrainConfig) if f.name in LATER_FIELDS}
    return values | {"train": later | values["train"]}


def _faults(found: object, wanted: Wanted, place: str = "") -> Iterator[str]:
    """Yield what is wrong with a JSON object and the objects in it."""
    if not isinstance(found, dict):
        yield f"{place} is {found!r}"
        return
    at = f"{place}." if place else ""
    yield from (f"{at}{name} is missing" for name in wanted if name not in found)
    yield from (f"{at}{name} is unknown" for name in found if name not in wanted)
    for name, test in wanted.items():
        if name not in found:
            continue
        if isinstance(test, Mapping):
            yield from _faults(found[name], test, at + name)
        elif not test(found[name]):
            yield f"{at}{name} is {found[name]!r}"


def _wanted(found: dict[str, Any]) -> Wanted:
    """Return what `Trainer.save` writes for a model with the parts of this one."""
    attention = ATTENTIONS.get(str(_at(found, "model", "attention", "kind")), MLAConfig)
    model = _names(ModelConfig) | {
        "attention": {"kind": _is_attention} | _names(attention),
        "rope": _names(RopeConfig),
    }
    for name, part in OPTIONAL_PARTS.items():
        if _at(found, "model", name) is not None:
            model[name] = _names(part)
    is_watched = found.get("scheduler") is not None
    return {
        "model": model,
        "train": _names(TrainConfig),
        "corpus": {"folder": _is_text_or_none, "fingerprint": _is_text},
        "scheduler": _watch() if is_watched else _is_none,
        **_progress(),
    }


def _progress() -> Wanted:
    windows = ("n_taken", "seed", "seq_len", "n_tokens")
    return {
        "cursor": dict.fromkeys(windows, _is_count),
        "n_steps_done": _is_count,
        "n_tokens_seen": _is_count,
    }


def _watch() -> Wanted:
    """Return what `PrecisionWatch.to_values` returns."""
    return {
        "hardware": _is_text,
        "limits": _names(Limits),
        "state": _is_object,
        "log": _are_objects,
        "snapshots": _are_snapshots,
    }


def _at(found: object, *path: str) -> object:
    """Return the value at a path of names, or None where there is none."""
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _names(config: type) -> dict[str, Callable[[object], bool]]:
    """Return the fields of a config; it tests their values itself."""
    return {field.name: lambda _: True for field in fields(config)}


def _is_attention(value: object) -> bool:
    return str(value) in ATTENTIONS


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_none(value: object) -> bool:
    return value is None


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _are_objects(values: object) -> bool:
    return isinstance(values, list) and all(map(_is_object, values))


def _are_snapshots(values: object) -> bool:
    wanted = {"progress": _progress(), "statistics": _is_object}
    return _are_objects(values) and not any(any(_faults(x, wanted)) for x in values)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: object) -> bool:
    return value is None or isinstance(value, str)


def check_tensors(tensors: Tensors, like: Tensors) -> None:
    """Raise a ValueError that names all tensors at fault, if there are any.

    Args:
        tensors: those of a checkpoint.
        like: all that must be there, with their shapes and dtypes; their values do
            not count. Names in `OPTIONAL_TENSORS` may be there as well.
    """
    shared = [name for name in like if name in tensors]
    alike = [name for name in shared if _kind(tensors[name]) == _kind(like[name])]
    faults = {
        "missing": [name for name in like if name not in tensors],
        "unknown": [n for n in tensors if n not in like and n not in OPTIONAL_TENSORS],
        "of another kind": [
            f"{name} is {_kind(tensors[name])}, not {_kind(like[name])}"
            for name in shared
            if name not in alike
        ],
        "not finite": [name for name in alike if not tensors[name].isfinite().all()],
        "no state of random numbers": [
            name
            for name in alike
            if name == RANDOM_STATE and not _is_random_state(tensors[name])
        ],
    }
    listed = "; ".join(f"{fault}: {named(n)}" for fault, n in faults.items() if n)
    if listed:
        raise ValueError(f"the checkpoint is not whole: {listed}. {REMEDY}")


def _kind(tensor: Shaped[Tensor, "..."]) -> str:
    """Return dtype and shape.

    >>> _kind(torch.zeros(2, 3))
    'float32 (2, 3)'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _is_random_state(state: UInt8[Tensor, "n"]) -> bool:
    try:
        torch.Generator().set_state(state)
    except RuntimeError:
        return False
    return True
