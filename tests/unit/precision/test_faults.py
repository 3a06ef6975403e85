"""Faults: what they change, in which passes, and that nothing of them stays."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from labkit.model.linear import Linear
from labkit.model.mlp import MLP
from labkit.precision.faults import FLOOR, Fault, faulty, inject, reckless_plan
from labkit.precision.linear import Fp8Recipe
from labkit.precision.signals import SignalProbe
from labkit.precision.transform import to_fp8, to_high


def layer(drawn) -> nn.Sequential:
    made = nn.Sequential(Linear(128, 128))
    made[0].weight.data = drawn(128, 128, seed=1) / 10
    return made


def fault(kind: str = "inf", first: int = 0, last: int | None = None, **more) -> Fault:
    return Fault(kind=kind, module="0", first=first, last=last, **more)


def test_each_kind_changes_what_it_says():
    x = torch.ones(2, 10, 3)
    assert torch.equal(faulty(x, "inf").isinf().nonzero(), torch.tensor([[0, 0, 0]]))
    outlier = faulty(x, "outlier")
    assert (outlier[..., 0] == 1e5).all()
    assert (outlier[..., 1:] == 1).all()
    rows = faulty(x, "imbalance").view(20, 3)
    assert (rows[[0, 10]] == 1).all()
    assert ((rows == 1e-5).sum(0) == 18).all()
    assert (x == 1).all()


def test_a_fault_befalls_the_passes_it_names_and_no_others(drawn):
    model, x = layer(drawn), torch.ones(4, 128)
    wanted = model(x)
    with inject(model, fault("outlier", first=1, last=2)) as (at_work,):
        same = [torch.equal(model(x), wanted) for _ in range(5)]
    assert same == [True, False, False, True, True]
    assert (at_work.n_passes, at_work.n_befallen) == (5, 2)
    assert torch.equal(model(x), wanted)
    assert not model[0]._forward_pre_hooks


def test_passes_without_gradients_are_spared_and_not_counted(drawn):
    model, x = layer(drawn), torch.ones(4, 128)
    with inject(model, fault()) as (at_work,), torch.no_grad():
        assert model(x).isfinite().all()
    assert at_work.n_passes == 0


def test_a_pass_that_runs_again_for_its_backward_is_one_pass_with_its_fault(drawn):
    model, x = layer(drawn), drawn(4, 128).requires_grad_()
    results = []
    for is_again in (False, True):
        with inject(model, fault("outlier", last=0)) as (at_work,):
            if is_again:
                y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
            else:
                y = model(x)
            results.append(torch.autograd.grad(y.sum(), x)[0])
        assert at_work.n_passes == 1
    assert torch.equal(*results)
    assert results[0].abs().max() > 1000


def test_a_trouble_of_precision_ends_when_its_module_is_high(drawn):
    model, x = layer(drawn), torch.ones(4, 128)
    to_fp8(model[0])
    with inject(model, fault(only_in_fp8=True)):
        assert not model(x).isfinite().all()
        to_high(model[0])
        assert model(x).isfinite().all()


def test_a_floor_takes_gradients_that_are_small_and_leaves_the_forward(drawn):
    model, x = layer(drawn), drawn(32, 128).requires_grad_()
    to_fp8(model[0])
    with SignalProbe(model) as probe, inject(model, fault("floor", last=0)):
        for _ in range(2):
            (model(x) * 1e-6).sum().backward()
            signals = probe.read()["0"]
            lost = {gemm: round(s.underflow, 1) for gemm, s in signals.items()}
            floor = model[0].recipe.least
            expected = 1.0 if floor == FLOOR else 0.0
            assert lost == {"fprop": 0.0, "dgrad": expected, "wgrad": expected}
    assert model[0].recipe == Fp8Recipe()


def test_a_floor_goes_with_its_context_and_does_nothing_out_of_fp8(drawn):
    model, x = layer(drawn), drawn(32, 128)
    with inject(model, fault("floor")) as (at_work,):
        model(x)
        to_fp8(model[0])
        model(x)
        assert model[0].recipe.least == FLOOR
    assert (at_work.n_passes, at_work.n_befallen) == (2, 1)
    assert model[0].recipe == Fp8Recipe()


def test_a_reckless_plan_is_a_floor_for_all_that_can_have_one():
    model = nn.ModuleDict({"mlp": MLP(8, 8), "wo": Linear(8, 8)})
    names = ["mlp.w1", "mlp.w2", "mlp.w3", "wo"]
    faults = reckless_plan(model, names, first=5)
    assert [f.module for f in faults] == ["mlp.w1", "mlp.w3", "wo"]
    assert {(f.kind, f.first, f.last) for f in faults} == {("floor", 5, None)}


@pytest.mark.parametrize("name", ["layers.9", "mlp.w2", "layers"])
def test_a_module_that_is_not_called_is_refused(name):
    model = nn.ModuleDict({"mlp": MLP(8, 8), "layers": nn.ModuleList()})
    message = (
        "module must be one of the model that is called with its input, which the w2 "
        f"of an MLP in FP8 is not; got '{name}'. Name another, such as its MLP."
    )
    with (
        pytest.raises(ValueError, match=f"^{re.escape(message)}$"),
        inject(model, Fault(kind="inf", module=name, first=0, last=None)),
    ):
        pass


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (
            "floor",
            "mlp",
            "module must be a linear layer or routed experts for kind='floor', which "
            "is of their products; got 'mlp', a Fp8MLP. Name a layer in it.",
        ),
        (
            "inf",
            "embed",
            "module must read numbers, of which a fault changes some; got 'embed', "
            "which reads tokens. Name the module after it.",
        ),
    ],
)
def test_a_module_that_a_fault_cannot_befall_is_refused(kind, name, message):
    model = nn.ModuleDict({"mlp": MLP(8, 8), "embed": nn.Embedding(8, 8)})
    to_fp8(model["mlp"])
    with (
        pytest.raises(ValueError, match=f"^{re.escape(message)}$"),
        inject(model, Fault(kind=kind, module=name, first=0, last=None)),
    ):
        pass


def test_of_faults_of_which_one_is_refused_none_stays(drawn):
    model = layer(drawn)
    with (
        pytest.raises(ValueError, match="module must be"),
        inject(model, fault(), replace(fault(), module="1")),
    ):
        pass
    assert not model[0]._forward_pre_hooks


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kind": "nan"},
            "kind must be one of 'inf', 'outlier', 'imbalance', 'floor'; got 'nan'. "
            "Set kind='inf' or another of these.",
        ),
        (
            {"first": 3, "last": 2},
            "last must be a whole number of at least 3; got 2. Set last to 3 or more.",
        ),
    ],
)
def test_a_fault_says_what_it_must_be(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fault(**fields)
