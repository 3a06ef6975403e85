import math
import os
import shlex
import shutil
import subprocess
import sys

import pytest

from labkit.__main__ import main
from labkit.commands import train as train_command
from labkit.monitor import StepMetrics, read_jsonl
from labkit.training import Trainer, read_checkpoint


def test_a_run_prints_its_steps_and_saves_itself(train, tmp_path, capsys):
    assert train("--steps", "3", "--log-every", "2", "--sample", "30") == 0
    lines = capsys.readouterr().out.rstrip("\n").split("\n")
    assert lines[0].startswith("text        Corpus(text: 6 documents")
    assert lines[1].startswith("model       1.81M parameters")
    assert "3 steps (0 done) of 2 x 16 tokens, fp32, 1 rank(s) on cpu" in lines[2]
    assert [line.split()[1] for line in lines[3:6]] == ["1", "2", "3"]
    assert lines[6].startswith("validation") and "bits per byte" in lines[6]
    assert lines[7] == "sample" and lines[8].startswith("    | def ")
    assert all(line.isprintable() for line in lines)
    assert lines[-1] == f"saved in {tmp_path / 'run'}"
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 3
    assert read_checkpoint(tmp_path / "run").values["n_steps_done"] == 3


def test_options_change_the_recipe_and_keep_its_proportions(train, tmp_path):
    train("--steps", "1", "--lr", "0.05", "--seed", "7", "--precision", "bf16")
    saved = read_checkpoint(tmp_path / "run").values["train"]
    assert (saved["lr"], saved["seed"], saved["precision"]) == (0.05, 7, "bf16")
    assert saved["min_lr"] < 0.05
    assert (saved["global_batch"], saved["micro_batch"]) == (2, 2)


def test_an_interrupted_run_says_how_to_go_on_and_does(
    train, tmp_path, capsys, monkeypatch
):
    run = Trainer.run
    monkeypatch.setattr(
        "labkit.training.Trainer.run", lambda self, **o: run(self, 2, **o)
    )
    train("--steps", "4")
    out = capsys.readouterr().out
    command = f"python -m labkit train --resume {tmp_path / 'run'}"
    assert f"stopped after step 2; go on with: {command}" in out

    monkeypatch.setattr("labkit.training.Trainer.run", run)
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    assert "4 steps (2 done)" in capsys.readouterr().out
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [record.step for record in records] == [1, 2, 3, 4]


def mistake(capsys, *arguments: str) -> str:
    assert main(["train", *arguments]) == 2
    return capsys.readouterr().err.strip()


def test_a_bad_folder_is_one_sentence(capsys, tmp_path):
    assert mistake(capsys, "--corpus", str(tmp_path / "no")) == (
        f"labkit train: corpus folder not found: {tmp_path / 'no'}. "
        "Give a folder that holds text files."
    )


REFUSED = {
    ("--steps", "0"): "--steps must be a whole number of at least 1; got 0. "
    "Set --steps to 1 or more.",
    ("--seed", "-1"): "--seed must be a whole number of at least 0; got -1. "
    "Set --seed to 0 or more.",
    ("--seed", str(2**64)): f"--seed must be below 2**63; got {2**64}. "
    "Set --seed=0 or another.",
    ("--micro-batch", "3"): "--micro-batch must divide --global-batch; got 3 and 2. "
    "Set --global-batch=3.",
    ("--lr", "inf"): "--lr must be above 0 and finite; got inf. "
    "Set --lr to a number above 0.",
    ("--seq-len", "1"): "--seq-len must exceed the MTP depth, because module k "
    "predicts k tokens further ahead; got 1 and 1. Set --seq-len=2 or more, or choose "
    "a preset without MTP.",
    ("--seq-len", "257"): "--seq-len must be at most the model's max_seq_len; got 257 "
    "and 256. Set --seq-len=256, or choose a preset for longer sequences.",
    ("--seq-len", "230"): "the validation text is too short: a window needs --seq-len "
    "+ 1 = 231 bytes, but only 221 are there. Give more text, or set --seq-len=220 or "
    "less.",
    ("--save-every", "0"): "--save-every must be at least 1; got 0. "
    "Set --save-every to 1 or more.",
    ("--log-every", "0"): "--log-every must be at least 1; got 0. "
    "Set --log-every to 1 or more.",
    ("--global-batch", "10000000000", "--micro-batch", "1"): "--global-batch must be "
    "at most 65,536, because a step holds all its tokens; got 10,000,000,000. Set "
    "--global-batch=64 or so.",
    ("--sample", "-1"): "--sample must be at least 0; got -1. "
    "Set --sample to 0 or more.",
}


