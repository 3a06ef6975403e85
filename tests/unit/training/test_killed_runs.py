import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from labkit.config import model_to_dict
from labkit.monitor import read_jsonl

SCRIPT = Path(__file__).with_name("killed_run.py")
PLACES = ("forward", "update", "record", "save", "before-move", "after-move")


def ten_kills() -> list[str]:
    """Ten random steps in order, each with a place; every place occurs."""
    chance = random.Random(0)
    steps = sorted(chance.sample(range(1, 40), 10))
    places = [*PLACES, *chance.choices(PLACES, k=4)]
    chance.shuffle(places)
    return [f"{step}:{place}" for step, place in zip(steps, places, strict=True)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_run_killed_at_ten_random_steps_equals_one_that_was_not(
    tmp_path, micro_config
):
    kills = ten_kills()
    (tmp_path / "model.json").write_text(json.dumps(model_to_dict(micro_config)))
    subprocess.run([sys.executable, SCRIPT, tmp_path, *kills], check=True, timeout=120)

    killed = read_jsonl(tmp_path / "killed" / "metrics.jsonl")
    whole = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    assert [record.step for record in whole] == list(range(1, 41))
    for ours, theirs in zip(killed, whole, strict=True):
        for field in ("step", "loss", "loss_main", "loss_mtp", "grad_norm", "lr"):
            assert getattr(ours, field) == getattr(theirs, field), kills

    ours, theirs = (
        load_file(tmp_path / name / "checkpoint.safetensors")
        for name in ("killed", "whole")
    )
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == [
        "checkpoint.safetensors",
        "metrics.jsonl",
    ]
