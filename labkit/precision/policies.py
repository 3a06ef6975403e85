"""Which operators are to run in FP8, and why: policies of articles, and of DeepSeek.

A policy says what each class of operators gets, and which of them are exceptions. It
knows nothing of devices. "bf16" leaves an operator as a BF16 run has it, in which sums
of norms, of softmax and of the router are in FP32 anyhow.

DeepSeek-V3's own policy is static: its scales follow the data, its formats do not.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from labkit.config.checks import require_choice, require_instance, require_whole
from labkit.precision.operators import PARTS, Operator
from labkit.precision.quantize import SCALES

COMPUTE = ("fp8", "bf16")

KEPT = ("e4m3", "e5m6", "bf16")

LAYERS = ("all", "first", "last", "ends")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What operators get, and why."""

    compute: str
    """One of `COMPUTE`: in which they multiply, or send."""

    reason: str

    kept: str | None = None
    """One of `KEPT`: in which the backward finds their input; None: as they compute."""

    def __post_init__(self) -> None:
        require_choice({"compute": self.compute}, COMPUTE)
        if self.kept is not None:
            require_choice({"kept": self.kept}, KEPT)

    @property
    def input_format(self) -> str:
        """Format of the input that is kept.

        >>> Choice(compute="fp8", reason="a linear layer").input_format
        'e4m3'
        """
        return self.kept or {"fp8": "e4m3", "bf16": "bf16"}[self.compute]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """An exception: operators that get something else than their class."""

    words: tuple[str, ...]
    """Any of these in its name makes an operator one of them: `wo`, `attn`, `mtp`."""

    choice: Choice

    layers: str = "all"
    """One of `LAYERS`: which of the main ones it holds for."""

    n_layers: int = 0
    """How many layers, at either end, "first", "last" and "ends" are."""

    def __post_init__(self) -> None:
        unknown = [word for word in self.words if word not in PARTS]
        if unknown or not self.words:
            raise ValueError(
                f"words must be among {', '.join(PARTS)}; got {self.words!r}. A rule "
                "that matches nothing would leave an operator as its class is."
            )
        require_instance({"choice": self.choice}, Choice)
        require_choice({"layers": self.layers}, LAYERS)
        if self.layers != "all":
            require_whole({"n_layers": self.n_layers})

    def matches(self, op: Operator, n_layers: int) -> bool:
        """Return whether this is one of them, in a model of so many main layers."""
        if set(self.words).isdisjoint(op.words):
            return False
        if self.layers == "all":
            return True
        if op.depth is None or op.depth >= n_layers:
            return False
        is_first = self.layers != "last" and op.depth < self.n_layers
        is_last = self.layers != "first" and op.depth >= n_layers - self.n_layers
        return is_first or is_last


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionPolicy:
    """What each operator of any model gets."""

    name: str
    critical: Choice
    dense: Choice
    sparse: Choice

    rules: tuple[Rule, ...] = ()
    """Exceptions; the first that matches holds."""

    scale: str = "po2"
    """One of `SCALES`: powers of two, in a byte each, or FP32."""

    def __post_init__(self) -> None:
        classes = {"critical": self.critical, "dense": self.dense}
        require_instance(classes | {"sparse": self.sparse}, Choice)
        require_choice({"scale": self.scale}, SCALES)

    def choose(self, op: Operator, n_layers: int) -> Choice:
        """Return what an operator gets in a model of so many main layers.

        >>> from labkit.config import PRESETS
        >>> from labkit.precision.operators import operators
        >>> by_name = {op.name: op for op in operators(PRESETS["tiny"])}
        >>> POLICIES["deepseek-v3"].choose(by_name["layers.0.attn.wo"], 4).input_format
        'e5m6'
        """
        for rule in self.rules:
            if rule.matches(op, n_layers):
                return rule.choice
        return getattr(self, op.precision_class)


def _bf16(reason: str) -> Choice:
    return Choice(compute="bf16", reason=reason)


def _fp8(reason: str) -> Choice:
    return Choice(compute="fp8", reason=reason)


