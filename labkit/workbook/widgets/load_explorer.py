"""The load explorer: a bias, a crowd of tokens, spare experts; who waits for whom.

    widgets.explore(draw, describe, caption="…", plan=LoadControls())

Choosing a setting puts the other controls where DeepSeek-V3 has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from ipywidgets import ValueWidget
from matplotlib.figure import Figure

from labkit.parallel import Placement, balance_experts, contiguous
from labkit.workbook.balance import idle, nodes_per_token
from labkit.workbook.crowd import N_EXPERTS, N_GROUPS, Crowd, busiest, steer
from labkit.workbook.figures.balance import load_view
from labkit.workbook.spelling import spell
from labkit.workbook.widgets.controls import LinkedControls, choice, steps, switch

Settings = Mapping[str, Any]
"""The controls' values, by the names of `LoadPlan`'s fields."""

GPUS_PER_NODE = 8

GAMMAS, SKEWS = (0, 1, 3, 10, 30, 100), (0, 25, 50, 75, 100, 150, 200)
LIMITS, SPARES = (1, 2, 4, 8), (0, 1, 2, 4, 8)


class Setting(NamedTuple):
    """Where DeepSeek-V3's experts work, and what it does about their load there."""

    n_gpus: int
    gamma: int
    skew: int
    n_limited: int
    spare: int
    words: str
    """What the report says of it."""


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        "training, 64 GPUs": Setting(
            *(64, 1, 100, 4, 0),
            words="DeepSeek-V3 trains with γ = 0.001 for 235,240 steps, 4 of 8 groups "
            "and no spare slot",
        ),
        "serving prompts, 32 GPUs": Setting(
            *(32, 0, 50, 4, 1),
            words="DeepSeek-V3 serves prompts with a frozen bias, 4 of 8 groups and 32 "
            "spare slots on 32 GPUs",
        ),
    }
)
"""DeepSeek-V3's report, sections 3.2, 3.4.1 and 4.2; the skew is ours, and the steps
are `RECIPES`'."""


class LoadControls(LinkedControls):
    """Controls over bias, crowd and placement, at DeepSeek-V3's training."""

    def __init__(self) -> None:
        super().__init__(_controls())

    def link(self, moved: str) -> None:
        """Put the others where DeepSeek-V3 has them in a setting."""
        if moved != "setting":
            return
        setting = SETTINGS[self.controls["setting"].value]
        for name in ("gamma", "skew", "n_limited", "spare"):
            self.controls[name].value = getattr(setting, name)
        self.controls["is_global"].value = False


def _controls() -> dict[str, ValueWidget]:
    return {
        "setting": choice("as DeepSeek-V3 in", list(SETTINGS)),
        "gamma": steps("bias rate γ", GAMMAS, value=1, unit="thousandths per step"),
        "skew": steps("skew of popularity", SKEWS, value=100, unit="%"),
        "n_limited": steps("node limit", LIMITS, value=4, unit="of 8 groups"),
        "spare": steps("replicas: spare slots", SPARES, value=0, unit="per GPU"),
        "is_global": switch("forget the nodes: global placement"),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """What the controls stand at, and what follows from them."""

    setting: str
    gamma: int
    """In thousandths."""

    skew: int
    """In per cent: how much wider popularity is than taste."""

    n_limited: int
    spare: int
    is_global: bool

    @property
    def n_gpus(self) -> int:
        return SETTINGS[self.setting].n_gpus

    @property
    def n_nodes(self) -> int:
        return self.n_gpus // GPUS_PER_NODE

    @property
    def crowd(self) -> Crowd:
        """What the bias made of the tokens' choices."""
        return _steer(self.skew, self.gamma, self.n_limited)

    def place(self, crowd: Crowd) -> tuple[Placement, Placement]:
        """Return the placement of a fresh model, and the balanced one."""
        sizes = {"n_gpus": self.n_gpus, "n_nodes": self.n_nodes}
        placed = balance_experts(
            torch.from_numpy(crowd.load)[None],
            n_replicas=N_EXPERTS + self.spare * self.n_gpus,
            n_groups=1 if self.is_global else N_GROUPS,
            **sizes,
        )
        return contiguous(1, N_EXPERTS, **sizes), placed


@lru_cache(maxsize=4)
def _steer(skew: int, gamma: int, n_limited: int) -> Crowd:
    """Return a crowd; what draws and what describes ask for the same one."""
    return steer(skew / 100, gamma / 1000, n_limited)


def draw(plan: Settings) -> Figure:
    """Return the figure for the controls' values."""
    chosen = LoadPlan(**plan)
    crowd = chosen.crowd
    fresh, placed = chosen.place(crowd)
    load = torch.from_numpy(crowd.load)[None]
    gpus = {
        name: (each.gpu_load(load)[0] / each.gpu_load(load)[0].mean()).tolist()
        for name, each in (("as they come", fresh), (_way(chosen), placed))
    }
    slowest = placed.imbalance(load).item()
    title = f"The slowest of {chosen.n_gpus} GPUs has {slowest:.2f} times the mean"
    return load_view(crowd.history, gpus, title=f"{title} to compute, once placed")


def describe(plan: Settings) -> str:
    """Return what the controls' values mean, in numbers."""
    chosen = LoadPlan(**plan)
    crowd = chosen.crowd
    fresh, placed = chosen.place(crowd)
    load = torch.from_numpy(crowd.load)[None]
    before, after = fresh.imbalance(load).item(), placed.imbalance(load).item()
    return (
        f"{_experts(chosen, crowd)} The slowest of {chosen.n_gpus} GPUs has "
        f"{before:.2f} times the mean if experts lie as they come, and {after:.2f} "
        f"times {_way(chosen)}{_slots(chosen)}: others wait "
        f"{100 * (1 - 1 / after):.0f} % of the time. {_reach(chosen, crowd, placed)} "
        f"({SETTINGS[chosen.setting].words}.)"
    )


def _experts(plan: LoadPlan, crowd: Crowd) -> str:
    """Return what the bias did to the experts' load."""
    last, n_idle = busiest(crowd.load), int(idle(torch.from_numpy(crowd.load)).sum())
    rest = f"{n_idle} of {N_EXPERTS} are idle."
    if not plan.gamma:
        return f"Without bias the busiest expert has {last:.1f} times the mean, {rest}"
    (_, before), *_, (_, after) = crowd.history
    return (
        f"γ = {plan.gamma / 1000:g}: in {len(crowd.loads)} steps the busiest expert "
        f"comes from {before:.1f} to {after:.1f} times the mean, {last:.1f} if the "
        f"bias freezes now; {rest}"
    )


def _way(plan: LoadPlan) -> str:
    return "placed globally" if plan.is_global else "placed by node"


def _slots(plan: LoadPlan) -> str:
    if not plan.spare:
        return " without a spare slot"
    return f" with {spell(plan.spare * plan.n_gpus)} spare slots"


def _reach(plan: LoadPlan, crowd: Crowd, placed: Placement) -> str:
    """Return how far tokens are sent."""
    reached = nodes_per_token(crowd.chosen, placed)
    return f"A token goes to {reached:.1f} of {plan.n_nodes} nodes."
