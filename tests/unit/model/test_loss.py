"""The training loss: its parts, its normalisers, and what it counts."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from labkit.config import PRESETS, MTPConfig
from labkit.model import Transformer
from labkit.model.moe import balance_loss

TINY = replace(
    PRESETS["tiny"],
    vocab_size=31,
    n_layers=3,
    moe=replace(PRESETS["tiny"].moe, balance_loss_weight=0.01),
)
DENSE = replace(TINY, moe=None, mtp=None)


def built(cfg=TINY):
    return Transformer(cfg, generator=torch.Generator().manual_seed(0))


def random_batch(batch=4, seq_len=12, ignored=0.2):
    sequence = torch.randint(0, TINY.vocab_size, (batch, seq_len + 1))
    tokens, targets = sequence[:, :-1], sequence[:, 1:].clone()
    targets[torch.rand(targets.shape) < ignored] = -100
    return tokens, targets


def test_main_loss_is_the_mean_cross_entropy_of_the_logits():
    model = built()
    tokens, targets = random_batch()
    expected = F.cross_entropy(model(tokens).mT, targets)
    torch.testing.assert_close(model.loss(tokens, targets).main, expected.detach())


def test_total_is_the_sum_of_its_parts_and_alone_has_a_gradient():
    parts = built().loss(*random_batch())
    assert parts.main > 0
    assert parts.mtp > 0
    assert parts.balance > 0
    torch.testing.assert_close(
        parts.total.detach(), parts.main + parts.mtp + parts.balance
    )
    assert parts.total.requires_grad
    assert not any(part.requires_grad for part in (parts.main, parts.mtp))
    assert not parts.balance.requires_grad


def test_an_untrained_model_is_as_unsure_as_a_uniform_guess():
    tokens, targets = random_batch()
    parts = built(replace(TINY, init_std=1e-4)).loss(tokens, targets)
    assert parts.main.item() == pytest.approx(torch.tensor(31.0).log().item(), abs=1e-3)


def test_balance_part_is_alpha_times_the_mean_over_sequences_of_each_router():
    model = built()
    tokens, targets = random_batch(ignored=0.0)
    affinities = []
    for router in model.routers():
        router.register_forward_hook(lambda _, __, out: affinities.append(out[2]))
    parts = model.loss(tokens, targets)
    assert len(affinities) == 3  # two MoE layers, and the one of MTP
    per_router = [
        balance_loss(affinity.unflatten(0, (4, -1)), 2) / 4 for affinity in affinities
    ]
    torch.testing.assert_close(parts.balance, 0.01 * sum(per_router).detach())


def test_balance_part_of_a_router_without_preferences_is_alpha():
    model = built(replace(TINY, n_layers=2, mtp=None))
    # Equal affinities share P evenly; then the sum of f · P is 1, whatever f is.
    (router,) = model.routers()
    with torch.no_grad():
        router.weight.zero_()
    parts = model.loss(*random_batch())
    assert parts.balance.item() == pytest.approx(0.01)


def test_parts_are_proportional_to_their_weights():
    batch = random_batch()
    once, twice, none = (built_with(weight).loss(*batch) for weight in (0.1, 0.2, 0.0))
    for part in ("mtp", "balance"):
        torch.testing.assert_close(getattr(twice, part), 2 * getattr(once, part))
        assert getattr(none, part) == 0
    assert none.total == none.main == once.main


def built_with(weight):
    moe = replace(TINY.moe, balance_loss_weight=weight)
    return built(replace(TINY, moe=moe, mtp=MTPConfig(loss_weight=weight)))


def test_the_weight_of_mtp_may_change_from_step_to_step():
    batch = random_batch()
    assert built_with(0.1).loss(*batch, mtp_weight=0.3).mtp == (
        built_with(0.3).loss(*batch).mtp
    )


def test_ignored_targets_count_for_nothing():
    model = built(DENSE)
    tokens, targets = random_batch(ignored=0.0)
    targets[1:] = -100
    alone = model.loss(tokens[:1], targets[:1])
    torch.testing.assert_close(model.loss(tokens, targets).total, alone.total)


def test_a_batch_of_ignored_targets_has_a_finite_loss_and_no_gradient():
    model = built_with(0.0)
    tokens, targets = random_batch()
    parts = model.loss(tokens, torch.full_like(targets, -100))
    assert parts.total == 0
    parts.total.backward()
    for parameter in model.parameters():
        assert parameter.grad is None or (parameter.grad == 0).all()


@pytest.mark.parametrize("cfg", [TINY, DENSE, replace(TINY, mtp=MTPConfig(depth=2))])
@pytest.mark.parametrize("cuts", [[2, 2], [1, 3], [1, 1, 1, 1]])
def test_micro_batches_add_up_to_the_large_batch(cfg, cuts):
    tokens, targets = random_batch(ignored=0.4)
    targets[0, 3:] = -100  # so that micro-batches weigh unequally
    whole = built(cfg)
    expected = whole.loss(tokens, targets)
    expected.total.backward()

    model = built(cfg)
    n_tokens = int((targets != -100).sum())
    parts = []
    for x, y in zip(tokens.split(cuts), targets.split(cuts), strict=True):
        part = model.loss(x, y, n_tokens=n_tokens, n_sequences=len(tokens))
        part.total.backward()
        parts.append(part)

    for name in ("total", "main", "mtp", "balance", "load"):
        total = sum(getattr(part, name) for part in parts)
        torch.testing.assert_close(total, getattr(expected, name))
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["n_tokens", "n_sequences"])
@pytest.mark.parametrize("count", [-1, 0, 2.0])
def test_counts_of_a_step_are_whole_numbers_from_1(unchecked, name, count):
    with pytest.raises(ValueError) as error:
        built().loss(*random_batch(), **{name: count})
    assert str(error.value) == (
        f"{name} must be a whole number of at least 1; got {count}. "
        f"Set {name} to 1 or more."
    )


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf")])
def test_weights_and_rates_are_finite_and_not_negative(weight):
    model, batch = built(), random_batch()
    load = model.loss(*batch).load
    with pytest.raises(ValueError) as error:
        model.update_router_bias(load, weight)
    assert str(error.value) == (
        f"rate must be at least 0 and finite; got {weight}. Set rate to 0 or more."
    )
    assert all((router.bias == 0).all() for router in model.routers())
    with pytest.raises(ValueError, match="mtp_weight must be at least 0 and finite"):
        model.loss(*batch, mtp_weight=weight)


def test_load_has_a_row_per_router_that_sums_to_tokens_times_choices():
    model = built()
    tokens, targets = random_batch(4, 12)
    load = model.loss(tokens, targets).load
    assert load.shape == (3, 8)
    # The MTP module sees all positions but the last of each sequence.
    assert load.sum(dim=1).tolist() == [4 * 12 * 2, 4 * 12 * 2, 4 * 11 * 2]


def test_load_of_a_dense_model_is_empty():
    assert built(DENSE).loss(*random_batch()).load.shape == (0, 0)


def test_recomputing_layers_changes_neither_load_nor_gradients():
    tokens, targets = random_batch()
    plain = built()
    expected = plain.loss(tokens, targets)
    expected.total.backward()

    model, calls = built(), []
    for layer in (*model.layers, *(module.block for module in model.mtp)):
        forward = layer.forward

        def recomputed(*args, forward=forward):
            def run(*args):
                calls.append(1)
                return forward(*args)

            return checkpoint(run, *args, use_reentrant=False)

        layer.forward = recomputed
    parts = model.loss(tokens, targets)
    parts.total.backward()

    assert len(calls) == 8  # each of the four layers ran twice
    assert torch.equal(parts.load, expected.load)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_loss_is_fp32_when_the_model_is_bf16():
    parts = built().bfloat16().loss(*random_batch())
    for part in (parts.total, parts.main, parts.mtp, parts.balance):
        assert part.dtype == torch.float32
    parts.total.backward()


def test_autocast_keeps_the_loss_near_and_the_gradients_fp32():
    model, batch = built(), random_batch()
    exact = model.loss(*batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        parts = model.loss(*batch)
    parts.total.backward()
    assert parts.total.item() == pytest.approx(exact.total.item(), rel=0.01)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


# The balancing bias, moved once per step by the whole batch's load.


def test_bias_rises_for_the_underloaded_and_falls_for_the_overloaded():
    model = built(replace(TINY, n_layers=2, mtp=None))
    (router,) = model.routers()
    router.bias.copy_(torch.arange(8.0))
    load = torch.tensor([[9, 5, 4, 6, 5, 5, 0, 6]])  # mean 5
    model.update_router_bias(load, 0.25)
    expected = torch.arange(8.0) + 0.25 * torch.tensor([-1, 0, 1, -1, 0, 0, 1, -1])
    assert torch.equal(router.bias, expected)


def test_a_rate_of_zero_leaves_the_bias_alone():
    model = built()
    load = model.loss(*random_batch()).load
    model.update_router_bias(load, 0.0)
    assert all((router.bias == 0).all() for router in model.routers())


def test_the_size_of_the_imbalance_does_not_matter():
    small, large = built(), built()
    load = small.loss(*random_batch()).load
    small.update_router_bias(load, 0.1)
    large.update_router_bias(load * 1000, 0.1)
    for a, b in zip(small.routers(), large.routers(), strict=True):
        assert torch.equal(a.bias, b.bias)
        assert (a.bias.abs() == 0.1).any()


def test_each_router_is_moved_by_its_own_row():
    model = built()
    load = torch.ones(3, 8, dtype=torch.int64)
    load[1, 0] = 9
    model.update_router_bias(load, 0.5)
    first, second, third = (router.bias for router in model.routers())
    assert (first == 0).all()
    assert (third == 0).all()
    assert second.tolist() == [-0.5] + [0.5] * 7


def test_load_of_the_wrong_number_of_routers_is_refused():
    with pytest.raises(ValueError) as error:
        built().update_router_bias(torch.ones(2, 8, dtype=torch.int64), 0.1)
    assert str(error.value) == (
        "load must have one row per router; got 2 rows for 3 routers. "
        "Pass the sum of LossParts.load."
    )


def test_a_model_without_biases_has_nothing_to_move():
    moe = replace(TINY.moe, has_bias=False)
    model = built(replace(TINY, moe=moe))
    model.update_router_bias(model.loss(*random_batch()).load, 0.1)
    assert all(router.bias is None for router in model.routers())


def test_updates_even_out_an_uneven_load():
    cfg = replace(DENSE, moe=TINY.moe, n_layers=1, n_dense_layers=0)
    model = built(replace(cfg, init_std=0.2))  # affinities spread wider than a step
    (router,) = model.routers()
    router.bias.normal_(std=0.3)
    batch = random_batch(8, 32)

    def violation():
        load = model.loss(*batch).load
        return (load.max() / load.float().mean() - 1).item(), load

    before, load = violation()
    for _ in range(60):
        model.update_router_bias(load, 0.02)
        after, load = violation()
    assert before > 1
    assert after < 0.3
