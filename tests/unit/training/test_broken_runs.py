"""How a run ends when something goes wrong, and what it leaves behind."""

import math
from dataclasses import replace

import pytest
import torch

from labkit.monitor import Monitor
from labkit.training import Trainer, read_checkpoint


def losses(records: list) -> list[float]:
    return [record.loss for record in records]


def message(call, *args, **options) -> str:
    with pytest.raises(ValueError) as error:
        call(*args, **options)
    return str(error.value)


@pytest.mark.parametrize("saved_before", [True, False])
def test_weights_that_are_not_finite_do_not_replace_a_checkpoint(
    make_model, train_config, corpus, tmp_path, saved_before
):
    trainer = Trainer(make_model(), train_config, corpus, run_dir=tmp_path / "run")
    if saved_before:
        trainer.run(2, progress=False)
    with torch.no_grad():
        trainer.model.norm.weight[0] = math.inf
    with pytest.raises(FloatingPointError) as error:
        trainer.run(1, progress=False)
    kept = ", and the previous one is intact" if saved_before else ""
    assert str(error.value) == (
        f"the run diverged: after step {3 if saved_before else 1}, these are not "
        f"finite: model.norm.weight. No checkpoint of them is written{kept}; start a "
        "new run with a smaller lr."
    )
    if saved_before:
        resumed = Trainer.resume(tmp_path / "run", corpus=corpus)
        assert resumed.n_steps_done == 2


def test_a_run_whose_listener_fails_is_saved_and_repeats_no_step(
    make_model, train_config, corpus, tmp_path
):
    def fail(metrics: object) -> None:
        if metrics.step == 3:
            raise BrokenPipeError

    expected = Trainer(make_model(), train_config, corpus).run(progress=False)
    trainer = Trainer(
        make_model(),
        train_config,
        corpus,
        run_dir=tmp_path,
        monitor=Monitor(on_step=[fail]),
    )
    with pytest.raises(BrokenPipeError):
        trainer.run(progress=False)
    resumed = Trainer.resume(tmp_path, corpus=corpus)
    assert resumed.n_steps_done == 3
    assert losses(resumed.run(2, progress=False)) == losses(expected[3:5])


def test_weights_half_changed_are_not_saved(
    make_model, train_config, corpus, tmp_path, monkeypatch
):
    trainer = Trainer(make_model(), train_config, corpus, run_dir=tmp_path)
    trainer.run(1, progress=False)
    update = trainer.optimizer.step

    def break_off() -> None:
        if trainer.n_steps_done == 2:
            raise RuntimeError
        update()

    monkeypatch.setattr(trainer.optimizer, "step", break_off)
    with pytest.raises(RuntimeError):
        trainer.run(progress=False)
    assert read_checkpoint(tmp_path).values["n_steps_done"] == 1


def test_two_trainers_of_one_folder_do_not_replace_each_others_run(
    make_model, train_config, corpus, tmp_path
):
    first, second = (
        Trainer(make_model(), train_config, corpus, run_dir=tmp_path) for _ in range(2)
    )
    first.run(1, progress=False)
    with pytest.raises(ValueError, match="already holds a checkpoint"):
        second.run(1, progress=False)
    first.run(1, progress=False)


def test_a_folder_in_which_a_run_is_going_on_cannot_be_resumed_from(
    make_model, train_config, corpus, tmp_path
):
    trainer = Trainer(make_model(), train_config, corpus, run_dir=tmp_path)
    trainer.run(1, progress=False)
    refusals = []

    def resume(metrics: object) -> None:
        resumed = Trainer.resume(tmp_path, corpus=corpus)
        refusals.append(message(resumed.run, progress=False))

    trainer.monitor.listeners.append(resume)
    trainer.run(1, progress=False)
    assert refusals[0].startswith(f"another run is writing to {tmp_path}, ")


def test_a_step_of_too_many_sequences_is_refused(make_model, train_config, corpus):
    train = replace(train_config, global_batch=10**10, micro_batch=1)
    assert message(Trainer, make_model(), train, corpus) == (
        "global_batch must be at most 65,536, because a step holds all its tokens; got "
        "10,000,000,000. Set global_batch=64 or so."
    )
