"""What the schedule viewer can be set to, and what follows: who waits, who keeps what.

Time is counted in forward passes of a rank's layers, so that one of `vpp` chunks takes
1 / vpp; a backward pass computes twice as long, half of it for weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import NamedTuple

from labkit.config import PRESETS, Layout, TrainConfig
from labkit.memory import STATES, predict
from labkit.parallel.pipeline import Timeline, Times, orders, timeline_of

GB = 10**9


class Schedule(NamedTuple):
    """A schedule as `labkit.parallel.pipeline` knows it."""

    name: str
    vpp: int = 1
    says: str = ""
    """What else there is to know of it."""


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "GPipe": Schedule("gpipe"),
        "1F1B": Schedule("1f1b"),
        "1F1B, interleaved": Schedule(
            "1f1b", 2, "Each micro-batch is sent between ranks twice as often."
        ),
        "zero bubble": Schedule("zero-bubble"),
        "ZB-V": Schedule(
            "zbv", 2, "Ranks start and end askew, and update without waiting."
        ),
        "DualPipe": Schedule(
            "dualpipe", 1, "Every stage is on two ranks, its weights too."
        ),
        "DualPipeV": Schedule("dualpipev", 2),
    }
)

MODEL = "v3-671b"
RECIPE = TrainConfig(micro_batch=1, global_batch=64, seq_len=4096, precision="bf16")


@lru_cache
def layer_bytes() -> int:
    """Return what one layer of DeepSeek-V3 keeps of one sequence, predicted.

    A layer with experts, which are over 64 ranks, with the recompute of its report.
    """
    report = predict(
        PRESETS[MODEL],
        RECIPE,
        Layout(dp=64, ep=64),
        "h800",
        recompute="selective",
        states=STATES["deepseek-v3"],
    )
    last = PRESETS[MODEL].n_layers - 1
    of_layer = (
        n for name, n in report.by_module.items() if name.startswith(f"layers.{last}.")
    )
    return sum(of_layer)


class Shares(NamedTuple):
    """Of the time of all ranks together."""

    computing: float
    sending: float
    """Passes that are held up by communication which nothing hides."""

    waiting: float


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """What the viewer's controls stand at, and what follows from them."""

    schedule: str
    pp: int
    micro_batches: int

    sent: int = 0
    """Communication within each pass, in percent of a forward pass's computation."""

    tail: int = 0
    """Work of the last stage beside its layers, in percent of a rank's."""

    @property
    def kind(self) -> Schedule:
        return SCHEDULES[self.schedule]

    @cached_property
    def n(self) -> int:
        """Micro-batches that the schedule can run: at least as many as asked for."""
        n = self.micro_batches
        while self._refusal(n):
            n += 1
        return n

    def _refusal(self, n: int) -> str:
        """Return why the schedule cannot run so many micro-batches; "" if it can."""
        try:
            orders(self.kind.name, self.pp, n, vpp=self.kind.vpp)
        except ValueError as error:
            return str(error)
        return ""

    @cached_property
    def times(self) -> Times:
        """What a virtual stage takes."""
        vpp, sent = self.kind.vpp, self.sent / 100
        n_stages = self.pp * vpp

        def of(work: float, tail: float) -> tuple[float, ...]:
            return (*((work / vpp,) * (n_stages - 1)), work / vpp + tail)

        tail = self.tail / 100
        return Times(
            f=of(1 + sent, tail),
            b=of(2 + sent, 2 * tail),
            w=of(1, tail),
            hidden=2 * sent / vpp,
        )

    @cached_property
    def timeline(self) -> Timeline:
        order = orders(self.kind.name, self.pp, self.n, vpp=self.kind.vpp)
        return timeline_of(order, self.times)

    @property
    def computing(self) -> float:
        """Time that all ranks compute in a step, whatever the schedule."""
        return self.n * 3 * (self.pp + self.tail / 100)

    @cached_property
    def shares(self) -> Shares:
        """How the ranks' time is spent."""
        whole = self.pp * self.timeline.seconds
        busy = sum(self.timeline.busy)
        return Shares(
            computing=self.computing / whole,
            sending=(busy - self.computing) / whole,
            waiting=1 - busy / whole,
        )

    @cached_property
    def kept(self) -> tuple[float, ...]:
        """Micro-batches of which each rank keeps all its layers, at most."""
        return tuple(
            sum(self.timeline.peak_live(rank).values()) / self.kind.vpp
            for rank in range(self.pp)
        )

    @property
    def kept_gb(self) -> tuple[float, ...]:
        """GB of activations that each rank of DeepSeek-V3 keeps, at most."""
        each = PRESETS[MODEL].n_layers / self.pp * layer_bytes() / GB
        return tuple(each * n for n in self.kept)

    @property
    def note(self) -> str:
        """Why other micro-batches are drawn than were asked for; "" if not."""
        if self.n == self.micro_batches:
            return ""
        rule = self._refusal(self.micro_batches).partition(";")[0]
        rule = rule.replace(f"schedule={self.kind.name!r}", self.schedule)
        return f"{rule}: drawn with {self.n}, not {self.micro_batches}."
