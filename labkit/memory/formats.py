"""In which format layers that compute in FP8 keep what they read, by name.

Names are those of modules; "swiglu" in one stands for its product, which is not kept if
its inputs are in FP8. This room does not know the policies of `labkit.precision`, and
is told what they come to: by the names, or by a model that was converted.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from torch import nn

from labkit.config import ModelConfig
from labkit.config.checks import require_choice
from labkit.memory.weights import Weight, layer_weights

KEPT_BITS: Mapping[str, int] = {"e4m3": 8, "e5m6": 12, "bf16": 16}
"""Bits of a value, by the name of its format."""

TILE = 128
"""Channels of a token that share a scale."""

FP32_SCALE, POWER_OF_TWO = 4, 1
"""Bytes of a scale."""

READERS = {
    "attn": ("wq", "wq_a", "wkv_a", "wk", "wv"),
    "ffn": ("w1", "w3", "experts", "shared_experts.w1", "shared_experts.w3"),
}
"""Layers that read the result of a block's two norms, by what the norm is of."""


@dataclass(frozen=True, slots=True)
class Formats:
    """Formats of a model, or of some module in it, by names relative to it."""

    pairs: frozenset[tuple[str, str]] = frozenset()
    """Name and format of each layer in FP8, and of cached inputs of SwiGLU."""

    scale_bytes: int = POWER_OF_TWO

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def of(self, name: str) -> str | None:
        """Return the format of a layer; None: it is not in FP8."""
        return _by_name(self).get(name)

    def within(self, module: str) -> "Formats":
        """Return those of a module in this one.

        >>> Formats(frozenset({("attn.wo", "e5m6"), ("head", "e4m3")})).within("attn")
        Formats(pairs=frozenset({('wo', 'e5m6')}), scale_bytes=1)
        """
        return _inner(self).get(module) or replace(self, pairs=frozenset())

    def n_bytes(self, kept: str, n_rows: int, width: int) -> int:
        """Return what rows of a tensor take in a format, scales included.

        >>> [Formats().n_bytes(kept, 1, 128) for kept in KEPT_BITS]
        [129, 193, 256]
        """
        values = n_rows * -(-width * KEPT_BITS[kept] // 8)
        if kept == "e5m6":  # two in three bytes
            values = n_rows * -(-width // 2) * 3
        if kept == "bf16":
            return values
        return values + n_rows * -(-width // TILE) * self.scale_bytes


@lru_cache(maxsize=256)
def _by_name(formats: Formats) -> Mapping[str, str]:
    return dict(formats.pairs)


@lru_cache(maxsize=256)
def _inner(formats: Formats) -> Mapping[str, Formats]:
    """Return those of every module, found once: a slider asks for all layers again."""
    pairs: dict[str, set[tuple[str, str]]] = {}
    for name, kept in formats.pairs:
        words = name.split(".")
        for n in range(1, len(words)):
            inner = pairs.setdefault(".".join(words[:n]), set())
            inner.add((".".join(words[n:]), kept))
    return {
        module: replace(formats, pairs=frozenset(inner))
        for module, inner in pairs.items()
    }


def require_formats(
    cfg: ModelConfig, cached: Literal["compute", "fp8"] | Mapping[str, str]
) -> None:
    """Raise ValueError unless these are formats of a model's layers, or a name."""
    if not isinstance(cached, Mapping):
        require_choice({"cached": cached}, ("compute", "fp8"))
        return
    known = _names(cfg)
    for name, kept in cached.items():
        require_choice({f"cached[{name!r}]": kept}, tuple(KEPT_BITS))
        if name not in known:
            raise ValueError(
                "cached must name layers of the model that can be in FP8, such as "
                f"{min(known)!r}; got {name!r}. Make it for this model."
            )


def formats_of(
    cfg: ModelConfig, cached: Literal["compute", "fp8"] | Mapping[str, str]
) -> Formats:
    """Return the formats of a model's layers, given as for `predict`.

    What a router reads, it keeps in BF16, and so do the experts that read it.

    Raises:
        ValueError: `cached` is not what its name says.
    """
    require_formats(cfg, cached)
    if cached == "compute":
        return Formats()
    if cached == "fp8":
        return _published(cfg)
    return Formats(_beside_routers(cfg, cached))


def converted_formats(model: nn.Module) -> dict[str, str]:
    """Return the formats of a model that `labkit.precision` converted, by name.

    They are what `predict` takes as `cached`; empty if the model is as it was made.
    """
    by_name = {}
    for name, module in model.named_modules():
        if not is_converted(module):
            continue
        if not hasattr(module, "w2"):
            by_name[name] = module.recipe.kept
            continue
        if not isinstance(module.w2, nn.Module):  # routed experts
            by_name[name] = module.recipe.kept
        elif not is_converted(module.w2):
            continue
        by_name[f"{name}.swiglu"] = "e4m3"
    return by_name


def is_converted(module: nn.Module) -> bool:
    """Return whether a module has a class that `labkit.precision` gave it."""
    return hasattr(module, "plain")


def _blocks(cfg: ModelConfig) -> Iterator[str]:
    yield from (f"layers.{index}" for index in range(cfg.n_layers))
    yield from (f"mtp.{index}.block" for index in range(cfg.n_mtp))


def _is_sparse(cfg: ModelConfig, index: int) -> bool:
    """Return whether a block has experts; those of MTP do if the model has any."""
    return cfg.moe is not None and index >= cfg.n_dense_layers


def _in_blocks(cfg: ModelConfig) -> Iterator[str]:
    """Yield the layers in blocks that can be in FP8, and SwiGLU's products."""
    kinds = {
        is_sparse: tuple(_layers(layer_weights(cfg, is_dense=not is_sparse)))
        for is_sparse in (False, cfg.moe is not None)
    }
    for index, block in enumerate(_blocks(cfg)):
        for name in kinds[_is_sparse(cfg, index)]:
            yield f"{block}.{name}"


def _layers(weights: Iterable[Weight]) -> Iterator[str]:
    for weight in weights:
        if not weight.is_fp8:
            continue
        layer, _, part = weight.name.rpartition(".")
        if part == "weight":
            yield layer
            owner, _, part = layer.rpartition(".")
        else:  # of routed experts, which are one module
            owner = layer
            yield from (owner,) if part == "w2" else ()
        if part == "w2":
            yield f"{owner}.swiglu"


@lru_cache(maxsize=8)
def _names(cfg: ModelConfig) -> frozenset[str]:
    """Return all that a policy may have in FP8."""
    projections = (f"mtp.{index}.eh_proj" for index in range(cfg.n_mtp))
    return frozenset(["head", *projections, *_in_blocks(cfg)])


@lru_cache(maxsize=8)
def _published(cfg: ModelConfig) -> Formats:
    """Return what DeepSeek-V3 keeps in which format (sections 3.3.1 and 3.3.3)."""
    by_name = {
        name: "e5m6" if name.endswith(".wo") else "e4m3" for name in _in_blocks(cfg)
    }
    return Formats(_beside_routers(cfg, by_name), FP32_SCALE)


def _beside_routers(
    cfg: ModelConfig, by_name: Mapping[str, str]
) -> frozenset[tuple[str, str]]:
    """Return names and formats, with BF16 of what a router keeps anyhow."""
    changed = dict(by_name)
    for index, block in enumerate(_blocks(cfg)):
        if _is_sparse(cfg, index):
            readers = (f"{block}.ffn.{reader}" for reader in READERS["ffn"])
            changed |= dict.fromkeys(changed.keys() & readers, "bf16")
    return frozenset(changed.items())
