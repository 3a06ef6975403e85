"""What a training step will need, by arithmetic: bytes by part, instant by instant.

On a CPU, one rank alone is compared with steps of a real Trainer, as `measure` counts
them. What is said of GPUs and of several ranks is compared with what others report of
theirs (`labkit.memory.comparison`), and with no run here. Not counted are what kernels
use inside themselves, and what allocators, libraries and the process need beside, of
which `labkit.memory.overheads` knows ranges.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from labkit.config import Layout, ModelConfig, TrainConfig
from labkit.config.checks import require_at_least, require_choice, require_instance
from labkit.hardware import ACCELERATORS
from labkit.memory.activations import Load, require_load
from labkit.memory.formats import formats_of
from labkit.memory.persistent import States, require_states, require_zero, states_of
from labkit.memory.published import ROUTINGS
from labkit.memory.ranks import rows_to_plan
from labkit.memory.recompute import block_policies, require_experts
from labkit.memory.report import MemoryReport
from labkit.memory.stages import SCHEDULES, given_split
from labkit.memory.step_report import StepReport
from labkit.memory.tape import Pass

COMPUTE_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
}
"""What products that are not in FP8 compute in, by `TrainConfig.precision`."""


def predict(  # noqa: PLR0913, each decides alone
    cfg: ModelConfig,
    train: TrainConfig,
    layout: Layout | None = None,
    device: str = "cpu",
    *,
    recompute: str | Sequence[str] = "none",
    zero: int = 0,
    states: States | None = None,
    schedule: str = "1f1b",
    layers_per_stage: Sequence[int] | None = None,
    routing: Literal["paper", "physical"] = "physical",
    imbalance: float = 1.0,
    load: Load | None = None,
    cached: Literal["compute", "fp8"] | Mapping[str, str] = "compute",
) -> MemoryReport:
    """Return what a rank holds over a step of training that is not its first.

    Instants have the names that `measure` gives them. With several micro-batches they
    are those of the last one, which finds the gradients of the others. Clipping and
    fused AdamW work in place, and so need no bytes of their own. With pipeline stages
    the report is that of the stage with the highest peak; activations are those of all
    micro-batches on their way, also by module.

    Assumed of several ranks: gradients that ZeRO shares out lie in one buffer, as those
    of `States.has_buffer` do, to which each is added once it is made; others are copied
    into one message when they are summed, as `Trainer` does. Rows on their way to
    experts of other ranks lie in one buffer. Weights that ZeRO shares out are gathered
    as `gathered_weights` says: a block at a time, and the next one ahead.

    Args:
        cfg: the model.
        train: batch, sequence and precision; BF16 weights compute in BF16.
        layout: degrees of parallelism; None is one rank alone.
        device: whose kernels run: "cpu", "gpu", or the name of an accelerator of
            `labkit.hardware`, which means those of a GPU.
        recompute: the policy, as for `apply_recompute`.
        zero: as for `persistent`.
        states: dtypes of what lasts; None takes those of `Trainer` with the recipe's
            moments.
        schedule: of the pipeline, as for `stage_layers`; one rank alone has none, and
            reads no more than its name.
        layers_per_stage: as for `stage_layers`.
        routing: as for `routed_rows`.
        imbalance: as for `routed_rows`: 1, or as much above it as `layout.ep` allows.
        load: tokens of each expert in a micro-batch, a row per router, as
            `LossParts.load.tolist()` gives it; None takes even routing. For one
            rank alone.
        cached: how layers keep what they read: as they compute; or the formats of
            those in FP8, by name, as `labkit.precision.kept_formats` gives them of a
            policy and `converted_formats` of a model; or "fp8", those of DeepSeek-V3
            with its scales in FP32, which no model here has. Precision "fp8" takes one
            of the last two. What is kept is compared with converted models on a CPU;
            its peak is that of FP8 units, and without them what emulates them needs
            copies beside.

    >>> from labkit.config import PRESETS
    >>> report = predict(PRESETS["tiny"], TrainConfig(micro_batch=4))
    >>> report.peak_instant.name, f"{report.peak / 2**20:.0f} MiB"
    ('backward', '82 MiB')

    Raises:
        ValueError: an argument is not what its name says, or says nothing of layers
            in FP8 though the recipe has some; the layout, the schedule or
            the policy does not fit the model, or the batch and its sequences the model
            or the layout; experts cannot have this load or imbalance; no device has
            this name; FP8 is to be kept of FP32; or a load is given for several ranks.
    """
    require_instance({"layout": layout}, Layout, optional=True)
    layout = Layout() if layout is None else layout
    require_choice({"schedule": schedule}, SCHEDULES)
    require_zero(zero)
    states = states_of(train) if states is None else states
    step = rank_pass(cfg, train, layout, device, states=states)
    _require_told(train, cached)
    step = replace(step, formats=formats_of(cfg, cached))
    step = with_rows(cfg, step, layout, routing=routing, imbalance=imbalance)
    if load is not None:
        _require_alone(layout, routing, imbalance)
        require_load(cfg, step, load)
    report = StepReport(
        cfg=cfg,
        train=train,
        layout=layout,
        step=step,
        states=states,
        zero=zero,
        policies=_policies(cfg, recompute),
    )
    cut = given_split(layers_per_stage)
    if layout.pp == 1:
        return report.alone(load, cut)
    return report.pipeline(schedule, cut)


def _require_told(train: TrainConfig, cached: object) -> None:
    """Raise ValueError if layers are in FP8, and nobody says which."""
    if train.precision == "fp8" and cached == "compute":
        raise ValueError(
            "cached must say what layers keep in FP8 if precision='fp8', because "
            f"policies are not known here; got {cached!r}. Set cached="
            f"labkit.precision.kept_formats(cfg, {train.fp8_policy!r})."
        )


def _require_alone(layout: Layout, routing: str, imbalance: float) -> None:
    """Raise ValueError unless a load alone says what experts compute, on one rank."""
    if layout.n_ranks > 1:
        raise ValueError(
            "load is that of one rank alone; got a layout of "
            f"{layout.n_ranks} ranks. Leave load out, and give imbalance instead."
        )
    if routing != "physical" or imbalance != 1:
        raise ValueError(
            "load says already what each expert computes; got also "
            f"routing={routing!r} and imbalance={imbalance!r}. "
            "Leave out these, or load."
        )


def _policies(cfg: ModelConfig, recompute: str | Sequence[str]) -> tuple[str, ...]:
    """Return the policy of each block, as `apply_recompute` would take it."""
    n_blocks = cfg.n_layers + cfg.n_mtp
    policies = block_policies(recompute, n_blocks, name="recompute")
    has_experts = cfg.n_moe_layers + cfg.n_mtp * (cfg.moe is not None) > 0
    require_experts(policies, has_experts=has_experts)
    return policies


def rank_pass(
    cfg: ModelConfig,
    train: TrainConfig,
    layout: Layout,
    device: str,
    *,
    states: States,
) -> Pass:
    """Return a rank's pass over a micro-batch, of which context ranks take a part each.

    Raises:
        ValueError: an argument is of another type, the model takes no sequences so
            long, ranks cannot take equal parts, or no device has this name.
    """
    require_instance({"cfg": cfg}, ModelConfig)
    require_instance({"train": train}, TrainConfig)
    require_states(states)
    if train.seq_len > cfg.max_seq_len:
        raise ValueError(
            "seq_len must be at most the model's max_seq_len; got "
            f"{train.seq_len} and {cfg.max_seq_len}. Set seq_len={cfg.max_seq_len}, "
            "or build the model for longer sequences."
        )
    _require_shares(train, layout)
    is_exact = states.weights == "float32"
    return Pass(
        batch=min(train.micro_batch, -(-train.global_batch // layout.dp)),
        seq_len=train.seq_len // layout.cp,
        weights=torch.float32 if is_exact else torch.bfloat16,
        compute=COMPUTE_DTYPES[train.precision] if is_exact else torch.bfloat16,
        device=kernels_of(device),
        ep=layout.ep,
    )


def _require_shares(train: TrainConfig, layout: Layout) -> None:
    """Raise ValueError unless ranks take equal parts of the batch and of sequences."""
    both = layout.cp * layout.tp
    for name, degree, whole in (
        ("dp", layout.dp, "global_batch"),
        ("cp", layout.cp, "seq_len"),
        ("cp * tp", both, "seq_len"),
    ):
        size = getattr(train, whole)
        if size % degree:
            raise ValueError(
                f"{name} must divide {whole}, because each rank takes an equal part; "
                f"got {name}={degree} and {size}. "
                f"Set {whole}={-(-size // degree) * degree}."
            )


def kernels_of(device: str) -> Literal["cpu", "gpu"]:
    """Return whose kernels run on a device.

    >>> kernels_of("cpu"), kernels_of("H800")
    ('cpu', 'gpu')

    Raises:
        ValueError: it is neither of these, nor an accelerator's name.
    """
    if device == "cpu":
        return "cpu"
    if isinstance(device, str) and (device == "gpu" or device.lower() in ACCELERATORS):
        return "gpu"
    raise ValueError(
        f"device must be 'cpu', 'gpu' or one of {', '.join(ACCELERATORS)}; got "
        f"{device!r}. Set device='gpu', or add a row to data/hardware.csv."
    )


def with_rows(
    cfg: ModelConfig,
    step: Pass,
    layout: Layout,
    *,
    routing: Literal["paper", "physical"],
    imbalance: float,
) -> Pass:
    """Return the pass with the rows that its experts compute; see `routed_rows`.

    Raises:
        ValueError: no such routing, or ranks cannot be so busy.
    """
    require_choice({"routing": routing}, ROUTINGS)
    require_at_least({"imbalance": imbalance}, 1)
    if imbalance > 1:
        _require_possible(cfg, layout, imbalance)
    is_even = layout.n_ranks == 1 and routing == "physical" and imbalance == 1
    if cfg.moe is None or is_even:
        return step
    rows = rows_to_plan(
        cfg.moe, step.n_tokens, layout, routing=routing, imbalance=imbalance
    )
    return replace(step, n_rows=rows)


def _require_possible(cfg: ModelConfig, layout: Layout, imbalance: float) -> None:
    """Raise ValueError if one rank is to compute more than tokens can send to it.

    That is all of them, or what fewer experts than a token chooses can receive.
    """
    most = 1.0
    if cfg.moe is not None:
        most = min(layout.ep, cfg.moe.n_routed_experts / cfg.moe.n_activated_experts)
    if imbalance > most:
        raise ValueError(
            f"imbalance must be at most {most!r}, when one of ep={layout.ep} ranks "
            f"computes all that tokens can send to it; got {imbalance!r}. Set "
            f"imbalance={most!r} or less, or spread the experts over more ranks."
        )
