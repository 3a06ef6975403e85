"""Levels of modules: what each multiplies in, and that nothing else changes."""

import re
from dataclasses import replace

import pytest
import torch

from labkit.config import PRESETS
from labkit.model import Transformer
from labkit.model.experts import Experts
from labkit.model.linear import Linear
from labkit.model.mlp import MLP
from labkit.precision.levels import modules_in_fp8, set_levels
from labkit.precision.linear import Fp8Recipe, shared_rows, wgrad
from labkit.precision.swiglu import Fp8Experts, Fp8MLP
from labkit.precision.transform import to_fp8

FEW = replace(
    PRESETS["tiny"].moe, n_routed_experts=4, n_expert_groups=2, n_limited_groups=1
)
SMALLEST = replace(PRESETS["tiny"], n_layers=2, n_dense_layers=1, moe=FEW, mtp=None)
HIGH_WGRAD = Fp8Recipe(wgrad="high")


def draw_weights(module: torch.nn.Module) -> None:
    """Give a module's weights values that do not depend on others."""
    generator = torch.Generator().manual_seed(3)
    for weight in module.parameters():
        weight.data.normal_(std=weight.shape[-1] ** -0.5, generator=generator)


def test_a_high_weight_gradient_is_the_product_of_what_came_and_what_was_kept(
    drawn, gradients
):
    linear, x = Linear(256, 128), drawn(64, 256).bfloat16()
    draw_weights(linear)
    to_fp8(linear, HIGH_WGRAD)
    dw = gradients(linear, x, linear.weight)[2]
    dy = drawn(64, 128, seed=2).bfloat16()
    kept = shared_rows(x, HIGH_WGRAD.rows).dequantize(torch.bfloat16)
    assert torch.equal(dw, (dy.T @ kept).float())


def test_of_a_layer_only_the_weight_s_gradient_changes_and_it_gains_3_db(
    drawn, gradients, sqnr
):
    linear, x = Linear(256, 384), drawn(256, 256)
    draw_weights(linear)
    exact = gradients(linear, x, linear.weight)
    to_fp8(linear)
    bold = gradients(linear, x, linear.weight)
    to_fp8(linear, HIGH_WGRAD)
    safe = gradients(linear, x, linear.weight)
    assert torch.equal(safe[0], bold[0])
    assert torch.equal(safe[1], bold[1])
    assert sqnr(exact[2], safe[2]) > 31 > 29 > sqnr(exact[2], bold[2])


def test_tokens_of_unequal_size_all_count_in_a_high_weight_gradient(drawn):
    x, dy = drawn(128, 128), drawn(128, 128, seed=1)
    dy[1:] *= 1e-7
    dy[0] = 0
    dy[0, 0] = 1
    x[0] = 0
    exact = dy.T @ x  # only small tokens meet inputs
    bold, safe = (wgrad(dy, x, recipe) for recipe in (Fp8Recipe(), HIGH_WGRAD))
    torch.testing.assert_close(safe, exact)
    assert (bold[0] == 0).all()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: MLP(128, 256), Fp8MLP),
        (lambda: Experts(2, 128, 256), Fp8Experts),
    ],
)
def test_swiglu_networks_change_no_more_than_their_weights_gradients(
    drawn, gradients, make, kind
):
    module, x = make(), drawn(32, 128)
    draw_weights(module)
    weights = drawn(32, 1, seed=4).sigmoid()
    chosen = (torch.arange(32) % 2).unsqueeze(1)

    def run(x):
        return module(x, weights, chosen) if kind is Fp8Experts else module(x)

    results = []
    for recipe in (Fp8Recipe(), HIGH_WGRAD):
        to_fp8(module, recipe)
        assert type(module) is kind
        results.append(gradients(run, x, *module.parameters()))
    (y, dx, *dw), (safe_y, safe_dx, *safe_dw) = results
    assert torch.equal(y, safe_y)
    assert torch.equal(dx, safe_dx)
    for bold, safe in zip(dw, safe_dw, strict=True):
        assert not torch.equal(bold, safe)
        assert (bold - safe).norm() < 0.06 * safe.norm()


def test_no_level_between_keeps_more_than_fp8_throughout(drawn, kept_bytes):
    linear, x = Linear(256, 128), drawn(64, 256).bfloat16()
    n_bytes = []
    for recipe in (Fp8Recipe(), HIGH_WGRAD):
        to_fp8(linear, recipe)
        n_bytes.append(kept_bytes(linear, x, linear.weight))
    assert n_bytes[0] == n_bytes[1] > 0


def test_levels_change_classes_and_recipes_but_no_weight():
    model = Transformer(SMALLEST, generator=torch.Generator().manual_seed(0))
    weights = list(model.parameters())
    levels = dict.fromkeys(modules_in_fp8(model.cfg, "deepseek-v3"), "fp8")
    levels["layers.1.ffn.experts"] = "fp8-high-wgrad"
    levels["layers.0.attn.wo"] = "high"
    set_levels(model, levels)
    assert model.layers[1].ffn.experts.recipe.wgrad == "high"
    assert model.layers[1].attn.wo.recipe == Fp8Recipe(kept="e5m6", backend="emulate")
    assert type(model.layers[0].attn.wo) is Linear
    set_levels(model, dict.fromkeys(levels, "high"))
    assert not [m for m in model.modules() if type(m).__name__.startswith("Fp8")]
    assert all(a is b for a, b in zip(weights, model.parameters(), strict=True))


def test_all_in_fp8_is_what_the_policy_converts():
    names = modules_in_fp8(SMALLEST, "deepseek-v3")
    assert "layers.1.ffn.experts" in names
    assert "layers.0.ffn.w2" in names
    assert not {"head", "embed", "layers.1.ffn.gate"} & set(names)


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        (
            {"layers.0.attn.wo": "bf16"},
            "the level of 'layers.0.attn.wo' must be one of 'fp8', 'fp8-high-wgrad', "
            "'high'; got 'bf16'. Set 'layers.0.attn.wo' to one of these.",
        ),
        (
            {"head": "fp8"},
            "levels other than 'high' must be of modules that the policy has in FP8; "
            "got 'fp8' for 'head'. Set it to 'high', or choose a bolder policy.",
        ),
    ],
)
def test_other_levels_are_refused_and_nothing_changes(levels, message):
    model = Transformer(SMALLEST, device="meta")
    set_levels(model, {"layers.1.attn.wo": "fp8"})
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        set_levels(model, levels)
    assert model.layers[1].attn.wo.recipe.backend == "emulate"
