"""Bytes that last from step to step: weights, master copy, gradients, moments.

Their dtypes are a choice (`States`), and ZeRO shares them out between the ranks that
hold the same weights: dense ones `dp * cp`, experts `dp * cp * tp / ep`. This is
arithmetic on configs; a real model with its optimizer holds the same bytes, which a
test measures on a CPU. On a GPU it has not been compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from labkit.config import Layout, ModelConfig, TrainConfig
from labkit.config.checks import (
    named,
    require_choice,
    require_flag,
    require_instance,
)
from labkit.memory.shards import Bucket, Shards, shard_params
from labkit.memory.stages import Contents, Stage

STATE_BYTES = {"float32": 4, "bfloat16": 2, "int16": 2, "fp8": 1}
"""Bytes of one value, by the name of its dtype."""

SCALE_BYTES = 4
"""Of the FP32 scale that comes with each block of an FP8 weight."""

COUNTER_BYTES = 4
"""Of the step count, in FP32, that torch.optim.AdamW keeps with every tensor."""

BIAS_BYTES = 4
"""Of one router bias, FP32 in every model."""

SHARED_FROM: Mapping[str, int] = MappingProxyType(
    {"weights": 3, "master": 1, "gradients": 2, "moments": 1}
)
"""The stage of ZeRO from which each part is shared out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """Dtypes of what training keeps for each parameter; `Trainer`'s by default.

    >>> from dataclasses import replace
    >>> States().bytes_per_param, replace(States(), moments="bfloat16").bytes_per_param
    (16, 12)
    """

    weights: str = "float32"
    """What the model computes with. "fp8" is for the weights that an FP8 model keeps
    so, each block with its scale; the others are then BF16."""

    master: str | None = None
    """A second, finer copy that the optimizer updates. None updates `weights`
    themselves; "int16" keeps the 16 bits of FP32 that BF16 weights lack."""

    gradients: str = "float32"
    moments: str = "float32"
    """Dtype of both moments of AdamW."""

    has_buffer: bool = False
    """Whether gradients lie in a buffer that is there from step to step, as Megatron's
    do. Those of another dtype than the weights always do."""

    has_counters: bool = True
    """Whether the optimizer counts steps with every tensor, as torch.optim.AdamW
    does; others count once."""

    def __post_init__(self) -> None:
        floats = ("float32", "bfloat16")
        require_choice(named(self, "weights"), (*floats, "fp8"))
        require_choice(named(self, "gradients", "moments"), floats)
        require_flag(named(self, "has_buffer", "has_counters"))
        if self.master is not None:
            require_choice(named(self, "master"), ("float32", "int16"))
        if self.weights == "fp8" and self.master != "float32":
            raise ValueError(
                "master must be 'float32' when weights are 'fp8', because an update "
                f"is smaller than a step of FP8; got {self.master!r}. "
                "Set master='float32'."
            )
        if self.master == "int16" and self.weights != "bfloat16":
            raise ValueError(
                "master='int16' keeps what BF16 weights lack of FP32; got "
                f"weights={self.weights!r}. Set weights='bfloat16', or another master."
            )

    @property
    def bytes_per_param(self) -> int:
        """Bytes per parameter, without the scales of FP8 and step counts."""
        dtypes = [self.weights, self.gradients, self.moments, self.moments]
        if self.master is not None:
            dtypes.append(self.master)
        return sum(STATE_BYTES[dtype] for dtype in dtypes)


STATES: Mapping[str, States] = MappingProxyType(
    {
        "trainer": States(),
        "megatron": States(
            weights="bfloat16", master="float32", has_buffer=True, has_counters=False
        ),
        "deepseek-v3": States(
            weights="bfloat16",
            master="float32",
            moments="bfloat16",
            has_counters=False,
        ),
        "deepseek-v3-fp8": States(
            weights="fp8", master="float32", moments="bfloat16", has_counters=False
        ),
    }
)
"""States by name: those of `Trainer`, 16 bytes per parameter; Megatron's BF16
training, 18; DeepSeek-V3's report with BF16 weights, 14, and with FP8 weights, 13.

The report names the dtypes of all but the weights that last between two steps; FP8
ones, with a scale a block, are what its products read and what its checkpoint holds.
A transposed copy of them, which some kernels want, is not counted."""


def states_of(train: TrainConfig) -> States:
    """Return what `Trainer` keeps under a recipe: FP32, but for moments in BF16.

    >>> states_of(TrainConfig(moments="bf16-stochastic")).bytes_per_param
    12
    """
    require_instance({"train": train}, TrainConfig)
    is_exact = train.moments == "fp32"
    return States(moments="float32" if is_exact else "bfloat16")


