"""What notebook 09 measures: loads, gradients, shares of work, nodes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from labkit.config import PRESETS, TrainConfig
from labkit.model import Transformer
from labkit.parallel import Placement, balance_experts, contiguous
from labkit.training import corpus
from labkit.training.trainer import Trainer
from labkit.training.windows import Batch
from labkit.workbook import balance
from labkit.workbook.balance import Watched, nodes_per_token, work_of


def watched(*loads):
    return Watched(torch.tensor(loads).unsqueeze(1), [0.0] * len(loads))


def test_the_last_steps_count_together():
    seen = watched([9, 9, 0], [3, 0, 0], [0, 3, 0])

    assert seen.busiest().tolist() == [3.0]
    assert seen.busiest(2).tolist() == [1.5]
    assert seen.n_idle(2).tolist() == [1]


def test_a_run_is_even_from_the_last_step_on_that_was_not():
    seen = watched([4, 0], [2, 2], [4, 0], [3, 1], [2, 2])

    assert seen.steps_to(1.5, n_mean=1) == 4  # 2.0, 1.0, 2.0, 1.5, 1.0
    assert seen.steps_to(1.2, n_mean=1) == 5
    assert seen.steps_to(0.5, n_mean=1) is None
    assert seen.steps_to(9, n_mean=1) == 1


def test_steps_are_counted_to_the_end_of_the_first_window_that_is_even():
    # Sums of two: 2.0, 1.75, 1.0.
    seen = watched([4, 0], [4, 0], [3, 1], [1, 3])

    assert seen.steps_to(1.9, n_mean=2) == 3


@pytest.fixture
def model():
    moe = replace(PRESETS["tiny"].moe, n_expert_groups=1, n_limited_groups=1)
    cfg = replace(PRESETS["tiny"], n_layers=2, mtp=None, moe=moe)
    return Transformer(cfg, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def batch():
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(1))
    return Batch(tokens, tokens)


def test_watching_trains_and_keeps_every_load(model):
    recipe = TrainConfig(global_batch=2, micro_batch=2, seq_len=16)
    trainer = Trainer(model, recipe, corpus.standard_library())
    seen = balance.watch(trainer, 3)

    assert trainer.n_steps_done == len(seen.losses) == 3
    assert seen.loads.shape == (3, 1, 8)
    assert (seen.loads.sum(dim=-1) == 2 * 16 * 2).all()
    assert torch.equal(seen.loads[-1], trainer.load)


def test_an_expert_without_tokens_has_no_gradient_at_all(model, batch):
    gate = model.layers[1].ffn.gate
    gate.bias[:] = torch.tensor([0.0] * 6 + [-10.0] * 2)
    found = balance.gradients(model, batch)

    assert (found[0, :6] > 0).all()
    assert (found[0, 6:] == 0).all()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_skew_is_the_spread_of_means_by_the_spread_around_them(model, batch):
    gate = model.layers[1].ffn.gate
    with torch.no_grad():
        gate.weight[1:] = gate.weight[0]  # all experts are liked alike
    (even,) = balance.skews(model, batch)
    assert even == pytest.approx(0, abs=1e-4)
    assert not gate._forward_hooks


def test_each_gpu_gets_its_share_of_the_tokens():
    load = torch.tensor([[80, 50, 90, 80, 10]])
    experts = torch.tensor([[0, 1, 1, 3, 2, 4]])
    placement = Placement(experts=experts, n_experts=5, n_gpus=3)
    works = [work_of(gpu, placement, load) for gpu in range(3)]

    assert [len(tokens) for _, tokens, _ in works] == [105, 105, 100]
    assert torch.bincount(works[0][2].flatten()).tolist() == [80, 25]
    seconds = balance.expert_seconds(placement, load, n_rounds=1)
    assert len(seconds) == 3
    assert min(seconds) > 0


def test_tokens_go_to_the_nodes_of_their_experts():
    chosen = np.array([[True, True, False, False], [True, False, False, True]])
    held = contiguous(1, 4, n_gpus=4, n_nodes=2)

    assert nodes_per_token(chosen, held) == 1.5


def test_replicas_take_tokens_in_turn():
    chosen = np.array([[True, False], [True, False], [True, True]])
    experts = torch.tensor([[0, 1, 0, 1]])  # both experts on both nodes
    held = Placement(experts=experts, n_experts=2, n_gpus=2, n_nodes=2)

    # Tokens 0 and 2 take the first slots, so that the third stays on one node.
    assert nodes_per_token(chosen, held) == 1.0


def test_by_node_no_token_goes_to_more_nodes_than_it_may_choose_groups():
    from labkit.workbook.crowd import steer

    served = steer(0.5, 0, 2, n_steps=1)
    load = torch.from_numpy(served.load)[None]
    sizes = {"n_replicas": 320, "n_gpus": 64, "n_nodes": 8}
    by_node = balance_experts(load, n_groups=8, **sizes)

    assert nodes_per_token(served.chosen, by_node) <= 2
    assert nodes_per_token(served.chosen, balance_experts(load, **sizes)) > 3
