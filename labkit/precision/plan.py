"""The static plan: in what every operator computes and is kept, on a given device.

Arithmetic on configs alone. A policy chooses, the device or the operator may refuse,
and each row says why it is as it is.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from labkit.config import ModelConfig
from labkit.config.checks import require_above, require_choice
from labkit.precision.formats import FORMATS
from labkit.precision.operators import Matrices, Operator, operators
from labkit.precision.policies import Choice, PrecisionPolicy, Rule, policy_of
from labkit.precision.quantize import QuantSpec
from labkit.precision.units import Fp8Units, fp8_units

EXACT_BYTES = 4
"""Of an FP32 number."""

NO_KERNEL = {
    "router": "never FP8: rounding would swap experts that are nearly equal",
    "norm": "never FP8: it multiplies by no matrix",
    "lookup": "never FP8: it multiplies by no matrix",
    "core": "never FP8: its kernels multiply BF16",
    "pointwise": "never FP8: it multiplies by no matrix",
}
"""Why operators of a kind stay BF16 whatever a policy asks for."""

NO_BF16 = (
    "no BF16 units: FP32, as FP16 would need its loss scaled, which labkit does not"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """What one operator gets."""

    operator: Operator

    compute: str | None
    """`fp8`, `emulated` (FP8 operands, multiplied as BF16), `bf16` or `fp32`; None of a
    look-up, and of what is sent."""

    weight: str | None
    """Format of its weights as they are multiplied; a master copy is beside."""

    kept: str | None
    """Format of its input as the backward finds it, or as it is sent. Operators that
    read the same input share it: it is kept once."""

    reason: str

    is_changed: bool
    """Whether the device or the operator refused what the policy asked for."""


class RowGroup(NamedTuple):
    """Rows of several layers in one; fields are those of a row."""

    name: str
    """With a star for the layer."""

    layers: str
    """As in "0-2, 5"; those of MTP follow the main ones."""

    compute: str | None
    weight: str | None
    kept: str | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PrecisionPlan:
    """What every operator of a model gets, and what follows from it."""

    policy: PrecisionPolicy
    units: Fp8Units
    rows: tuple[PlanRow, ...]
    unused_rules: tuple[Rule, ...]
    """Rules of the policy that no operator of this model falls under."""

    def row(self, name: str) -> PlanRow:
        """Return what the operator of that name gets.

        Raises:
            ValueError: the model has no such operator.
        """
        for row in self.rows:
            if row.operator.name == name:
                return row
        raise ValueError(
            f"name must be an operator's, such as {self.rows[1].operator.name!r}; got "
            f"{name!r}. Each row's operator has its name."
        )

    def groups(self) -> tuple[RowGroup, ...]:
        """Return rows that are alike but for their layer, in one each: a table."""
        depths: dict[RowGroup, list[int]] = {}
        for row in self.rows:
            words = row.operator.name.split(".")
            name = ".".join("*" if word.isdigit() else word for word in words)
            group = RowGroup(name, "", row.compute, row.weight, row.kept, row.reason)
            layers = depths.setdefault(group, [])
            if row.operator.depth is not None:
                layers.append(row.operator.depth)
        return tuple(g._replace(layers=ranges(of)) for g, of in depths.items())

    @property
    def flop_shares(self) -> dict[str, float]:
        """Share of the FLOPs of matrix products, by in what they are computed.

        A backward has two for each one of the forward, so that these shares are also
        those of a training step. MTP's are among them.
        """
        flops: Counter[str] = Counter()
        for row in self.rows:
            if row.compute is not None:
                flops[row.compute] += row.operator.flops_per_token
        return {name: n / flops.total() for name, n in flops.items()}

    @property
    def fp8_flop_share(self) -> float:
        """Share of the FLOPs that FP8 units compute; 0 where there are none."""
        return self.flop_shares.get("fp8", 0.0)

    def speed_up(self, factor: float) -> float:
        """Return how much more a step does if FP8 products are `factor` times as fast.

        A bound from above: all time is taken to go by FLOPs of products, but norms,
        exchanges and the optimizer take their own, and quantization too, unless
        `factor` is net of it.

        Raises:
            ValueError: `factor` is not above 0.
        """
        return speed_up(self.fp8_flop_share, factor)

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of the weights as they are multiplied, by format, and of scales."""
        n_bytes: Counter[str] = Counter()
        for row in self.rows:
            if row.weight is not None and not row.operator.is_shared:
                for name, n in _weight_bytes(row, self.units.weights):
                    n_bytes[name] += n
        return {name: n for name, n in n_bytes.items() if n}

    def sent_bytes(self, *parts: str) -> int:
        """Return bytes that a token sends in a forward, in all layers.

        Args:
            parts: "dispatch", "combine" or both, which is what none means. Each of a
                token's experts is taken to be on another rank; where a node gets a row
                once for all of its experts, both shrink alike.

        Raises:
            ValueError: nothing else is sent.
        """
        return sum(
            sum(stored_bytes(_sent(row), row.kept, self.units.inputs))
            for row in self._senders(parts)
        )

    def sent_share(self, *parts: str) -> float:
        """Return the same by what BF16 would send; 1 where nothing is sent."""
        in_bf16 = sum(2 * _sent(row).n_params for row in self._senders(parts))
        return self.sent_bytes(*parts) / in_bf16 if in_bf16 else 1.0

    def _senders(self, parts: Iterable[str]) -> Iterator[PlanRow]:
        for part in parts:
            require_choice({"part": part}, ("dispatch", "combine"))
        chosen = tuple(parts) or ("dispatch", "combine")
        return (row for row in self.rows if row.operator.part in chosen)

    def __repr__(self) -> str:
        n_changed = sum(row.is_changed for row in self.rows)
        shares = ", ".join(f"{s:.1%} {name}" for name, s in self.flop_shares.items())
        gigabytes = sum(self.weight_bytes.values()) / 1e9
        return (
            f"PrecisionPlan({self.policy.name} on {self.units.device}: "
            f"{len(self.rows)} operators, {n_changed} not as the policy asked; FLOPs "
            f"{shares}; weights {gigabytes:.4g} GB; {self.units.reason})"
        )


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers with runs of them shortened.

    >>> ranges([0, 1, 2, 4, 7, 8])
    '0-2, 4, 7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def plan(
    cfg: ModelConfig,
    policy: str | PrecisionPolicy = "deepseek-v3",
    hardware: str = "h800",
    *,
    seq_len: int | None = None,
) -> PrecisionPlan:
    """Return what every operator of a model gets from a policy on a device.

    >>> from labkit.config import PRESETS
    >>> on = {name: plan(PRESETS["v3-671b"], hardware=name) for name in ("h800", "cpu")}
    >>> {name: each.row("layers.9.attn.wo").compute for name, each in on.items()}
    {'h800': 'fp8', 'cpu': 'emulated'}
    >>> round(on["h800"].fp8_flop_share, 3), round(on["h800"].sent_share("dispatch"), 3)
    (0.833, 0.516)

    Args:
        cfg: the model.
        policy: a name of `POLICIES`, or a policy.
        hardware: "cpu", or an accelerator of data/hardware.csv.
        seq_len: tokens of a sequence, for the share of attention; None is as in
            `operators`.

    Raises:
        ValueError: no policy or no device has this name, or no sequence this length.
    """
    policy = policy_of(policy)
    units = fp8_units(hardware, scale=policy.scale)
    ops = operators(cfg, seq_len=seq_len)
    return PrecisionPlan(
        policy=policy,
        units=units,
        rows=tuple(_row(op, policy.choose(op, cfg.n_layers), units) for op in ops),
        unused_rules=tuple(
            rule
            for rule in policy.rules
            if not any(rule.matches(op, cfg.n_layers) for op in ops)
        ),
    )