def require_states(states: States) -> None:
    """Raise ValueError unless these are `States`, and not the name of some."""
    if isinstance(states, States):
        return
    name = states if isinstance(states, str) and states in STATES else "trainer"
    raise ValueError(
        "states must be the dtypes of what lasts, of type States; got "
        f"{states!r}. Set states=STATES[{name!r}], or build States(...)."
    )


def require_zero(zero: int) -> None:
    """Raise ValueError unless this is a stage of ZeRO."""
    if type(zero) is not int or not 0 <= zero <= 3:
        raise ValueError(
            "zero must be 0, 1, 2 or 3: ZeRO shares out nothing, optimizer states, "
            f"gradients too, weights too; got {zero!r}. Set zero=0 or another of these."
        )


def persistent(
    cfg: ModelConfig,
    layout: Layout,
    *,
    stage: Stage | None = None,
    states: States = STATES["trainer"],
    zero: int = 0,
) -> dict[str, int]:
    """Return the bytes of each lasting part on the fullest rank of a stage.

    Gradients are counted as at the end of a backward pass. Shares of ZeRO are rounded
    up, without the padding of buffers. A part without bytes is left out.

    Args:
        cfg: the model, its MTP modules included.
        layout: the cuts, and the ranks that hold copies.
        stage: one of `stage_layers`; None is the whole model.
        states: dtypes.
        zero: stage of ZeRO, what is shared out: nothing (0), optimizer states (1),
            gradients too (2), weights too (3).

    >>> from labkit.config import PRESETS
    >>> persistent(PRESETS["tiny"], Layout(dp=2), states=STATES["megatron"], zero=1)
    {'weights': 3619232, 'master': 3619104, 'gradients': 7238208, 'moments': 7238208}

    Raises:
        ValueError: the layout cuts through a head, an expert or a hidden unit, or
            `zero` is no stage.
    """
    require_instance({"cfg": cfg}, ModelConfig)
    require_instance({"layout": layout}, Layout)
    require_instance({"stage": stage}, Stage, optional=True)
    return state_bytes(shard_params(cfg, layout, stage), states=states, zero=zero)


def state_bytes(
    shards: Shards,
    *,
    states: States = STATES["trainer"],
    zero: int = 0,
) -> dict[str, int]:
    """Return the bytes of each lasting part of a rank's weights, as `persistent`.

    >>> from labkit.config import PRESETS
    >>> shards = shard_params(PRESETS["v3-671b"], Layout())
    >>> f"{sum(state_bytes(shards, states=STATES['deepseek-v3']).values()):.4e}"
    '9.5569e+12'
    """
    require_states(states)
    require_zero(zero)
    by_part = {}
    for part, first in SHARED_FROM.items():
        is_shared = zero >= first
        by_part[part] = 0
        for bucket in shards.buckets:
            n_shares = bucket.n_holders if is_shared else 1
            by_part[part] += -(-part_bytes(part, bucket, states) // n_shares)
    by_part["weights"] += BIAS_BYTES * shards.n_biases
    if states.has_counters:
        n_tensors = sum(bucket.n_tensors for bucket in shards.buckets)
        by_part["moments"] += COUNTER_BYTES * n_tensors
    return {part: n_bytes for part, n_bytes in by_part.items() if n_bytes}


def persistent_by_stage(
    cfg: ModelConfig,
    layout: Layout,
    stages: Sequence[Stage],
    *,
    states: States = STATES["trainer"],
    zero: int = 0,
) -> list[dict[str, int]]:
    """Return `persistent` of every stage; equal contents are worked out once.

    >>> from labkit.config import PRESETS
    >>> from labkit.memory.stages import stage_layers
    >>> v3, layout = PRESETS["v3-671b"], Layout(pp=16, dp=128, ep=64)
    >>> by_stage = persistent_by_stage(
    ...     v3, layout, stage_layers(v3, layout), states=STATES["deepseek-v3"], zero=1
    ... )
    >>> [round(sum(parts.values()) / 2**30, 1) for parts in by_stage[::5]]
    [18.1, 11.8, 11.8, 17.0]
    """
    known: dict[tuple[Contents, int], dict[str, int]] = {}
    by_stage = []
    for stage in stages:
        key = stage.contents(cfg), stage.n_copies
        if key not in known:
            known[key] = persistent(cfg, layout, stage=stage, states=states, zero=zero)
        by_stage.append(dict(known[key]))
    return by_stage


def part_bytes(part: str, bucket: Bucket, states: States) -> int:
    """Return the bytes of one part of a bucket, before ZeRO shares it out."""
    if part == "weights" and states.weights == "fp8":
        n_rest = bucket.n_params - bucket.n_fp8_params
        scales = SCALE_BYTES * bucket.n_fp8_blocks
        return bucket.n_fp8_params + scales + STATE_BYTES["bfloat16"] * n_rest
    dtype = getattr(states, part)
    if dtype is None:
        return 0
    n_values = bucket.n_params * (2 if part == "moments" else 1)
    return n_values * STATE_BYTES[dtype]
