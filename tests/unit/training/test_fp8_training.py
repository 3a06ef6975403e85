"""Recipes in FP8: which layers, from the first step on and after a resumption."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from labkit.config import TrainConfig
from labkit.memory.recompute import recompute_policies
from labkit.model import generate
from labkit.precision import convert
from labkit.precision.linear import InFp8
from labkit.precision.scheduler import PrecisionScheduler
from labkit.training import Trainer, read_checkpoint
from labkit.training.checkpoint import CHECKPOINT_NAME, write_checkpoint


@pytest.fixture
def in_fp8(train_config) -> TrainConfig:
    return replace(train_config, precision="fp8", global_batch=2)


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def losses(records: list) -> list[float]:
    return [record.loss for record in records]


def message(call, *args, **options) -> str:
    with pytest.raises(ValueError) as error:
        call(*args, **options)
    return str(error.value)


@pytest.mark.parametrize("policy", ["deepseek-v3", "conservative"])
def test_the_model_is_converted_by_the_policy_of_its_recipe(
    make_model, in_fp8, corpus, policy
):
    expected = make_model()
    convert(expected, policy)
    trainer = Trainer(make_model(), replace(in_fp8, fp8_policy=policy), corpus)
    assert classes(trainer.model) == classes(expected)


def test_steps_are_those_of_autocast_over_a_converted_model(make_model, in_fp8, corpus):
    trainer, model = Trainer(make_model(), in_fp8, corpus), make_model()
    convert(model, "deepseek-v3")
    batch = trainer.cursor.peek(2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.loss(batch.tokens, batch.targets).total
    assert trainer.step().loss == pytest.approx(expected.item(), rel=1e-6)


def test_a_run_in_fp8_learns_and_differs_from_bf16(make_model, in_fp8, corpus):
    records = Trainer(make_model(), in_fp8, corpus).run(6, progress=False)
    in_bf16 = Trainer(make_model(), replace(in_fp8, precision="bf16"), corpus)
    assert records[-1].loss < records[0].loss - 0.3
    assert records[0].loss != in_bf16.step().loss


def test_a_resumed_run_is_converted_again_and_repeats_bit_for_bit(
    make_model, in_fp8, corpus, tmp_path
):
    recipe = replace(in_fp8, fp8_policy="aggressive")
    expected = losses(Trainer(make_model(), recipe, corpus).run(3, progress=False))
    first = Trainer(make_model(), recipe, corpus, run_dir=tmp_path)
    found = first.run(2, progress=False)
    resumed = Trainer.resume(tmp_path, corpus=corpus)
    assert classes(resumed.model) == classes(first.model)
    assert losses(found + resumed.run(1, progress=False)) == expected


def test_a_checkpoint_from_before_fp8_is_resumed(
    make_model, train_config, corpus, tmp_path
):
    trainer = Trainer(make_model(), train_config, corpus, run_dir=tmp_path)
    trainer.run(1, progress=False)
    saved = read_checkpoint(tmp_path)
    del saved.values["train"]["fp8_policy"], saved.values["train"]["moments"]
    write_checkpoint(tmp_path / CHECKPOINT_NAME, saved)
    resumed = Trainer.resume(tmp_path, corpus=corpus)
    assert resumed.train == train_config
    assert resumed.step().loss == trainer.step().loss


def test_a_model_in_fp8_evaluates_and_generates(make_model, in_fp8, corpus):
    trainer = Trainer(make_model(), in_fp8, corpus)
    trainer.run(2, progress=False)
    in_fp8_nats = trainer.evaluate(2).nats
    text = generate(trainer.model, torch.arange(8).unsqueeze(0), 4).tokens
    assert text.shape == (1, 4)
    convert(trainer.model, "bf16")
    assert in_fp8_nats == pytest.approx(trainer.evaluate(2).nats, rel=1e-2)


def test_an_unknown_policy_is_refused_with_the_known_ones(make_model, in_fp8, corpus):
    model = make_model()
    text = message(Trainer, model, replace(in_fp8, fp8_policy="bold"), corpus)
    assert text == (
        "fp8_policy must be one of 'bf16', 'conservative', 'deepseek-v3', "
        "'aggressive', 'article-1', 'article-a100'; got 'bold'. "
        "Set fp8_policy='bf16' or another of these."
    )
    assert not any(isinstance(module, InFp8) for module in model.modules())


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_a_model_that_is_converted_already_is_refused(
    make_model, in_fp8, corpus, precision
):
    model = make_model()
    convert(model)
    assert message(Trainer, model, replace(in_fp8, precision=precision), corpus) == (
        "model must be in high precision, because a Trainer converts it as its recipe "
        "says; got layers.0.attn.wq in FP8. Take it back with convert(model, 'bf16'), "
        "and set precision='fp8' and fp8_policy."
    )


def test_recompute_comes_under_fp8_at_any_time_and_changes_no_loss(
    make_model, in_fp8, corpus
):
    expected = losses(Trainer(make_model(), in_fp8, corpus).run(2, progress=False))
    trainer = Trainer(make_model(), in_fp8, corpus)
    found = losses(trainer.run(1, progress=False))
    trainer.recompute("full")
    assert recompute_policies(trainer.model) == ("full",) * 3
    assert any(isinstance(module, InFp8) for module in trainer.model.modules())
    assert found + losses(trainer.run(1, progress=False)) == expected


def test_a_policy_of_recompute_that_is_refused_leaves_the_model_in_fp8(
    make_model, in_fp8, corpus
):
    trainer = Trainer(make_model(), in_fp8, corpus)
    before = classes(trainer.model)
    assert "policy must be one of" in message(trainer.recompute, "some")
    assert classes(trainer.model) == before


def test_what_is_in_fp8_and_what_multiplies_is_told(make_model, in_fp8, corpus):
    assert str(Trainer(make_model(), in_fp8, corpus).fp8) == (
        "23 of 25 layers in FP8 (wq, wkv_a, wkv_b, wo, w1, w2, w3, experts) by "
        "deepseek-v3, emulated on this CPU"
    )
    scheduler = PrecisionScheduler(make_model().cfg)
    assert str(Trainer(make_model(), in_fp8, corpus, scheduler=scheduler).fp8) == (
        "none of 25 layers in FP8 as a scheduler decides, up to deepseek-v3"
    )


def test_a_scheduler_is_one_made_for_the_model(make_model, in_fp8, corpus):
    model = make_model()
    shorter = PrecisionScheduler(replace(model.cfg, n_layers=1))
    assert message(Trainer, model, in_fp8, corpus, scheduler=shorter) == (
        "a precision scheduler must be made for the model that it watches; got one "
        "that differs in 'layers.1.attn.wkv_a', 'layers.1.attn.wkv_b', "
        "'layers.1.attn.wo'. Make it anew: PrecisionScheduler(model.cfg, "
        "aim='deepseek-v3')."
    )


@pytest.mark.usefixtures("unchecked")
def test_a_scheduler_is_a_precision_scheduler(make_model, in_fp8, corpus):
    assert message(Trainer, make_model(), in_fp8, corpus, scheduler="adaptive") == (
        "scheduler must be of type PrecisionScheduler; got 'adaptive'. Build it first: "
        "scheduler=PrecisionScheduler(...)."
    )
