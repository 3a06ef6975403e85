"""The cache explorer: a design, a context and a batch; what they keep and cost.

    widgets.explore(draw, describe, caption="…", plan=CacheControls())

Choosing a model sets its heads and its latent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ipywidgets import ValueWidget
from matplotlib.figure import Figure

from labkit.config import PRESETS, AttentionConfig, GQAConfig, MLAConfig, ModelConfig
from labkit.hardware import accelerator
from labkit.workbook.figures.cache import cache_figure, spell_bytes
from labkit.workbook.figures.charts import Part
from labkit.workbook.published import published
from labkit.workbook.spelling import spell, spell_ratio
from labkit.workbook.widgets.controls import (
    LinkedControls,
    choice,
    slider,
    steps,
    switch,
)

Settings = Mapping[str, Any]
"""The controls' values, by the names of `CachePlan`'s fields."""

MODELS = {
    "DeepSeek-V3 (671B, FP8 weights)": ("v3-671b", 1),
    "DeepSeek-V2 (236B, BF16 weights)": ("v2-236b", 2),
    "DeepSeek-V2-Lite (16B, BF16 weights)": ("v2-lite-16b", 2),
}
"""Preset and bytes per weight, as published, by the name on the page."""

KINDS = ("MLA", "GQA", "MHA")

PUBLISHED = {
    "DeepSeek-V3": "v3-671b",
    "Qwen2.5-72B": "qwen2.5-72b",
    "Llama-3.1-405B": "llama-3.1-405b",
}
"""Models whose cache is published, by the name on the page."""

DEVICE = "h800"

HEADS = tuple(2**n for n in range(3, 9))

KV_HEADS = 8
"""Of GQA, as in the published models beside it; none of DeepSeek's has GQA."""


