"""Folders of safetensors files: read tensor by tensor, written whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes of unquantised weights, by safetensors' name."""

Tensors = dict[str, Shaped[Tensor, "..."]]


class Archive:
    """The tensors of some open safetensors files, by name; none is in memory."""

    def __init__(self, files: list[safe_open]) -> None:
        self._file = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    @property
    def names(self) -> set[str]:
        return set(self._file)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return safetensors' name of a tensor's dtype."""
        return self._file[name].get_slice(name).get_dtype()

    def read(self, name: str) -> Shaped[Tensor, "..."]:
        return self._file[name].get_tensor(name)


@contextmanager
def open_archive(folder: Path) -> Iterator[Archive]:
    """Open the files that the folder's index names, or its only one.

    Raises:
        ValueError: there are none, or some are missing or damaged.
    """
    with ExitStack() as stack:
        files = []
        for path in _weight_files(folder):
            try:
                files.append(stack.enter_context(safe_open(path, framework="pt")))
            except SafetensorError as error:
                raise ValueError(
                    f"{path} must be a whole safetensors file; it is not ({error}). "
                    "Download it again."
                ) from error
        yield Archive(files)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        files = _indexed_files(folder / INDEX)
        if absent := sorted(name for name in files if not (folder / name).is_file()):
            raise ValueError(
                f"{folder} must hold every file that {INDEX} names; "
                f"{named(absent)} missing. Download the rest."
            )
        return [folder / name for name in sorted(files)]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    pickles = sorted(path.name for glob in PICKLES for path in folder.glob(glob))
    if pickles:
        raise ValueError(
            "weights must be safetensors, because loading a pickle runs whatever code "
            f"it contains; {folder} holds only {named(pickles)}. Take the release's "
            "safetensors files, or convert in a place where that code may run."
        )
    raise ValueError(
        f"{folder} must hold {SINGLE}, or {INDEX} and the files it names; it has "
        "neither. Download the weights, or save them again if saving was interrupted."
    )


def _indexed_files(index: Path) -> set[str]:
    try:
        contents = json.loads(index.read_text(encoding="utf-8"))
    except ValueError:  # what is no UTF-8 raises one, too
        contents = None
    weight_map = contents.get("weight_map") if isinstance(contents, dict) else None
    files = weight_map.values() if isinstance(weight_map, dict) else [None]
    if not all(isinstance(file, str) for file in files):
        raise ValueError(
            f"{index} must be JSON with a weight_map from tensors to files; it is not. "
            "Download it again."
        )
    if elsewhere := sorted({file for file in files if file != Path(file).name}):
        raise ValueError(
            f"{index} must name files beside it, by their names alone; got "
            f"{named(elsewhere)}. Take the index that was published with the weights."
        )
    return set(files)


def named(names: Iterable[str], *, limit: int = 20) -> str:
    """Return the names as text, those past the limit as a number.

    >>> named(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    names = list(names)
    text = ", ".join(names[:limit])
    return text + (f" and {len(names) - limit} more" if len(names) > limit else "")


def write_folder(
    folder: Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    max_shard_bytes: int,
) -> None:
    """Write config and tensors; until all is on disk, the folder stays as it was.

    Tensors are held until their shard is full, then written and let go.

    Raises:
        OSError: they could not be written, for want of space or permission.
    """
    staging, is_new, is_complete = (
        folder / ".partial",
        not os.path.exists(folder),
        False,
    )
    try:
        shutil.rmtree(staging, ignore_errors=True)  # left by a killed process
        staging.mkdir(parents=True)
        _write_shards(staging, tensors, max_shard_bytes)
        text = json.dumps(config, indent=2) + "\n"
        (staging / "config.json").write_text(text, encoding="utf-8")
        for path in staging.iterdir():
            _force_to_disk(path)
        is_complete = True
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"weights not written to {folder}: {error}. What it held before is intact; "
            "free some space or choose another folder."
        ) from error
    finally:
        if not is_complete:
            shutil.rmtree(folder if is_new else staging, ignore_errors=True)
    _replace_weights(folder, staging)


def _write_shards(
    staging: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> None:
    shards, total = [], 0
    for number, shard in enumerate(_shards(tensors, max_shard_bytes)):
        save_file(shard, staging / f"{number}", metadata={"format": "pt"})
        shards.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(shards) == 1:
        os.replace(staging / "0", staging / SINGLE)
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        os.replace(staging / f"{number}", staging / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (staging / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(
    tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> Iterator[Tensors]:
    """Gather tensors in order, up to the limit; a larger one is alone in its shard."""
    shard, size = {}, 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    yield shard


def _replace_weights(folder: Path, staging: Path) -> None:
    """Move the files in; the one a reader opens first leaves first and comes last."""
    entries = (INDEX, SINGLE)
    for old in (*entries, *(p.name for p in folder.glob("model-*-of-*.safetensors"))):
        (folder / old).unlink(missing_ok=True)
    for path in sorted(staging.iterdir(), key=lambda path: path.name in entries):
        os.replace(path, folder / path.name)
    staging.rmdir()


def _force_to_disk(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
