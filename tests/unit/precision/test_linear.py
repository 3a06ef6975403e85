"""Layers in FP8: their products and gradients, what they keep, and who shares it."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from labkit.config import PRESETS, GQAConfig
from labkit.memory import apply_recompute
from labkit.model import Transformer
from labkit.model.attention import GQA, build_attention
from labkit.model.linear import Linear
from labkit.model.mlp import MLP
from labkit.model.rope import rope_frequencies, rotations
from labkit.precision import QuantSpec, quantize
from labkit.precision.linear import (
    Fp8Linear,
    Fp8MLP,
    Fp8Recipe,
    shared_rows,
    to_fp8,
    to_high,
    wgrad,
)
from labkit.precision.products import Backend, fp8_mm, transposed

ROWS, SQUARES = QuantSpec(), QuantSpec(tile=(128, 128))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(n_in: int, n_out: int, recipe: Fp8Recipe | None = None) -> Linear:
    """Return a layer in FP8 with drawn weights."""
    made = Linear(n_in, n_out)
    made.weight.data = drawn(n_out, n_in, seed=1) / math.sqrt(n_in)
    to_fp8(made, recipe)
    return made


def gradients(run, x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
    """Return a module's result and the gradients, for a drawn one of the result."""
    x = x.detach().requires_grad_()
    y = run(x)
    return [
        y,
        *torch.autograd.grad(y, (x, *weights), drawn(*y.shape, seed=2).type_as(y)),
    ]


def sqnr(exact: torch.Tensor, got: torch.Tensor) -> float:
    """Return the ratio of signal to error in dB."""
    error = (exact - got).detach()
    return 20 * math.log10(exact.detach().norm() / error.norm())


def kept_bytes(run, x: torch.Tensor, *weights: torch.Tensor) -> int:
    """Return the bytes that autograd keeps of a run, without its weights."""
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run(x.detach().requires_grad_())
    known = {weight.untyped_storage().data_ptr() for weight in weights}
    n_bytes = sum(n for key, n in storages.items() if key not in known)
    del out
    return n_bytes


def test_results_and_gradients_are_the_three_products_of_tiles():
    linear, x = layer(256, 384), drawn(2, 75, 256)
    y, dx, dw = gradients(linear, x, linear.weight)

    qx, qw = quantize(x.view(150, 256), ROWS), quantize(linear.weight.data, SQUARES)
    dy = drawn(2, 75, 384, seed=2).view(150, 384)
    exact = {"out_dtype": torch.float32}
    assert torch.equal(y.view(150, 384), fp8_mm(qx, qw, **exact))
    expected = fp8_mm(quantize(dy, ROWS), transposed(qw), **exact)
    assert torch.equal(dx.view(150, 256), expected)
    along_tokens = transposed(qx.retile((128, 1)))
    expected = fp8_mm(quantize(dy.T, ROWS), along_tokens, **exact)
    assert torch.equal(dw, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_pass_28_db(dtype):
    linear, x = layer(256, 384), drawn(256, 256)
    exact = gradients(lambda x: x @ linear.weight.T, x, linear.weight)
    got = gradients(linear, x.to(dtype), linear.weight)
    assert [part.dtype for part in got] == [dtype, dtype, torch.float32]
    for wanted, part in zip(exact, got, strict=True):
        assert sqnr(wanted, part.float()) >= 28


def test_a_model_under_autocast_answers_in_bf16_from_fp32_weights():
    linear, x = layer(256, 128), drawn(32, 256)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, linear(x).bfloat16())


def test_gradients_of_weights_add_in_fp32():
    linear = layer(128, 128)
    parts = []
    for seed in range(2):
        x = drawn(128, 128, seed=seed).bfloat16()
        linear.zero_grad()
        linear(x).sum().backward()
        parts.append(linear.weight.grad.clone())
    linear.zero_grad()
    for seed in range(2):
        linear(drawn(128, 128, seed=seed).bfloat16()).sum().backward()
    assert torch.equal(linear.weight.grad, parts[0] + parts[1])
    assert (linear.weight.grad != linear.weight.grad.bfloat16()).any()