def speed_up(share: float, factor: float) -> float:
    """Return by how much throughput grows if a share of the time shrinks by a factor.

    >>> round(speed_up(0.6, 1.4), 2), round(speed_up(0.7, 1.6), 2)
    (0.21, 0.36)

    Raises:
        ValueError: `share` is no share, or `factor` not above 0.
    """
    require_above({"factor": factor}, 0)
    if not 0 <= share <= 1:
        raise ValueError(
            f"share must be between 0 and 1; got {share!r}. Divide the time of FP8 "
            "products by the time of the step."
        )
    return 1 / ((1 - share) + share / factor) - 1


def stored_bytes(rows: Matrices, name: str, spec: QuantSpec) -> tuple[int, int]:
    """Return bytes of values and of scales, of matrices in a format.

    >>> stored_bytes(Matrices(1, 576, 7168), "e4m3", QuantSpec(tile=(128, 128)))
    (4128768, 280)
    """
    n_values = rows.n_params
    if name == "fp32":
        return EXACT_BYTES * n_values, 0
    fmt = FORMATS[name]
    per_row = fmt.stored_width(rows.n_columns) * fmt.dtype.itemsize
    values = rows.n * rows.n_rows * per_row
    if not fmt.needs_scale:
        return values, 0
    tile = spec.tile_of(rows.n_rows, rows.n_columns)
    n_tiles = -(-rows.n_rows // tile[0]) * -(-rows.n_columns // tile[1])
    return values, rows.n * n_tiles * (1 if spec.scale == "po2" else EXACT_BYTES)


def _weight_bytes(row: PlanRow, spec: QuantSpec) -> Iterator[tuple[str, int]]:
    """Yield formats, or scales, and bytes of an operator's weights."""
    op = row.operator
    for matrices in op.matrices:
        values, scales = stored_bytes(matrices, row.weight, spec)
        yield row.weight, values
        yield "scale", scales
    if op.n_vector_params:
        name = "fp32" if op.kind == "router" else row.weight
        yield name, stored_bytes(Matrices(1, 1, op.n_vector_params), name, spec)[0]


def _sent(row: PlanRow) -> Matrices:
    return Matrices(1, row.operator.n_rows_sent, row.operator.row_width)


def _row(op: Operator, choice: Choice, units: Fp8Units) -> PlanRow:
    """Return what an operator gets of what a policy chose for it."""
    reasons = [choice.reason]
    refusal = _refusal(op, units) if choice.compute == "fp8" else None
    if refusal is not None:
        reasons.append(refusal)
        choice = Choice(compute="bf16", reason=choice.reason)
    is_fp8 = choice.compute == "fp8"
    compute = None if op.kind in ("lookup", "send") else "bf16"
    if is_fp8 and op.kind == "product":
        compute = {"storage": "bf16", "emulate": "emulated"}.get(units.backend, "fp8")
        reasons += _device_reasons(op, units)
    is_weighted = bool(op.matrices or op.n_vector_params)
    formats = {
        "compute": compute,
        "weight": ("e4m3" if is_fp8 else "bf16") if is_weighted else None,
        "kept": None if op.kind == "lookup" else choice.input_format,
    }
    is_lifted = units.high != "bf16" and "bf16" in formats.values()
    if is_lifted:
        formats = {k: units.high if v == "bf16" else v for k, v in formats.items()}
        reasons.append(NO_BF16)
    is_unlike = is_fp8 and compute in ("bf16", "emulated")
    return PlanRow(
        operator=op,
        **formats,
        reason="; ".join(reasons),
        is_changed=refusal is not None or is_unlike or is_lifted,
    )


def _refusal(op: Operator, units: Fp8Units) -> str | None:
    """Return why an operator cannot be in FP8 on a device, or None."""
    if op.kind in NO_KERNEL:
        return NO_KERNEL[op.kind]
    shortest = min((min(m.n_rows, m.n_columns) for m in op.matrices), default=None)
    if shortest is not None and shortest < units.multiple:
        return (
            f"a side of {shortest} is less than the {units.multiple} of its FP8 units"
        )
    return None


def _device_reasons(op: Operator, units: Fp8Units) -> Iterator[str]:
    """Yield what a device does otherwise than tiles of 128 on FP8 units."""
    if units.backend != "hopper":
        yield units.reason
    sides = {side for m in op.matrices for side in (m.n_rows, m.n_columns)}
    for side in sorted(sides):
        whole = -(-side // units.multiple) * units.multiple
        if whole != side:
            yield f"{side} is padded to {whole}"
