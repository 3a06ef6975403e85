"""Everything a run needs to go on, in one safetensors file that is never half there.

The file is written in a folder of its own, forced to disk, and moved over the
previous one, which stays intact until that moment. Plain values (configs, step, data
cursor) are JSON in the file's header, so no pickle is ever written or read.
The state of random numbers on CUDA is kept as well; that has not been run.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from labkit.model.checkpoint_files import named
from labkit.training.checkpoint_check import (
    RANDOM_STATE,
    REMEDY,
    Tensors,
    check_tensors,
)
from labkit.training.optimizer import MOMENTS, first_state, moment_dtype

FORMAT = "labkit-checkpoint-1"

CHECKPOINT_NAME = "checkpoint.safetensors"
"""Its name in the folder of a run."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Tensors by name, and plain values."""

    tensors: Tensors
    values: dict[str, Any]


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint; the file at `path` is the old one or the new one.

    Raises:
        OSError: it could not be written, for want of space or permission.
    """
    header = {"format": FORMAT, "values": json.dumps(checkpoint.values)}
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
        partial.mkdir()
        save_file(checkpoint.tensors, partial / path.name, metadata=header)
        _force_to_disk(partial / path.name)
        os.replace(partial / path.name, path)
        if os.name == "posix":  # elsewhere a folder cannot be opened
            _force_to_disk(path.parent)
    except (OSError, SafetensorError) as error:
        kept = "The previous one is intact" if path.exists() else "Nothing was written"
        raise OSError(
            f"checkpoint of {_megabytes(checkpoint.tensors)} MB not written to {path}: "
            f"{error}. {kept}; free some space or choose another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_finite(tensors: Tensors, n_steps: int, path: Path) -> None:
    """Raise FloatingPointError if the run that is to be saved at `path` diverged."""
    faults = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if not faults:
        return
    kept = ", and the previous one is intact" if path.exists() else ""
    raise FloatingPointError(
        f"the run diverged: after step {n_steps}, these are not finite: "
        f"{named(faults, limit=3)}. No checkpoint of them is written{kept}; start a "
        "new run with a smaller lr."
    )


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _megabytes(tensors: Tensors) -> int:
    return -(-sum(tensor.nbytes for tensor in tensors.values()) // 10**6)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint at `path`, a file or a folder that holds one."""
    path = checkpoint_path(path)
    if not path.is_file():
        raise ValueError(
            f"checkpoint not found: {path}. Give the file, or the folder of the run."
        )
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise ValueError(
                    f"{path} is not a training checkpoint: its format is "
                    f"{header.get('format')!r}, not {FORMAT!r}. Give a file that "
                    "Trainer.save wrote; load_hf reads published weights."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a readable safetensors file ({error}). "
            "Give a file that Trainer.save wrote."
        ) from error
    return Checkpoint(tensors, _parse(header.get("values", ""), path))


def _parse(text: str, path: Path) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError:
        values = None
    if not isinstance(values, dict):
        raise ValueError(
            f"{path} is not whole: its header holds no JSON object of values. {REMEDY}"
        )
    return values


def checkpoint_path(path: str | Path) -> Path:
    """Return the checkpoint's file for a file or the folder of a run."""
    path = Path(path)
    return path / CHECKPOINT_NAME if path.is_dir() else path


def gather_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return weights, biases, moments and the state of random numbers, by name.

    A parameter that was never updated gets the moments AdamW begins with, so that a
    moment that is missing from a file is always a fault.
    """
    tensors = {f"model.{name}": tensor for name, tensor in _weights(model).items()}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter) or first_state(parameter, optimizer)
        for key, value in state.items():
            tensors[f"optimizer.{key}.{name}"] = value
    tensors[RANDOM_STATE] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def scatter_tensors(
    tensors: Tensors, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Put back what `gather_tensors` returned, bit for bit.

    Raises:
        ValueError: the tensors are not this model's, or not all finite. Nothing has
            been changed then.
    """
    weights, parameters = _weights(model), dict(model.named_parameters())
    check_tensors(tensors, _expected(weights, parameters, optimizer))
    with torch.no_grad():
        for name, tensor in _below(tensors, "model.").items():
            weights[name].copy_(tensor)
    optimizer.state.clear()
    for name, value in _below(tensors, "optimizer.").items():
        key, _, parameter_name = name.partition(".")
        parameter = parameters[parameter_name]
        optimizer.state[parameter][key] = value.to(parameter.device, copy=True)
    torch.set_rng_state(tensors[RANDOM_STATE])
    if torch.cuda.is_available() and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"])


def _weights(model: nn.Module) -> Tensors:
    """Return parameters and persistent buffers, each once although it be shared."""
    persistent = model.state_dict(keep_vars=True)
    buffers = {n: buffer for n, buffer in model.named_buffers() if n in persistent}
    return dict(model.named_parameters()) | buffers


def _expected(
    weights: Tensors, parameters: Tensors, optimizer: torch.optim.Optimizer
) -> Tensors:
    """Return a tensor of the right shape and dtype for each name of a checkpoint."""
    expected = {f"model.{name}": weight for name, weight in weights.items()}
    for name, parameter in parameters.items():
        expected[f"optimizer.step.{name}"] = torch.zeros(())
        dtype = moment_dtype(parameter, optimizer)
        moment = torch.empty_like(parameter, dtype=dtype, device="meta")
        for key in MOMENTS:
            expected[f"optimizer.{key}.{name}"] = moment
    return expected | {RANDOM_STATE: torch.get_rng_state()}


def _below(tensors: Tensors, prefix: str) -> Tensors:
    """Return the entries whose names start with the prefix, without it."""
    start = len(prefix)
    return {n[start:]: t for n, t in tensors.items() if n.startswith(prefix)}
