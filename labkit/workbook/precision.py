"""What the notebook on precision measures: bytes kept, gradients, runs in pairs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from statistics import fmean
from types import MappingProxyType

import torch
from jaxtyping import Float
from torch import Tensor, nn

from labkit.config import PRESETS, Layout, MLAConfig, ModelConfig, TrainConfig
from labkit.data import read_rows
from labkit.memory import apply_recompute, measure
from labkit.model import Transformer
from labkit.model.linear import Linear
from labkit.model.mlp import MLP
from labkit.monitor import StepMetrics
from labkit.precision import convert, to_fp8
from labkit.precision.scheduler import Decision, PrecisionScheduler
from labkit.training import RECIPES, Trainer, corpus
from labkit.training.accumulation import LossScale, accumulate
from labkit.training.decisions import Rollback
from labkit.training.windows import Batch, Windows
from labkit.workbook.memory import by_kind
from labkit.workbook.table import Row

V3_LAYER = replace(
    PRESETS["v3-671b"],
    vocab_size=256,
    dim=896,
    n_layers=1,
    n_dense_layers=0,
    mtp=None,
    max_seq_len=512,
    attention=MLAConfig(n_heads=16, q_lora_rank=192, kv_lora_rank=64),
    moe=replace(
        PRESETS["v3-671b"].moe,
        n_routed_experts=8,
        n_expert_groups=1,
        n_limited_groups=1,
        moe_inter_dim=256,
    ),
)
"""A sparse layer of DeepSeek-V3 with an eighth of its width, its heads and its ranks.

Each token visits 8 experts, as there, of 8 in all. Its weights are BF16.
"""

V3_RUN = replace(RECIPES["v3-671b"], global_batch=128 * 16)
V3_LAYOUT = Layout(pp=16, dp=128, ep=64)
"""DeepSeek-V3 on 2,048 H800, with 16 micro-batches of a sequence on each rank."""

RUN = TrainConfig(
    n_steps=300, global_batch=4, micro_batch=4, seq_len=64, lr=2e-3, min_lr=2e-4
)
"""Runs that are short enough for a page; on smaller batches than those of `tiny`'s own
recipe, at a third of its rate."""


class Projections(nn.Module):
    """Three linear layers that read one tensor, as for queries, keys and values."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (Linear(dim, dim) for _ in range(3))

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return self.q(x) + self.k(x) + self.v(x)


EXAMPLES: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "one linear layer": partial(Linear, 1024, 1024),
        "q, k and v": partial(Projections, 1024),
        "a SwiGLU network": partial(MLP, 1024, 2048),
    }
)
"""Parts of a model whose width is 1,024."""


class _Fresh(nn.Module):
    """Gives on a copy, so that who keeps it is seen to do so."""

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return x * 1


def convert_alone(module: nn.Module) -> None:
    """Let each linear layer in a module keep an FP8 copy of its own input."""
    for layer in _parts(module, Linear):
        to_fp8(layer)
        # Another tensor of the same values: nothing that others left is with it.
        layer.register_forward_pre_hook(lambda _, args: (args[0].view_as(args[0]),))


def convert_together(module: nn.Module) -> None:
    """Let layers share what they read, and networks make SwiGLU's product again."""
    for part in (*_parts(module, MLP), *_parts(module, Linear)):
        to_fp8(part)


def _parts(module: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, kind)]


def kept_bytes(module: nn.Module, x: Float[Tensor, "n d"]) -> int:
    """Return what autograd keeps of a module's forward pass, its input among it.

    >>> kept_bytes(Linear(8, 8), torch.ones(4, 8))
    128
    """
    reader = nn.Sequential(_Fresh(), module)

    def step() -> None:
        reader(x).sum().backward()

    step()  # tables that are made once are no activations
    return measure(step, reader).by_part.get("activations", 0)


def layer_bytes(policy: str, recompute: str = "none") -> dict[str, int]:
    """Return what `V3_LAYER` keeps of 512 tokens, by kind of module.

    Args:
        policy: of precision; products of "bf16" are BF16.
        recompute: the policy of recomputation.
    """
    generator = torch.Generator().manual_seed(0)
    model = Transformer(V3_LAYER, dtype=torch.bfloat16, generator=generator)
    apply_recompute(model, recompute)
    convert(model, policy)
    text = corpus.standard_library().train

    def step(n_tokens: int) -> None:
        _backward(model, Windows(text, n_tokens).take(0, 1), torch.float32)

    step(32)  # tables that are made once are no activations
    found = measure(lambda: step(512), model).by_module.items()
    return by_kind({name: n for name, n in found if name.startswith("layers")})


