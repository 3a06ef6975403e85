"""What a training step will need, by arithmetic: bytes by part, instant by instant.

On a CPU, one rank alone is compared with steps of a real Trainer, as `measure` counts
them. What is said of GPUs and of several ranks is compared with what others report of
theirs (`labkit.memory.comparison`), and with no run here. Not counted are what kernels
use inside themselves, and what allocators, libraries and the process need beside, of
which `labkit.memory.overheads` knows ranges.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from labkit.config import Layout, ModelConfig, TrainConfig
from labkit.config.checks import require_choice
from labkit.hardware import ACCELERATORS
from labkit.memory.activations import Load
from labkit.memory.persistent import STATES, States
from labkit.memory.ranks import rows_to_plan
from labkit.memory.recompute import block_policies
from labkit.memory.report import MemoryReport
from labkit.memory.stages import SCHEDULES
from labkit.memory.step_report import StepReport
from labkit.memory.tape import Pass

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What `TrainConfig.precision` names."""


def predict(  # noqa: PLR0913, each decides alone
    cfg: ModelConfig,
    train: TrainConfig,
    layout: Layout | None = None,
    device: str = "cpu",
    *,
    recompute: str | Sequence[str] = "none",
    zero: int = 0,
    states: States = STATES["trainer"],
    schedule: str = "1f1b",
    layers_per_stage: Sequence[int] | None = None,
    routing: Literal["paper", "physical"] = "physical",
    imbalance: float = 1.0,
    load: Load | None = None,
    cached: Literal["compute", "fp8"] = "compute",
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
        states: dtypes of what lasts.
        schedule: of the pipeline, as for `stage_layers`; one rank alone has none.
        layers_per_stage: as for `stage_layers`.
        routing: as for `routed_rows`.
        imbalance: as for `routed_rows`.
        load: tokens of each expert in a micro-batch, a row per router, as
            `LossParts.load.tolist()` gives it; None takes even routing. For one
            rank alone.
        cached: how linear layers in blocks keep what they read: as they compute, or
            "fp8" as DeepSeek-V3 does, which `fp8_tape` describes. That takes BF16
            products, and is arithmetic on any device: no kernel here does it yet.

    >>> from labkit.config import PRESETS
    >>> report = predict(PRESETS["tiny"], TrainConfig(micro_batch=4))
    >>> report.peak_instant.name, f"{report.peak / 2**20:.0f} MiB"
    ('backward', '82 MiB')

    Raises:
        ValueError: the layout, the schedule or the policy does not fit the model, or
            the batch and its sequences the layout; no device has this name; FP8 is to
            be kept of FP32; or a load is given for several ranks.
    """
    layout = layout or Layout()
    require_choice({"schedule": schedule}, SCHEDULES)
    if load is not None and layout.n_ranks > 1:
        raise ValueError(
            "load is that of one rank alone; got a layout of "
            f"{layout.n_ranks} ranks. Leave load out, and give imbalance instead."
        )
    step = rank_pass(cfg, train, layout, device, states=states)
    if cached != "compute":
        step = replace(step, cached=cached)
    if layout.n_ranks > 1 or routing != "physical" or imbalance != 1:
        step = with_rows(cfg, step, layout, routing=routing, imbalance=imbalance)
    report = StepReport(
        cfg=cfg,
        train=train,
        layout=layout,
        step=step,
        states=states,
        zero=zero,
        policies=_policies(cfg, recompute),
    )
    cut = None if layers_per_stage is None else tuple(layers_per_stage)
    if layout.pp == 1:
        return report.alone(load, cut)
    return report.pipeline(schedule, cut)


def _policies(cfg: ModelConfig, recompute: str | Sequence[str]) -> tuple[str, ...]:
    """Return the policy of each block, as `apply_recompute` would take it."""
    policies = block_policies(recompute, cfg.n_layers + cfg.n_mtp)
    if "moe" in policies and cfg.n_moe_layers + cfg.n_mtp * (cfg.moe is not None) == 0:
        raise ValueError(
            "policy 'moe' runs experts again, so the model must have some; got a dense "
            "model. Choose 'selective', 'attention' or 'full'."
        )
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
        ValueError: ranks cannot take equal parts, or no device has this name.
    """
    _require_shares(train, layout)
    is_exact = states.weights == "float32"
    return Pass(
        batch=min(train.micro_batch, -(-train.global_batch // layout.dp)),
        seq_len=train.seq_len // layout.cp,
        weights=torch.float32 if is_exact else torch.bfloat16,
        compute=DTYPES[train.precision] if is_exact else torch.bfloat16,
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
    if device == "gpu" or device.lower() in ACCELERATORS:
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
    """Return the pass with the rows that its experts compute; see `routed_rows`."""
    if cfg.moe is None:
        return step
    rows = rows_to_plan(
        cfg.moe, step.n_tokens, layout, routing=routing, imbalance=imbalance
    )
    return replace(step, n_rows=rows)