SENSITIVE = _bf16("sensitive: its rounding reaches all that follows")

LINEAR = _fp8("a linear layer: most of the work, and it bears the rounding")

SWIGLU_KEPT = Rule(
    words=("swiglu",),
    choice=Choice(
        compute="bf16",
        kept="e4m3",
        reason="its inputs are cached in FP8, its product is computed again",
    ),
)

BF16 = PrecisionPolicy(
    name="bf16",
    critical=_bf16("all is BF16"),
    dense=_bf16("all is BF16"),
    sparse=_bf16("all is BF16"),
)

CONSERVATIVE = PrecisionPolicy(
    name="conservative",
    critical=SENSITIVE,
    dense=LINEAR,
    sparse=_bf16("experts see few tokens each: they wait until the rest is stable"),
    rules=(
        Rule(
            words=("layers",),
            choice=_bf16("the first and last two layers stay as they are"),
            layers="ends",
            n_layers=2,
        ),
        Rule(words=("mtp",), choice=_bf16("a small part of the work")),
        Rule(words=("wo",), choice=_bf16("reads what attention's backward reads too")),
    ),
)

DEEPSEEK_V3 = PrecisionPolicy(
    name="deepseek-v3",
    critical=SENSITIVE,
    dense=LINEAR,
    sparse=_fp8("experts are linear layers too"),
    rules=(
        Rule(
            words=("wo",),
            choice=Choice(
                compute="fp8",
                kept="e5m6",
                reason="its input is read by attention's backward too",
            ),
        ),
        SWIGLU_KEPT,
        Rule(words=("dispatch",), choice=_fp8("experts read FP8: half the bytes")),
        Rule(words=("combine",), choice=_bf16("results are summed at the other end")),
        Rule(words=("eh_proj",), choice=_bf16("the published weights are BF16")),
    ),
    scale="fp32",
)
"""Sections 3.2.2 and 3.3 of the report; `eh_proj` from the published checkpoint. There
scales of dispatched and of `wo`'s inputs are powers of two; all are stored in FP32."""

AGGRESSIVE = PrecisionPolicy(
    name="aggressive",
    critical=SENSITIVE,
    dense=LINEAR,
    sparse=_fp8("experts, and what is sent to them and back"),
    rules=(
        Rule(words=("head",), choice=_fp8("the widest linear layer of all")),
        SWIGLU_KEPT,
    ),
)

ARTICLE_1 = PrecisionPolicy(
    name="article-1",
    critical=_bf16("the gate is critical; norms, embedding and head are not linear"),
    dense=_fp8("linear is dense"),
    sparse=_bf16("everything else is sparse"),
    rules=(Rule(words=("attn",), choice=_bf16("attention is critical, as a whole")),),
)
"""A sketch that asks for a layer's type and its depth, and does not use the depth. It
takes attention for one layer: its projections are critical with it."""

ARTICLE_A100 = PrecisionPolicy(
    name="article-a100",
    critical=_bf16("output and what is not linear"),
    dense=_fp8("a linear layer in the middle"),
    sparse=_bf16("expert routing is BF16"),
    rules=(
        Rule(
            words=("attn",),
            choice=_bf16("one of the first four attention layers"),
            layers="first",
            n_layers=4,
        ),
    ),
)
"""Advice for one A100 80 GB, which has no FP8 units."""

POLICIES: Mapping[str, PrecisionPolicy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            *(BF16, CONSERVATIVE, DEEPSEEK_V3, AGGRESSIVE),
            *(ARTICLE_1, ARTICLE_A100),
        )
    }
)
"""Policies by name; the first four grow bolder from one to the next."""


def policy_of(policy: str | PrecisionPolicy) -> PrecisionPolicy:
    """Return the policy of that name, or the policy itself.

    Raises:
        ValueError: no such name.
    """
    if isinstance(policy, PrecisionPolicy):
        return policy
    require_choice({"policy": policy}, tuple(POLICIES))
    return POLICIES[policy]