def gradient(
    policy: str, *, start: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Float[Tensor, "p"]:
    """Return all gradients of one batch of text, of "tiny" as it is before training.

    Args:
        policy: of precision.
        start: the window of text with which the batch begins.
        dtype: in which products are that are not in FP8.
    """
    model = _model(PRESETS["tiny"], 0)
    convert(model, policy)
    text = corpus.standard_library().train
    _backward(model, Windows(text, 128).take(start, 4), dtype)
    return torch.cat([x.grad.flatten() for x in model.parameters()])


def new_trainer(
    precision: str, seed: int, scheduler: PrecisionScheduler | None = None
) -> Trainer:
    """Return a run of "tiny"; the seed decides weights and text alone."""
    model = _model(PRESETS["tiny"], seed)
    train = replace(RUN, seed=seed, precision=precision)
    text = corpus.standard_library()
    return Trainer(model, train, text, scheduler=scheduler)


def losses(precision: str, seed: int, n_steps: int) -> list[float]:
    """Return the losses of a run."""
    steps = new_trainer(precision, seed).run(n_steps, progress=False)
    return [step.loss_main for step in steps]


def steps_to(trainer: Trainer, n_steps: int) -> list[StepMetrics]:
    """Return all steps on the way to `n_steps`, also those that were taken back."""
    computed = []
    while trainer.n_steps_done < n_steps:
        computed.append(trainer.step())
    return computed


def what_happened(entries: Iterable[Decision | Rollback]) -> list[Row]:
    """Return a row for each rollback, and for modules that changed level together."""

    def together(entry: Decision | Rollback) -> tuple[object, ...]:
        if isinstance(entry, Rollback):
            return entry.step, "rollback"
        return entry.step, entry.signal, entry.before, entry.after

    rows: list[Row] = []
    for _, group in groupby(entries, key=together):
        first, *others = group
        if isinstance(first, Rollback):
            change = {"modules": "all", "what": f"rolled back to step {first.back_to}"}
            because = first.cause
        else:
            more = f" and {len(others)} more" if others else ""
            change = {"modules": f"{first.module}{more}"}
            change["what"] = f"{first.before} → {first.after}"
            because = first.signal
        rows.append({"after step": first.step} | change | {"because": because})
    return rows


def long_runs(column: str = "train_nats") -> dict[str, list[float]]:
    """Return how longer runs of "small" ended, seed by seed, for each precision.

    They were made by `tests/benchmarks/bench_fp8_loss.py`.

    Args:
        column: "train_nats", means over the last 25 steps, or "valid_nats", on other
            text, after the last step.

    >>> {name: len(losses) for name, losses in long_runs().items()}
    {'fp32': 5, 'bf16': 5, 'fp8': 5}
    """
    runs: dict[str, list[float]] = {}
    for row in read_rows("fp8_loss.csv"):
        runs.setdefault(row["precision"], []).append(float(row[column]))
    return runs


def window_gaps(
    runs: Sequence[Sequence[float]], reference: Sequence[Sequence[float]], window: int
) -> list[list[float]]:
    """Return by how many per cent losses exceed their partner's, window by window.

    >>> window_gaps([[9.0, 9.0, 2.1, 2.1]], [[9.0, 9.0, 2.0, 2.0]], window=2)
    [[0.0, 5.0]]
    """
    pairs = zip(_means(runs, window), _means(reference, window), strict=True)
    return [
        [round(100 * (a / b - 1), 6) for a, b in zip(run, other, strict=True)]
        for run, other in pairs
    ]


def _means(runs: Sequence[Sequence[float]], window: int) -> list[list[float]]:
    return [
        [fmean(run[start : start + window]) for start in range(0, len(run), window)]
        for run in runs
    ]


def _model(cfg: ModelConfig, seed: int) -> Transformer:
    return Transformer(cfg, generator=torch.Generator().manual_seed(seed))


def _backward(
    model: Transformer, batch: Batch, dtype: torch.dtype = torch.bfloat16
) -> None:
    scale = LossScale(n_tokens=batch.n_targets, n_sequences=batch.n_sequences)
    accumulate(model, [batch], scale, dtype=dtype)
