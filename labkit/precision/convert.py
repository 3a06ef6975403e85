"""A finished model changed to FP8 by the static plan, and taken back.

Modules change their class, as `to_fp8` says; weights and names stay. What a layer's
backward pass needs of its input is kept as the policy says, unless recomputation lets
no one keep that input: then it is not kept in FP8 either, but had again. Nor is it
where a router reads it too, which keeps it in BF16: experts need no copy beside.

None of this has been run on a GPU.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from labkit.model.mlp import MLP
from labkit.model.moe import MoE
from labkit.model.norm import RMSNorm
from labkit.model.transformer import MTPModule, Transformer
from labkit.precision.linear import Fp8Recipe, InFp8
from labkit.precision.plan import PlanRow, PrecisionPlan, plan
from labkit.precision.policies import PrecisionPolicy
from labkit.precision.transform import to_fp8, to_high

Level = Literal["high", "fp8"]

Filter = str | Iterable[str] | Callable[[nn.Module, str], bool]

READS = {
    **dict.fromkeys(("wq", "wq_a", "wkv_a", "wk", "wv"), "attn"),
    **dict.fromkeys(("w1", "w3", "experts"), "ffn"),
}
"""Which of a block's two halves, and so which norm, layers read that read a norm."""

IN_TILES = ("hopper", "emulate", "storage")
"""Devices whose plan has tiles of 128, the only ones that layers here multiply in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionRow:
    """What one operator has become."""

    module: str
    """Its module, or for `core` and `swiglu`, which have none, the operator's name."""

    before: Level
    """In what it multiplied: FP8, or as without any conversion."""

    after: Level

    kept: str | None
    """Format in which FP8 layers, or `swiglu`, keep their input; None: as it comes."""

    backend: str | None
    """What multiplies on the device of its weights, if it is in FP8."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Conversion:
    """What has become of a model, and the way back."""

    rows: tuple[ConversionRow, ...]

    plan: PrecisionPlan
    """What it goes by; the filter and recomputation are not in it."""

    model: Transformer = field(compare=False)

    def undo(self) -> None:
        """Take everything back to high precision, whichever conversion was the last."""
        _take_back(self.model)

    def __repr__(self) -> str:
        n_fp8 = sum(row.after == "fp8" for row in self.rows)
        made = self.plan
        title = (
            f"Conversion({made.policy.name} on {made.units.device}: {n_fp8} of "
            f"{len(self.rows)} operators in FP8; {made.units.reason})"
        )
        return "\n".join((title, *_table(self.rows)))


def convert(
    model: Transformer,
    policy: str | PrecisionPolicy = "deepseek-v3",
    filter: Filter | None = None,
    *,
    hardware: str = "cpu",
) -> Conversion:
    """Let a model compute in FP8 what a policy says, in place; return what changed.

    A second conversion takes the place of the first; "bf16" takes all back. Apply a
    policy of recomputation before. Where it runs a norm again, layers that read the
    norm keep their BF16 input itself, which then costs nothing; an FP32 one would be
    rounded and kept. Scales are powers of two, whatever the policy stores them in.

    Args:
        model: under autocast, or in BF16, as for a run without FP8.
        policy: a name of `POLICIES`, or a policy.
        filter: what stays high whatever the policy says, with all modules in it: names
            as globs, such as "layers.0.*", or a function of a module and its name that
            is true of it.
        hardware: whose plan holds, as in `plan`. On that of "cpu", and of cards that
            only keep FP8, products are emulated wherever the weights lie.

    >>> from labkit.config import PRESETS
    >>> model = Transformer(PRESETS["tiny"], device="meta")
    >>> conversion = convert(model, filter="layers.0.attn")
    >>> [type(layer.attn.wo).__name__ for layer in model.layers[:2]]
    ['Linear', 'Fp8Linear']
    >>> conversion.undo()
    >>> type(model.layers[1].attn.wo).__name__
    'Linear'

    Raises:
        ValueError: no `Transformer`, policy, device or backend, a device with other
            tiles than 128, or a pattern that matches no module. The model is as before.
    """
    if not isinstance(model, Transformer):
        raise ValueError(
            "model must be a Transformer of labkit.model, whose operators are known; "
            f"got a {type(model).__name__}. Convert the model before it is wrapped or "
            "compiled."
        )
    made = plan(model.cfg, policy, hardware)
    _require_tiles(made)
    rows = tuple(_Decisions(model, made, _chosen(model, filter)).rows())
    _take_back(model)
    _change(model, rows, backend=_backend_asked(made))
    return Conversion(rows=rows, plan=made, model=model)


def _take_back(model: Transformer) -> None:
    for module in model.modules():
        if isinstance(module, InFp8):
            to_high(module)


def _change(model: Transformer, rows: Iterable[ConversionRow], *, backend: str) -> None:
    """Give modules of a model in high precision the classes and recipes of rows."""
    for row in rows:
        owner = model.get_submodule(row.module.rpartition(".")[0])
        if row.kept is not None and row.after == "high" and isinstance(owner, MLP):
            to_fp8(owner, Fp8Recipe(backend=backend))
            for layer in (owner.w1, owner.w2, owner.w3):  # have rows of their own
                to_high(layer)
    for row in rows:
        if row.after == "fp8":
            recipe = Fp8Recipe(kept=row.kept, backend=backend)
            to_fp8(model.get_submodule(row.module), recipe)


def _backend_asked(made: PrecisionPlan) -> str:
    """Return the backend of recipes: what the plan says, and nothing faster."""
    return "auto" if made.units.backend == "hopper" else "emulate"


def _require_tiles(made: PrecisionPlan) -> None:
    units = made.units
    if units.backend in IN_TILES or not any(_is_fp8(row) for row in made.rows):
        return
    raise ValueError(
        "hardware must be one whose plan has tiles of 128, which layers multiply in; "
        f"got {units.device!r}: {units.reason}. Set hardware='cpu', which emulates "
        "them on any device, or policy='bf16'."
    )


def _is_fp8(row: PlanRow) -> bool:
    return row.weight == "e4m3"


def _chosen(model: Transformer, filter: Filter | None) -> dict[str, str]:
    """Return the names of modules that a filter keeps high, and why."""
    modules = {name: module for name, module in model.named_modules() if name}
    if filter is None:
        return {}
    if callable(filter):
        chosen = [name for name, module in modules.items() if filter(module, name)]
        return dict.fromkeys(chosen, "the filter keeps it high")
    is_one = isinstance(filter, str) or not isinstance(filter, Iterable)
    chosen = {}
    for pattern in (filter,) if is_one else tuple(filter):
        if not isinstance(pattern, str):
            raise ValueError(
                "filter must be a function, or names of modules as globs; got "
                f"{pattern!r}. Pass names such as 'layers.0.*'."
            )
        found = [name for name in modules if fnmatchcase(name, pattern)]
        if not found:
            _raise_no_match(pattern, modules)
        chosen |= dict.fromkeys(found, f"filter {pattern!r} keeps it high")
    return chosen


def _raise_no_match(pattern: str, names: Iterable[str]) -> None:
    if "*" in pattern:
        names = dict.fromkeys(map(_starred, names))
    nearest = get_close_matches(pattern, list(names), n=3, cutoff=0)
    raise ValueError(
        f"every pattern of filter must match a module's name; got {pattern!r}, which "
        f"matches none. The nearest are {', '.join(map(repr, nearest))}: correct it, "
        "or leave it out."
    )


class _Decisions:
    """What becomes of each operator of a model; nothing is changed yet."""

    def __init__(
        self, model: Transformer, made: PrecisionPlan, chosen: Mapping[str, str]
    ) -> None:
        self.model = model
        self.made = made
        self.chosen = chosen
        self.in_fp8 = {
            row.operator.name
            for row in made.rows
            if _is_fp8(row) and self._filtered(row.operator.name) is None
        }

    def rows(self) -> Iterator[ConversionRow]:
        """Yield a row for each operator of this model's modules."""
        for row in self.made.rows:
            op = row.operator
            if op.kind == "send" or op.is_shared:
                continue
            if op.part == "swiglu":
                yield self._of_swiglu(row)
            elif op.name in self.in_fp8:
                yield self._of_layer(row)
            else:
                yield self._of_high(row)

    def _of_high(self, row: PlanRow) -> ConversionRow:
        name = row.operator.name
        reason = self._filtered(name) if _is_fp8(row) else None
        before = self._level(name) if row.operator.kind == "product" else "high"
        return ConversionRow(
            module=name,
            before=before,
            after="high",
            kept=None,
            backend=None,
            reason=reason or row.reason,
        )

    def _of_layer(self, row: PlanRow) -> ConversionRow:
        name = row.operator.name
        kept, reasons = row.kept, [self._without_units(row.reason)]
        if self._reads_rebuilt(name):
            kept = "bf16"
            reasons.append("its input runs again, and so is not kept in FP8")
        elif self._reads_kept(name):
            kept = "bf16"
            reasons.append("the router keeps the same input in BF16 anyhow")
        recipe = Fp8Recipe(backend=_backend_asked(self.made))
        device = next(self.model.get_submodule(name).parameters()).device
        return ConversionRow(
            module=name,
            before=self._level(name),
            after="fp8",
            kept="bf16" if kept == "fp32" else kept,
            backend=recipe.backend_on(device).name,
            reason="; ".join(reasons),
        )

    def _of_swiglu(self, row: PlanRow) -> ConversionRow:
        """Return the row of SwiGLU's product, which caches its inputs in FP8 or not."""
        owner = row.operator.name.rpartition(".")[0]
        reader, reason = self._reader(owner), row.reason
        is_asked = row.kept == "e4m3"
        is_cached = reader in self.in_fp8 and (is_asked or reader == owner)
        if is_asked and not is_cached:
            reason = f"{reader} is not in FP8, and neither is what it reads"
        elif is_cached and not is_asked:
            reason += "; but experts in FP8 keep its inputs in FP8"
        return ConversionRow(
            module=row.operator.name,
            before="high",
            after="high",
            kept="e4m3" if is_cached else None,
            backend=None,
            reason=reason,
        )

    def _reader(self, owner: str) -> str:
        """Return the operator that reads the product of an MLP, or of experts."""
        is_mlp = isinstance(self.model.get_submodule(owner), MLP)
        return f"{owner}.w2" if is_mlp else owner

    def _reads_rebuilt(self, name: str) -> bool:
        """Return whether a layer's input is of those that a policy has run again."""
        owner, _, part = name.rpartition(".")
        if part == "eh_proj":
            return self._is_changed(owner, MTPModule)
        if part == "w2":
            is_cached = self.made.row(f"{owner}.swiglu").kept == "e4m3"
            return not is_cached and self._is_changed(owner, MLP)
        if part not in READS:
            return False
        half = READS[part]
        block = name.partition(f".{half}.")[0]
        return self._is_changed(f"{block}.{half}_norm", RMSNorm)

    def _reads_kept(self, name: str) -> bool:
        """Return whether a router reads a layer's input too, and keeps it."""
        owner, _, part = name.rpartition(".")
        owner = owner.removesuffix(".shared_experts")
        is_reader = READS.get(part) == "ffn"
        return is_reader and isinstance(self.model.get_submodule(owner), MoE)

    def _is_changed(self, name: str, plain: type[nn.Module]) -> bool:
        """Return whether a module has another class than its plain one, but for FP8."""
        module = self.model.get_submodule(name)
        kind = module.plain if isinstance(module, InFp8) else type(module)
        return kind is not plain

    def _level(self, name: str) -> Level:
        is_fp8 = isinstance(self.model.get_submodule(name), InFp8)
        return "fp8" if is_fp8 else "high"

    def _filtered(self, name: str) -> str | None:
        """Return why a filter keeps a module, or one around it, high; None: none."""
        words = name.split(".")
        around = (".".join(words[:n]) for n in range(1, len(words) + 1))
        return next((self.chosen[n] for n in around if n in self.chosen), None)

    def _without_units(self, reason: str) -> str:
        """Return a reason less that of the device, which a table says once."""
        return reason.replace(f"; {self.made.units.reason}", "")


def _starred(name: str) -> str:
    """Return a name with a star for each number.

    >>> _starred("layers.3.attn.wo")
    'layers.*.attn.wo'
    """
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def _table(rows: Iterable[ConversionRow]) -> Iterator[str]:
    """Yield aligned lines; rows that are alike but for their layer are one."""
    alike = {
        row: (_starred(row.module), row.before, row.after, row.kept, row.backend)
        + (row.reason,)
        for row in rows
    }
    counts = Counter(alike.values())
    cells = {
        key: (row.module if counts[key] == 1 else key[0], str(counts[key]), *key[1:])
        for row, key in alike.items()
    }
    header = ("module", "n", "from", "to", "kept", "backend", "reason")
    lines = [header, *(tuple(c or "-" for c in line) for line in cells.values())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (cell.ljust(n) for cell, n in zip(line, widths, strict=True))
        yield "  ".join(padded).rstrip()
