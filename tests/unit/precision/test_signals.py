"""The probe: what it counts, what it leaves alone, and when it sees nothing."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from labkit.config import PRESETS
from labkit.memory import apply_recompute
from labkit.model import Transformer
from labkit.model.experts import Experts
from labkit.model.linear import Linear
from labkit.model.mlp import MLP
from labkit.precision import QuantSpec, quantization_error, quantize
from labkit.precision.levels import set_levels
from labkit.precision.linear import Fp8Recipe
from labkit.precision.signals import GemmSignal, SignalProbe, lost_in_sample
from labkit.precision.transform import to_fp8, to_high

SQUARES = QuantSpec(tile=(128, 128))
SMALLEST = replace(PRESETS["tiny"], n_layers=1, n_dense_layers=1, moe=None, mtp=None)


def fp8_layer(drawn, recipe: Fp8Recipe | None = None) -> nn.Sequential:
    layer = nn.Sequential(Linear(256, 128))
    layer[0].weight.data = drawn(128, 256, seed=1)
    to_fp8(layer[0], recipe)
    return layer


def run(module: nn.Module, x: torch.Tensor) -> None:
    module(x.requires_grad_()).square().sum().backward()


def test_a_sample_of_all_rows_loses_what_the_whole_loses(drawn):
    x = drawn(192, 200) ** 9
    for spec in (QuantSpec(), SQUARES):
        q = quantize(x, spec)
        noise, signal, left, before, bad = lost_in_sample(x, q, 192).tolist()
        error = quantization_error(x, q)
        assert noise / signal == pytest.approx(error.relative_error, rel=1e-5)
        assert 1 - left / before == pytest.approx(error.underflow)
        assert error.underflow > 0.1
        assert bad == 0


def test_tiles_that_are_not_finite_are_counted_in_rows_outside_of_the_sample(drawn):
    x = drawn(100, 256)
    x[1, 0], x[51, 255] = torch.inf, torch.nan
    *sample, bad = lost_in_sample(x, quantize(x, QuantSpec()), 50).tolist()
    assert bad == 2
    assert all(map(math.isfinite, sample))


def test_a_product_s_noise_is_that_of_both_operands(drawn):
    layer, x = fp8_layer(drawn), drawn(64, 256)
    with SignalProbe(layer, n_rows=128) as probe:
        run(layer, x)
        signals = probe.read()["0"]
    assert set(signals) == {"fprop", "dgrad", "wgrad"}
    weight = layer[0].weight.data
    errors = [
        quantization_error(x, quantize(x, QuantSpec())).relative_error,
        quantization_error(weight, quantize(weight, SQUARES)).relative_error,
    ]
    assert signals["fprop"].sqnr_db == pytest.approx(
        -20 * math.log10(math.hypot(*errors))
    )
    assert signals["fprop"].sqnr_db > 28


def test_what_the_weight_s_gradient_loses_to_unequal_tokens_is_seen_there_alone(drawn):
    layer, x = fp8_layer(drawn), drawn(128, 256)
    x[13:] *= 1e-7
    with SignalProbe(layer) as probe:
        run(layer, x)
        signals = probe.read()["0"]
    assert signals["wgrad"].underflow > 0.85
    assert signals["fprop"].underflow < 0.01
    assert signals["dgrad"].underflow < 0.01


def test_an_infinity_is_seen_where_it_comes_in(drawn):
    layer, x = fp8_layer(drawn), drawn(200, 256)
    x[7, 3] = torch.inf
    with SignalProbe(layer) as probe:
        layer(x)
        signals = probe.read()["0"]
    assert {gemm: s.n_nonfinite_tiles for gemm, s in signals.items()} == {"fprop": 1}


def test_reading_begins_anew(drawn):
    layer, x = fp8_layer(drawn), drawn(64, 256)
    with SignalProbe(layer) as probe:
        run(layer, x)
        first = probe.read()
        assert probe.read() == {}
        for part in x.detach().split(32):
            run(layer, part)
        assert set(probe.read()["0"]) == set(first["0"])


def test_a_weight_s_gradient_in_high_precision_has_no_signal(drawn):
    layer = fp8_layer(drawn, Fp8Recipe(wgrad="high"))
    with SignalProbe(layer) as probe:
        run(layer, drawn(64, 256))
        assert set(probe.read()["0"]) == {"fprop", "dgrad"}


def test_modules_are_watched_from_when_they_come_to_fp8(drawn):
    layer, x = nn.Sequential(Linear(256, 128)), drawn(64, 256)
    with SignalProbe(layer) as probe:
        run(layer, x)
        assert probe.read() == {}
        to_fp8(layer[0])
        run(layer, x)
        assert list(probe.read()) == ["0"]
        to_high(layer[0])
        run(layer, x)
        assert probe.read() == {}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_passes_without_gradients_are_not_seen(drawn, mode):
    model = nn.ModuleList([MLP(128, 128), Experts(2, 128, 128)])
    for module in model:
        for weight in module.parameters():
            weight.data = drawn(*weight.shape)
        to_fp8(module)
    x, chosen = drawn(32, 128), torch.zeros(32, 1, dtype=torch.long)
    with SignalProbe(model) as probe, mode():
        model[0](x)
        model[1](x, torch.ones(32, 1), chosen)
        assert probe.read() == {}


def test_networks_are_seen_layer_by_layer_and_experts_as_one(drawn):
    model = nn.ModuleDict({"mlp": MLP(128, 128), "experts": Experts(3, 128, 128)})
    for module in model.values():
        for weight in module.parameters():
            weight.data = drawn(*weight.shape)
        to_fp8(module)
    x = drawn(48, 128).requires_grad_()
    chosen = (torch.arange(48) % 5 // 2).unsqueeze(1)  # none has the third
    with SignalProbe(model) as probe:
        y = model["mlp"](x) + model["experts"](x, torch.ones(48, 1), chosen)
        y.square().sum().backward()
        signals = probe.read()
    assert list(signals) == ["mlp.w1", "mlp.w2", "mlp.w3", "experts"]
    for each in signals.values():
        assert set(each) == {"fprop", "dgrad", "wgrad"}
        assert all(s.sqnr_db > 28 and s.n_nonfinite_tiles == 0 for s in each.values())


def test_an_infinity_in_the_least_busy_expert_is_counted(drawn):
    experts = Experts(3, 128, 128)
    for weight in experts.parameters():
        weight.data = drawn(*weight.shape)
    to_fp8(experts)
    x = drawn(48, 128)
    x[40, 0] = torch.inf
    chosen = torch.zeros(48, 1, dtype=torch.long)
    chosen[40] = 2
    with SignalProbe(experts) as probe:
        experts(x, torch.ones(48, 1), chosen)
        assert probe.read()[""]["fprop"].n_nonfinite_tiles >= 1


def test_gradients_are_the_same_with_a_probe_and_without(drawn):
    layer, x = fp8_layer(drawn), drawn(64, 256)
    run(layer, x)
    wanted = layer[0].weight.grad.clone()
    layer.zero_grad()
    with SignalProbe(layer):
        run(layer, x)
    assert torch.equal(layer[0].weight.grad, wanted)


def test_a_closed_probe_leaves_nothing_and_a_second_one_is_refused():
    layer = nn.Sequential(Linear(128, 128))
    before = set(vars(layer[0]))
    probe = SignalProbe(layer)
    message = "model must have one probe at most; another still watches it. Close that "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}first.$"):
        SignalProbe(layer)
    probe.close()
    probe.close()
    assert set(vars(layer[0])) == before


def test_a_probe_that_is_closed_again_leaves_the_next_one_at_work(drawn):
    layer = fp8_layer(drawn)
    first = SignalProbe(layer)
    first.close()
    with SignalProbe(layer) as second:
        first.close()
        run(layer, drawn(64, 256))
        assert list(second.read()) == ["0"]
    assert not layer[0].observer


def test_layers_that_run_again_show_the_same_losses():
    def signals(policy: str) -> dict[str, GemmSignal]:
        model = Transformer(SMALLEST, generator=torch.Generator().manual_seed(0))
        apply_recompute(model, policy)
        set_levels(model, {"layers.0.attn.wo": "fp8"})
        tokens = torch.arange(34).view(2, 17) % model.cfg.vocab_size
        with SignalProbe(model) as probe:
            model.loss(tokens[:, :-1], tokens[:, 1:]).total.backward()
            return probe.read()["layers.0.attn.wo"]

    once, again = signals("none"), signals("full")
    assert {g: s.sqnr_db for g, s in again.items()} == pytest.approx(
        {g: s.sqnr_db for g, s in once.items()}
    )
