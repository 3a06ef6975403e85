"""Routed experts against a loop over tokens, with gradients, dtypes and autocast."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.model.experts import Experts, dispatch

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def built(n_experts=4, dim=5, inter_dim=3, dtype=torch.float32):
    layer = Experts(n_experts, dim, inter_dim).to(dtype)
    with torch.no_grad():
        layer.w13.normal_()
        layer.w2.normal_()
    return layer


def random_routing(n_tokens, n_experts, k, dtype=torch.float32):
    """Return weights and, for each token, k different experts."""
    experts = torch.rand(n_tokens, n_experts).argsort(dim=-1)[:, :k]
    return torch.rand(n_tokens, k, dtype=dtype), experts


def loop(layer, x, weights, experts):
    out = []
    for token in range(len(x)):
        total = torch.zeros_like(x[token])
        for weight, expert in zip(weights[token], experts[token], strict=True):
            gate, up = (layer.w13[expert] @ x[token]).chunk(2)
            total = total + weight * (layer.w2[expert] @ (F.silu(gate) * up))
        out.append(total)
    return torch.stack(out)


def gradients(out, layer, x, weights):
    direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    inputs = (x, weights, layer.w13, layer.w2)
    return torch.autograd.grad((out * direction).sum(), inputs)


@settings(max_examples=25)
@given(
    n_tokens=st.integers(1, 12),
    n_experts=st.integers(1, 9),
    dim=st.integers(1, 7),
    inter_dim=st.integers(1, 7),
    data=st.data(),
)
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens(
    n_tokens, n_experts, dim, inter_dim, data
):
    k = data.draw(st.integers(1, n_experts))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    layer = built(n_experts, dim, inter_dim)
    x = torch.randn(n_tokens, dim, requires_grad=True)
    weights, experts = random_routing(n_tokens, n_experts, k)
    weights.requires_grad_()
    out, expected = layer(x, weights, experts), loop(layer, x, weights, experts)
    torch.testing.assert_close(out, expected, **CLOSE)
    ours = gradients(out, layer, x, weights)
    for mine, theirs in zip(ours, gradients(expected, layer, x, weights), strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


def test_gradients_pass_gradcheck():
    layer = built(dtype=torch.float64)
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    weights, experts = random_routing(6, 4, 2, dtype=torch.float64)
    experts[experts == 1] = 3  # expert 1 has no tokens; some visit 3 twice
    weights.requires_grad_()

    def run(x, weights, w13, w2):
        parameters = {"w13": w13, "w2": w2}
        return torch.func.functional_call(layer, parameters, (x, weights, experts))

    inputs = (x, weights, layer.w13, layer.w2)
    assert torch.autograd.gradcheck(run, inputs)


def test_an_expert_without_tokens_gets_a_gradient_of_zero():
    layer = built()
    x = torch.randn(6, 5)
    weights, _ = random_routing(6, 4, 2)
    experts = torch.tensor([[0, 3]]).expand(6, 2)
    layer(x, weights, experts).sum().backward()
    for parameter in (layer.w13, layer.w2):
        assert parameter.grad[[1, 2]].eq(0).all()
        assert parameter.grad[[0, 3]].ne(0).any(dim=-1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_tokens_may_visit_one_expert(dtype):
    layer = built(dtype=dtype)
    x = torch.randn(50, 5, dtype=dtype)
    experts = torch.full((50, 1), 2)
    out = layer(x, torch.ones(50, 1, dtype=dtype), experts)
    gate, up = (x @ layer.w13[2].T).chunk(2, dim=-1)
    expected = (F.silu(gate) * up) @ layer.w2[2].T
    rounding = {"rtol": 2**-6, "atol": 2**-4} if dtype == torch.bfloat16 else CLOSE
    torch.testing.assert_close(out, expected, **rounding)


def relative_error(found, exact):
    return ((found.float() - exact).norm() / exact.norm()).item()


def bf16_case():
    """Return a layer, inputs that BF16 holds exactly, and the FP32 result."""
    layer = built(8, 32, 16)
    x = torch.randn(60, 32)
    weights, experts = random_routing(60, 8, 3)
    with torch.no_grad():
        for tensor in (layer.w13, layer.w2, x, weights):
            tensor.copy_(tensor.bfloat16())
    x.requires_grad_()
    weights.requires_grad_()
    exact = loop(layer, x, weights, experts)
    return layer, (x, weights, experts), exact, gradients(exact, layer, x, weights)


def test_bf16_experts_are_within_rounding_of_the_loop_in_fp32():
    layer, (x, weights, experts), exact, exact_grads = bf16_case()
    low = layer.to(torch.bfloat16)
    x = x.detach().bfloat16().requires_grad_()
    weights = weights.detach().bfloat16().requires_grad_()
    out = low(x, weights, experts)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, exact) < 0.01
    for found, expected in zip(
        gradients(out, low, x, weights), exact_grads, strict=True
    ):
        assert found.dtype == torch.bfloat16
        assert relative_error(found, expected) < 0.02


def test_under_autocast_products_are_bf16_and_gradients_fp32():
    layer, (x, weights, experts), exact, exact_grads = bf16_case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x, weights, experts)
    assert out.dtype == torch.bfloat16
    assert 0 < relative_error(out, exact) < 0.01
    for found, expected in zip(
        gradients(out, layer, x, weights), exact_grads, strict=True
    ):
        assert found.dtype == torch.float32
        assert relative_error(found, expected) < 0.02


def test_gradients_may_be_laid_out_in_any_way():
    layer = built()
    x = torch.randn(6, 5, requires_grad=True)
    weights, experts = random_routing(6, 4, 2)
    direction = torch.randn(5, 6).T
    assert not direction.is_contiguous()
    (found,) = torch.autograd.grad(layer(x, weights, experts), x, direction)
    expected = torch.autograd.grad(loop(layer, x, weights, experts), x, direction)[0]
    torch.testing.assert_close(found, expected, **CLOSE)


def test_gradients_accumulate_over_micro_batches():
    layer = built()
    x = torch.randn(8, 5)
    weights, experts = random_routing(8, 4, 2)
    layer(x, weights, experts).sum().backward()
    whole = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    for part in (slice(0, 3), slice(3, 8)):
        layer(x[part], weights[part], experts[part]).sum().backward()
    for parameter, expected in zip(layer.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, expected, **CLOSE)


def test_each_choice_has_one_row_and_each_row_lies_in_its_experts_block():
    experts = random_routing(40, 7, 3)[1]
    token, row, ends = dispatch(experts, 7)
    assert sorted(row.flatten().tolist()) == list(range(120))
    assert torch.equal(token[row], torch.arange(40)[:, None].expand(40, 3))
    starts = torch.tensor([0, *ends[:-1]])
    assert (row >= starts[experts]).all()
    assert (row < torch.tensor(ends)[experts]).all()
    counts = torch.bincount(experts.flatten(), minlength=7)
    assert ends == counts.cumsum(0).tolist()


def test_tokens_keep_their_order_within_a_block():
    token, _, ends = dispatch(random_routing(40, 7, 3)[1], 7)
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        assert (token[start:end].diff() > 0).all()
