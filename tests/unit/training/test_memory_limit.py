"""A run whose memory ends: what it was before the step, and how it goes on."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from labkit.memory import apply_recompute, measure
from labkit.memory.out_of_memory import OutOfMemory
from labkit.monitor import read_jsonl
from labkit.precision.scheduler import PrecisionScheduler
from labkit.training import Trainer, read_checkpoint
from labkit.training.checkpoint import gather_tensors

pytestmark = pytest.mark.usefixtures("unchecked")  # each of very many operators


@pytest.fixture
def make_trainer(make_model, train_config, corpus) -> Callable[..., Trainer]:
    return lambda **options: Trainer(make_model(), train_config, corpus, **options)


@pytest.fixture
def limit(make_trainer) -> int:
    """Fewer bytes than a second step needs, but enough for the first, without moments.

    The largest instants differ by the moments, of which half are subtracted.
    """
    trainer = make_trainer()
    trainer.step()
    report = measure(trainer.step, trainer.model, trainer.optimizer)
    return report.peak - report.by_part["moments"] // 2


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    tensors = gather_tensors(trainer.model, trainer.optimizer)
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        torch.equal(one[name], two[name]) for name in one
    )


def losses(records: list) -> list[float]:
    return [record.loss for record in records]


def test_a_step_that_passes_the_limit_leaves_the_run_as_it_was(make_trainer, limit):
    trainer = make_trainer(memory_limit=limit)
    trainer.step()
    before, cursor = everything(trainer), trainer.cursor.state_dict()
    with pytest.raises(OutOfMemory):
        trainer.step()
    assert same(everything(trainer), before)
    assert trainer.cursor.state_dict() == cursor
    assert (trainer.n_steps_done, trainer.n_tokens_seen) == (1, 4 * 16)
    assert all(p.grad is None for p in trainer.model.parameters())


def test_a_run_whose_scheduler_has_nothing_in_fp8_is_answered_too(
    make_model, train_config, corpus
):
    train, model = replace(train_config, precision="fp8"), make_model()
    scheduler = PrecisionScheduler(model.cfg, start="bf16")
    trainer = Trainer(model, train, corpus, scheduler=scheduler, memory_limit=10**4)
    with pytest.raises(OutOfMemory, match="passed the limit of 9.77 KiB"):
        trainer.step()


def test_with_more_memory_it_goes_on_as_if_nothing_had_been(make_trainer, limit):
    expected = losses(make_trainer().run(4, progress=False))
    trainer = make_trainer(memory_limit=limit)
    found = losses(trainer.run(1, progress=False))
    with pytest.raises(OutOfMemory):
        trainer.run(1, progress=False)
    trainer.memory_limit = None
    assert found + losses(trainer.run(3, progress=False)) == expected


def test_a_limit_that_is_not_passed_changes_no_loss(make_trainer):
    expected = losses(make_trainer().run(3, progress=False))
    limited = make_trainer(memory_limit=10**9).run(3, progress=False)
    assert losses(limited) == expected


@pytest.fixture
def make_small(make_trainer) -> Callable[[], Trainer]:
    """Return a function that makes a trainer whose step is fullest at its end."""

    def make() -> Trainer:
        trainer = make_trainer()
        train = replace(trainer.train, micro_batch=1, global_batch=1, seq_len=2)
        return Trainer(trainer.model, train, trainer.corpus)

    return make


def test_moments_for_which_there_is_no_room_are_not_begun(make_small):
    trainer = make_small()
    report = measure(trainer._step, trainer.model, trainer.optimizer)
    most = {instant.name: instant.total for instant in report.timeline}
    assert most["optimizer"] > most["backward"]

    trainer = make_small()
    trainer.memory_limit = most["optimizer"] - 1
    before = everything(trainer)
    with pytest.raises(OutOfMemory, match="optimizer: zeros(_like)? passed") as caught:
        trainer.step()
    assert caught.value.is_undone and trainer._is_whole
    assert caught.value.report.timeline[-1].by_part["moments"] > 0
    assert not trainer.optimizer.state
    assert same(everything(trainer), before)


def test_a_limit_that_is_passed_once_weights_change_ends_a_whole_step(make_small):
    plain, trainer = make_small(), make_small()
    report = measure(plain._step, plain.model, plain.optimizer)
    assert report.peak_instant.name == "after optimizer"  # router biases

    trainer.memory_limit = report.peak - 1
    with pytest.raises(OutOfMemory, match="so the step was done") as caught:
        trainer.step()
    assert not caught.value.is_undone and trainer._is_whole
    assert trainer.n_steps_done == 1
    assert same(everything(trainer), everything(plain))


def test_moments_are_those_that_the_optimizer_would_begin_with(make_trainer):
    trainer, plain = make_trainer(), make_trainer()
    plain.optimizer._optimizer_step_pre_hooks.clear()
    for one in (trainer, plain):
        one.run(2, progress=False)
    assert same(everything(trainer), everything(plain))


def test_a_run_that_ends_so_is_saved_and_goes_on(make_trainer, limit, corpus, tmp_path):
    expected = losses(make_trainer().run(3, progress=False))
    trainer = make_trainer(memory_limit=limit, run_dir=tmp_path)
    with pytest.raises(OutOfMemory):
        trainer.run(progress=False)
    assert read_checkpoint(tmp_path).values["n_steps_done"] == 1
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1

    resumed = Trainer.resume(tmp_path, corpus=corpus)
    assert resumed.memory_limit is None
    assert losses(resumed.run(2, progress=False)) == expected[1:]


def test_a_run_that_is_resumed_may_have_a_limit_and_only_recompute_helps(
    make_trainer, limit, corpus, tmp_path
):
    make_trainer(run_dir=tmp_path).run(1, progress=False)
    resumed = Trainer.resume(tmp_path, corpus=corpus, memory_limit=limit)
    with pytest.raises(OutOfMemory) as caught:
        resumed.run(1, progress=False)
    (remedy,) = caught.value.remedies
    assert remedy.arguments.keys() == {"recompute"} and remedy.fits
    assert "what fits" not in str(caught.value)  # without another recipe
    apply_recompute(resumed.model, remedy.arguments["recompute"])
    assert len(resumed.run(2, progress=False)) == 2


def test_an_error_of_the_machine_is_answered_without_a_limit(make_trainer):
    trainer = make_trainer()
    trainer.model.norm.register_forward_hook(lambda *_: torch.empty(2**50))
    with pytest.raises(OutOfMemory, match="forward of norm: DefaultCPUAllocator"):
        trainer.step()


def test_a_limit_must_be_a_number_of_bytes(make_trainer):
    with pytest.raises(ValueError) as error:
        make_trainer(memory_limit=0)
    assert str(error.value) == (
        "memory_limit must be a whole number of at least 1; got 0. "
        "Set memory_limit to 1 or more."
    )
