"""SwiGLU networks in FP8: what they keep, and what that costs their gradients."""

import math

import pytest
import torch
import torch.nn.functional as F

from labkit.config import MoEConfig
from labkit.model.experts import Experts
from labkit.model.linear import Linear
from labkit.model.mlp import MLP
from labkit.model.moe import MoE
from labkit.precision.linear import Fp8Recipe, fprop
from labkit.precision.transform import to_fp8, to_high


@pytest.fixture
def with_weights(drawn):
    """Return a function that gives a module drawn weights."""

    def draw_weights(module):
        for seed, weight in enumerate(module.parameters(), start=1):
            weight.data = drawn(*weight.shape, seed=seed) / math.sqrt(weight.shape[-1])
        return module

    return draw_weights


def whole(mlp: MLP):
    """Return a run that keeps the SwiGLU product, as its reader's input."""
    return lambda x: mlp.w2(F.silu(mlp.w1(x)) * mlp.w3(x))


def test_a_network_answers_as_its_layers_do_and_keeps_what_swiglu_reads(
    with_weights, drawn, kept_bytes
):
    mlp, x = with_weights(MLP(256, 384)), drawn(2, 64, 256).bfloat16()
    to_fp8(mlp)
    assert torch.equal(mlp(x), whole(mlp)(x))
    with torch.no_grad():
        assert torch.equal(mlp(x), whole(mlp)(x))
    n_values = 128 * (256 + 2 * 384)
    assert kept_bytes(mlp, x, *mlp.parameters()) == n_values + n_values // 128


def test_keeping_what_swiglu_reads_costs_gradients_a_decibel(
    with_weights, drawn, gradients, sqnr
):
    mlp, x = with_weights(MLP(256, 384)), drawn(256, 256)
    exact = gradients(mlp, x, *mlp.parameters())
    to_fp8(mlp)
    _, *low = gradients(mlp, x, *mlp.parameters())
    _, *high = gradients(whole(mlp), x, *mlp.parameters())
    for wanted, ours, other in zip(exact[1:], low, high, strict=True):
        assert 22 < sqnr(wanted, ours) < sqnr(wanted, other) < sqnr(wanted, ours) + 1.5


@pytest.mark.parametrize("name", ["w1", "w2", "w3"])
def test_a_layer_of_a_network_can_be_taken_back_alone(with_weights, drawn, name):
    mlp, x = with_weights(MLP(256, 128)), drawn(32, 256)
    to_fp8(mlp)
    to_high(getattr(mlp, name))
    assert torch.equal(mlp(x), whole(mlp)(x))
    assert type(getattr(mlp, name)) is Linear


def routing(n_tokens: int, n_experts: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and choices of tokens; nobody chooses the last expert."""
    generator = torch.Generator().manual_seed(3)
    order = torch.rand(n_tokens, n_experts - 1, generator=generator).argsort(-1)
    weights = torch.rand(n_tokens, k, generator=generator) / k
    return weights, order[:, :k]


def test_experts_answer_as_a_loop_over_tokens_in_fp8(with_weights, drawn):
    layer, x = with_weights(Experts(5, 256, 128)), drawn(16, 256)
    weights, experts = routing(16, 5, 2)
    to_fp8(layer)
    got, recipe = layer(x, weights, experts), Fp8Recipe()
    with torch.no_grad():
        assert torch.equal(layer(x, weights, experts), got)
        for token in range(16):
            row, total = x[token : token + 1], torch.zeros(1, 256)
            for weight, expert in zip(weights[token], experts[token], strict=True):
                gate, up = fprop(row, layer.w13[expert], recipe).chunk(2, dim=-1)
                product = F.silu(gate) * up * weight
                total += fprop(product, layer.w2[expert], recipe)
            torch.testing.assert_close(
                got[token : token + 1], total, rtol=1e-3, atol=1e-3
            )


def test_gradients_of_experts_are_those_of_networks_that_get_their_tokens(
    with_weights, drawn, gradients
):
    layer, x = with_weights(Experts(3, 256, 128)), drawn(60, 256)
    experts = torch.arange(60).unsqueeze(-1) % 3
    networks = [MLP(256, 128) for _ in range(3)]
    for expert, mlp in enumerate(networks):
        mlp.w1.weight.data, mlp.w3.weight.data = layer.w13.data[expert].chunk(2)
        mlp.w2.weight.data = layer.w2.data[expert]
        to_fp8(mlp)
    to_fp8(layer)

    def run(x):
        return layer(x, torch.ones(60, 1), experts)

    y, dx, dw13, dw2 = gradients(run, x, layer.w13, layer.w2)
    dy = drawn(60, 256, seed=2)
    for expert, mlp in enumerate(networks):
        rows = x[expert::3].requires_grad_()
        out = mlp(rows)
        out.backward(dy[expert::3])
        pairs = (
            (y[expert::3], out),
            (dx[expert::3], rows.grad),
            (dw13[expert], torch.cat((mlp.w1.weight.grad, mlp.w3.weight.grad))),
            (dw2[expert], mlp.w2.weight.grad),
        )
        for ours, other in pairs:
            torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_experts_carry_the_error_of_fp8_alone(
    with_weights, drawn, gradients, sqnr, dtype
):
    layer, x = with_weights(Experts(5, 256, 128)), drawn(256, 256)
    weights, experts = routing(256, 5, 2)

    def run(weights):
        weights = weights.detach().requires_grad_()
        inputs = (weights, layer.w13, layer.w2)
        return gradients(lambda x: layer(x, weights, experts), x.to(dtype), *inputs)

    exact = run(weights)
    to_fp8(layer)
    got = run(weights.to(dtype))
    # A layer's 28 dB, less what its reader, what is kept, and the way back add.
    for wanted, part in zip(exact, got, strict=True):
        assert sqnr(wanted.float(), part.float()) > 21
    for of_idle in (got[3][4], got[4][4]):
        assert of_idle.eq(0).all()


def test_experts_keep_their_input_and_hidden_layers_in_fp8(
    with_weights, drawn, kept_bytes
):
    layer, x = with_weights(Experts(5, 256, 128)), drawn(64, 256)
    weights, experts = routing(64, 5, 2)
    to_fp8(layer)

    def run(x):
        return layer(x, weights, experts)

    n_rows = 2 * 64
    n_values = 64 * 256 + n_rows * 2 * 128
    kept = kept_bytes(run, x, layer.w13, layer.w2)
    index_bytes = 8 * (n_rows + n_rows)  # where rows come from, and go
    assert kept - weights.nbytes - index_bytes == n_values + n_values // 128


def test_routed_and_shared_experts_share_their_input(with_weights, drawn, kept):
    moe = MoEConfig(
        n_routed_experts=4, n_activated_experts=2, moe_inter_dim=128, n_shared_experts=1
    )
    layer, x = with_weights(MoE(256, moe)), drawn(1, 64, 256)
    for part in (layer.experts, layer.shared_experts):
        to_fp8(part)
    narrow = [t.shape for t in kept(layer, x) if t.dtype == torch.float8_e4m3fn]
    assert sorted(narrow) == [(64, 128), (64, 128), (64, 256), (128, 256)]
