"""A small model trained in one process and in many: what each rank found and kept.

    whole = alone(training)
    by_rank = launch(train, 2, training, TWO, whole.gradients)

`train` runs in the ranks and trains every way, one after the other: to start processes
takes longer than a few steps. Everything else reads what they hand back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from labkit.config import Layout, ModelConfig, TrainConfig
from labkit.model import Transformer
from labkit.model.transformer import LossParts
from labkit.parallel.communication.count import Traffic, count_communication
from labkit.parallel.held import Held, held
from labkit.parallel.mesh import Mesh
from labkit.parallel.model import Parallel, parallelize
from labkit.training import corpus
from labkit.training.optimizer import build_optimizer
from labkit.training.windows import Batch, Windows

TRAIN = TrainConfig(lr=1e-3, min_lr=1e-4, eps=1e-5)
BIAS_RATE = 1e-3

SMALL_BYTES = 1000
"""Messages that carry less in a step tell ranks a few numbers: losses, loads, norms."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The same steps for all: model, text, and how many of each."""

    cfg: ModelConfig
    n_steps: int = 2
    n_sequences: int = 8
    seq_len: int = 64

    def model(self) -> Transformer:
        """Return the model at its beginning, the same everywhere."""
        return Transformer(self.cfg, generator=torch.Generator().manual_seed(0))

    def batches(self) -> list[Batch]:
        """Return the sequences of each step."""
        text = Windows(corpus.standard_library().train, self.seq_len)
        n = self.n_sequences
        return [text.take(n * step, n) for step in range(self.n_steps)]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A layout, and how `parallelize` fills it."""

    name: str
    layout: Layout
    n_micro_batches: int = 1
    replicate: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


TWO = (
    Way(name="data, ZeRO-0", layout=Layout(dp=2)),
    Way(name="data, ZeRO-1", layout=Layout(dp=2), options={"zero": 1}),
    Way(name="data, ZeRO-3", layout=Layout(dp=2), options={"zero": 3}),
    Way(name="tensor", layout=Layout(tp=2)),
    Way(name="expert", layout=Layout(dp=2, ep=2)),
    Way(name="pipeline", layout=Layout(pp=2), n_micro_batches=4),
)
"""One kind of cut each, on two ranks."""

FOUR = (
    Way(
        name="PP 2 × DP 2, EP 2, ZeRO-1",
        layout=Layout(pp=2, dp=2, ep=2),
        n_micro_batches=4,
        options={"zero": 1},
    ),
    Way(name="TP 2 × DP 2, EP 2", layout=Layout(tp=2, dp=2, ep=2)),
    Way(
        name="PP 2 × TP 2",
        layout=Layout(pp=2, tp=2),
        n_micro_batches=4,
    ),
    Way(
        name="two copies of ZeRO-3 over 2",
        layout=Layout(dp=4),
        replicate=2,
        options={"zero": 3},
    ),
)
"""Several cuts at once, on four ranks; the first is DeepSeek-V3's, in small."""

Gradients = Mapping[str, Float[Tensor, "..."]]
"""By the name of the parameter."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rank found."""

    losses: tuple[float, ...]
    """Of each step, over all ranks."""

    difference: float
    """The largest of any gradient in the first step from one process's, by the largest
    value of that gradient."""

    kept: Held
    """At the end of the last backward pass, moments after the step."""

    traffic: tuple[Traffic, ...]
    """What this rank sent in the last step, clipping included."""

    @property
    def sent_bytes(self) -> float:
        """All that this rank sent in a step."""
        return sum(row.sent_bytes for row in self.traffic)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """What one process found."""

    losses: tuple[float, ...]
    gradients: Gradients
    """Of the first step."""

    kept: Held


