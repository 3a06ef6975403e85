"""The cache explorer: a design, a context and a batch; what they keep and cost.

widgets.explore(draw, describe, caption="…", **controls())
"""

from dataclasses import dataclass, replace
from typing import Any

from ipywidgets import ValueWidget
from matplotlib.figure import Figure

from labkit.config import PRESETS, AttentionConfig, GQAConfig, MLAConfig, ModelConfig
from labkit.hardware import accelerator
from labkit.workbook.figures.cache import cache_figure
from labkit.workbook.figures.charts import Part
from labkit.workbook.published import published
from labkit.workbook.spelling import spell_ratio
from labkit.workbook.widgets.controls import choice, slider, steps, switch

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
    "LLaMA-3.1-405B": "llama-3.1-405b",
}
"""Models whose cache is published, by the name on the page."""

DEVICE = "h800"


def published_bytes_per_token() -> dict[str, int]:
    """Return the bytes of BF16 cache per token of models as published.

    >>> published_bytes_per_token()
    {'DeepSeek-V3': 70272, 'Qwen2.5-72B': 327680, 'LLaMA-3.1-405B': 516096}
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


def controls() -> dict[str, ValueWidget]:
    """Return the explorer's controls, standing at DeepSeek-V3 and 128K tokens."""
    powers = [2**n for n in range(21)]
    return {
        "model": choice("model", list(MODELS)),
        "kind": choice("attention", KINDS),
        "n_heads": steps("heads", powers[3:9], value=128),
        "n_kv_heads": steps("KV heads of GQA", powers[:4], value=8),
        "kv_lora_rank": slider("latent of MLA", (64, 1024), value=512, step=64),
        "context": steps("context", powers[10:], value=131_072, unit="tokens"),
        "batch": steps("batch", powers[:9], value=1, unit="sequences per GPU"),
        "n_gpus": steps("GPUs", powers[:8], value=16, unit="sharing the weights"),
        "is_fp32": switch("cache in FP32 instead of BF16"),
    }


def draw(**values: Any) -> Figure:  # noqa: ANN401, the controls' values
    """Return the figure for the controls' values."""
    plan = CachePlan(**values)
    limit = accelerator(DEVICE).memory_bytes
    used = plan.weight_bytes + plan.cache_bytes
    memory = {
        "weights": plan.weight_bytes,
        "cache": plan.cache_bytes,
        "idle": max(0.0, limit - used),
    }
    return cache_figure(
        _bars(plan),
        [
            Part(name=name.replace("idle", "free"), amount=size / 1e9, meaning=name)
            for name, size in memory.items()
        ],
        title=_title(plan),
        capacity=limit / 1e9,
        device="one H800",
    )


def describe(**values: Any) -> str:  # noqa: ANN401, the controls' values
    """Return what the controls' values mean, in numbers."""
    plan = CachePlan(**values)
    first, second = (kind for kind in KINDS if kind != plan.kind)
    return (
        f"{plan.design(plan.kind)} keeps {plan.bytes_per_token():,} bytes per token, "
        f"{plan.design(first)} would keep {plan.bytes_per_token(first):,}, "
        f"{plan.design(second)} {plan.bytes_per_token(second):,}. {_fit(plan)}"
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
    for name, n_bytes in published_bytes_per_token().items():
        part = Part(name=f"{name}, published", amount=n_bytes, meaning="idle")
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
            f"The weights alone ({whole / 1e9:,.0f} GB on {gpus}) "
            f"exceed an H800's {memory / 1e9:.1f} GB: share them among {fewest} or "
            f"more. The cache of {plan.batch} × {plan.context:,} tokens takes "
            f"{plan.cache_bytes / 1e9:,.3g} GB."
        )
    room = plan.n_tokens_that_fit
    text = (
        f"{plan.batch} × {plan.context:,} tokens take "
        f"{plan.cache_bytes / 1e9:,.3g} GB, which an H800 reads in "
        f"{plan.read_seconds * 1e3:,.3g} ms per decoding step; beside its "
        f"{plan.weight_bytes / 1e9:,.3g} GB share of the weights {room:,} tokens fit"
    )
    if plan.batch * plan.context <= room:
        return f"{text}."
    return f"{text}: too few, so shorten the context or lower the batch."


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"
