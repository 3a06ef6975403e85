import math
import os
import signal
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from labkit.monitor import Monitor, read_jsonl
from labkit.training import Trainer, read_checkpoint
from labkit.training import corpus as corpora
from labkit.training.checkpoint import CHECKPOINT_NAME, write_checkpoint


@pytest.fixture
def trainer(make_model, train_config, corpus) -> Trainer:
    return Trainer(make_model(), train_config, corpus)


def losses(records: list) -> list[float]:
    return [record.loss for record in records]


def test_the_loss_falls_from_that_of_a_uniform_guess(trainer):
    records = trainer.run(progress=False)
    assert records[0].loss_main == pytest.approx(math.log(256), abs=0.1)
    assert records[-1].loss_main < records[0].loss_main - 1
    assert [record.step for record in records] == list(range(1, 21))


def test_a_record_holds_the_step(trainer):
    record = trainer.step()
    parts = record.loss_main + record.loss_mtp + record.loss_balance
    assert record.loss == pytest.approx(parts)
    assert record.tokens == 4 * 16
    assert record.lr == pytest.approx(5e-3)  # half-way up a warm-up of two steps
    assert record.grad_norm > 0 and not record.is_skipped
    assert record.memory_bytes > 10**7
    assert len(record.expert_load) == 2
    assert all(1 <= load <= 2 for load in record.expert_load)  # top 2 of 4 experts
    assert record.seconds == pytest.approx(64 / record.tokens_per_second)
    assert record.mfu is None


def test_mfu_is_the_models_own_flops_by_the_measured_peak(
    make_model, train_config, corpus
):
    trainer = Trainer(
        make_model(), train_config, corpus, monitor=Monitor(peak_flops=1e9)
    )
    record = trainer.step()
    flops = trainer.model.cfg.flops_per_token(16, training=True)
    assert record.mfu == pytest.approx(record.tokens_per_second * flops / 1e9)


def test_micro_batches_change_nothing(make_model, train_config, corpus):
    runs = [
        Trainer(make_model(), replace(train_config, micro_batch=size), corpus)
        for size in (4, 1)
    ]
    whole, parts = (losses(run.run(5, progress=False)) for run in runs)
    assert parts == pytest.approx(whole, rel=1e-5)


def test_gradients_are_clipped_to_the_norm_of_the_recipe(
    make_model, train_config, corpus
):
    trainer = Trainer(make_model(), replace(train_config, grad_clip=1e-3), corpus)
    record = trainer.step()
    clipped = torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm()
    assert record.grad_norm > 0.1
    assert clipped.item() == pytest.approx(1e-3, rel=1e-3)


def test_gradients_that_are_not_finite_change_no_weight(trainer):
    trainer.run(2, progress=False)
    before = {n: t.clone() for n, t in trainer.model.state_dict().items()}
    moments = {p: s["exp_avg"].clone() for p, s in trainer.optimizer.state.items()}
    trainer.model.embed.register_forward_hook(lambda *args: args[-1] * math.nan)
    record = trainer.step()
    assert record.is_skipped and math.isnan(record.loss)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    for parameter, moment in moments.items():
        assert torch.equal(trainer.optimizer.state[parameter]["exp_avg"], moment)


def test_each_step_moves_the_router_bias_once_by_gamma_until_it_is_frozen(
    make_model, train_config, corpus
):
    train = replace(
        train_config, n_steps=4, bias_update_rate=0.5, bias_freeze_fraction=0.25
    )
    trainer = Trainer(make_model(), train, corpus)
    bias = trainer.model.layers[1].ffn.gate.bias
    expected = torch.zeros(4)
    for step in range(4):
        trainer.step()
        load = trainer.load[0].double()
        if step < 3:  # two micro-batches, one update from the load of both
            expected += 0.5 * torch.sign(load.mean() - load).float()
        assert load.sum() == 64 * 2
        torch.testing.assert_close(bias, expected)
    assert expected.abs().max() > 0


