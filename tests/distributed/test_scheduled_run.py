"""Two processes with a precision scheduler, one of which meets a fault."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.monitor import read_jsonl
from labkit.training.decisions import Rollback, read_decisions

SCRIPT = Path(__file__).with_name("scheduled_run.py")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(folder: Path, n_steps: int) -> list[dict]:
    """Train so many steps on two ranks, and return what each did."""
    command = (sys.executable, "-m", *TORCHRUN, SCRIPT, folder, str(n_steps))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("scheduled")


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run(folder, 6)


def test_a_fault_of_one_rank_is_decided_on_alike_by_both(ranks):
    assert ranks[0] == ranks[1]
    assert len(ranks[0]["losses"]) == 6


def test_the_module_that_was_struck_is_taken_back_and_so_is_the_run(ranks, folder):
    entries = read_decisions(folder / "run" / "decisions.jsonl")
    *decisions, rollback = entries
    assert [(x.step, x.module, x.after) for x in decisions] == [
        (4, "layers.1.attn.wo", "high")
    ]
    assert isinstance(rollback, Rollback) and rollback.back_to == 0
    records = read_jsonl(folder / "run" / "metrics.jsonl", all_attempts=True)
    assert [record.attempt for record in records] == [0] * 4 + [1] * 6


def test_a_resumed_run_goes_on_with_the_same_levels_on_both(ranks, folder, tmp_path):
    again = run(shutil.copytree(folder, tmp_path / "again"), 1)
    assert again[0] == again[1]
    levels = again[0]["scheduler"]["levels"]
    assert levels == ranks[0]["scheduler"]["levels"]
    assert again[0]["log"] == ranks[0]["log"]
