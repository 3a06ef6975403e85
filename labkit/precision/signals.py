"""What a training step shows of its numbers: losses, norms, and what FP8 loses."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType, TracebackType

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from labkit.config.checks import require_whole
from labkit.model.experts import Experts
from labkit.model.linear import Linear
from labkit.precision.quantize import QTensor

GEMMS = ("fprop", "dgrad", "wgrad")
"""The three products of a module, as in `labkit.precision.products`."""


@dataclass(frozen=True, slots=True)
class GemmSignal:
    """What the operands of one product lost by quantization in a step."""

    underflow: float
    """Share, among sampled values other than zero, of those that became zero; of the
    operand that lost more."""

    sqnr_db: float
    """Signal over quantization noise, of both operands' sampled rows together; infinite
    where nothing is lost. Tiles that are not finite are left out."""

    n_nonfinite_tiles: int
    """Tiles that held an infinity or NaN, of all there were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSignals:
    """All that a scheduler is told of a training step."""

    step: int
    """Steps done with it, as in `StepMetrics`."""

    loss: float
    grad_norm: float
    """Before clipping."""

    gemms: Mapping[str, Mapping[str, GemmSignal]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    """Of modules in FP8, by name, and by which of `GEMMS`; what was not watched, or was
    not in FP8, is not there."""


class SignalProbe:
    """Watches what FP8 modules of a model quantize, until it is closed.

    Modules that come to FP8 later are watched too. Passes without gradients are not;
    layers that run again for the backward pass are seen twice. Nothing waits for the
    device before `read`; on a GPU this has not been run. Of experts the busiest one's
    operands are the sample.

    On a CPU it was seen to take 0.1 s of the 0.5 s of a step of "tiny", most of it the
    start of small operations, whose number does not grow with the batch.

    Args:
        model: any module with linear layers or experts of `labkit.model`.
        n_rows: most rows of an operand that are compared to what they became; tiles
            that are not finite are counted in all.

    >>> from labkit.precision.transform import to_fp8
    >>> layer = nn.Sequential(Linear(128, 128))
    >>> to_fp8(layer[0])
    >>> with SignalProbe(layer) as probe:
    ...     layer(torch.ones(4, 128)).sum().backward()
    ...     {gemm: s.n_nonfinite_tiles for gemm, s in probe.read()["0"].items()}
    {'fprop': 0, 'wgrad': 0}

    Raises:
        ValueError: another probe watches the model.
    """

    def __init__(self, model: nn.Module, n_rows: int = 64) -> None:
        require_whole({"n_rows": n_rows})
        self.n_rows = n_rows
        self._lost: dict[tuple[str, str, int], list[Tensor]] = defaultdict(list)
        kinds = (Linear, Experts)
        self._modules = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, kinds)
        }
        if any("observer" in vars(module) for module in self._modules.values()):
            raise ValueError(
                "model must have one probe at most; another still watches it. Close "
                "that first."
            )
        self._observers = {name: partial(self._observe, name) for name in self._modules}
        for name, module in self._modules.items():
            module.observer = self._observers[name]

    def read(self) -> dict[str, dict[str, GemmSignal]]:
        """Return the signals since the last call, by module and product."""
        lost = {key: _Lost() for key in self._lost}
        for key, sums in _on_host(self._lost):
            lost[key] += _Lost(*sums)
        self._lost.clear()
        operands = defaultdict(lambda: defaultdict(list))
        for (name, gemm, _), of_operand in lost.items():
            operands[name][gemm].append(of_operand)
        return {
            name: {gemm: _signal(each) for gemm, each in operands[name].items()}
            for name in self._modules
            if name in operands
        }

    def close(self) -> None:
        """Leave the model as it was before; a probe that came since stays."""
        for name, module in self._modules.items():
            if vars(module).get("observer") is self._observers[name]:
                del module.observer

    def __enter__(self) -> "SignalProbe":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _observe(
        self,
        name: str,
        gemm: str,
        *operands: tuple[Tensor, QTensor],
        is_sampled: bool = True,
    ) -> None:
        n_rows = self.n_rows if is_sampled else 0
        for number, (exact, q) in enumerate(operands):
            sums = lost_in_sample(exact, q, n_rows)
            self._lost[name, gemm, number].append(sums)


@dataclass(frozen=True, slots=True)
class _Lost:
    """Norms and counts of an operand, of samples but for the last."""

    noise: float = 0.0
    signal: float = 0.0
    n_left: float = 0.0
    n_before: float = 0.0
    n_nonfinite_tiles: float = 0.0

    def __add__(self, other: "_Lost") -> "_Lost":
        return _Lost(
            math.hypot(self.noise, other.noise),
            math.hypot(self.signal, other.signal),
            self.n_left + other.n_left,
            self.n_before + other.n_before,
            self.n_nonfinite_tiles + other.n_nonfinite_tiles,
        )

    @property
    def relative_noise(self) -> float:
        return self.noise / self.signal if self.signal else 0.0

    @property
    def underflow(self) -> float:
        return 1 - self.n_left / self.n_before if self.n_before else 0.0


def _on_host(
    sums: Mapping[tuple[str, str, int], list[Tensor]],
) -> Iterator[tuple[tuple[str, str, int], list[float]]]:
    """Yield the values of small tensors by their key, all copied at once."""
    keys = [key for key, of_key in sums.items() for _ in of_key]
    tensors = [each for of_key in sums.values() for each in of_key]
    if tensors:
        yield from zip(keys, torch.stack(tensors).tolist(), strict=True)


def _signal(operands: list[_Lost]) -> GemmSignal:
    noise = math.hypot(*(lost.relative_noise for lost in operands))
    if math.isnan(noise):  # of a tile that was not finite
        noise = math.inf
    return GemmSignal(
        underflow=max(lost.underflow for lost in operands),
        sqnr_db=-20 * math.log10(noise) if noise else math.inf,
        n_nonfinite_tiles=int(sum(lost.n_nonfinite_tiles for lost in operands)),
    )


def lost_in_sample(
    exact: Float[Tensor, "r c"], q: QTensor, n_rows: int
) -> Float[Tensor, "5"]:
    """Return norms of noise and signal, values left and before, tiles not finite.

    All but the last are of evenly spread rows, and of no rows if `n_rows` is 0.
    """
    n_bad = torch.count_nonzero(q.scale.float().isnan())
    if n_rows == 0:
        return F.pad(n_bad.float().unsqueeze(0), (4, 0))
    step = max(1, -(-len(exact) // n_rows))
    x, kept = exact[::step].float(), _every(q, step).dequantize()
    left, before = torch.count_nonzero(kept), torch.count_nonzero(x)
    noise = torch.linalg.vector_norm(kept.sub_(x))
    signal = torch.linalg.vector_norm(x)
    return torch.stack([noise, signal, left, before, n_bad])


def _every(q: QTensor, step: int) -> QTensor:
    """Return each `step`-th row of a matrix in tiles."""
    n_rows, n_columns = q.spec.tile_of(*q.shape)
    scale = q.scale[::step] if n_rows == 1 else _scales_of_rows(q, n_rows, step)
    spec = replace(q.spec, tile=(1, n_columns))
    return QTensor(q.data[::step], scale, spec, q.n_columns)


def _scales_of_rows(q: QTensor, n_rows: int, step: int) -> Float[Tensor, "r tc"]:
    rows = torch.arange(0, q.shape[0], step, device=q.scale.device)
    return q.scale.float()[rows // n_rows]
