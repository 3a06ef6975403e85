"""Two processes under torchrun against one, on the same global batches."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labkit.monitor import StepMetrics, read_jsonl
from labkit.training import read_checkpoint

N_STEPS = 6

OPTIONS = (
    *("--preset", "tiny", "--steps", str(N_STEPS), "--seq-len", "32"),
    *("--global-batch", "4", "--micro-batch", "1", "--save-every", "3"),
)

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for index in range(6):
        (folder / f"{index}.txt").write_text(f"document {index} of six\n" * 60)
    return folder


def train(*launcher: str, text: Path, out: Path) -> subprocess.CompletedProcess:
    command = (sys.executable, "-m", *launcher, "labkit", "train", *OPTIONS)
    places = ("--corpus", str(text), "--out", str(out), "--threads", "1")
    return subprocess.run(
        (*command, *places), capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def alone(text_folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    assert train(text=text_folder, out=out).returncode == 0
    return out


@pytest.fixture(scope="module")
def together(text_folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("together") / "run"
    done = train(*TORCHRUN, text=text_folder, out=out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bits per byte") == 1  # only the first rank prints
    return out


def records(run: Path) -> list[StepMetrics]:
    return read_jsonl(run / "metrics.jsonl")


def test_losses_and_gradient_norms_are_those_of_one_process(alone, together):
    assert len(records(together)) == N_STEPS
    for ours, theirs in zip(records(together), records(alone), strict=True):
        assert (ours.step, ours.tokens, ours.lr) == (
            theirs.step,
            theirs.tokens,
            theirs.lr,
        )
        for part in ("loss", "loss_main", "loss_mtp", "loss_balance", "grad_norm"):
            value = pytest.approx(getattr(theirs, part), rel=1e-5)
            assert getattr(ours, part) == value, (ours.step, part)


def test_the_load_is_that_of_the_whole_batch_so_router_biases_agree(alone, together):
    for ours, theirs in zip(records(together), records(alone), strict=True):
        assert ours.expert_load == theirs.expert_load
    saved = [read_checkpoint(run).tensors for run in (together, alone)]
    biases = [name for name in saved[0] if name.endswith("gate.bias")]
    assert len(biases) == 4
    for name in biases:
        assert torch.equal(saved[0][name], saved[1][name])
        assert saved[0][name].abs().max() > 0


def test_weights_agree_and_the_first_rank_wrote_one_checkpoint(alone, together):
    ours, theirs = (read_checkpoint(run) for run in (together, alone))
    assert ours.values == theirs.values
    for name in theirs.tensors:
        if name.startswith("model."):
            torch.testing.assert_close(
                ours.tensors[name], theirs.tensors[name], rtol=1e-3, atol=1e-4
            )
    assert sorted(path.name for path in together.iterdir()) == [
        "checkpoint.safetensors",
        "metrics.jsonl",
    ]


def test_a_batch_that_two_ranks_cannot_share_is_one_sentence(text_folder, tmp_path):
    out = tmp_path / "run"
    command = (sys.executable, "-m", *TORCHRUN, "labkit", "train")
    options = ("--corpus", str(text_folder), "--out", str(out), "--global-batch", "3")
    done = subprocess.run(
        (*command, *options), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    rule = "labkit train: --global-batch must be a multiple of the number of ranks"
    assert rule in done.stderr
    assert not out.exists()