@pytest.mark.parametrize("n_readers", [1, 3])
def test_however_many_read_an_input_one_copy_in_fp8_is_kept(n_readers):
    layers = [layer(256, 128) for _ in range(n_readers)]
    weights = [linear.weight for linear in layers]
    x = drawn(4, 64, 256).bfloat16()
    n = x.numel()

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [linear(x) for linear in layers]

    assert kept_bytes(run, x, *weights) == n + n // 128


def test_the_format_of_the_kept_input_is_the_recipe_s():
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


def test_an_input_kept_in_bf16_is_the_input_itself():
    linear, x = layer(256, 128, Fp8Recipe(kept="bf16")), drawn(64, 256).bfloat16()
    kept = []
    with saved_tensors_hooks(kept.append, lambda tensor: tensor):
        linear(x)
    assert x.data_ptr() in [tensor.data_ptr() for tensor in kept]
    assert not any(tensor.dtype == torch.float8_e4m3fn for tensor in kept)
    dy = drawn(64, 128, seed=2).bfloat16()
    dw = gradients(linear, x, linear.weight)[2]
    assert torch.equal(dw, wgrad(dy, x, Fp8Recipe()))


def test_an_input_that_was_written_to_is_quantized_anew():
    x = drawn(4, 128)
    before = shared_rows(x, ROWS)
    assert shared_rows(x, ROWS) is before
    assert shared_rows(x, QuantSpec(scale="fp32")) is not before
    assert shared_rows(x, ROWS) is before
    x.mul_(2)
    assert torch.equal(shared_rows(x, ROWS).dequantize(), 2 * before.dequantize())


def test_layers_read_tensors_of_inference_mode():
    linear, x = layer(128, 128), drawn(4, 128)
    with torch.inference_mode():
        y = linear(x * 1)
    assert torch.equal(y, linear(x).detach())


def test_a_frozen_weight_lets_gradients_through_and_keeps_no_input():
    linear, x = layer(256, 128), drawn(64, 256)
    wanted = gradients(linear, x)[1]
    linear.weight.requires_grad_(False)
    assert kept_bytes(linear, x, linear.weight) == 0
    assert torch.equal(gradients(linear, x)[1], wanted)


def mlp_of(dim: int, inter_dim: int) -> MLP:
    mlp = MLP(dim, inter_dim)
    for seed, weight in enumerate(mlp.parameters(), start=1):
        weight.data = drawn(*weight.shape, seed=seed) / math.sqrt(weight.shape[1])
    return mlp


def test_swiglu_is_the_same_forward_and_keeps_its_inputs_alone():
    mlp, x = mlp_of(256, 384), drawn(2, 64, 256).bfloat16()
    to_fp8(mlp)
    parts = nn.functional.silu(mlp.w1(x)) * mlp.w3(x)
    assert torch.equal(mlp(x), mlp.w2(parts))
    with torch.no_grad():
        assert torch.equal(mlp(x), mlp.w2(parts))
    n_values = 128 * (256 + 2 * 384)
    kept = kept_bytes(mlp, x, *mlp.parameters())
    assert kept == n_values + n_values // 128


def test_keeping_what_swiglu_reads_costs_its_gradients_a_decibel():
    mlp, x = mlp_of(256, 384), drawn(256, 256)

    def error(run) -> list[float]:
        got = gradients(run, x, *mlp.parameters())
        return [sqnr(wanted, part) for wanted, part in zip(exact, got, strict=True)]

    exact = gradients(mlp, x, *mlp.parameters())
    to_fp8(mlp)
    whole = error(lambda x: mlp.w2(nn.functional.silu(mlp.w1(x)) * mlp.w3(x)))
    kept = error(mlp)
    assert kept.pop(0) == whole.pop(0)
    for low, high in zip(kept, whole, strict=True):
        assert 22 < low < high < low + 1.5


