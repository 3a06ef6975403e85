"""A precision plan as a map of layers and operators, and what a change of it brings.

Layers that are alike share a column, operators that do like work a row. A cell can be
given another level than its policy chose; the device may refuse it, and says why.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from labkit.config import PRESETS, ModelConfig
from labkit.precision import (
    POLICIES,
    Choice,
    Operator,
    PrecisionPlan,
    PrecisionPolicy,
    plan,
)
from labkit.precision.operators import Matrices
from labkit.precision.plan import PlanRow, ranges, stored_bytes

MODELS: Mapping[str, str] = MappingProxyType(
    {
        "DeepSeek-V3 (671B)": "v3-671b",
        "DeepSeek-V2 (236B)": "v2-236b",
        "DeepSeek-V2-Lite (16B)": "v2-lite-16b",
        "small (this book's)": "small",
        "tiny (this book's)": "tiny",
    }
)

DEVICES: Mapping[str, str] = MappingProxyType(
    {
        "A100 80 GB": "a100-80g",
        "H100, H800": "h800",
        "B200": "b200",
        "CPU": "cpu",
    }
)

ROWS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "embedding": ("embed",),
        "norms": (
            *("attn_norm", "q_norm", "kv_norm", "ffn_norm", "enorm", "hnorm", "norm"),
        ),
        "queries": ("wq", "wq_a", "wq_b"),
        "keys, values": ("wkv_a", "wkv_b", "wk", "wv"),
        "attention core": ("core",),
        "attention output": ("wo",),
        "router": ("gate",),
        "dispatch": ("dispatch",),
        "routed experts": ("experts",),
        "combine": ("combine",),
        "gate and up": ("w1", "w3"),
        "SwiGLU": ("swiglu",),
        "down": ("w2",),
        "joint of MTP": ("eh_proj",),
        "head": ("head",),
    }
)
"""Rows of the map, and the parts of operators' names that are in them."""

ROW_OF = {part: row for row, parts in ROWS.items() for part in parts}

ENDS = "outside"
"""Column of what is in no layer."""

NARROW = ("e4m3", "e5m6")
"""Formats that inputs are kept in instead of BF16."""

LOOKS = ("fp8", "emulated", "stored", "bf16", "fp32")
"""What becomes of an operator, from narrow to wide; `figures` colours them so."""

YOURS = "your choice"

FP8, FP8_E5M6, BF16_E4M3, BF16 = (
    Choice(compute=compute, kept=kept, reason=YOURS)
    for compute, kept in (
        *(("fp8", None), ("fp8", "e5m6"), ("bf16", "e4m3"), ("bf16", None)),
    )
)

LEVELS: Mapping[str, tuple[Choice, ...]] = MappingProxyType(
    {
        "product": (FP8, FP8_E5M6, BF16),
        "pointwise": (BF16_E4M3, BF16),
        "send": (FP8, BF16),
    }
)
"""What each kind of operator can be asked to be, in turn."""

OTHER_LEVELS = (BF16, FP8)
"""Of kinds that refuse FP8, which is worth asking: they say why."""

SOURCES: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("wq", "wq_a", "wkv_a", "wk", "wv"), "attn_norm")
    | dict.fromkeys(("w1", "w3", "gate"), "ffn_norm")
)
"""Where operators of a layer that read the same find it; others read their own."""


class Cell(NamedTuple):
    """A place on the map."""

    column: str
    row: str


