"""Layers of DeepSeek-V3 in FP8 beside BF16: what each keeps, measured and predicted.

In their full size on fake tensors, and with a quarter of its widths in numbers, with
BF16 weights as DeepSeek-V3 has them. Then whole models in training, under several
policies, with FP32 weights under autocast.

Where attention's core keeps queries, keys and values, in BF16 both times, a layer with
experts cannot come near 0.70: they are half of it. DeepSeek-V3 runs them again, with
all norms (section 3.2.3), and that is the layer which the bar is of. The plain ones
are shown; so is a quarter under autocast, whose residual stream is FP32 both times.
Copies of weights that autocast makes are no saved activations, and not counted.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from labkit.config import PRESETS, ModelConfig, TrainConfig
from labkit.memory import apply_recompute, measure, predict
from labkit.memory.full_size import local_experts, measure_stage, predict_stage
from labkit.memory.report import MemoryReport
from labkit.model import Transformer
from labkit.precision.convert import convert
from labkit.precision.kept_formats import kept_formats

MOST_KEPT = 0.70
"""Of the bytes in BF16, of a layer as DeepSeek-V3 trains it."""

PREDICTED = 0.02
"""Largest error of what is kept."""

RECOMPUTED = "selective"
"""Runs norms, MLA's up-projections, router and SwiGLU again."""

V3 = PRESETS["v3-671b"]
KINDS: Mapping[str, ModelConfig] = {
    "dense": replace(V3, moe=None, n_dense_layers=V3.n_layers, mtp=None),
    "experts": local_experts(V3, 8),
}
FULL = TrainConfig(micro_batch=1, global_batch=1, seq_len=1024)

QUARTER = replace(
    V3,
    vocab_size=256,
    dim=V3.dim // 4,
    inter_dim=V3.inter_dim // 4,
    n_layers=2,
    n_dense_layers=1,
    attention=replace(
        V3.attention,
        n_heads=V3.attention.n_heads // 4,
        q_lora_rank=V3.attention.q_lora_rank // 4,
        kv_lora_rank=V3.attention.kv_lora_rank // 4,
    ),
    moe=replace(
        V3.moe,
        n_routed_experts=16,
        moe_inter_dim=V3.moe.moe_inter_dim // 4,
        n_expert_groups=1,
        n_limited_groups=1,
    ),
    mtp=None,
)
"""A dense layer, and one of experts, with heads of the full size."""

STEPS = {
    "tiny": (PRESETS["tiny"], 4, 128),
    "small": (PRESETS["small"], 2, 128),
    "V3, quarter": (QUARTER, 1, 256),
}
"""Models in training: what they are, sequences, and tokens of each."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one layer keeps per token, by module, in two precisions."""

    name: str
    recompute: str
    plain: Mapping[str, float]
    fp8: Mapping[str, float]

    @property
    def ratio(self) -> float:
        return sum(self.fp8.values()) / sum(self.plain.values())


def in_fp8(recompute: str, policy: str) -> Callable[[Transformer], None]:
    """Return what puts a model under a policy of each kind."""

    def change(model: Transformer) -> None:
        convert(apply_recompute(model, recompute), policy)

    return change


def of_activations(report: MemoryReport) -> int:
    """Return what is kept as the forward ends."""
    (last,) = (x for x in report.timeline if x.name == "end of forward")
    return last.by_part["activations"]


def per_token(report: MemoryReport, layer: str, n_tokens: int) -> dict[str, float]:
    """Return the KiB of each module of a layer; turns of RoPE are all layers'."""
    prefix = f"{layer}."
    return {
        name.removeprefix(prefix): n_bytes / n_tokens / 1024
        for name, n_bytes in report.by_module.items()
        if name.startswith(prefix)
    }


def full_size() -> Iterator[tuple[Layer, float]]:
    """Yield layers in their full size, and the larger error of the predictions."""
    for kind, cfg in KINDS.items():
        for recompute in ("none", RECOMPUTED):
            kept, errors = [], []
            for policy in ("bf16", "deepseek-v3"):
                change = in_fp8(recompute, policy)
                report = measure_stage(cfg, FULL, 1, change=change)
                kept.append(per_token(report, "layers.0", FULL.seq_len))
                alone = replace(cfg, n_layers=1, n_dense_layers=int(cfg.moe is None))
                formats = kept_formats(replace(alone, mtp=None), policy)
                formats.pop("head", None)
                predicted = predict_stage(
                    cfg, FULL, 1, recompute=recompute, cached=formats
                )
                ours = of_activations(predicted)
                errors.append(abs(ours / of_activations(report) - 1))
            plain, fp8 = kept
            yield (
                Layer(name=kind, recompute=recompute, plain=plain, fp8=fp8),
                max(errors),
            )


