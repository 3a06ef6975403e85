"""Whether a folder holds the tensors of a model: every difference, in one error."""

from pathlib import Path

import torch

from labkit.model.checkpoint_files import Archive, named
from labkit.model.checkpoint_fp8 import SCALE_SUFFIX, scale_shape
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
        if name in stored and archive.dtype(name) == torch.float8_e4m3fn
    }
    copies = {n: o for n, o in shared_copies(model.cfg).items() if n not in targets}
    extra = stored - expected.keys() - copies.keys()
    wrong = [n for n in expected if n in stored and archive.shape(n) != expected[n]]
    faults = {
        "missing": [name for name in expected if name not in stored],
        "unknown": [name for name in sorted(extra) if not _is_idle(archive, name)],
        "of another shape": [
            f"{name} {archive.shape(name)} instead of {expected[name]}"
            for name in wrong
        ],
        "unlike the shared weight": [
            copy
            for copy, original in copies.items()
            if copy in stored and not _is_equal(archive, copy, original)
        ],
    }
    if any(faults.values()):
        raise ValueError(_message(folder, faults))


def _is_idle(archive: Archive, name: str) -> bool:
    """Return whether a tensor adds nothing: it is empty, or a table of constants."""
    return name.endswith(DERIVED) or 0 in archive.shape(name)


def _is_equal(archive: Archive, copy: str, original: str) -> bool:
    return torch.equal(archive.read(copy), archive.read(original))


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
