"""The product of a single row equals that of many."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from labkit.model.linear import SMALL, Linear, linear


@given(n_in=st.integers(1, 40), n_out=st.integers(1, 40), big=st.booleans())
def test_a_row_alone_equals_the_row_among_others(n_in, n_out, big):
    n_out = n_out + SMALL // n_in if big else n_out
    x, weight = torch.randn(3, n_in), torch.randn(n_out, n_in)
    expected = F.linear(x, weight)
    for row in (x[:1], x[None, :1], x[1:2].clone()):
        together = expected[:1] if row.data_ptr() == x.data_ptr() else expected[1:2]
        torch.testing.assert_close(linear(row, weight).view(1, -1), together)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_keep_theirs(dtype):
    x, weight = torch.randn(1, 64, dtype=dtype), torch.randn(512, 64, dtype=dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_a_column_of_a_wider_row_is_read_where_it_lies():
    wide, weight = torch.randn(1, 300), torch.randn(256, 100)
    torch.testing.assert_close(
        linear(wide[:, 100:200], weight), F.linear(wide[:, 100:200], weight)
    )


def test_a_row_has_the_gradient_of_the_plain_product():
    layer, x = Linear(64, 512), torch.randn(1, 64, requires_grad=True)
    slope = torch.randn(1, 512)
    (layer(x) * slope).sum().backward()
    torch.testing.assert_close(x.grad, slope @ layer.weight, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.weight.grad, slope.T @ x)


def test_a_layer_has_no_bias():
    assert Linear(3, 5).bias is None
    assert Linear(3, 5)(torch.zeros(2, 3)).abs().max() == 0