@pytest.mark.parametrize("name", ["w1", "w2", "w3"])
def test_a_layer_of_an_mlp_can_be_taken_back_alone(name):
    mlp, x = mlp_of(256, 128), drawn(32, 256)
    to_fp8(mlp)
    to_high(getattr(mlp, name))
    parts = nn.functional.silu(mlp.w1(x)) * mlp.w3(x)
    assert torch.equal(mlp(x), mlp.w2(parts))
    assert type(getattr(mlp, name)) is Linear


def in_fp8(module: nn.Module) -> nn.Module:
    """Return a module with all layers in FP8, but for the router and the head."""
    for name, part in list(module.named_modules()):
        if isinstance(part, Linear | MLP) and name != "head":
            to_fp8(part)
    return module


@pytest.mark.parametrize(
    ("attention", "readers"),
    [
        # wq_a and wkv_a read one tensor; wq_b, wkv_b and wo one each.
        (PRESETS["tiny"].attention, 4),
        # wq, wk and wv read one tensor; wo another.
        (GQAConfig(n_heads=4, n_kv_heads=2, head_dim=32), 2),
    ],
)
def test_an_attention_layer_keeps_each_tensor_once(attention, readers):
    cfg = replace(PRESETS["tiny"], attention=attention)
    attn = in_fp8(build_attention(cfg))
    turns = rotations(torch.arange(32), rope_frequencies(cfg))
    n_kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.float8_e4m3fn:
            n_kept.append(tensor.data_ptr())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attn(drawn(1, 32, cfg.dim), turns)
    assert len(set(n_kept)) == readers < len(n_kept)
    del out


def tiny() -> tuple[Transformer, torch.Tensor]:
    """Return a model and a batch of tokens."""
    generator = torch.Generator().manual_seed(0)
    model = Transformer(replace(PRESETS["tiny"], n_layers=2), generator=generator)
    return model, torch.randint(model.cfg.vocab_size, (2, 17), generator=generator)


def loss_of(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    return model.loss(tokens[:, :-1], tokens[:, 1:]).total


def test_a_model_in_fp8_keeps_its_names_and_weights_and_can_be_taken_back():
    model, tokens = tiny()
    names, plain = list(model.state_dict()), loss_of(model, tokens)
    loss = loss_of(in_fp8(model), tokens)
    loss.backward()
    assert list(model.state_dict()) == names
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert 0 < (loss - plain).abs() < 0.01 * plain
    for module in list(model.modules()):
        if isinstance(module, Linear | MLP):
            to_high(module)
    assert not any(isinstance(m, Fp8Linear | Fp8MLP) for m in model.modules())
    assert torch.equal(loss_of(model, tokens), plain)


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_what_is_run_again_is_the_same_in_fp8(policy):
    def run(policy: str) -> list[torch.Tensor]:
        model, tokens = tiny()
        in_fp8(apply_recompute(model, policy))
        loss_of(model, tokens).backward()
        return [p.grad for p in model.parameters()]

    for again, kept in zip(run(policy), run("none"), strict=True):
        assert torch.equal(again, kept)


def test_a_layer_says_what_multiplies_for_it():
    assert layer(128, 128).backend == Backend("emulate", "cpu has no FP8 units")
    named = layer(128, 128, Fp8Recipe(backend="fp22"))
    assert named.backend == Backend("fp22", "the recipe names it")


def test_a_layer_sums_as_hopper_does_where_the_recipe_says_so():
    x = drawn(8, 256).abs()
    linear = layer(256, 8, Fp8Recipe(backend="fp22"))
    qx, qw = quantize(x, ROWS), quantize(linear.weight.data, SQUARES)
    expected = fp8_mm(qx, qw, backend="fp22", out_dtype=torch.float32)
    assert torch.equal(linear(x), expected)


def test_other_modules_are_refused():
    message = (
        "module must be a Linear or an MLP of labkit's model; got a GQA. Pass its "
        "layers one by one."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        to_fp8(GQA.__new__(GQA))


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
            {"scale": "int8"},
            "scale must be one of 'po2', 'fp32'; got 'int8'. Set scale='po2' or "
            "another of these.",
        ),
    ],
)
def test_a_recipe_says_what_it_must_be(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Fp8Recipe(**fields)
