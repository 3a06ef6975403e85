"""Layers in FP8: their products and gradients, what they keep, and who shares it."""

import math
import re

import pytest
import torch

from labkit.model.linear import Linear
from labkit.precision import QuantSpec, quantize
from labkit.precision.linear import Fp8Recipe, shared_rows, wgrad
from labkit.precision.products import Backend, fp8_mm, transposed
from labkit.precision.transform import to_fp8

ROWS, SQUARES = QuantSpec(), QuantSpec(tile=(128, 128))
EXACT = {"out_dtype": torch.float32}


@pytest.fixture
def layer(drawn):
    """Return a function that makes a layer in FP8."""

    def make(n_in: int, n_out: int, recipe: Fp8Recipe | None = None) -> Linear:
        made = Linear(n_in, n_out)
        made.weight.data = drawn(n_out, n_in, seed=1) / math.sqrt(n_in)
        to_fp8(made, recipe)
        return made

    return make


def test_results_and_gradients_are_the_three_products_of_tiles(layer, drawn, gradients):
    linear, x = layer(256, 384), drawn(2, 75, 256)
    y, dx, dw = gradients(linear, x, linear.weight)

    qx, qw = quantize(x.view(150, 256), ROWS), quantize(linear.weight.data, SQUARES)
    dy = drawn(2, 75, 384, seed=2).view(150, 384)
    assert torch.equal(y.view(150, 384), fp8_mm(qx, qw, **EXACT))
    expected = fp8_mm(quantize(dy, ROWS), transposed(qw), **EXACT)
    assert torch.equal(dx.view(150, 256), expected)
    along_tokens = transposed(qx.retile((128, 1)))
    assert torch.equal(dw, fp8_mm(quantize(dy.T, ROWS), along_tokens, **EXACT))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_pass_28_db(layer, drawn, gradients, sqnr, dtype):
    linear, x = layer(256, 384), drawn(256, 256)
    exact = gradients(lambda x: x @ linear.weight.T, x, linear.weight)
    got = gradients(linear, x.to(dtype), linear.weight)
    assert [part.dtype for part in got] == [dtype, dtype, torch.float32]
    for wanted, part in zip(exact, got, strict=True):
        assert sqnr(wanted, part.float()) >= 28


def test_an_input_with_other_scales_is_rounded_twice_for_its_weight(
    layer, drawn, gradients, sqnr
):
    linear, x = layer(256, 384, Fp8Recipe(scale="fp32")), drawn(256, 256)
    exact = gradients(lambda x: x @ linear.weight.T, x, linear.weight)
    y, dx, dw = map(sqnr, exact, gradients(linear, x, linear.weight))
    assert min(y, dx) > 28
    assert 27 <= dw < 28


def test_a_layer_under_autocast_answers_in_bf16_from_fp32_weights(layer, drawn):
    linear, x = layer(256, 128), drawn(32, 256)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, linear(x).bfloat16())


def test_gradients_of_weights_add_in_fp32(layer, drawn):
    linear = layer(128, 128)
    parts = []
    for seed in range(2):
        linear.zero_grad()
        linear(drawn(128, 128, seed=seed).bfloat16()).sum().backward()
        parts.append(linear.weight.grad.clone())
    linear.zero_grad()
    for seed in range(2):
        linear(drawn(128, 128, seed=seed).bfloat16()).sum().backward()
    assert torch.equal(linear.weight.grad, parts[0] + parts[1])
    assert (linear.weight.grad != linear.weight.grad.bfloat16()).any()


@pytest.mark.parametrize("n_readers", [1, 3])
def test_however_many_read_an_input_one_copy_in_fp8_is_kept(
    layer, drawn, kept_bytes, n_readers
):
    layers = [layer(256, 128) for _ in range(n_readers)]
    weights = [linear.weight for linear in layers]
    x = drawn(4, 64, 256).bfloat16()
    n = x.numel()
    kept = kept_bytes(lambda x: [linear(x) for linear in layers], x, *weights)
    assert kept == n + n // 128


