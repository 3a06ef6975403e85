"""What a training step will need, by arithmetic: bytes by part, instant by instant.

On a CPU, one rank alone is compared with steps of a real Trainer, as `measure` counts
them. What is said of GPUs and of several ranks has been compared with no run. Not
counted are what kernels use inside themselves, and what allocators add by rounding and
fragments.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch

from labkit.config import Layout, ModelConfig, TrainConfig
from labkit.memory.activations import Load, bytes_by_module
from labkit.memory.measure import AFTER_BACKWARD, BACKWARD, FORWARD, OPTIMIZER
from labkit.memory.persistent import persistent
from labkit.memory.playback import fullest_instant, kept_by_part
from labkit.memory.recompute_kept import kept_tape
from labkit.memory.replay import rebuilt_casts, replay_tape
from labkit.memory.report import Instant, MemoryReport
from labkit.memory.tape import EXACT_BYTES, INDEX_BYTES, Kept, Op, Pass

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What `TrainConfig.precision` names."""


def predict(
    cfg: ModelConfig,
    train: TrainConfig,
    device: Literal["cpu", "gpu"] = "cpu",
    *,
    recompute: str | Sequence[str] = "none",
    load: Load | None = None,
) -> MemoryReport:
    """Return what one rank alone holds over a step of `Trainer` that is not its first.

    Instants have the names that `measure` gives them. With several micro-batches they
    are those of the last one, which finds the gradients of the others. Clipping and
    fused AdamW work in place, and so need no bytes of their own.

    Args:
        cfg: the model.
        train: batch, sequence and precision.
        device: whose kernels run.
        recompute: the policy, as for `apply_recompute`.
        load: tokens of each expert in a micro-batch, a row per router, as
            `LossParts.load.tolist()` gives it; None takes even routing.

    >>> from labkit.config import PRESETS
    >>> report = predict(PRESETS["tiny"], TrainConfig(micro_batch=4))
    >>> report.peak_instant.name, f"{report.peak / 2**20:.0f} MiB"
    ('backward', '82 MiB')
    """
    step = Pass(
        batch=train.micro_batch,
        seq_len=train.seq_len,
        compute=DTYPES[train.precision],
        device=device,
    )
    lasting = Counter(persistent(cfg, Layout()))
    gradients = Counter(gradients=lasting.pop("gradients"))
    lasting["temporaries"] = batch_bytes(train)
    is_accumulated = train.n_micro_batches > 1
    waiting = lasting + gradients if is_accumulated else lasting
    tape = [*replay_tape(cfg, step, recompute, load=load), *copied_targets(step)]
    left = [*kept_tape(cfg, step, recompute, load=load), *copied_targets(step)]
    kept = waiting + Counter(kept_by_part(tape))
    played = Counter(fullest_instant(tape, has_gradients=is_accumulated))
    unkept = Counter(logits=unkept_logits(cfg, step), temporaries=rebuilt_casts(tape))
    instants = {
        "start": lasting - Counter(temporaries=batch_bytes(train)),
        FORWARD: kept + unkept,
        "end of forward": kept,
        BACKWARD: lasting + played,
        AFTER_BACKWARD: lasting + gradients,
        OPTIMIZER: lasting + gradients,
    }
    return MemoryReport(
        timeline=tuple(
            Instant(name=name, by_part=dict(live)) for name, live in instants.items()
        ),
        by_module=bytes_by_module(left),
    )


def batch_bytes(train: TrainConfig) -> int:
    """Return the bytes of a step's tokens, whose targets are a view one further."""
    return train.global_batch * (train.seq_len + 1) * INDEX_BYTES


def copied_targets(step: Pass) -> list[Op]:
    """Return what the loss keeps of targets that it copies, to have them in a row.

    They are views of windows one token longer: those of a single window are in a row.
    """
    if step.batch == 1:
        return []
    return [Op("loss", (Kept("targets", step.n_tokens * INDEX_BYTES),))]


def unkept_logits(cfg: ModelConfig, step: Pass) -> int:
    """Return the bytes of logits that live beside the log-probabilities made of them.

    Those of the last loss, which is computed when most is kept already: the head's
    result and, unless that is FP32, a copy which is.
    """
    n_logits = step.batch * (step.seq_len - cfg.n_mtp) * cfg.vocab_size
    copy = EXACT_BYTES if step.compute != torch.float32 else 0
    return n_logits * (step.compute.itemsize + copy)
