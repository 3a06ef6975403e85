"""A run under a policy is the same run: steps, router biases, checkpoints."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from labkit.config import MTPConfig, TrainConfig
from labkit.memory.recompute import RECOMPUTE_POLICIES, apply_recompute
from labkit.model import Transformer
from labkit.training import Corpus, Trainer

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog; " * 12, np.uint8)
CORPUS = Corpus("a sentence", TEXT[:400], TEXT[400:], fingerprint="sentence")


@pytest.fixture(scope="module")
def cfg(small_models):
    """Return a model that reads bytes."""
    return replace(small_models["no query rank"], vocab_size=256, mtp=MTPConfig())


@pytest.fixture
def trainer(cfg):
    """Return a function that makes the trainer of a model under a policy."""

    def build(policy, *, precision="fp32"):
        model = Transformer(cfg, generator=torch.Generator().manual_seed(0))
        recipe = TrainConfig(
            n_steps=8,
            global_batch=4,
            micro_batch=2,
            seq_len=16,
            lr=1e-2,
            warmup_steps=1,
            precision=precision,
        )
        return Trainer(apply_recompute(model, policy), recipe, CORPUS)

    return build


def state(trainer):
    return [*trainer.model.state_dict().values(), trainer.load]


def are_equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_of_small_batches_end_in_the_same_weights_and_router_biases(
    precision, trainer
):
    plain = trainer("none", precision=precision)
    plain.run(2, progress=False)
    biases = [router.bias for router in plain.model.routers()]
    assert all(bias.any() for bias in biases)

    for policy in RECOMPUTE_POLICIES:
        saving = trainer(policy, precision=precision)
        saving.run(2, progress=False)
        assert are_equal(state(saving), state(plain)), policy
        # Every token chose two experts; running again in the backward adds none.
        assert saving.load.sum(dim=1).tolist() == [4 * 16 * 2, 4 * 15 * 2]


def test_a_resumed_run_goes_on_under_any_policy_as_if_it_had_none(trainer, tmp_path):
    plain = trainer("none")
    plain.run(3, progress=False)
    first = trainer("selective")
    first.run(1, progress=False)
    path = first.save(tmp_path / "after_one_step.safetensors")

    for policy in RECOMPUTE_POLICIES:
        second = Trainer.resume(path, corpus=CORPUS)
        apply_recompute(second.model, policy)
        second.run(2, progress=False)
        assert are_equal(state(second), state(plain)), policy


def test_a_policy_may_change_between_steps(trainer):
    plain, changing = trainer("none"), trainer("none")
    plain.run(len(RECOMPUTE_POLICIES), progress=False)
    for policy in RECOMPUTE_POLICIES:
        apply_recompute(changing.model, policy)
        changing.step()
        changing.evaluate(n_batches=1)

    assert are_equal(state(changing), state(plain))
