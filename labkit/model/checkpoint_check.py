"""Whether a folder holds the tensors of a model: every difference, in one error."""

from pathlib import Path

import torch

from labkit.model.checkpoint_files import FLOATS, Archive, named
from labkit.model.checkpoint_fp8 import (
    SCALE_SUFFIX,
    STORED_SCALES,
    STORED_VALUES,
    scale_shape,
)
from labkit.model.checkpoint_names import Place, shared_copies
from labkit.model.transformer import Transformer

DERIVED = ".rotary_emb.inv_freq"
"""A table that some files store although the config determines it."""

Shape = tuple[int, ...]


def check_tensors(
    folder: Path,
    archive: Archive,
    stored: set[str],
    model: Transformer,
    targets: dict[str, Place],
) -> None:
    """Raise a ValueError that names all tensors at fault, if there are any.

    Args:
        folder: named in the message.
        archive: its open files.
        stored: the tensors in it that must be accounted for.
        model: what is to be filled.
        targets: the place of each tensor that is to be read.
    """
    weights = model.state_dict()
    expected = {n: tuple(place.within(weights).shape) for n, place in targets.items()}
    expected |= {
        name + SCALE_SUFFIX: scale_shape(shape)
        for name, shape in expected.items()
        if name in stored and _has_scales(archive.dtype(name), shape)
    }
    shared = shared_copies(model.cfg)
    copies = {copy: o for copy, o in shared.items() if copy not in targets}
    # Where only copies are stored, the first of them is read for the original.
    originals = {o: copy for copy, o in shared.items() if copy in targets}
    extra = stored - expected.keys() - copies.keys()
    wrong = [n for n in expected if n in stored and archive.shape(n) != expected[n]]
    faults = {
        "missing": [name for name in expected if name not in stored],
        "unknown": [name for name in sorted(extra) if not _is_idle(archive, name)],
        "of another shape": [
            f"{name} {archive.shape(name)} instead of {expected[name]}"
            for name in wrong
        ],
        "of a dtype that is not read here": [
            f"{name} {archive.dtype(name)}"
            for name, shape in expected.items()
            if name in stored and not _is_readable(name, archive.dtype(name), shape)
        ],
        "unlike the shared weight": [
            copy
            for copy, original in copies.items()
            if copy in stored
            and not _is_equal(archive, copy, originals.get(original, original))
        ],
    }
    if any(faults.values()):
        raise ValueError(_message(folder, faults))


def _is_idle(archive: Archive, name: str) -> bool:
    """Return whether a tensor adds nothing: it is empty, or a table of constants."""
    return name.endswith(DERIVED) or 0 in archive.shape(name)


def _has_scales(dtype: str, shape: Shape) -> bool:
    return dtype == STORED_VALUES and len(shape) == 2


def _is_readable(name: str, dtype: str, shape: Shape) -> bool:
    if name.endswith(SCALE_SUFFIX):
        return dtype in FLOATS or dtype == STORED_SCALES
    return dtype in FLOATS or _has_scales(dtype, shape)


def _is_equal(archive: Archive, copy: str, original: str) -> bool:
    names = copy, original
    if len({(archive.dtype(name), archive.shape(name)) for name in names}) > 1:
        return False
    # As bytes, because FP8 values are not compared.
    ours, theirs = (archive.read(name).flatten().view(torch.uint8) for name in names)
    return torch.equal(ours, theirs)


def _message(folder: Path, faults: dict[str, list[str]]) -> str:
    listed = "; ".join(
        f"{len(names)} {fault}: {named(names)}"
        for fault, names in faults.items()
        if names
    )
    return (
        f"{folder} must hold exactly the tensors of the model in its config.json. "
        f"{listed}. Take config.json and weights from one release; with mtp=False, "
        "layers of multi-token prediction are left out."
    )
