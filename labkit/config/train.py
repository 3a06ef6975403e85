"""How a model is trained: batch, optimizer, schedule, precision."""

from dataclasses import dataclass
from typing import Literal

from labkit.config.checks import (
    named,
    require_above,
    require_at_least,
    require_choice,
    require_fraction,
    require_name,
    require_whole,
)

LARGEST_BF16_BETA = 257 / 258
"""Beyond it, a moment that is rounded to the nearest BF16 number may never fall.

BF16 has 8 bits of significand: between a power of two and the next lie 127 numbers.
Without gradients `m` becomes `beta * m`, and is itself again if that is nearer to `m`
than to the number below. It is hardest to leave 129/128, for 128/128: half way between
them is 257/256, and a tie goes to the even one.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Recipe of a run; the defaults train the small presets on a CPU."""

    n_steps: int = 200
    """Optimizer steps."""

    global_batch: int = 8
    """Sequences per optimizer step, over all ranks and micro-batches."""

    micro_batch: int = 8
    """Sequences per forward pass on one rank; accumulation makes up the rest."""

    seq_len: int = 256
    """Tokens per sequence."""

    lr: float = 3e-3
    """Peak learning rate (DeepSeek-V3: 2.2e-4)."""

    min_lr: float = 3e-4
    """Learning rate after the cosine (DeepSeek-V3: 2.2e-5)."""

    final_lr: float | None = None
    """Learning rate of the last `final_fraction` (DeepSeek-V3: 7.3e-6); None keeps
    `min_lr`."""

    warmup_steps: int = 20
    """Steps of linear warm-up (DeepSeek-V3: 2000)."""

    constant_fraction: float = 0.676
    """Share of `n_steps` before the cosine begins (DeepSeek-V3: 10T of 14.8T)."""

    cosine_fraction: float = 0.29
    """Share of `n_steps` that the cosine takes (DeepSeek-V3: 4.3T of 14.8T)."""

    final_fraction: float = 0.011
    """Last share of `n_steps`, at `final_lr` (DeepSeek-V3: 167B of 14.8T)."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    """AdamW epsilon; the report does not publish its own."""

    weight_decay: float = 0.1
    grad_clip: float = 1.0
    """Largest global gradient norm."""

    bias_update_rate: float = 1e-3
    """Rate gamma of the balancing bias (DeepSeek-V3, section 4.2)."""

    bias_freeze_fraction: float = 0.034
    """Last share of `n_steps` with gamma 0 (DeepSeek-V3: 500B of 14.8T)."""

    mtp_final_scale: float = 1 / 3
    """Factor on the MTP weight lambda once the constant phase ends (DeepSeek-V3:
    0.3 for the first 10T tokens, then 0.1)."""

    precision: Literal["fp32", "bf16", "fp8"] = "fp32"
    """In what matrices multiply; master weights are FP32 in any case. "fp8" is BF16 but
    for the layers that `fp8_policy` names."""

    fp8_policy: str = "deepseek-v3"
    """Which layers are in FP8 if `precision` says so: a name of
    `labkit.precision.POLICIES`."""

    moments: Literal["fp32", "bf16", "bf16-stochastic"] = "fp32"
    """In what AdamW keeps its moments, beside FP32 weights and gradients. "bf16" rounds
    to the nearest number, as DeepSeek-V3 does (section 3.3.3), and needs
    `beta1` and `beta2` up to 257/258; "bf16-stochastic" rounds up or down at random,
    right on average, and takes any."""

    seed: int = 0
    """Decides the order of windows, and the stochastic rounding; 0 up to 2**63 - 1."""

    def __post_init__(self) -> None:
        sizes = ("n_steps", "global_batch", "micro_batch", "seq_len")
        require_whole(named(self, *sizes))
        require_choice(named(self, "precision"), ("fp32", "bf16", "fp8"))
        require_name(named(self, "fp8_policy"))
        require_fraction(named(self, "beta1", "beta2"))
        self._check_moments()
        self._check_phases()
        self._check_rates()
        require_whole(named(self, "seed"), at_least=0)
        if self.seed >= 2**63:
            raise ValueError(
                f"seed must be below 2**63; got {self.seed}. Set seed=0 or another."
            )
        if self.global_batch % self.micro_batch:
            raise ValueError(
                "micro_batch must divide global_batch; got "
                f"{self.micro_batch} and {self.global_batch}. "
                f"Set global_batch={self.n_micro_batches * self.micro_batch}."
            )

    def _check_moments(self) -> None:
        kinds = ("fp32", "bf16", "bf16-stochastic")
        require_choice(named(self, "moments"), kinds)
        if self.moments != "bf16":
            return
        for name, beta in named(self, "beta1", "beta2").items():
            if beta > LARGEST_BF16_BETA:
                raise ValueError(
                    f"{name} must be at most 257/258 = {LARGEST_BF16_BETA:.4f} with "
                    f"moments='bf16', or a rounded moment never falls; got {beta!r}. "
                    f"Set {name}=0.95 or moments='bf16-stochastic'."
                )

    def _check_phases(self) -> None:
        phases = named(self, "constant_fraction", "cosine_fraction", "final_fraction")
        require_fraction(phases | named(self, "bias_freeze_fraction"))
        require_whole(named(self, "warmup_steps"), at_least=0)
        total = sum(phases.values())
        if total > 1 + 1e-9:  # decimal fractions that sum to 1 may round above it
            raise ValueError(
                "constant_fraction, cosine_fraction and final_fraction share the "
                f"steps and must sum to at most 1; got {total:g}. "
                f"Lower one of them by {total - 1:g}."
            )

    def _check_rates(self) -> None:
        require_above(named(self, "lr", "min_lr", "eps", "grad_clip"), 0)
        factors = ("weight_decay", "bias_update_rate", "mtp_final_scale")
        require_at_least(named(self, *factors), 0)
        if self.min_lr > self.lr:
            raise ValueError(
                f"min_lr must be at most lr; got {self.min_lr} and {self.lr}. "
                f"Set min_lr={self.lr / 10:g}."
            )
        if self.final_lr is None:
            return
        require_above(named(self, "final_lr"), 0)
        if self.final_lr > self.min_lr:
            raise ValueError(
                f"final_lr must be at most min_lr; got {self.final_lr} and "
                f"{self.min_lr}. Set final_lr=None to keep min_lr."
            )

    @property
    def n_micro_batches(self) -> int:
        """Micro-batches per step on one rank, before data parallelism shares them."""
        return -(-self.global_batch // self.micro_batch)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees.

        >>> TrainConfig(global_batch=15360, micro_batch=1, seq_len=4096).tokens_per_step
        62914560
        """
        return self.global_batch * self.seq_len
