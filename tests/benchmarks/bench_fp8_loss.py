"""What FP8 costs in loss: "small" trained in FP8, BF16 and FP32 from equal starts.

Runs of one seed have the same weights at the start and the same text in the same
order; only the products differ. Compared are means of the training loss over the last
steps; the validation loss is written beside them. Products in FP8 are emulated
on a CPU: exact products of FP8 operands, summed as BF16 products are. Two seeds train
at a time, on a thread each.

Run with `make bench`, or `python tests/benchmarks/bench_fp8_loss.py [SEED ...]`; with
`--write` they go to `data/fp8_loss.csv`, which notebook 05 reads.
"""

import argparse
import csv
import multiprocessing
import platform
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from typing import NamedTuple

import torch

from labkit.config import PRESETS
from labkit.data import data_path
from labkit.model import Transformer
from labkit.training import Corpus, Trainer, corpus
from labkit.training.recipes import SMALL

PRECISIONS = ("fp32", "bf16", "fp8")

WINDOW = 25
"""Steps whose losses are averaged."""

LIMIT = 0.005
"""Most that the mean gap of the last window may be, of BF16's loss."""

TABLE = "fp8_loss.csv"


class Row(NamedTuple):
    """How a run ended; columns of the table."""

    seed: int
    precision: str
    last_step: int
    train_nats: float
    """Mean of the last window."""

    valid_nats: float


def trained(text: Corpus, seed: int, precision: str) -> Row:
    """Train, and say how it ended."""
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(PRESETS["small"], generator=generator)
    train = replace(SMALL, seed=seed, precision=precision)
    trainer = Trainer(model, train, text)
    steps = trainer.run(progress=False)
    loss = statistics.fmean(step.loss_main for step in steps[-WINDOW:])
    return Row(seed, precision, train.n_steps, loss, trainer.evaluate(32).nats)


def runs(seed: int) -> list[Row]:
    """Train in every precision, in a process of its own."""
    torch.set_num_threads(1)
    text = corpus.standard_library(seq_len=SMALL.seq_len)
    rows = []
    for precision in PRECISIONS:
        rows.append(trained(text, seed, precision))
        print(rows[-1], flush=True)
    return rows


def gaps(rows: list[Row], low: str, high: str) -> list[float]:
    """Return by how much the last window of each seed is worse, of the better one."""
    last = {(row.seed, row.precision): row.train_nats for row in rows}
    seeds = dict.fromkeys(row.seed for row in rows)
    return [last[seed, low] / last[seed, high] - 1 for seed in seeds]


def write(rows: list[Row]) -> None:
    """Write the table that the workbook reads."""
    python = platform.python_version()
    origin = {
        "read": date.today().isoformat(),
        "source": "measured: python tests/benchmarks/bench_fp8_loss.py --write "
        f"(Python {python}'s standard library, PyTorch {torch.__version__}, CPU)",
    }
    with data_path(TABLE).open("w", newline="", encoding="utf-8") as lines:
        table = csv.DictWriter(lines, [*Row._fields, *origin], lineterminator="\n")
        table.writeheader()
        for row in rows:
            nats = {"train_nats": row.train_nats, "valid_nats": row.valid_nats}
            rounded = {name: f"{value:.5f}" for name, value in nats.items()}
            table.writerow(row._asdict() | rounded | origin)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seeds", metavar="SEED", type=int, nargs="*", default=range(5))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    print(f"{corpus.standard_library(seq_len=SMALL.seq_len)}\n{SMALL}", flush=True)
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        rows = [row for rows in pool.map(runs, options.seeds) for row in rows]
    for low, high in (("bf16", "fp32"), ("fp8", "bf16")):
        found = gaps(rows, low, high)
        each = ", ".join(f"{gap:+.2%}" for gap in found)
        error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0
        print(
            f"{low} against {high}, last {WINDOW} steps: mean "
            f"{statistics.fmean(found):+.2%}, standard error {error:.2%} (seeds {each})"
        )
    passed = abs(statistics.fmean(gaps(rows, "fp8", "bf16"))) <= LIMIT
    print(f"within {LIMIT:.1%}" if passed else "the bar was missed")
    if options.write:
        write(rows)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