def published_bytes_per_token() -> dict[str, int]:
    """Return the bytes of BF16 cache per token of models as published.

    >>> published_bytes_per_token()
    {'DeepSeek-V3': 70272, 'Qwen2.5-72B': 327680, 'Llama-3.1-405B': 516096}
    """
    return {name: int(published(key, "cache")) for name, key in PUBLISHED.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class CachePlan:
    """What the explorer's controls stand at, and what follows from them."""

    model: str
    kind: str
    n_heads: int
    n_kv_heads: int
    kv_lora_rank: int
    context: int
    batch: int
    n_gpus: int
    """Devices that share the weights evenly; each keeps the cache of its sequences."""

    is_fp32: bool = False

    def config(self, kind: str) -> ModelConfig:
        """Return the model with its attention exchanged, all else equal."""
        base = PRESETS[MODELS[self.model][0]]
        return replace(base, attention=self._attention(kind, base.attention))

    def _attention(self, kind: str, latent: MLAConfig) -> AttentionConfig:
        if kind == "MLA":
            return replace(latent, n_heads=self.n_heads, kv_lora_rank=self.kv_lora_rank)
        n_kv_heads = self.n_heads if kind == "MHA" else self.n_kv_heads
        return GQAConfig(n_heads=self.n_heads, n_kv_heads=n_kv_heads)

    def design(self, kind: str) -> str:
        """Return what a kind of attention is, with the size that its cache follows."""
        return {
            "MLA": f"MLA (latent {self.kv_lora_rank})",
            "GQA": f"GQA ({_count(self.n_kv_heads, 'KV head')})",
            "MHA": f"MHA ({self.n_heads} heads)",
        }[kind]

    def bytes_per_token(self, kind: str | None = None) -> int:
        """Return the bytes that one token keeps; of the chosen kind by default."""
        dtype = "float32" if self.is_fp32 else "bfloat16"
        return self.config(kind or self.kind).kv_bytes_per_token(dtype)

    @property
    def cache_bytes(self) -> int:
        """Cache of one device."""
        return self.batch * self.context * self.bytes_per_token()

    @property
    def weight_bytes(self) -> float:
        """Weights of one device."""
        n_bytes = self.config(self.kind).n_params() * MODELS[self.model][1]
        return n_bytes / self.n_gpus

    @property
    def n_tokens_that_fit(self) -> int:
        """Tokens whose cache fits on one device beside the weights."""
        free = accelerator(DEVICE).memory_bytes - self.weight_bytes
        return max(0, int(free // self.bytes_per_token()))

    @property
    def read_seconds(self) -> float:
        """Time to read the whole cache once, as every decoding step must."""
        return self.cache_bytes / accelerator(DEVICE).memory_bytes_per_second


class CacheControls(LinkedControls):
    """Sliders over a design, with models to start from, at DeepSeek-V3 and 128K."""

    def __init__(self) -> None:
        super().__init__(_controls())

    def link(self, moved: str) -> None:
        """Follow a model with its sizes, and heads with the KV heads they allow."""
        if moved == "model":
            self._load_model()
        if moved == "n_heads":
            self._offer_kv_heads(self.controls["n_kv_heads"].value)

    def _load_model(self) -> None:
        """Move the sliders to the model's own sizes."""
        attention = PRESETS[MODELS[self.controls["model"].value][0]].attention
        self.controls["n_heads"].value = attention.n_heads
        self.controls["kv_lora_rank"].value = attention.kv_lora_rank
        self._offer_kv_heads(KV_HEADS)

    def _offer_kv_heads(self, wanted: int) -> None:
        """Offer as many KV heads as there are heads, and no more."""
        n_heads, slider = self.controls["n_heads"].value, self.controls["n_kv_heads"]
        with slider.hold_sync():
            slider.options = [(f"{n:,}", n) for n in _powers(n_heads)]
            slider.value = min(wanted, n_heads)


def _controls() -> dict[str, ValueWidget]:
    powers = _powers(2**20)
    return {
        "model": choice("model", list(MODELS)),
        "kind": choice("attention", KINDS),
        "n_heads": steps("heads", HEADS, value=128),
        "n_kv_heads": steps("KV heads of GQA", powers[:8], value=KV_HEADS),
        "kv_lora_rank": slider("latent of MLA", (64, 1024), value=512, step=64),
        "context": steps("context", powers[10:], value=131_072, unit="tokens"),
        "batch": steps("batch", powers[:9], value=1, unit="sequences per GPU"),
        "n_gpus": steps("GPUs", powers[:8], value=16, unit="sharing the weights"),
        "is_fp32": switch("cache in FP32 instead of BF16"),
    }


def _powers(largest: int) -> list[int]:
    """Return 1, 2, 4, … up to `largest`."""
    return [2**n for n in range(largest.bit_length())]


def draw(plan: Settings) -> Figure:
    """Return the figure for the controls' values."""
    chosen = CachePlan(**plan)
    limit = accelerator(DEVICE).memory_bytes
    used = chosen.weight_bytes + chosen.cache_bytes
    memory = {
        "weights": chosen.weight_bytes,
        "cache": chosen.cache_bytes,
        "idle": max(0.0, limit - used),
    }
    return cache_figure(
        _bars(chosen),
        [
            Part(name=name.replace("idle", "free"), amount=size, meaning=name)
            for name, size in memory.items()
        ],
        title=_title(chosen),
        capacity=limit,
        device="one H800",
    )


def describe(plan: Settings) -> str:
    """Return what the controls' values mean, in numbers."""
    chosen = CachePlan(**plan)
    first, second = (kind for kind in KINDS if kind != chosen.kind)
    return (
        f"{chosen.design(chosen.kind)} keeps {chosen.bytes_per_token():,} bytes per "
        f"token, {chosen.design(first)} would keep {chosen.bytes_per_token(first):,}, "
        f"{chosen.design(second)} {chosen.bytes_per_token(second):,}. {_fit(chosen)}"
    )


def _bars(plan: CachePlan) -> list[Part]:
    """Return the three designs, the chosen one marked, and published models."""
    parts = []
    for kind in KINDS:
        is_chosen = kind == plan.kind
        parts.append(
            Part(
                name=("▶ " if is_chosen else "") + plan.design(kind),
                amount=plan.bytes_per_token(kind),
                meaning="cache",
            )
        )
    source = " in BF16" if plan.is_fp32 else ", published"
    for name, n_bytes in published_bytes_per_token().items():
        part = Part(name=name + source, amount=n_bytes, meaning="idle")
        parts.append(part)
    return parts


def _title(plan: CachePlan) -> str:
    verb, other = ("would keep", plan.kind) if plan.kind != "MHA" else ("keeps", "MLA")
    ratio = plan.bytes_per_token("MHA") / plan.bytes_per_token(other)
    return f"MHA {verb} {spell_ratio(ratio)} the cache of {other}"


def _fit(plan: CachePlan) -> str:
    """Return whether weights and cache fit, and what to change if they do not."""
    memory = accelerator(DEVICE).memory_bytes
    if plan.weight_bytes >= memory:
        whole = plan.weight_bytes * plan.n_gpus
        fewest = int(whole // memory) + 1
        gpus = _count(plan.n_gpus, "GPU")
        return (
            f"The weights alone ({spell_bytes(whole)} on {gpus}) "
            f"exceed an H800's {spell_bytes(memory)}: share them among {fewest} or "
            f"more. The cache of {plan.batch} × {plan.context:,} tokens takes "
            f"{spell_bytes(plan.cache_bytes)}."
        )
    room = plan.n_tokens_that_fit
    text = (
        f"{plan.batch} × {plan.context:,} tokens take "
        f"{spell_bytes(plan.cache_bytes)}, which an H800 reads in "
        f"{_spell_seconds(plan.read_seconds)} per decoding step; beside its "
        f"{spell_bytes(plan.weight_bytes)} share of the weights {room:,} tokens fit"
    )
    if plan.batch * plan.context <= room:
        return f"{text}."
    return f"{text}: too few, so shorten the context or lower the batch."


def _spell_seconds(seconds: float) -> str:
    return f"{spell(seconds)} s" if seconds >= 1 else f"{spell(1e3 * seconds)} ms"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"