def trained(
    cfg: ModelConfig,
    train: TrainConfig,
    recompute: str,
    *,
    weights: torch.dtype = torch.float32,
) -> tuple[MemoryReport, list[list[int]]]:
    """Return the report of a step's passes, and the load of experts."""
    generator = torch.Generator().manual_seed(0)
    model = Transformer(cfg, dtype=weights, generator=generator)
    in_fp8(recompute, train.fp8_policy)(model)
    shape = train.micro_batch, train.seq_len + 1
    generator.manual_seed(1)
    tokens = torch.randint(cfg.vocab_size, shape, generator=generator)
    counts = {
        "n_tokens": train.tokens_per_step,
        "n_sequences": train.micro_batch,
    }
    loads = []

    def step() -> None:
        is_mixed = weights == torch.float32
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:], **counts)
        loads.append(loss.load.tolist())
        loss.total.backward()

    return measure(step, model), loads[0]


def recipe(batch: int, seq_len: int, policy: str) -> TrainConfig:
    return TrainConfig(
        micro_batch=batch,
        global_batch=batch,
        seq_len=seq_len,
        precision="fp8",
        fp8_policy=policy,
    )


def quarter_size(weights: torch.dtype, label: str) -> Iterator[Layer]:
    """Yield layers of a quarter of the widths."""
    for recompute in ("none", RECOMPUTED):
        reports = [
            trained(QUARTER, recipe(1, 256, policy), recompute, weights=weights)[0]
            for policy in ("bf16", "deepseek-v3")
        ]
        for layer, kind in (("layers.0", "dense"), ("layers.1", "experts")):
            plain, fp8 = (per_token(report, layer, 256) for report in reports)
            name = f"{kind}, {label}"
            yield Layer(name=name, recompute=recompute, plain=plain, fp8=fp8)


def errors() -> Iterator[tuple[str, float, float]]:
    """Yield errors of what models in training are predicted to keep.

    The second is without knowing the load of experts.
    """
    for name, (cfg, batch, seq_len) in STEPS.items():
        for policy in ("deepseek-v3", "conservative", "aggressive"):
            for recompute in ("none", RECOMPUTED, "attention"):
                train = recipe(batch, seq_len, policy)
                report, load = trained(cfg, train, recompute)
                formats = kept_formats(cfg, policy)
                known, even = (
                    predict(cfg, train, recompute=recompute, load=x, cached=formats)
                    for x in (load, None)
                )
                measured = of_activations(report)
                yield (
                    f"{name:12} {policy:13} {recompute:10}",
                    of_activations(known) / measured - 1,
                    of_activations(even) / measured - 1,
                )


def fp8() -> bool:
    """Print layers and errors; return whether all bars are reached."""
    print(f"{'layer':19}{'recompute':11}{'BF16':>8}{'FP8':>8}{'ratio':>8}{'error':>8}")
    layers, worst = [], 0.0
    for layer, error in full_size():
        layers.append(layer)
        worst = max(worst, error)
        print(f"{_line(layer)}{error:>8.2%}", flush=True)
    for layer in quarter_size(torch.bfloat16, "quarter"):
        layers.append(layer)
        print(_line(layer), flush=True)
    for layer in quarter_size(torch.float32, "autocast"):
        print(_line(layer), flush=True)
    print("KiB per token, by module: in BF16, and in FP8 where that is not the same")
    for layer in layers[: 2 * len(KINDS)]:
        print(f"  {layer.name}, {layer.recompute}: {_parts(layer)}")
    judged = [layer for layer in layers if layer.recompute == RECOMPUTED]
    most = max(layer.ratio for layer in judged)
    print(f"recomputed as DeepSeek-V3 does: at most {most:.3f} (bar {MOST_KEPT:.2f})")
    print(f"{'model, policy, recompute':37}{'error':>9}   with even routing")
    for name, known, even in errors():
        worst = max(worst, abs(known), abs(even))
        print(f"{name:37}{known:>+9.3%}{even:>+12.3%}", flush=True)
    print(f"largest error of a prediction: {worst:.2%} (bar {PREDICTED:.0%})")
    return most <= MOST_KEPT and worst <= PREDICTED


def _line(layer: Layer) -> str:
    plain, narrow = sum(layer.plain.values()), sum(layer.fp8.values())
    return (
        f"{layer.name:19}{layer.recompute:11}{plain:>8.1f}{narrow:>8.1f}"
        f"{layer.ratio:>8.3f}"
    )


def _parts(layer: Layer) -> str:
    names = dict.fromkeys([*layer.plain, *layer.fp8])
    cells = []
    for name in names:
        plain, narrow = (kept.get(name, 0) for kept in (layer.plain, layer.fp8))
        same = round(plain, 1) == round(narrow, 1)
        cells.append(f"{name} {plain:.1f}" + ("" if same else f" → {narrow:.1f}"))
    return ", ".join(cells)