def test_the_format_of_the_kept_input_is_the_recipe_s(
    layer, drawn, gradients, kept_bytes
):
    x = drawn(256, 256).bfloat16()
    n = x.numel()
    linear = layer(256, 128, Fp8Recipe(kept="e5m6"))
    assert kept_bytes(linear, x, linear.weight) == n * 3 // 2 + n // 128

    y, dx, dw = gradients(linear, x, linear.weight)
    to_fp8(linear)
    wanted = gradients(linear, x, linear.weight)
    assert torch.equal(y, wanted[0])
    assert torch.equal(dx, wanted[1])
    q = quantize(x, QuantSpec(format="e5m6"))
    dy = drawn(256, 128, seed=2).bfloat16()
    assert torch.equal(dw, wgrad(dy, q.dequantize(), Fp8Recipe()))
    assert not torch.equal(dw, wanted[2])


def test_an_input_kept_in_bf16_is_the_input_itself(layer, drawn, gradients, kept):
    linear, x = layer(256, 128, Fp8Recipe(kept="bf16")), drawn(64, 256).bfloat16()
    (of_input,) = kept(linear, x, linear.weight)
    assert of_input.data_ptr() == x.data_ptr()
    dy = drawn(64, 128, seed=2).bfloat16()
    dw = gradients(linear, x, linear.weight)[2]
    assert torch.equal(dw, wgrad(dy, x, Fp8Recipe()))


def test_an_input_that_was_written_to_is_quantized_anew(drawn):
    x = drawn(4, 128)
    before = shared_rows(x, ROWS)
    assert shared_rows(x, QuantSpec(scale="fp32")) is not before
    assert shared_rows(x, ROWS) is before
    x.mul_(2)
    assert torch.equal(shared_rows(x, ROWS).dequantize(), 2 * before.dequantize())


def test_layers_read_tensors_of_inference_mode(layer, drawn):
    linear, x = layer(128, 128), drawn(4, 128)
    with torch.inference_mode():
        y = linear(x * 1)
    assert torch.equal(y, linear(x).detach())


def test_a_frozen_weight_lets_gradients_through_and_keeps_no_input(
    layer, drawn, gradients, kept
):
    linear, x = layer(256, 128), drawn(64, 256)
    wanted = gradients(linear, x)[1]
    linear.weight.requires_grad_(False)
    assert kept(linear, x, linear.weight) == []
    assert torch.equal(gradients(linear, x)[1], wanted)


def test_a_layer_says_what_multiplies_for_it(layer):
    assert layer(128, 128).backend == Backend("emulate", "cpu has no FP8 units")
    named = layer(128, 128, Fp8Recipe(backend="fp22"))
    assert named.backend == Backend("fp22", "the recipe names it")


def test_a_layer_sums_as_hopper_does_where_the_recipe_says_so(layer, drawn):
    x = drawn(8, 256).abs()
    linear = layer(256, 8, Fp8Recipe(backend="fp22"))
    qx, qw = quantize(x, ROWS), quantize(linear.weight.data, SQUARES)
    assert torch.equal(linear(x), fp8_mm(qx, qw, backend="fp22", **EXACT))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"backend": "deepgemm"},
            "backend must be one of 'auto', 'emulate', 'fp22', 'hopper'; got "
            "'deepgemm'. Set backend='auto' or another of these.",
        ),
        (
            {"kept": "fp16"},
            "kept must be one of 'e4m3', 'e5m2', 'e5m6', 'bf16'; got 'fp16'. Set "
            "kept='e4m3' or another of these.",
        ),
        (
            {"wgrad": "bf16"},
            "wgrad must be one of 'fp8', 'high'; got 'bf16'. Set wgrad='fp8' or "
            "another of these.",
        ),
        (
            {"least": 0},
            "least must be above 1e-30 and finite; got 0. Set least to a number above "
            "1e-30.",
        ),
        (
            {"scale": "int8"},
            "scale must be one of 'po2', 'fp32'; got 'int8'. Set scale='po2' or "
            "another of these.",
        ),
    ],
)
def test_a_recipe_says_what_it_must_be(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Fp8Recipe(**fields)