def alone(training: Training) -> Whole:
    """Train in this process, all sequences of a step at once."""
    model = training.model()
    optimizer = build_optimizer(model, TRAIN)
    losses, gradients = [], {}
    for batch in training.batches():
        optimizer.zero_grad()
        parts = model.loss(batch.tokens, batch.targets)
        parts.total.backward()
        losses.append(parts.total.item())
        gradients = gradients or _copies(model)
        nn.utils.clip_grad_norm_(model.parameters(), TRAIN.grad_clip)
        optimizer.step()
        model.update_router_bias(parts.load, BIAS_RATE)
    kept = held(model, optimizer)
    return Whole(losses=tuple(losses), gradients=gradients, kept=kept)


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def train(
    training: Training, ways: Sequence[Way], serial: Gradients
) -> dict[str, Outcome]:
    """Train each way, in every rank; return what this rank found, by name.

    Args:
        training: the model and its text.
        ways: one after the other.
        serial: gradients of the first step in one process.
    """
    return {way.name: _train(training, way, serial) for way in ways}


def _train(training: Training, way: Way, serial: Gradients) -> Outcome:
    mesh = Mesh(way.layout, replicate=way.replicate)
    run = parallelize(training.model(), mesh, **way.options)
    parts_here = nn.ModuleList(run.modules)
    optimizer = build_optimizer(parts_here, TRAIN)
    losses, difference = [], 0.0
    for batch in training.batches():
        optimizer.zero_grad()
        with count_communication() as counted:
            parts = _step(run, batch, way)
        if not losses:
            difference = _difference(run.full_gradients(), serial)
        with counted.here():
            run.clip_gradients(TRAIN.grad_clip)
        losses.append(float(parts.total))
        optimizer.step()
        run.update_router_bias(parts.load, BIAS_RATE)
    return Outcome(
        losses=tuple(losses),
        difference=difference,
        kept=held(parts_here, optimizer),
        traffic=counted.traffic,
    )


def _step(run: Parallel, batch: Batch, way: Way) -> LossParts:
    """Do this rank's sequences, normalised by the counts of all."""
    place, n = run.mesh.dp.get_local_rank(), way.layout.dp
    return run.step(
        batch.tokens.chunk(n)[place].contiguous(),
        batch.targets.chunk(n)[place].contiguous(),
        n_tokens=batch.n_targets,
        n_sequences=batch.n_sequences,
        n_micro_batches=way.n_micro_batches,
    )


def _difference(found: Gradients, serial: Gradients) -> float:
    assert found.keys() == serial.keys()
    return max(
        float((found[name] - right).abs().max() / right.abs().max())
        for name, right in serial.items()
    )


def equality_rows(
    by_rank: Sequence[Mapping[str, Outcome]], whole: Whole
) -> list[dict[str, Any]]:
    """Return for each way how far its losses and gradients are from one process's."""
    rows = []
    for name, outcome in by_rank[0].items():
        pairs = zip(outcome.losses, whole.losses, strict=True)
        apart = max(abs(ours / theirs - 1) for ours, theirs in pairs)
        rows.append(
            {
                "cut": name,
                "loss, step 1": round(outcome.losses[0], 3),
                "loss, step 2": round(outcome.losses[-1], 3),
                "losses equal to 1e-5": apart < 1e-5,
                "gradients equal to 1e-5": outcome.difference < 1e-5,
                "largest difference of a gradient": f"{outcome.difference:.1e}",
            }
        )
    return rows


def kept_columns(
    by_rank: Sequence[Mapping[str, Outcome]], whole: Whole
) -> dict[str, dict[str, int]]:
    """Return bytes by part for one process, and for the fullest rank of each way."""
    columns = {"one process": asdict(whole.kept)}
    for name in by_rank[0]:
        kept = [asdict(outcomes[name].kept) for outcomes in by_rank]
        columns[name] = max(kept, key=lambda parts: sum(parts.values()))
    return columns


def traffic_rows(outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    """Return what one rank sent in a step, a row for each way and collective.

    Rounded to 10 kB: a near-tie between experts may end otherwise on another machine.
    """
    rows = []
    for name, outcome in outcomes.items():
        found: dict[str, tuple[int, float]] = {}
        for row in outcome.traffic:
            n_calls, n_bytes = found.get(row.collective, (0, 0))
            found[row.collective] = n_calls + row.n_calls, n_bytes + row.sent_bytes
        for collective, (n_calls, n_bytes) in found.items():
            if n_bytes > SMALL_BYTES:
                row = {"cut": name, "what": collective.replace("_", "-")}
                row |= {"calls": n_calls, "sent (kB)": 10 * round(n_bytes / 10_000)}
                rows.append(row)
    return rows