def test_evaluation_is_the_mean_over_the_first_validation_windows(trainer):
    result = trainer.evaluate(n_batches=2)
    batch = trainer.valid.take(0, 4)
    with torch.no_grad():
        logits = trainer.model(batch.tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    assert result.nats == pytest.approx(expected.item(), rel=1e-5)
    assert result.n_tokens == 64
    assert result.bits_per_byte == pytest.approx(result.nats / math.log(2))


def test_evaluation_takes_each_window_once_and_changes_no_run(
    trainer, make_model, train_config, corpus
):
    assert trainer.valid.per_epoch == 11
    assert trainer.evaluate(n_batches=100).n_tokens == 11 * 16
    undisturbed = Trainer(make_model(), train_config, corpus).run(3, progress=False)
    assert losses(trainer.run(3, progress=False)) == losses(undisturbed)
    assert trainer.model.training


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(
    make_model, train_config, corpus, tmp_path
):
    whole = Trainer(make_model(), train_config, corpus)
    expected = losses(whole.run(progress=False))
    first = Trainer(make_model(), train_config, corpus, run_dir=tmp_path)
    first.run(7, progress=False)
    torch.manual_seed(99)
    resumed = Trainer.resume(tmp_path, corpus=corpus)
    resumed.run(progress=False)
    assert losses(read_jsonl(tmp_path / "metrics.jsonl")) == expected
    for ours, theirs in zip(
        whole.model.state_dict().values(),
        resumed.model.state_dict().values(),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_a_run_finds_its_text_again(
    make_model, train_config, text_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(corpora, "cache_folder", lambda: tmp_path / "cache")
    corpus = corpora.from_folder(text_folder)
    trainer = Trainer(make_model(), train_config, corpus)
    path = trainer.save(tmp_path / "a.safetensors")
    expected = trainer.step().loss
    resumed = Trainer.resume(path)
    assert resumed.run_dir is None
    assert resumed.step().loss == expected


@pytest.mark.parametrize("part", ["model.norm.weight", "optimizer.exp_avg.norm.weight"])
def test_a_checkpoint_with_nan_is_refused_and_draws_no_random_number(
    make_model, train_config, corpus, tmp_path, part
):
    trainer = Trainer(make_model(), train_config, corpus, run_dir=tmp_path)
    trainer.run(1, progress=False)
    saved = read_checkpoint(tmp_path)
    saved.tensors[part][0] = math.nan
    write_checkpoint(tmp_path / CHECKPOINT_NAME, saved)
    before = torch.get_rng_state()
    text = message(Trainer.resume, tmp_path, corpus=corpus)
    assert text.startswith(f"the checkpoint is not whole: not finite: {part}. ")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_checkpoint_without_some_values_is_refused(
    make_model, train_config, corpus, tmp_path
):
    path = Trainer(make_model(), train_config, corpus).save(tmp_path / "a.safetensors")
    saved = read_checkpoint(path)
    del saved.values["cursor"], saved.values["train"]["lr"]
    write_checkpoint(path, saved)
    assert message(Trainer.resume, path, corpus=corpus) == (
        "the checkpoint is not whole: cursor is missing, train.lr is missing. "
        "Take a whole copy of the checkpoint, or start a new run."
    )


def test_a_run_whose_first_steps_were_all_skipped_can_be_resumed(
    make_model, train_config, corpus, tmp_path
):
    trainer = Trainer(make_model(), train_config, corpus, run_dir=tmp_path)
    hook = trainer.model.embed.register_forward_hook(lambda *args: args[-1] * math.nan)
    trainer.run(1, progress=False)
    hook.remove()
    resumed = Trainer.resume(tmp_path, corpus=corpus)
    assert resumed.step().loss == trainer.step().loss


def test_another_text_is_refused(make_model, train_config, corpus, tmp_path):
    path = Trainer(make_model(), train_config, corpus).save(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="the text of a sentence changed since"):
        Trainer.resume(path, corpus=replace(corpus, fingerprint="other"))


def test_an_interrupt_ends_the_run_after_its_step_and_loses_nothing(
    make_model, train_config, corpus, tmp_path
):
    def interrupt(metrics: object) -> None:
        if metrics.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    expected = Trainer(make_model(), train_config, corpus).run(progress=False)
    trainer = Trainer(
        make_model(),
        train_config,
        corpus,
        run_dir=tmp_path,
        monitor=Monitor(on_step=[interrupt]),
    )
    records = trainer.run(progress=False)
    assert [record.step for record in records] == [1, 2, 3]
    resumed = Trainer.resume(tmp_path, corpus=corpus).run(progress=False)
    assert losses(records + resumed) == losses(expected)
    rest = trainer.run(progress=False)  # the same object goes on as well
    assert losses(records + rest) == losses(expected)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_is_not_held_back(make_model, train_config, corpus):
    def interrupt_twice(metrics: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    trainer = Trainer(
        make_model(), train_config, corpus, monitor=Monitor(on_step=[interrupt_twice])
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.run(progress=False)


def test_a_step_that_was_broken_off_is_done_again_with_its_own_text(
    trainer, make_model, train_config, corpus
):
    expected = Trainer(make_model(), train_config, corpus).run(4, progress=False)
    records = trainer.run(2, progress=False)

    def break_off(*_: object) -> None:
        raise KeyboardInterrupt

    hook = trainer.model.norm.register_forward_hook(break_off)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(2, progress=False)
    hook.remove()
    assert losses(records + trainer.run(2, progress=False)) == losses(expected)


def test_a_run_that_fails_before_its_first_record_leaves_no_folder(
    make_model, train_config, corpus, tmp_path, monkeypatch
):
    def fail(trainer: Trainer) -> None:
        raise RuntimeError

    monkeypatch.setattr(Trainer, "step", fail)
    run_dir = tmp_path / "runs" / "a"
    trainer = Trainer(make_model(), train_config, corpus, run_dir=run_dir)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError):
        trainer.run(progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_saved_every_so_often_and_at_its_end(
    make_model, train_config, corpus, tmp_path, monkeypatch
):
    trainer = Trainer(make_model(), train_config, corpus, run_dir=tmp_path)
    saved, save = [], trainer.save

    def note() -> None:
        saved.append(trainer.n_steps_done)
        save()

    monkeypatch.setattr(trainer, "save", note)
    trainer.run(5, progress=False, save_every=2)
    assert saved == [2, 4, 5]
    trainer.run(3, progress=False, save_every=2)
    assert saved == [2, 4, 5, 6, 8]  # the last of these was the end as well


def test_bf16_changes_the_loss_by_its_rounding_only(make_model, train_config, corpus):
    half = Trainer(make_model(), replace(train_config, precision="bf16"), corpus)
    full = Trainer(make_model(), train_config, corpus)
    assert half.step().loss == pytest.approx(full.step().loss, rel=1e-2)
    assert half.step().loss != full.step().loss


def message(call, *args, **options) -> str:
    with pytest.raises(ValueError) as error:
        call(*args, **options)
    return str(error.value)


def test_a_folder_with_a_checkpoint_is_not_overwritten(
    trainer, make_model, train_config, corpus, tmp_path
):
    trainer.save(tmp_path / "checkpoint.safetensors")
    model = make_model()
    text = message(Trainer, model, train_config, corpus, run_dir=tmp_path)
    assert text == (
        f"{tmp_path} already holds a checkpoint, which a new run would replace. Go on "
        f"with Trainer.resume('{tmp_path}'), or choose another run_dir."
    )


def test_a_folder_with_another_runs_records_is_not_added_to(
    make_model, train_config, corpus, tmp_path
):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    model = make_model()
    text = message(Trainer, model, train_config, corpus, run_dir=tmp_path)
    assert text.startswith(f"{tmp_path} already holds metrics.jsonl of a run")


def test_sequences_shorter_than_the_mtp_depth_are_refused(
    make_model, train_config, corpus, tmp_path
):
    train = replace(train_config, seq_len=1)
    text = message(Trainer, make_model(), train, corpus, run_dir=tmp_path / "run")
    assert text == (
        "seq_len must exceed the MTP depth, because module k predicts k tokens "
        "further ahead; got 1 and 1. Set seq_len=2 or more, or build the model "
        "without MTP."
    )
    assert not (tmp_path / "run").exists()


def test_sequences_longer_than_the_model_takes_are_refused(
    make_model, train_config, corpus
):
    text = message(Trainer, make_model(), replace(train_config, seq_len=65), corpus)
    assert text == (
        "seq_len must be at most the model's max_seq_len; got 65 and 64. "
        "Set seq_len=64, or build the model for longer sequences."
    )


def test_saving_without_a_place_is_refused(trainer):
    assert message(trainer.save) == (
        "there is no place to save to: the Trainer has no run_dir. "
        "Give save a path, or the Trainer a run_dir."
    )
    assert message(trainer.run, 1, save_every=5) == (
        "save_every needs a run_dir and at least 1 step; got save_every=5 and "
        "run_dir=None. Give the Trainer a run_dir, or set save_every=None."
    )


def test_an_evaluation_over_nothing_is_refused(trainer):
    assert message(trainer.evaluate, n_batches=0) == (
        "n_batches must be at least 1; got 0. Set n_batches=8 or so."
    )


def test_a_negative_number_of_steps_is_refused(trainer):
    assert message(trainer.run, -1) == (
        "n_steps must not be negative; got -1. "
        "Set n_steps=None to go on to the end of the recipe."
    )