Edits = tuple[tuple[Cell, Choice], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EditedPolicy(PrecisionPolicy):
    """A policy but for some operators."""

    edits: tuple[tuple[str, Choice], ...] = ()
    """Names of operators, and what they are to be."""

    def choose(self, op: Operator, n_layers: int) -> Choice:
        """Return what an operator gets in a model of so many main layers."""
        for name, choice in self.edits:
            if name == op.name:
                return choice
        return PrecisionPolicy.choose(self, op, n_layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class MapPlan:
    """What the map's controls stand at, and what follows from it."""

    model: str
    device: str
    policy: str
    percent: int
    """Speed of products in FP8, by that in BF16."""

    selected: Cell
    edits: Edits = ()

    @property
    def cfg(self) -> ModelConfig:
        return PRESETS[MODELS[self.model]]

    @property
    def planned(self) -> PrecisionPlan:
        """The plan, edits included."""
        return _planned(self.model, self.device, self.policy, self.edits)

    @property
    def unedited(self) -> PrecisionPlan:
        """The plan as the policy has it."""
        return _planned(self.model, self.device, self.policy, ())

    @property
    def in_bf16(self) -> PrecisionPlan:
        """The plan with all in BF16, to compare with."""
        return _planned(self.model, self.device, "bf16", ())

    @property
    def cells(self) -> dict[Cell, tuple[PlanRow, ...]]:
        """Operators by their place, in the order of the forward."""
        return _cells(self.model, self.device, self.policy, self.edits)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.column for cell in self.cells))

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(row for row in ROWS if any(cell.row == row for cell in self.cells))

    def words(self, cell: Cell) -> tuple[str, str]:
        """Return what a cell gets in a few words, and its look, one of `LOOKS`."""
        each = dict.fromkeys(map(_words, self.cells[cell]))
        look = min((look for _, look in each), key=LOOKS.index)
        return " / ".join(words for words, _ in each), look

    def reason(self, cell: Cell) -> str:
        """Return why a cell's operators are as they are, each reason once.

        What a device does to all of them is left out where the whole plan says it.
        """
        units = self.planned.units
        said = "" if units.multiplies else f"; {units.reason}"
        reasons = (row.reason.removesuffix(said) for row in self.cells[cell])
        return "; ".join(dict.fromkeys(w for each in reasons for w in each.split("; ")))

    def next_edits(self, cell: Cell) -> Edits:
        """Return the edits with a cell at its next level; its policy's is no edit."""
        base = POLICIES[self.policy]
        op = self.cells[cell][0].operator
        own = base.choose(op, self.cfg.n_layers)
        now = dict(self.edits).get(cell, own)
        levels = LEVELS.get(op.kind, OTHER_LEVELS)
        looks = [_wish(level) for level in levels]
        at = looks.index(_wish(now)) if _wish(now) in looks else -1
        choice = levels[(at + 1) % len(levels)]
        others = tuple(edit for edit in self.edits if edit[0] != cell)
        return others if _wish(choice) == _wish(own) else (*others, (cell, choice))

    def part(self, cell: Cell) -> PrecisionPlan:
        """Return the plan of a cell's operators alone."""
        return replace(self.planned, rows=self.cells[cell])

    def flop_share(self, cell: Cell) -> float:
        """Return the share of all products' FLOPs that are a cell's."""
        flops = [row.operator.flops_per_token for row in self.cells[cell]]
        whole = sum(row.operator.flops_per_token for row in self.planned.rows)
        return sum(flops) / whole


def _words(row: PlanRow) -> tuple[str, str]:
    """Return what an operator gets, and its look."""
    is_narrow, is_e5m6 = row.kept in NARROW, row.kept == "e5m6"
    if row.operator.kind == "send":
        return ("FP8 sent", "stored") if is_narrow else ("BF16 sent", "bf16")
    kept = f", keeps {row.kept.upper()}" if is_narrow else ""
    if row.compute in ("fp8", "emulated"):
        name = "FP8" if row.compute == "fp8" else "emul." if is_e5m6 else "emulated"
        return f"{name}{kept if is_e5m6 else ''}", row.compute
    name = (row.compute or row.weight).upper()
    if row.weight == "e4m3":
        return f"{name}, stored FP8", "stored"
    return f"{name}{kept}", "stored" if is_narrow else name.lower()


def _wish(choice: Choice) -> tuple[str, str]:
    return choice.compute, choice.input_format


@lru_cache(maxsize=16)
def _planned(model: str, device: str, policy: str, edits: Edits) -> PrecisionPlan:
    """Return a plan; the last ones are remembered: figure and sentence ask for each."""
    base = POLICIES[policy]
    if edits:
        cells = _cells(model, device, policy, ())
        names = tuple(
            (row.operator.name, choice) for cell, choice in edits for row in cells[cell]
        )
        fields = ("name", "critical", "dense", "sparse", "rules", "scale")
        base = EditedPolicy(
            **{field: getattr(base, field) for field in fields}, edits=names
        )
    return plan(PRESETS[MODELS[model]], base, DEVICES[device])


