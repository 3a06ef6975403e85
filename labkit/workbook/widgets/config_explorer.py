"""The config explorer: a model of one's own, beside the published ones.

    widgets.explore(draw, describe, caption="…", sizes=ConfigControls("v3-671b"))

A preset is a starting point: choosing one sets all sliders at once.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from ipywidgets import Box, Layout, SelectionSlider, ValueWidget, VBox
from matplotlib.figure import Figure

from labkit.config import PRESETS, ModelConfig
from labkit.workbook.figures.landscape import Landmark, landscape
from labkit.workbook.published import published
from labkit.workbook.spelling import spell
from labkit.workbook.table import Row
from labkit.workbook.widgets.controls import choice, row, steps

Sizes = Mapping[str, int | str]

CONTEXT = 4096
"""Tokens of context for the FLOPs, as in the published figures."""

STARTS = ("v3-671b", "v2-236b", "v2-lite-16b", "small", "tiny")
"""Presets to start from; V3.1 has the sizes of V3."""

RANGES: Mapping[str, tuple[str, tuple[int, ...]]] = MappingProxyType(
    {
        "n_layers": ("layers", (1, 2, 4, 6, 12, 16, 27, 40, 60, 61, 80, 100, 126)),
        "n_dense_layers": ("first dense layers", (0, 1, 2, 3, 4, 8, 16)),
        "dim": (
            "width (values)",
            (128, 256, 512, 1024, 2048, 4096, 5120, 7168, 8192, 16384),
        ),
        "inter_dim": (
            "dense width (values)",
            (384, 1024, 4096, 10_944, 12_288, 18_432, 24_576, 53_248),
        ),
        "n_heads": ("heads", (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)),
        "q_lora_rank": (
            "query rank (0: none)",
            (0, 48, 96, 256, 512, 1024, 1536, 3072),
        ),
        "kv_lora_rank": ("KV rank", (32, 64, 128, 256, 512, 768, 1024, 2048)),
        "n_routed_experts": (
            "routed experts",
            (1, 2, 8, 16, 32, 64, 128, 160, 256, 384, 512),
        ),
        "n_activated_experts": ("activated experts", (1, 2, 4, 6, 8, 9, 12, 16, 32)),
        "n_shared_experts": ("shared experts", (0, 1, 2, 3, 4)),
        "moe_inter_dim": (
            "expert's width (values)",
            (96, 128, 256, 512, 1024, 1408, 1536, 2048, 3072, 4096),
        ),
        "vocab_size": (
            "vocabulary (tokens)",
            (256, 32_768, 102_400, 129_280, 152_064, 262_144),
        ),
    }
)
"""Label and stops of each slider; every preset lies on them."""

COLUMN, NAME = "450px", "170px"


class ConfigControls(VBox, ValueWidget):
    """Sliders over the sizes of a model, with presets to start from.

    `value` holds the sizes by the name of their field, and the preset that gives what
    no slider sets. It changes once per move, also when a preset moves all sliders.
    """

    def __init__(self, start: str) -> None:
        self.start = choice("start from", STARTS, value=start)
        self.start.orientation = "horizontal"
        self.sliders = {name: _slider(name, start) for name in RANGES}
        self._is_loading = False
        columns = Layout(display="flex", flex_flow="row wrap", width="100%")
        super().__init__(
            [row(self.start), Box([*self.sliders.values()], layout=columns)]
        )
        self._base = start
        self.value = self._read()
        self.start.observe(self._load, "value")
        for slider in self.sliders.values():
            slider.observe(self._follow, "value")

    def _read(self) -> dict[str, int | str]:
        sizes = {name: slider.value for name, slider in self.sliders.items()}
        return {"base": self._base, **sizes}

    def _load(self, _: object) -> None:
        """Move all sliders to the preset that was chosen."""
        if self.start.value is None:
            return
        self._base, self._is_loading = self.start.value, True
        for name, size in sizes_of(self._base).items():
            self.sliders[name].value = size
        self._is_loading = False
        self.value = self._read()

    def _follow(self, _: object) -> None:
        """Take over a slider that was moved; the model is then no preset."""
        if not self._is_loading:
            self.start.value = None
            self.value = self._read()


def _slider(name: str, start: str) -> SelectionSlider:
    label, stops = RANGES[name]
    slider = steps(label, stops, value=sizes_of(start)[name])
    slider.style.description_width = NAME
    slider.layout = Layout(width=COLUMN, max_width="100%")
    return slider


def sizes_of(preset: str) -> dict[str, int]:
    """Return a preset's size for each slider.

    >>> sizes_of("v2-lite-16b")["q_lora_rank"]  # it does not compress queries
    0
    """
    cfg = PRESETS[preset]
    return {name: getattr(_owner(cfg, name), name) or 0 for name in RANGES}


def _owner(cfg: ModelConfig, name: str) -> object:
    """Return the part of a config that has the field."""
    parts = (cfg, cfg.attention, cfg.moe)
    return next(part for part in parts if hasattr(part, name))


def build(sizes: Sizes) -> ModelConfig:
    """Return the model of these sizes, without groups of experts.

    Raises:
        ValueError: the sizes contradict each other; says which sliders, and the
            remedy.
    """
    try:
        return _compose(sizes)
    except ValueError as error:
        raise ValueError(in_labels(str(error))) from error


def in_labels(message: str) -> str:
    """Return a message about fields with the names that stand beside the sliders.

    >>> in_labels("dim must be at most n_heads=2; got 3. Set dim=2 or less.")
    '“width” must be at most “heads” (2); got 3. Set “width” to 2 or less.'
    """
    for name in RANGES:
        label = f"“{_label(name)}”"
        message = re.sub(rf"\bSet {name}=", f"Set {label} to ", message)
        message = re.sub(rf"\b{name}=(\d+)", rf"{label} (\1)", message)
        message = re.sub(rf"\b{name}\b", label, message)
    return message


def _label(name: str) -> str:
    """Return what a slider is called, without its unit."""
    return RANGES[name][0].split(" (")[0]


def _compose(sizes: Sizes) -> ModelConfig:
    """Return the model of these sizes; its complaints name fields."""
    base = PRESETS[str(sizes["base"])]
    chosen = {name: int(sizes[name]) for name in RANGES}

    def those(part: object) -> dict[str, int]:
        return {name: size for name, size in chosen.items() if hasattr(part, name)}

    attention = those(base.attention)
    attention["q_lora_rank"] = attention["q_lora_rank"] or None
    return replace(
        base,
        **those(base),
        attention=replace(base.attention, **attention),
        moe=replace(base.moe, **those(base.moe), n_expert_groups=1, n_limited_groups=1),
    )


def landmark(name: str, cfg: ModelConfig) -> Landmark:
    """Return where a model stands, by arithmetic on its config."""
    return Landmark(
        name=name,
        total_billion=cfg.n_params() / 1e9,
        active_billion=cfg.n_active_params() / 1e9,
        cache_bytes=cfg.kv_bytes_per_token(),
        train_gflop=cfg.flops_per_token(CONTEXT) / 1e9,
    )


def published_landmark(label: str, model: str) -> Landmark:
    """Return where a dense model stands, by what was published about it."""
    total = published(model, "total parameters")
    return Landmark(
        name=label,
        total_billion=total,
        active_billion=total,
        cache_bytes=published(model, "cache"),
        train_gflop=published(model, "training FLOPs"),
    )


def draw(sizes: Sizes) -> Figure:
    """Return the model of these sizes beside five real ones."""
    yours = landmark("yours", build(sizes))
    presets = {"V2-Lite": "v2-lite-16b", "V2": "v2-236b", "V3": "v3-671b"}
    real = [landmark(name, PRESETS[key]) for name, key in presets.items()]
    real += [
        published_landmark("Qwen2.5-72B", "qwen2.5-72b"),
        published_landmark("Llama-3.1-405B", "llama-3.1-405b"),
    ]
    share = 100 * yours.active_billion / yours.total_billion
    return landscape(
        [yours, *real],
        title=f"{share:.1f} % of this model's parameters work on a token",
    )


def describe(sizes: Sizes) -> str:
    """Return the model's four numbers, each beside DeepSeek-V3's."""
    cfg, v3 = build(sizes), PRESETS["v3-671b"]
    total, active = cfg.n_params(), cfg.n_active_params()
    cache, flops = cfg.kv_bytes_per_token(), cfg.flops_per_token(CONTEXT)

    def beside(ours: int, theirs: int) -> str:
        return f"{spell(100 * ours / theirs)} %"

    return (
        f"{total:,} parameters ({beside(total, v3.n_params())} of DeepSeek-V3's), "
        f"{active:,} of them per token ({beside(active, v3.n_active_params())}); a "
        f"token keeps {cache:,} bytes of cache "
        f"({beside(cache, v3.kv_bytes_per_token())}) and takes {flops / 1e9:,.4g} "
        f"GFLOP to train ({beside(flops, v3.flops_per_token(CONTEXT))})."
    )


def doublings(preset: str) -> list[Row]:
    """Return what doubling one size multiplies, a row per size."""
    base = sizes_of(preset)
    before = _budgets(build({"base": preset, **base}))
    rows: list[Row] = []
    for name, size in base.items():
        after = _budgets(build({"base": preset, **base, name: 2 * size}))
        change = {what: round(after[what] / before[what], 2) for what in before}
        rows.append({"twice the": _label(name)} | change)
    return rows


def _budgets(cfg: ModelConfig) -> dict[str, int]:
    return {
        "total (×)": cfg.n_params(),
        "per token (×)": cfg.n_active_params(),
        "cache (×)": cfg.kv_bytes_per_token(),
        "FLOPs (×)": cfg.flops_per_token(CONTEXT),
    }