@pytest.mark.parametrize("options", REFUSED)
def test_a_refusal_speaks_of_options_and_leaves_nothing(
    train, tmp_path, capsys, options
):
    assert train(*options) == 2
    assert capsys.readouterr().err == f"labkit train: {REFUSED[options]}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_an_unknown_preset_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--preset", "huge"])
    assert "invalid choice: 'huge' (choose from" in capsys.readouterr().err


def test_a_model_that_cannot_fit_is_refused_before_it_is_built(capsys, text_folder):
    text = mistake(capsys, "--preset", "v3-671b", "--corpus", str(text_folder))
    assert text.startswith(
        "labkit train: v3-671b does not fit: weights, gradients and moments of "
        "1 rank(s) take 10,172 GiB, and this machine has "
    )
    assert text.endswith("Choose a smaller preset, such as small.")


def test_resuming_takes_no_option_of_a_new_run(capsys):
    assert mistake(capsys, "--resume", "x", "--lr", "1", "--steps", "5") == (
        "labkit train: --resume goes on with the saved recipe and takes no options of "
        "a new run; got --steps, --lr. Leave them out."
    )


def test_a_file_in_place_of_the_folder_is_refused(train, tmp_path, capsys):
    (tmp_path / "run").write_text("a file in the way")
    assert train("--steps", "1") == 2
    assert capsys.readouterr().err == (
        "labkit train: --out must be a folder, or a place to make one; "
        f"{tmp_path / 'run'} is a file. Choose another --out.\n"
    )


