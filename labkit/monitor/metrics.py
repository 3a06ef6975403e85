"""What one training step did, and where that is written.

A `StepMetrics` is a plain record. `Monitor` appends records to a JSON Lines file,
to TensorBoard where it is installed, and hands them to listeners such as a live
view. The file survives a killed run: each line is written whole and at once, a torn
last line is ignored, and a step that is run again replaces its earlier record, be it
after a resumption or after a rollback.
"""

import importlib.util
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step, over all its micro-batches and ranks."""

    step: int
    """Steps finished, this one included."""

    attempt: int = 0
    """How many times the run had gone back to an earlier step before this one."""

    tokens: int
    """Tokens seen since the start of the run, this step included."""

    loss: float
    """What was minimised: the sum of the three parts below, in nats per token."""

    loss_main: float
    """Cross-entropy of the next token."""

    loss_mtp: float
    """Weighted multi-token-prediction loss."""

    loss_balance: float
    """Weighted sequence-wise balance loss of the routers."""

    grad_norm: float
    """Global gradient norm before clipping."""

    is_skipped: bool = False
    """Whether the gradients were not finite, so that no weight was changed."""

    lr: float

    tokens_per_second: float
    """Tokens of this step, over all ranks, by its wall time."""

    mfu: float | None = None
    """Share of the measured peak that the model's own FLOPs reached (recomputed
    FLOPs not counted); None when no peak was given."""

    memory_bytes: int
    """On CPU the resident set of this process; on CUDA the peak of allocated bytes."""

    expert_load: tuple[float, ...] = ()
    """Tokens of the busiest expert by the mean, one value per router."""

    data_seconds: float
    forward_seconds: float
    backward_seconds: float
    communication_seconds: float = 0.0
    """Sums over ranks, including the wait for the slowest rank."""

    optimizer_seconds: float
    """Clipping, the AdamW update and the router biases."""

    def __str__(self) -> str:
        line = (
            f"step {self.step:>5}  loss {self.loss:.4f}  main {self.loss_main:.4f}  "
            f"grad norm {self.grad_norm:.2f}  lr {self.lr:.2e}  "
            f"{self.tokens_per_second:,.0f} tokens/s"
        )
        if self.mfu is not None:
            line += f"  MFU {self.mfu:.1%}"
        return line + ("  skipped: gradients not finite" if self.is_skipped else "")

    @property
    def seconds(self) -> float:
        """Wall time of the step."""
        return sum(self.time_split.values())

    @property
    def time_split(self) -> dict[str, float]:
        """Seconds by phase, in the order they happen."""
        phases = ("data", "forward", "backward", "communication", "optimizer")
        return {phase: getattr(self, f"{phase}_seconds") for phase in phases}


class Monitor:
    """Writes the records of a run and tells its listeners.

    Args:
        path: JSON Lines file to append to, made by the first record; None writes none.
        tensorboard: also write TensorBoard events beside `path`. Where TensorBoard
            is not installed, one warning says how to get it.
        interval: record every so many steps.
        on_step: called with each record, for example by a live view.
        peak_flops: measured FLOP/s of one device, against which MFU is given.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        tensorboard: bool = False,
        interval: int = 1,
        on_step: Iterable[Callable[[StepMetrics], None]] = (),
        peak_flops: float | None = None,
    ) -> None:
        if interval < 1:
            raise ValueError(
                f"interval must be at least 1 step; got {interval}. Set interval=1."
            )
        self.path = None if path is None else Path(path)
        self.interval = interval
        self.listeners = list(on_step)
        self.peak_flops = peak_flops
        self._has_events = tensorboard
        self._writer: Any | None = None
        self._is_open = False

    def mfu(self, flops_per_second: float) -> float | None:
        """Return the share of one device's peak; None where no peak was given."""
        return None if self.peak_flops is None else flops_per_second / self.peak_flops

    def record(self, metrics: StepMetrics) -> None:
        """Write the record and tell the listeners, if its step is due."""
        if metrics.step % self.interval:
            return
        if not self._is_open:
            self._open()
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(metrics)) + "\n")
        if self._writer is not None:
            _write_scalars(self._writer, metrics)
        for listener in self.listeners:
            listener(metrics)

    def _open(self) -> None:
        """Prepare the files; not earlier, so that a run refused leaves none."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(self.path)
        if self._has_events:
            self._writer = _tensorboard_writer(self.path)
        self._is_open = True


def read_jsonl(path: str | Path, *, all_attempts: bool = False) -> list[StepMetrics]:
    """Return the records of a run, in order of their steps.

    A last line without an end is left out: the run was killed while it wrote. Where
    a resumed run repeats steps, the later records stand.

    Args:
        path: the file.
        all_attempts: whether to return steps that were taken back by a rollback too,
            in the order in which they were done; else those stand that took their
            place.
    """
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    records = [
        _parse(line, f"{path}:{number}")
        for number, line in enumerate(lines[:-1], start=1)
    ]
    records = _latest(records, lambda record: (record.attempt, record.step))
    return records if all_attempts else _latest(records, lambda record: record.step)


def _latest(
    records: Iterable[StepMetrics], place: Callable[[StepMetrics], Any]
) -> list[StepMetrics]:
    """Return the records that no later one, at their place or before it, replaces."""
    stack: list[StepMetrics] = []
    for record in records:
        while stack and place(stack[-1]) >= place(record):
            stack.pop()
        stack.append(record)
    return stack


def _parse(line: str, place: str) -> StepMetrics:
    try:
        values = json.loads(line)
        values["expert_load"] = tuple(values["expert_load"])
        return StepMetrics(**values)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{place} is not a record of StepMetrics ({error}). "
            "Remove the line, or read a file that Monitor wrote."
        ) from None


def _cut_torn_line(path: Path) -> None:
    """Remove a last line without an end, so that the next record starts a line."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)


def _tensorboard_writer(path: Path | None) -> Any | None:  # noqa: ANN401
    """Return a writer of TensorBoard events, or None where it is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        logger.warning(
            "TensorBoard is not installed, so no events are written; "
            'install it with: pip install "labkit[tensorboard]"'
        )
        return None
    from torch.utils.tensorboard import SummaryWriter

    folder = Path("runs") if path is None else path.parent
    return SummaryWriter(folder / "tensorboard")


def _write_scalars(writer: Any, metrics: StepMetrics) -> None:  # noqa: ANN401
    for field in fields(metrics):
        value = getattr(metrics, field.name)
        if isinstance(value, int | float) and field.name != "step":
            writer.add_scalar(field.name, value, metrics.step)
    for router, load in enumerate(metrics.expert_load):
        writer.add_scalar(f"expert_load/{router}", load, metrics.step)
    writer.flush()  # else a killed run loses its last minutes
