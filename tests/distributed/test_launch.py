"""Functions run in several processes, and what comes back from them."""

import os
import signal
import sys
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from labkit.parallel.failures import RankFailed
from labkit.parallel.group import at_step
from labkit.parallel.launch import launch


@dataclass
class Seen:
    rank: int
    total: torch.Tensor


def add_up(scale: float) -> Seen:
    rank = dist.get_rank()
    total = torch.full((3,), scale * (rank + 1))
    dist.all_reduce(total)
    sys.stdout.write(f"added up in rank {rank}\n")
    return Seen(rank, total)


def fail(how: str) -> None:
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
    dist.barrier()


def test_results_come_back_by_rank_with_tensors_and_logs(tmp_path):
    results = launch(add_up, 2, 0.5, log_dir=tmp_path)

    assert [type(result) for result in results] == [Seen, Seen]
    assert [result.rank for result in results] == [0, 1]
    for result in results:
        assert torch.equal(result.total, torch.full((3,), 1.5))
    for rank in range(2):
        printed = (tmp_path / f"rank{rank}.log").read_text(encoding="utf-8")
        assert f"added up in rank {rank}" in printed


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "raised KeyError: 'no such expert' (at step 7)"),
        ("kill", "was killed by SIGKILL, as happens when memory runs out (at step 7)"),
        ("exit", "called sys.exit(0) (at step 7)"),
        ("hang", "did not end within 25 s (at step 7)"),
    ],
)
def test_a_rank_that_fails_is_named(how, words):
    with pytest.raises(RankFailed) as caught:
        launch(fail, 2, how, timeout=25.0 if how == "hang" else 120.0)

    assert str(caught.value).splitlines()[0] == f"rank 1 of 2 {words}"
    assert caught.value.rank == 1