def test_the_records_of_another_run_are_not_added_to(train, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    assert train("--steps", "1") == 2
    assert capsys.readouterr().err == (
        f"labkit train: {tmp_path / 'run'} already holds metrics.jsonl of a run "
        "without a checkpoint, to which a new run would append. Remove the file, or "
        "choose another --out.\n"
    )


def test_a_finished_run_says_how_to_go_on_instead(train, tmp_path, capsys):
    train("--steps", "1")
    capsys.readouterr()
    assert train("--steps", "1") == 2
    assert capsys.readouterr().err == (
        f"labkit train: {tmp_path / 'run'} already holds a checkpoint, which a new run "
        f"would replace. Go on with --resume {tmp_path / 'run'}, or choose another "
        "--out.\n"
    )


def test_a_copy_of_a_checkpoint_does_not_replace_the_one_beside_it(
    train, tmp_path, capsys
):
    train("--steps", "1")
    original = tmp_path / "run" / "checkpoint.safetensors"
    copy = shutil.copy(original, original.with_name("copy.safetensors"))
    before = original.read_bytes()
    assert main(["train", "--resume", str(copy)]) == 2
    assert "already holds a checkpoint" in capsys.readouterr().err
    assert original.read_bytes() == before


def test_a_checkpoint_that_cannot_be_written_gives_status_1(train, capsys, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("checkpoint of 22 MB not written; choose another run_dir.")

    monkeypatch.setattr("labkit.training.Trainer.save", fail)
    assert train("--steps", "1") == 1
    assert capsys.readouterr().err == (
        "labkit train: checkpoint of 22 MB not written; choose another --out.\n"
    )


def test_two_runs_that_start_in_the_same_second_have_two_folders():
    names = {train_command._run_name("tiny") for _ in range(10)}
    assert len(names) == 10
    assert all(name.startswith("tiny-20") for name in names)


def test_a_run_that_fails_at_its_first_step_leaves_no_folder(
    text_folder, tmp_path, monkeypatch
):
    def fail(trainer: Trainer) -> None:
        raise OSError("out of luck")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("labkit.training.Trainer.step", fail)
    options = ("--corpus", str(text_folder), "--seq-len", "16", "--steps", "1")
    assert main(["train", *options]) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("option", ["corpus", "out", "resume"])
def test_an_empty_folder_name_is_refused_and_not_a_default(option, capsys):
    assert main(["train", f"--{option}", "", "--steps", "1"]) != 0
    assert f"--{option} must name a folder; got an empty" in capsys.readouterr().err


@pytest.mark.parametrize("threads", ["0", "-1", "99999999"])
def test_threads_out_of_range_are_refused(train, threads, capsys):
    assert train("--threads", threads) != 0
    assert "--threads must lie between 1 and 1024" in capsys.readouterr().err


def test_a_run_whose_reader_goes_away_is_saved_and_ends_quietly(text_folder, tmp_path):
    options = [
        *("--corpus", text_folder, "--out", tmp_path / "run", "--seq-len", "16"),
        *("--global-batch", "2", "--log-every", "1", "--steps", "1000"),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "labkit", "train", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    while not process.stdout.readline().startswith(b"step"):
        pass
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    assert read_checkpoint(tmp_path / "run").values["n_steps_done"] > 0


def test_a_run_that_diverges_says_so_and_gives_status_1(train, capsys):
    assert train("--steps", "2", "--lr", "1e30") == 1
    captured = capsys.readouterr()
    assert captured.err == (
        "labkit train: the run diverged: at step 2 its loss or gradients are not "
        "finite. Start a new run with a smaller --lr.\n"
    )
    assert "saved in" not in captured.out


def test_weights_that_are_not_finite_are_one_sentence_and_give_status_1(
    train, tmp_path, capsys, monkeypatch
):
    step = Trainer.step

    def ruin(trainer: Trainer) -> StepMetrics:
        trainer.model.norm.weight.data.fill_(math.nan)
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", ruin)
    assert train("--steps", "1") == 1
    assert capsys.readouterr().err == (
        "labkit train: the run diverged: after step 1, these are not finite: "
        "model.norm.weight. No checkpoint of them is written; start a new run with a "
        "smaller --lr.\n"
    )
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


def test_a_full_disk_leaves_nothing_and_the_same_command_works_later(
    train, tmp_path, capsys, monkeypatch
):
    def fail(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("labkit.training.checkpoint.save_file", fail)
        assert train("--steps", "1") == 1
    assert "Nothing was written; free some space or" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert train("--steps", "1", "--sample", "0") == 0


@pytest.mark.usefixtures("unchecked")
def test_a_step_that_does_not_fit_is_answered_and_leaves_nothing(
    train, tmp_path, capsys
):
    assert train("--steps", "3", "--memory-limit", "20MiB") == 1
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert lines[0].startswith("labkit train: out of memory, ")
    assert lines[0].endswith(" passed the limit of 20 MiB")
    assert "micro_batch" not in captured.err and "--micro-batch" in captured.err
    assert "Traceback" not in captured.err and len(lines) <= 15
    assert "stopped after" not in captured.out
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("unchecked")
def test_a_step_that_does_not_fit_leaves_the_steps_before_it(train, tmp_path, capsys):
    # The first step needs no moments in its backward, the second does.
    options = ("--steps", "3", "--seq-len", "64")
    assert train(*options, "--memory-limit", "28.5MiB") == 1
    command = f"python -m labkit train --resume {tmp_path / 'run'}"
    assert f"stopped after step 1; go on with: {command}" in capsys.readouterr().out

    resume = ("train", "--resume", str(tmp_path / "run"), "--sample", "0")
    assert main([*resume, "--memory-limit", "1GiB"]) == 0
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [record.step for record in records] == [1, 2, 3]


@pytest.mark.usefixtures("unchecked")
def test_a_remedy_of_the_answer_is_an_option_that_helps(train, tmp_path, capsys):
    options = ["--steps", "2", "--global-batch", "4", "--seq-len", "96"]
    options += ["--sample", "0", "--memory-limit", "37MiB"]
    assert train(*options) == 1
    lines = capsys.readouterr().err.splitlines()
    remedies = [line.split(" with ")[1] for line in lines if line[:4] == "  1."]
    assert remedies[0].startswith("--micro-batch=1,")
    options += ["--micro-batch=1", "--out", str(tmp_path / "other")]
    assert train(*options) == 0


@pytest.mark.usefixtures("unchecked")
def test_what_runs_again_changes_no_loss(train, tmp_path, capsys):
    losses = []
    for policy in ("none", "full"):
        run = tmp_path / policy
        options = ("--out", str(run), "--sample", "0", "--recompute", policy)
        assert train("--steps", "2", *options) == 0
        losses.append([x.loss for x in read_jsonl(run / "metrics.jsonl")])
    assert losses[0] == losses[1]


def test_a_limit_that_is_no_size_is_refused(train, tmp_path, capsys):
    assert train("--memory-limit", "2GB") == 2
    assert capsys.readouterr().err == (
        "labkit train: --memory-limit: a size must be a number above 0 with a unit of "
        "B, KiB, MiB, GiB, TiB; got '2GB'. Write 2GiB or 500MiB, for example.\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_policies_are_refused_by_the_name_of_their_option(train, capsys):
    assert train("--recompute", "full", "full") == 2
    rule = "labkit train: --recompute must be one name, or one for each of"
    assert capsys.readouterr().err.startswith(rule)


@pytest.mark.usefixtures("unchecked")
def test_each_block_may_have_a_policy_as_an_answer_spells_it(train, tmp_path, capsys):
    options = ["--steps", "2", "--global-batch", "4", "--seq-len", "96"]
    options += ["--sample", "0", "--memory-limit", "39MiB"]
    assert train(*options) == 1
    lines = capsys.readouterr().err.splitlines()
    remedy = next(x for x in lines if "--recompute '" in x).split(" with ")[1]
    words = shlex.split(remedy.split(", +")[0])
    assert words[0] == "--recompute" and len(words) == 6
    assert train(*options, "--out", str(tmp_path / "other"), *words) == 0
