"""What the recompute chooser can be set to, and what each setting should cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from labkit.config import PRESETS, Layout, ModelConfig, TrainConfig
from labkit.hardware import accelerator
from labkit.memory import STATES, MemoryReport, States, predict
from labkit.memory.cost import StepTimes, step_times
from labkit.memory.recompute import block_policies
from labkit.workbook.recompute import kept_bytes

DEVICE = "h800"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A model, and the ranks that it is trained on."""

    preset: str
    ranks: str
    """As the status line calls the one that holds most."""

    layout: Layout = field(default_factory=Layout)
    device: Literal["cpu", "gpu"] = "gpu"
    states: States = STATES["deepseek-v3"]
    zero: int = 1
    n_micro_batches: int = 64
    micro_batch: int = 1
    seq_len: int = 4096

    @property
    def cfg(self) -> ModelConfig:
        return PRESETS[self.preset]

    @property
    def n_blocks(self) -> int:
        """Layers and MTP modules."""
        return self.cfg.n_layers + self.cfg.n_mtp

    def recipe(self, micro_batch: int, seq_len: int) -> TrainConfig:
        """Return the training recipe for a micro-batch of so many tokens."""
        return TrainConfig(
            micro_batch=micro_batch,
            global_batch=micro_batch * self.layout.dp * self.n_micro_batches,
            seq_len=seq_len,
            precision="fp32" if self.device == "cpu" else "bf16",
        )


MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "DeepSeek-V3, 671B on 2,048 GPUs": Machine(
            preset="v3-671b",
            ranks="the fullest of 2,048 ranks",
            layout=Layout(pp=16, dp=128, ep=64),
        ),
        "DeepSeek-V2-Lite, 16B on 16 GPUs": Machine(
            preset="v2-lite-16b",
            ranks="the fullest of 16 ranks",
            layout=Layout(pp=2, dp=8, ep=8),
            n_micro_batches=8,
        ),
        "small, on one CPU in FP32": Machine(
            preset="small",
            ranks="this CPU",
            device="cpu",
            states=STATES["trainer"],
            zero=0,
            n_micro_batches=1,
            micro_batch=4,
            seq_len=256,
        ),
    }
)

WHAT = MappingProxyType(
    {
        "norms, up-projections, SwiGLU": "selective",
        "attention": "attention",
        "experts": "moe",
        "whole blocks": "full",
    }
)
"""Policies by what they run again."""

OTHERS = MappingProxyType({"nothing": "none"} | dict(WHAT))

FIXED = MappingProxyType(
    {
        "none": "none",
        "every 4th": "every_k",
        "experts": "moe",
        "attention": "attention",
        "selective": "selective",
        "full": "full",
    }
)
"""Policies of the whole model that are drawn beside the chosen one, by name."""

EVERY = (1, 2, 3, 4, 6, 8, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What policies cost, predicted for one rank."""

    time: float
    """Extra time, as a share of a step without recompute."""

    peak: int
    kept: int
    lasting: int
    """Bytes of weights, gradients and optimizer, which no policy changes."""

    def beats(self, other: "Price") -> bool:
        """Return whether this takes less memory and no more time."""
        return self.peak < other.peak and self.time <= other.time


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputePlan:
    """What the chooser's controls stand at, and what follows from them."""

    model: str
    what: str
    k: int
    """The first of every k blocks runs it again."""

    others: str
    """What all other blocks run again."""

    micro_batch: int
    seq_len: int
    is_fp8: bool = False
    """Whether linear layers keep FP8 copies of what they read, as DeepSeek-V3's do."""

    is_kept: bool = False
    """Whether the figure shows what is kept, in place of the peak."""

    @property
    def machine(self) -> Machine:
        return MACHINES[self.model]

    @property
    def cfg(self) -> ModelConfig:
        """The machine's model, built for sequences as long as the chosen ones."""
        cfg = self.machine.cfg
        return replace(cfg, max_seq_len=max(cfg.max_seq_len, self.seq_len))

    @property
    def recipe(self) -> TrainConfig:
        return self.machine.recipe(self.micro_batch, self.seq_len)

    @property
    def policies(self) -> tuple[str, ...]:
        """The policy of each block."""
        what, others = WHAT[self.what], OTHERS[self.others]
        n = self.machine.n_blocks
        return tuple(others if i % self.k else what for i in range(n))

    def prices(self) -> tuple[Price, dict[str, Price]]:
        """Return the price of the chosen policies, and those of fixed ones by name."""
        times, n = self.times(), self.machine.n_blocks
        fixed = {
            name: self.price(block_policies(policy, n), times)
            for name, policy in FIXED.items()
        }
        return self.price(self.policies, times), fixed

    @property
    def cached(self) -> Literal["compute", "fp8"]:
        """How linear layers keep what they read; FP32 training has no FP8 copies."""
        return "fp8" if self.is_fp8 and self.machine.device == "gpu" else "compute"

    def times(self) -> StepTimes:
        """Return the times of a step's parts."""
        machine = self.machine
        return step_times(
            self.cfg,
            self.recipe,
            machine.layout,
            machine.device,
            states=machine.states,
            zero=machine.zero,
        )

    def price(self, policies: Sequence[str], times: StepTimes) -> Price:
        """Return the price of these policies, one per block."""
        report = self.predicted(policies)
        return Price(
            time=times.cost(policies),
            peak=report.peak,
            kept=kept_bytes(report),
            lasting=report.persistent,
        )

    def predicted(self, policies: Sequence[str]) -> MemoryReport:
        """Return the bytes of the fullest rank under these policies."""
        machine = self.machine
        return predict(
            self.cfg,
            self.recipe,
            machine.layout,
            machine.device,
            recompute=policies,
            states=machine.states,
            zero=machine.zero,
            cached=self.cached,
        )

    @property
    def capacity(self) -> int | None:
        """Memory of one GPU; a CPU's is not asked for."""
        if self.machine.device == "cpu":
            return None
        return accelerator(DEVICE).memory_bytes
