"""What `launch` does when ranks fail, a hundred times, and when they do not.

In each launch a random rank raises, is killed or hangs, after it has started a process
of its own. Each must come back as one error that names the rank, with everything gone
within 5 s of the failure, or of the timeout where a rank hangs. Then come launches in
which nothing fails, and the time that four ranks take to start.

Run with `make bench`, or
`python tests/benchmarks/bench_launch.py [--failing N] [--clean N]`.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from labkit.parallel.failures import RankFailed
from labkit.parallel.group import at_step
from labkit.parallel.launch import launch

MOST_SECONDS = 5.0
"""From a failure, or the timeout, until everything is gone."""

MOST_START_SECONDS = 6.0
"""For four ranks, on a machine that does nothing else."""

LEAST_TIMEOUT = 12.0
"""Seconds for a launch with a rank that hangs; more where starts take long."""

WORDS = {"raise": "raised ValueError", "kill": "was killed", "hang": "did not end"}

MARK = "86400.{}"
"""Seconds that a rank's own process sleeps: a day, and the id of its launcher."""


def work(how: str, failing: int, mark: str, moment: str) -> float:
    """Add up some tensors, and fail on the way as told."""
    if how != "none":
        subprocess.Popen(("sleep", mark))
    total = torch.zeros(())
    for step in range(5):
        at_step(step)
        total += 1
        dist.all_reduce(total)
        if step == 3 and dist.get_rank() == failing and how != "none":
            Path(moment).write_text(str(time.monotonic()), encoding="ascii")
            _fail(how)
    return total.item()


def _fail(how: str) -> None:
    if how == "raise":
        raise ValueError("on purpose")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


def failing_launch(seed: int, timeout: float, scratch: Path) -> list[str]:
    """Return what was wrong with one launch in which a rank fails."""
    draw = random.Random(seed)
    n_procs = draw.choice((2, 2, 2, 3, 4))
    failing, how = draw.randrange(n_procs), draw.choice(tuple(WORDS))
    moment, mark = scratch / str(seed), MARK.format(os.getpid())
    begin = time.monotonic()
    limit = timeout if how == "hang" else 10 * timeout
    faults = []
    try:
        launch(work, n_procs, how, failing, mark, str(moment), timeout=limit)
        faults.append("no error")
    except RankFailed as error:
        if error.rank != failing or error.first.step != 3:
            faults.append(f"names rank {error.rank}, step {error.first.step}")
        if WORDS[how] not in str(error):
            faults.append("does not say what happened")
    gone = time.monotonic()
    began = float(moment.read_text(encoding="ascii")) if moment.exists() else begin
    seconds = gone - (begin + timeout if how == "hang" else began)
    if seconds > MOST_SECONDS:
        faults.append(f"took {seconds:.1f} s")
    faults += orphans(began + MOST_SECONDS if how != "hang" else gone + 1)
    told = f"{how} in rank {failing} of {n_procs}"
    return [f"launch {seed}, {told}: {fault}" for fault in faults]


def orphans(until: float) -> list[str]:
    """Return what still runs then of our ranks and their processes."""
    while (found := running()) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def running() -> list[str]:
    """Return what runs of our ranks and their processes."""
    marks = (f'"parent": {os.getpid()},', MARK.format(os.getpid()))
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if any(mark in line for mark in marks):
            found.append(f"left process {process.pid}: {line[:60]}")
    return found


def clean_launch(n_procs: int) -> tuple[list[str], float]:
    """Return what was wrong with one launch in which nothing fails, and its time."""
    begin = time.monotonic()
    try:
        totals = launch(work, n_procs, "none", 0, "", "", timeout=300.0)
    except RankFailed as error:
        return [f"clean launch: {error}"], time.monotonic() - begin
    # Each step adds one in each rank, and then adds up what all of them have.
    expected = 0.0
    for _ in range(5):
        expected = n_procs * (expected + 1)
    faults = [] if totals == [expected] * n_procs else [f"clean launch: {totals}"]
    return faults + orphans(time.monotonic()), time.monotonic() - begin


def repeat(name: str, n: int, attempt: Callable[[int], list[str]]) -> list[str]:
    """Return all faults of `n` attempts; print how it goes."""
    faults = []
    for number in range(n):
        faults += attempt(number)
        if (number + 1) % 10 == 0 or number + 1 == n:
            print(f"{name}: {number + 1} of {n}, {len(faults)} faults", flush=True)
    return faults


def main() -> int:
    """Print the faults and the time to start, and say whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--failing", type=int, default=100)
    parser.add_argument("--clean", type=int, default=50)
    options = parser.parse_args()
    timeout = max(LEAST_TIMEOUT, 5 * clean_launch(4)[1])
    with tempfile.TemporaryDirectory() as scratch:
        attempt = partial(failing_launch, timeout=timeout, scratch=Path(scratch))
        faults = repeat("failing", options.failing, attempt)
    faults += repeat("clean", options.clean, lambda _: clean_launch(2)[0])
    seconds = min(clean_launch(4)[1] for _ in range(3))
    print(f"four ranks: {seconds:.1f} s from launch to results (bar 6 s, quiet)")
    print(*faults, sep="\n")
    return int(bool(faults) or seconds > MOST_START_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
