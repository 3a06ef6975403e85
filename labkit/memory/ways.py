"""Single ways to make a training step need less, from the cheapest of each kind on."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from labkit.config import Layout, ModelConfig, TrainConfig
from labkit.config.checks import require_choice
from labkit.memory.budget import budget
from labkit.memory.cost import StepTimes, step_times
from labkit.memory.overheads import overheads
from labkit.memory.persistent import States, states_of
from labkit.memory.predict import predict
from labkit.memory.recompute import RECOMPUTE_POLICIES, block_policies
from labkit.memory.report import MemoryReport

UNCERTAINTY = 0.05
"""Share by which a measured peak may pass the predicted one; what fits still does so
then, with the most of all overheads. It is what the tests of `predict` allow."""

LEAST_SHARE = 0.25
"""Of the present sequence: to learn from less is no remedy any more."""

MOST_SPELLED = 12
"""Of more blocks, policies are counted instead of listed."""

ROUND = 16
"""Shorter sequences are multiples of it."""

OF_TRAIN = ("micro_batch", "seq_len", "precision")
OF_LAYOUT = ("pp", "ep")


class Plan(NamedTuple):
    """A step that may be changed, and the bytes it may take."""

    cfg: ModelConfig
    capacity: int
    arguments: Mapping[str, Any]
    """Of `predict`."""

    def but(self, **changes: Any) -> "Plan":  # noqa: ANN401, of any argument
        """Return the plan with other arguments, or fields of recipe and layout."""
        changes = {**self.arguments, **changes}
        for owner, fields in (("train", OF_TRAIN), ("layout", OF_LAYOUT)):
            own = {name: changes.pop(name) for name in fields if name in changes}
            if own:
                changes[owner] = replace(getattr(self, owner), **own)
        return self._replace(arguments=changes)

    @property
    def train(self) -> TrainConfig:
        """The recipe."""
        return self.arguments["train"]

    @property
    def layout(self) -> Layout:
        """Degrees of parallelism, also of one rank."""
        return self.arguments["layout"] or Layout()

    @property
    def states(self) -> States:
        """Dtypes of what lasts."""
        return self.arguments.get("states") or states_of(self.train)

    @property
    def policies(self) -> tuple[str, ...]:
        """The recompute policy of each block."""
        policy = self.arguments.get("recompute", "none")
        return block_policies(policy, self.cfg.n_layers + self.cfg.n_mtp)

    @property
    def is_bf16(self) -> bool:
        """Whether products are computed in BF16."""
        return self.train.precision == "bf16" or self.states.weights != "float32"

    def report(self) -> MemoryReport:
        """Return what the step needs."""
        return predict(self.cfg, **self.arguments)

    def takes(self, **changes: Any) -> bool:  # noqa: ANN401, of any argument
        """Return whether the step with other arguments fits."""
        changed = self.but(**changes)
        return changed.holds(changed.report())

    def holds(self, report: MemoryReport) -> bool:
        """Return whether what was predicted surely is within the capacity."""
        more = overheads(report, self.layout, self.arguments["device"])
        return report.peak * (1 + UNCERTAINTY) + more.high <= self.capacity

    def room(self) -> int:
        """Return about the highest peak that holds: gaps grow with it, alone."""
        report = self.report()
        more = overheads(report, self.layout, self.arguments["device"])
        gaps = more.fragmentation.high
        share = 1 + UNCERTAINTY + gaps / report.peak
        return int((self.capacity - more.high + gaps) / share)

    def takes_micro_batch(self, size: int) -> bool:
        """Return whether a step of micro-batches of this size fits."""
        train, dp = self.train, self.layout.dp
        n = -(-train.global_batch // (train.micro_batch * dp))
        if size < train.micro_batch:
            n = max(n, 2)
        return self.takes(
            train=replace(train, micro_batch=size, global_batch=size * dp * n)
        )

    def times(self) -> StepTimes:
        """Return the times of the step's parts."""
        return step_times(self.cfg, **self.arguments)

    def extra_time(self, other: "Plan") -> float:
        """Return the share of this step's time that another one adds."""
        times, others = self.times(), other.times()
        return others.total(other.policies) / times.total(self.policies) - 1


class Way(NamedTuple):
    """A change that might help, before it is priced."""

    kind: str
    change: str
    cost: str
    changes: Mapping[str, Any]
    """As `Plan.but` takes them."""


