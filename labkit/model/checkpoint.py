"""Published checkpoints, in and out: `load_hf` and `save_hf`.

Weights are read from the files one tensor at a time, straight into the place where
the model keeps them, so that loading takes the memory of the model and of one tensor.
"""

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from labkit.config import ModelConfig
from labkit.config.checks import require_choice, require_whole
from labkit.model.checkpoint_check import check_tensors
from labkit.model.checkpoint_files import (
    FLOATS,
    Archive,
    open_archive,
    write_folder,
)
from labkit.model.checkpoint_fp8 import (
    QUANTIZATION,
    READ_SCALE_FORMATS,
    SCALE_FORMATS,
    SCALE_SUFFIX,
    dequantize_into,
    is_quantized,
    quantize_blocks,
)
from labkit.model.checkpoint_names import Place, is_beyond, places, shared_copies
from labkit.model.checks import require_weight_dtype
from labkit.model.transformer import Transformer

logger = logging.getLogger(__name__)


def load_hf(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    mtp: bool = True,
) -> Transformer:
    """Return the model that a folder in the published format holds.

    FP8 weights are dequantised; scales that are powers of two make them exact in BF16.
    Router biases stay in FP32, whatever the dtype.

    Args:
        folder: `config.json`, and safetensors files with or without an index.
        dtype: of parameters; None takes that of the stored embedding, or BF16 if that
            is in FP8.
        device: where the model goes.
        mtp: False leaves MTP modules out. True loads them; if the config promises
            some and the files hold none, as when transformers has saved the model,
            it says so in the log and leaves them out.

    Raises:
        ValueError: the files are no safetensors, are damaged or missing, or hold
            other tensors than the config asks for: those are named; or a dtype that
            weights are not computed in.
    """
    require_weight_dtype(dtype)
    if folder == "" or not os.path.isdir(folder):
        raise ValueError(
            "a checkpoint is a folder of config.json and safetensors files; "
            f"{folder or 'an empty name'} is none. "
            "Give the folder of the downloaded model."
        )
    folder = Path(folder)
    cfg = ModelConfig.from_hf(folder)
    _check_quantization(folder)
    with open_archive(folder) as archive:
        cfg, stored = _settle_mtp(cfg, archive.names, mtp)
        model = Transformer(cfg, device="meta")
        targets = _targets(model, stored)
        check_tensors(folder, archive, stored, model, targets)
        model.to(dtype or _embedding_dtype(archive, targets))
        model.to_empty(device=device or torch.get_default_device())
        _fill(model, archive, targets)
    return model


def _check_quantization(folder: Path) -> None:
    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = hf.get("quantization_config")
    if found is None:
        return
    if not isinstance(found, dict):
        found = {"quant_method": found}
    found = {"fmt": QUANTIZATION["fmt"]} | found  # some leave it out
    for key in ("quant_method", "fmt", "weight_block_size"):
        if found.get(key) != QUANTIZATION[key]:
            raise ValueError(
                f"{key} must be {QUANTIZATION[key]!r}, as in DeepSeek's FP8 releases; "
                f"got {found.get(key)!r} in {folder / 'config.json'}. Take the "
                "original release, or one in BF16."
            )
    if found.get("scale_fmt") not in READ_SCALE_FORMATS:
        raise ValueError(
            "scale_fmt must be 'ue8m0', 'float' or left out, as in DeepSeek's FP8 "
            f"releases; got {found['scale_fmt']!r} in {folder / 'config.json'}. Take "
            "the original release, or one in BF16."
        )


def _settle_mtp(
    cfg: ModelConfig, stored: set[str], mtp: bool
) -> tuple[ModelConfig, set[str]]:
    """Return the config to build, and the stored tensors to account for."""
    beyond = {name for name in stored if is_beyond(name, cfg.n_layers)}
    if not mtp:
        return replace(cfg, mtp=None), stored - beyond
    if cfg.mtp is not None and not beyond:
        logger.warning(
            "the config promises MTP modules (%d), but the files hold none: "
            "the model is loaded without them",
            cfg.mtp.depth,
        )
        return replace(cfg, mtp=None), stored
    return cfg, stored


def _targets(model: Transformer, stored: set[str]) -> dict[str, Place]:
    """Return which tensor to read for each place: a copy, if only that is stored."""
    targets = places(model, stored)
    for copy, original in shared_copies(model.cfg).items():
        if copy in stored and original in targets and original not in stored:
            targets[copy] = targets.pop(original)
    return targets


