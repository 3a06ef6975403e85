"""Earlier states of a run, kept in memory to go back to."""

from dataclasses import dataclass
from typing import Any

from labkit.training.checkpoint_check import Tensors

SNAPSHOT_EVERY = 10
"""Steps from one snapshot to the next."""

N_SNAPSHOTS = 2
"""The last may have been taken in trouble that was not seen yet; the one before it is
10 steps older, and trouble is seen within 5."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """All that changes in a run, as it was."""

    progress: dict[str, Any]
    """Counts and the data cursor, as in a checkpoint."""

    tensors: Tensors
    """Copies of weights, biases, moments and the state of random numbers."""

    statistics: dict[str, Any]
    """Of the scheduler."""

    @property
    def n_steps_done(self) -> int:
        return self.progress["n_steps_done"]

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class SnapshotRing:
    """The last snapshots of a run, oldest first.

    They lie in the memory of the CPU. Each takes what a checkpoint does: 12 bytes for
    each parameter, or 8 with moments in BF16.
    """

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []

    @property
    def n_bytes(self) -> int:
        """Bytes of tensors in all snapshots."""
        return sum(snapshot.n_bytes for snapshot in self.snapshots)

    @property
    def most_bytes(self) -> int:
        """The same once all are there, which are equally large."""
        return N_SNAPSHOTS * max((each.n_bytes for each in self.snapshots), default=0)

    def is_due(self, n_steps_done: int) -> bool:
        """Return whether the state after so many steps is to be kept, and is not."""
        if n_steps_done % SNAPSHOT_EVERY:
            return False
        return not self.snapshots or self.snapshots[-1].n_steps_done < n_steps_done

    def take(self, snapshot: Snapshot) -> None:
        """Keep copies of a snapshot's tensors; drop the oldest if there are too many.

        It is dropped first, so that there is never room needed for one more.
        """
        del self.snapshots[: len(self.snapshots) - N_SNAPSHOTS + 1]
        tensors = {n: t.to("cpu", copy=True) for n, t in snapshot.tensors.items()}
        self.snapshots.append(
            Snapshot(
                progress=snapshot.progress,
                tensors=tensors,
                statistics=snapshot.statistics,
            )
        )

    def before(self, step: int) -> Snapshot:
        """Return the last snapshot from before a step, or the oldest; drop later ones.

        Step numbers count from 1: a snapshot after three steps is from before step 4.
        """
        while len(self.snapshots) > 1 and self.snapshots[-1].n_steps_done >= step:
            self.snapshots.pop()
        return self.snapshots[-1]