def largest(takes: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the largest number from `low` to `high` that fits, if all below it do.

    >>> largest(lambda n: n * n < 40, 1, 1000), largest(lambda n: n > 9, 1, 1000)
    (6, None)
    """
    if high < low or not takes(low):
        return None
    while low < high:
        # From below, because steps far too large take longest to predict.
        middle = min(2 * low, (low + high + 1) // 2)
        if takes(middle):
            low = middle
        else:
            high = middle - 1
    return low


Ways = Iterator[tuple[str, str, Mapping[str, Any]]]
"""Change and cost in words, and what `Plan.but` takes; from the cheapest on."""


def _smaller_micro_batches(plan: Plan) -> Ways:
    train, dp = plan.train, plan.layout.dp
    for size in range(train.micro_batch - 1, 0, -1):
        if train.global_batch % (size * dp) == 0:
            n = train.global_batch // (size * dp)
            cost = f"the same global_batch from {n} of them; operators start more often"
            yield f"micro_batch={size}", cost, {"micro_batch": size}


def _more_recompute(plan: Plan) -> Ways:
    n, times = len(plan.policies), plan.times()
    has_experts = plan.cfg.moe is not None
    names = [name for name in RECOMPUTE_POLICIES if has_experts or name != "moe"]
    names.sort(key=lambda name: times.total(block_policies(name, n)))
    for policy in (*_mixtures(plan), *names):
        yield f"recompute={_spelled(policy)}", "the same results", {"recompute": policy}


def _mixtures(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield the cheapest policy of each block that fits, if they are not all one."""
    room = plan.room()
    if plan.but(recompute="full").report().peak > room:
        return  # nothing needs much less
    arguments = {k: v for k, v in plan.arguments.items() if k != "recompute"}
    policies = budget(room, plan.cfg, **arguments)
    if len({*policies}) > 1:
        yield policies


def _spelled(policy: str | tuple[str, ...]) -> str:
    """Return a policy as it is written, or how many blocks are under which."""
    if isinstance(policy, str) or len(policy) <= MOST_SPELLED:
        return repr(policy)
    counts = Counter(policy).most_common()
    return f"[{', '.join(f'{n} x {name!r}' for name, n in counts)}]"


def _bf16_products(plan: Plan) -> Ways:
    if not plan.is_bf16:
        cost = "products are rounded to BF16"
        yield "precision='bf16'", cost, {"precision": "bf16"}


def _bf16_moments(plan: Plan) -> Ways:
    if plan.states.moments != "bfloat16":
        states = replace(plan.states, moments="bfloat16")
        cost = "moments are rounded to BF16"
        yield "states with moments='bfloat16'", cost, {"states": states}


def _fp8_activations(plan: Plan) -> Ways:
    if plan.is_bf16 and plan.arguments.get("cached", "compute") == "compute":
        cost = "what linear layers keep is rounded to FP8"
        yield "cached='fp8'", cost, {"cached": "fp8"}


def _higher_zero(plan: Plan) -> Ways:
    costs = {
        1: "sends as much as before: gradients are scattered, weights gathered",
        2: "a message for each micro-batch's gradients",
        3: "weights are gathered for each forward and each backward",
    }
    if plan.layout.dp * plan.layout.cp > 1:
        for zero in range(plan.arguments.get("zero", 0) + 1, 4):
            yield f"zero={zero}", costs[zero], {"zero": zero}


def _more_expert_ranks(plan: Plan) -> Ways:
    layout, moe = plan.layout, plan.cfg.moe
    ep, n_places = 2 * layout.ep, layout.dp * layout.cp * layout.tp
    while moe is not None and n_places % ep == 0 and moe.n_routed_experts % ep == 0:
        yield f"ep={ep}", "rows are exchanged among more ranks", {"ep": ep}
        ep *= 2


def _more_stages(plan: Plan) -> Ways:
    if plan.arguments["layout"] is None or plan.arguments.get("layers_per_stage"):
        return
    layout, pp = plan.layout, 2 * plan.layout.pp
    while pp * layout.vpp <= plan.cfg.n_layers:
        n_ranks = replace(layout, pp=pp).n_ranks
        cost = f"{n_ranks:,} ranks, activations sent between stages, a longer bubble"
        yield f"pp={pp}", cost, {"pp": pp}
        pp *= 2


def _shorter_sequences(plan: Plan) -> Ways:
    present, unit = plan.train.seq_len, ROUND * plan.layout.cp
    low, high = math.ceil(LEAST_SHARE * present / unit), (present - 1) // unit
    n = largest(lambda n: plan.takes(seq_len=n * unit), max(low, 1), high)
    if n is not None:
        share = f"{n * unit / present:.0%}"
        cost = f"learns from shorter text, {share} of the tokens a step"
        yield f"seq_len={n * unit}", cost, {"seq_len": n * unit}


class Kind(NamedTuple):
    """Ways that change the same thing."""

    ways: Callable[[Plan], Ways]
    level: int
    """What is given up: 0 time alone, 1 digits of numbers, 2 more ranks or another
    spread over them, 3 what is learnt."""


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "micro_batch": Kind(_smaller_micro_batches, 0),
        "zero": Kind(_higher_zero, 0),
        "recompute": Kind(_more_recompute, 0),
        "precision": Kind(_bf16_products, 1),
        "moments": Kind(_bf16_moments, 1),
        "activations": Kind(_fp8_activations, 1),
        "expert ranks": Kind(_more_expert_ranks, 2),
        "stages": Kind(_more_stages, 2),
        "seq_len": Kind(_shorter_sequences, 3),
    }
)
"""What may be changed, what gives up least first."""


def require_kinds(kinds: object) -> None:
    """Raise ValueError unless these are names in `KINDS`."""
    if isinstance(kinds, str) or not isinstance(kinds, Sequence):
        raise ValueError(
            "kinds must be a sequence of names, which may be tried in turn; got "
            f"{kinds!r}. Set kinds=('recompute',) or others of {', '.join(KINDS)}."
        )
    for kind in kinds:
        require_choice({"kinds": kind}, tuple(KINDS))


TIMED = frozenset({"micro_batch", "recompute"})
"""Kinds with the same operators on the same device, whose times can be compared.

Small micro-batches take longer than that: each operator starts more often, and its
products are smaller."""
