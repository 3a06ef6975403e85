"""`train` in FP8: policies, moments, and a scheduler of precision."""

import pytest
import torch

from labkit.__main__ import main
from labkit.commands.progress import print_decisions
from labkit.config import PRESETS
from labkit.precision.scheduler import Decision
from labkit.training import read_checkpoint
from labkit.training.decisions import Rollback


def test_a_run_in_fp8_says_what_is_in_fp8_and_what_multiplies(train, tmp_path, capsys):
    options = ("--precision", "fp8", "--fp8-policy", "aggressive", "--moments", "bf16")
    assert train("--steps", "1", "--sample", "4", *options) == 0
    line = capsys.readouterr().out.splitlines()[3]
    assert line == (
        "precision   46 of 46 layers in FP8 (wq_a, wq_b, wkv_a, wkv_b, wo, w1, w2, w3, "
        "experts, head, eh_proj) by aggressive, emulated on this CPU; the rest in BF16"
    )
    saved = read_checkpoint(tmp_path / "run")
    names = ("precision", "fp8_policy", "moments")
    chosen = [saved.values["train"][name] for name in names]
    assert chosen == ["fp8", "aggressive", "bf16"]
    assert saved.tensors["optimizer.exp_avg.norm.weight"].dtype == torch.bfloat16


def test_an_unknown_policy_of_fp8_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--precision", "fp8", "--fp8-policy", "bold"])
    assert "invalid choice: 'bold' (choose from 'bf16'," in capsys.readouterr().err


def test_decisions_of_a_scheduler_are_lines_and_alike_ones_are_one(capsys):
    alike = {"step": 7, "signal": "loss", "value": 9.25, "before": "fp8"}
    changes = [
        Decision(module=f"layers.{n}.attn.wo", after="high", **alike) for n in range(4)
    ]
    back = Rollback(step=7, since=6, back_to=0, cause="loss 9.25")
    print_decisions((*changes, back))
    assert capsys.readouterr().out.splitlines() == [
        "step     7  fp8 to high (loss: 9.25), 4 layer(s): layers.0.attn.wo, "
        "layers.1.attn.wo, layers.2.attn.wo and 1 more",
        "step     7  rolled back to step 0: loss 9.25",
    ]


def test_a_run_with_a_scheduler_starts_with_little_in_fp8(train, tmp_path, capsys):
    options = ("--precision", "fp8", "--precision-scheduler", "--sample", "0")
    assert train("--steps", "1", *options) == 0
    assert capsys.readouterr().out.splitlines()[3] == (
        "precision   none of 46 layers in FP8 as a scheduler decides, up to "
        "deepseek-v3; the rest in BF16"
    )
    assert read_checkpoint(tmp_path / "run").values["scheduler"] is not None


def test_a_scheduler_of_precision_needs_fp8(train, capsys):
    assert train("--precision-scheduler") == 2
    assert capsys.readouterr().err == (
        "labkit train: --precision-scheduler decides what --precision fp8 has in FP8; "
        "got --precision fp32. Give --precision fp8, or leave --precision-scheduler "
        "out.\n"
    )


def test_a_policy_of_fp8_needs_fp8(train, tmp_path, capsys):
    assert train("--fp8-policy", "aggressive", "--precision", "auto") == 2
    assert capsys.readouterr().err == (
        "labkit train: --fp8-policy says what --precision fp8 has in FP8; got "
        "--precision auto. Give --precision fp8, or leave --fp8-policy out.\n"
    )
    assert not (tmp_path / "run").exists()


def test_snapshots_count_among_what_must_fit(train, capsys):
    options = ("--preset", "v3-671b", "--precision", "fp8", "--precision-scheduler")
    assert train(*options) == 2
    n_params = PRESETS["v3-671b"].n_params(include_mtp=True)
    assert (
        "weights, gradients, moments and snapshots of 1 rank(s) take "
        f"{40 * n_params / 2**30:,.0f} GiB"
    ) in capsys.readouterr().err