def _embedding_dtype(archive: Archive, targets: dict[str, Place]) -> torch.dtype:
    names = {place.parameter: name for name, place in targets.items()}
    return FLOATS.get(archive.dtype(names["embed.weight"]), torch.bfloat16)


def _fill(model: Transformer, archive: Archive, targets: dict[str, Place]) -> None:
    weights = model.state_dict()
    for name, place in targets.items():
        target, tensor = place.within(weights), archive.read(name)
        if tensor.dtype == torch.float8_e4m3fn:
            scales = archive.read(name + SCALE_SUFFIX).to(target.device, torch.float32)
            dequantize_into(target, tensor.to(target.device), scales)
        else:
            target.copy_(tensor)


def save_hf(
    model: Transformer,
    folder: str | Path,
    *,
    fp8: bool = False,
    scale: str = "fp32",
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model in the published format, which transformers reads.

    Args:
        model: its attention must be MLA.
        folder: where; weights that it holds are replaced once the new ones are on
            disk, other files stay.
        fp8: store matrices in FP8 blocks, and the rest in BF16, as DeepSeek-V3 does.
        scale: of FP8 blocks, "fp32" as in DeepSeek-V3, or "po2": powers of two, as
            since V3.1. What `load_hf` reads from these, in BF16 or FP32, is saved as
            the same bytes; with "fp32", what it reads in FP32.
        max_shard_bytes: where to begin another file; one tensor may exceed it.

    Raises:
        ValueError: the format cannot express the model, it has no weights, or some
            that are not finite and would be in FP8, or the folder has no name.
        OSError: the files could not be written; what was there before is intact.
    """
    require_whole({"max_shard_bytes": max_shard_bytes})
    _check_scale(scale, fp8=fp8)
    _check_destination(folder)
    _check_weights(model)
    dtype = torch.bfloat16 if fp8 else model.embed.weight.dtype
    config = model.cfg.to_hf() | {"dtype": str(dtype).removeprefix("torch.")}
    if fp8:
        name = SCALE_FORMATS[scale]
        named_scales = {} if name is None else {"scale_fmt": name}
        config["quantization_config"] = QUANTIZATION | named_scales
    tensors = _published_tensors(model, scale if fp8 else None)
    write_folder(Path(folder), config, tensors, max_shard_bytes=max_shard_bytes)


def _check_scale(scale: str, *, fp8: bool) -> None:
    require_choice({"scale": scale}, tuple(SCALE_FORMATS))
    if scale != "fp32" and not fp8:
        raise ValueError(
            f"scale={scale!r} is of FP8 blocks; without fp8=True there are none. Set "
            "fp8=True, or leave scale out."
        )


def _check_destination(folder: str | Path) -> None:
    if folder == "":
        raise ValueError(
            "a checkpoint is written to a folder; got an empty name. "
            'Give the name of one, or "." for the current folder.'
        )


def _check_weights(model: Transformer) -> None:
    parameters = list(model.parameters())
    n_absent = sum(parameter.is_meta for parameter in parameters)
    if n_absent:
        raise ValueError(
            f"a model must hold weights to be saved; {n_absent} of {len(parameters)} "
            "parameters are on the meta device, which keeps shapes alone. Build the "
            'model with device="cpu", or load it.'
        )


@torch.no_grad()
def _published_tensors(
    model: Transformer, scale: str | None
) -> Iterator[tuple[str, Shaped[Tensor, "..."]]]:
    """Yield what the files hold, by name; with a kind of scales, matrices in FP8."""
    weights, exact = model.state_dict(), dict(model.named_buffers())
    targets = places(model)
    for name, place in targets.items():
        tensor = place.within(weights)
        if scale and is_quantized(name, tensor.shape):
            values, scales = quantize_blocks(tensor, scale=scale)
            _check_finite(name, tensor, scales)
            yield name, values
            yield name + SCALE_SUFFIX, scales
        elif scale and place.parameter not in exact:
            yield name, tensor.bfloat16()
        else:
            yield name, tensor
    for copy, original in shared_copies(model.cfg).items():
        tensor = targets[original].within(weights)
        yield copy, tensor.to(torch.bfloat16 if scale else tensor.dtype, copy=True)


def _check_finite(
    name: str, weight: Float[Tensor, "o i"], scales: Float[Tensor, "bo bi"]
) -> None:
    if scales.isfinite().all():
        return
    n_faults = int((~weight.isfinite()).sum())
    raise ValueError(
        "weights must be finite to be stored in FP8, where one that is not ruins its "
        f"block; {name} holds {n_faults} infinities or NaN. Save an earlier state of "
        "the model, or set fp8=False to keep these."
    )
