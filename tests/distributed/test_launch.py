"""Functions run in several processes, and what comes back from them."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from labkit.parallel.failures import RankFailed
from labkit.parallel.group import at_step
from labkit.parallel.launch import launch

ROOT = Path(__file__).resolve().parents[2]

PATIENCE_SECONDS = 100.0
"""For what takes 2 s on a quiet machine."""

GONE_SECONDS = 5.0
"""Until nothing is left of ranks whose launcher has ended."""


@dataclass
class Seen:
    rank: int
    total: torch.Tensor


def add_up(scale: float) -> Seen:
    rank = dist.get_rank()
    total = torch.full((3,), scale * (rank + 1))
    dist.all_reduce(total)
    sys.stdout.write(f"added up in rank {rank}\n")
    assert torch.get_num_threads() == 1
    return Seen(rank, total)


def fail(how: str) -> object:
    at_step(7)
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "raise":
            raise KeyError("no such expert")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(1000)
        if how == "exit":
            sys.exit(0)
        if how == "unsendable":
            return (n for n in range(3))
    dist.barrier()
    return None


def check(results: list[Seen]) -> None:
    assert [type(result) for result in results] == [Seen, Seen]
    assert [result.rank for result in results] == [0, 1]
    for result in results:
        assert torch.equal(result.total, torch.full((3,), 1.5))


def test_results_come_back_by_rank_with_tensors_and_logs(tmp_path):
    check(launch(add_up, 2, 0.5, log_dir=tmp_path))

    for rank in range(2):
        printed = (tmp_path / f"rank{rank}.log").read_text(encoding="utf-8")
        assert f"added up in rank {rank}" in printed


def test_it_runs_in_another_thread_and_under_a_running_event_loop():
    results = []

    async def cell() -> None:
        results.extend(launch(add_up, 2, 0.5))

    thread = threading.Thread(target=lambda: asyncio.run(cell()))
    thread.start()
    thread.join()

    check(results)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "raised KeyError: 'no such expert'"),
        ("kill", "was killed by SIGKILL, as happens when memory runs out"),
        ("exit", "called sys.exit(0)"),
        ("hang", "did not end within 20 s"),
        (
            "unsendable",
            "returned an object of type generator, which cannot be pickled "
            "(TypeError: cannot pickle 'generator' object); return numbers, tensors "
            "or containers",
        ),
    ],
)
def test_a_rank_that_fails_is_named_with_its_step(how, words):
    with pytest.raises(RankFailed) as caught:
        launch(fail, 2, how, timeout=20.0 if how == "hang" else PATIENCE_SECONDS)

    message = str(caught.value)
    assert message.splitlines()[0] == f"rank 1 of 2 {words} (at step 7)"
    assert caught.value.rank == 1
    if how in ("raise", "exit", "hang"):
        assert Path(__file__).name in caught.value.first.trace
    if how == "raise":
        assert 'raise KeyError("no such expert")' in message
    if how == "hang":
        assert "rank 0 waits for other ranks" in message


SCRIPT = """\
import subprocess, sys, time
from labkit.parallel.launch import launch

def wait_long():
    subprocess.Popen(("sleep", "1000"))
    print("up", flush=True)
    time.sleep(1000)

launch(wait_long, 2, timeout=900, log_dir="{logs}")
"""
"""A function of a script without a guard, in ranks that have processes of their own."""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_outlives_its_launcher_and_no_file_is_left(ending, tmp_path):
    logs, scratch = tmp_path / "logs", tmp_path / "scratch"
    scratch.mkdir()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(logs=logs), encoding="utf-8")
    launcher = subprocess.Popen(
        (sys.executable, script),
        env=os.environ | {"TMPDIR": str(scratch)},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: are_up(logs, launcher), PATIENCE_SECONDS)
        started = psutil.Process(launcher.pid).children(recursive=True)
        n_sleeping = [process.name() for process in started].count("sleep")
        launcher.send_signal(ending)
        _, error = launcher.communicate(timeout=PATIENCE_SECONDS)
    finally:
        launcher.kill()

    assert n_sleeping == 2
    wait_for(lambda: not any(map(is_alive, started)), GONE_SECONDS)
    assert ("KeyboardInterrupt" in error) == (ending == signal.SIGINT)
    assert list(scratch.iterdir()) == []


def are_up(logs: Path, launcher: subprocess.Popen) -> bool:
    assert launcher.poll() is None, launcher.stderr.read()
    found = list(logs.glob("rank?.log"))
    return len(found) == 2 and all("up" in log.read_text() for log in found)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it takes too long"
        time.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


TORCHRUN_SCRIPT = """\
import sys
import torch.distributed as dist
from labkit.parallel.group import node_of, run
from tests.distributed.test_launch import add_up

def work(scale):
    seen = add_up(scale)
    return seen.rank, node_of(seen.rank), seen.total.tolist()

if __name__ == "__main__":
    rank, *rest = run(work, 0.5)
    with open(f"{sys.argv[1]}/{rank}", "w") as file:
        print(rest, file=file)
"""


def test_torchrun_runs_the_same_functions(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN_SCRIPT, encoding="utf-8")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        (sys.executable, "-m", *torchrun, script, tmp_path),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = (tmp_path / str(rank)).read_text(encoding="utf-8")
        assert found == "[0, [1.5, 1.5, 1.5]]\n"
