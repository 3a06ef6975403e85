"""Training windows: which tokens each step sees, as a pure function of a seed.

Window number `n` is the same on every machine and after every restart. A cursor is
therefore one number, and a rank's share of a batch is a range of numbers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from labkit.model.transformer import IGNORED
from labkit.training.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences and, at each position, the token to predict there."""

    tokens: Int[Tensor, "b s"]
    targets: Int[Tensor, "b s"]

    @property
    def n_sequences(self) -> int:
        return len(self.tokens)

    @property
    def n_targets(self) -> int:
        """Targets that take part in the loss."""
        return int((self.targets != IGNORED).sum())

    def split(self, size: int) -> list["Batch"]:
        """Return micro-batches of at most `size` sequences, in order."""
        pairs = zip(self.tokens.split(size), self.targets.split(size), strict=True)
        return [Batch(*pair) for pair in pairs]

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.tokens.to(device), self.targets.to(device))


def require_window(n_tokens: int, seq_len: int, name: str) -> None:
    """Raise ValueError if a text is shorter than one window and its last target."""
    if n_tokens <= seq_len:
        fix = f", or set seq_len={n_tokens - 1} or less" if n_tokens > 1 else ""
        raise ValueError(
            f"the {name} is too short: a window needs seq_len + 1 = {seq_len + 1} "
            f"bytes, but only {n_tokens} are there. Give more text{fix}."
        )


class Windows:
    """All windows of a token stream, epoch after epoch, each shuffled anew.

    Windows of one epoch do not overlap. What the stream holds beyond a whole number
    of windows is left out at the start or the end, in another place each epoch.
    """

    def __init__(
        self,
        tokens: UInt8[np.ndarray, "n"],
        seq_len: int,
        *,
        seed: int = 0,
        name: str = "text",
    ) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.seed = seed
        require_window(len(tokens), seq_len, name)
        self.per_epoch = (len(tokens) - 1) // seq_len
        self._epoch: int | None = None
        self._starts = np.empty(0, dtype=np.int64)

    def start(self, number: int) -> int:
        """Return where in the stream window `number` begins."""
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._starts = epoch, self._shuffle(epoch)
        return int(self._starts[place])

    def _shuffle(self, epoch: int) -> Int[np.ndarray, "n"]:
        random = np.random.default_rng([self.seed, epoch])
        remainder = len(self.tokens) - 1 - self.per_epoch * self.seq_len
        offset = random.integers(remainder + 1)
        return offset + self.seq_len * random.permutation(self.per_epoch)

    def take(self, first: int, count: int) -> Batch:
        """Return windows `first` to `first + count - 1`."""
        starts = [self.start(first + i) for i in range(count)]
        rows = np.stack([self.tokens[s : s + self.seq_len + 1] for s in starts])
        rows = torch.from_numpy(rows.astype(np.int64))
        return Batch(rows[:, :-1], rows[:, 1:])


class BatchCursor:
    """This rank's shares of successive global batches, resumable at any step.

    Looking at a batch does not move the cursor: a step that is broken off is done
    again with the same windows.
    """

    def __init__(self, windows: Windows, *, ranks: Ranks | None = None) -> None:
        self.windows = windows
        self.ranks = ranks or Ranks()
        self.n_taken = 0
        """Windows that all ranks together have taken."""

    def peek(self, global_batch: int) -> Batch:
        """Return this rank's share of the next `global_batch` windows."""
        share = self.ranks.share(global_batch)
        return self.windows.take(self.n_taken + self.ranks.rank * share, share)

    def advance(self, global_batch: int) -> None:
        """Move past the next `global_batch` windows."""
        self.n_taken += global_batch

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, and what its number means, as plain values."""
        windows = self.windows
        return {
            "n_taken": self.n_taken,
            "seed": windows.seed,
            "seq_len": windows.seq_len,
            "n_tokens": len(windows.tokens),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, over the same windows."""
        here = self.state_dict()
        for name in ("seed", "seq_len", "n_tokens"):
            if state[name] != here[name]:
                raise ValueError(
                    f"the data cursor belongs to other windows: {name} was "
                    f"{state[name]} and is {here[name]}. Continue with the same corpus "
                    "and TrainConfig, or start a new run."
                )
        self.n_taken = state["n_taken"]