@lru_cache(maxsize=4)
def _cells(
    model: str, device: str, policy: str, edits: Edits
) -> dict[Cell, tuple[PlanRow, ...]]:
    """Return operators by their place; columns are those of the unedited plan."""
    cfg = PRESETS[MODELS[model]]
    columns = _columns(cfg, _planned(model, device, policy, ()))
    found: dict[Cell, list[PlanRow]] = {}
    for row in _planned(model, device, policy, edits).rows:
        op = row.operator
        column = ENDS if op.depth is None else columns[op.depth]
        found.setdefault(Cell(column, ROW_OF[op.part]), []).append(row)
    return {cell: tuple(rows) for cell, rows in found.items()}


def _columns(cfg: ModelConfig, unedited: PrecisionPlan) -> dict[int, str]:
    """Return the column of each layer: its own, with all that are like it."""
    alike: dict[int, list[object]] = {}
    for row in unedited.rows:
        if row.operator.depth is not None:
            words = [word for word in row.operator.words if not word.isdigit()]
            look = (*words, row.compute, row.weight, row.kept)
            alike.setdefault(row.operator.depth, []).append(look)
    depths: dict[tuple[object, ...], list[int]] = {}
    for depth, looks in alike.items():
        depths.setdefault(tuple(looks), []).append(depth)
    return {
        depth: "MTP" if group[0] >= cfg.n_layers else _layers(group)
        for group in depths.values()
        for depth in group
    }


def _layers(depths: list[int]) -> str:
    return f"layer{'s' * (len(depths) > 1)} {ranges(depths)}"


def kept_bytes(
    planned: PrecisionPlan, cfg: ModelConfig, rows: Iterable[PlanRow] | None = None
) -> dict[str, int]:
    """Return bytes per token of inputs that products and SwiGLU keep, by format.

    What several read is kept once in each of their formats. Where SwiGLU's inputs are
    kept in FP8, its result is computed again. What norms and attention keep is not
    counted: no policy changes it.

    Args:
        planned: the plan.
        cfg: the model.
        rows: those of the plan that count; None counts all.

    >>> mine = plan(PRESETS["v3-671b"], "deepseek-v3")
    >>> kept_bytes(mine, PRESETS["v3-671b"])["e5m6"]
    1555456
    """
    recomputed = {
        row.operator.name.removesuffix(".swiglu")
        for row in planned.rows
        if row.operator.kind == "pointwise" and row.kept in NARROW
    }
    kept = {
        (source, row.kept): sum(stored_bytes(width, row.kept, planned.units.inputs))
        for row in (planned.rows if rows is None else rows)
        for source, width in _inputs(row.operator, cfg, recomputed)
    }
    n_bytes: Counter[str] = Counter()
    for (_, name), n in kept.items():
        n_bytes[name] += n
    return dict(n_bytes)


def _inputs(
    op: Operator, cfg: ModelConfig, recomputed: set[str]
) -> Iterator[tuple[tuple[object, ...], Matrices]]:
    """Yield what an operator reads and keeps: where from, and how much for a token."""
    parent = op.name.rpartition(".")[0]
    own = (op.name,)
    if op.kind == "pointwise":
        n_rows, hidden = _hidden(op, cfg)
        yield own, Matrices(1, n_rows, 2 * hidden)
    elif op.part == "experts":
        n_rows = cfg.moe.n_activated_experts
        yield own, Matrices(1, n_rows, op.matrices[0].n_columns)
        if op.name not in recomputed:
            yield (*own, "w2"), Matrices(1, n_rows, op.matrices[1].n_columns)
    elif op.kind in ("product", "router"):
        if op.part == "w2" and parent in recomputed:
            return
        source = (op.depth, SOURCES[op.part]) if op.part in SOURCES else own
        yield source, Matrices(1, 1, op.matrices[0].n_columns)


def _hidden(op: Operator, cfg: ModelConfig) -> tuple[int, int]:
    """Return how many rows of what width SwiGLU makes of a token."""
    if "experts" in op.words:
        return cfg.moe.n_activated_experts, cfg.moe.moe_inter_dim
    if "shared_experts" in op.words:
        return 1, cfg.moe.n_shared_experts * cfg.moe.moe_inter_dim
    return 1, cfg.inter_dim
