"""Rows as bytes, and back."""

import pytest
import torch

from labkit.parallel.communication.payload import (
    FORMATS,
    PAYLOADS,
    Payload,
    RowFormat,
    from_fp8,
    payload_of,
    to_fp8,
)
from labkit.precision import QuantSpec, quantize


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-9, 9, (shape[0], 1), generator=generator)
    return torch.randn(*shape, generator=generator) * 2.0**exponents


@pytest.mark.parametrize("dim", [1, 37, 128, 300])
def test_fp8_rows_are_the_bytes_of_the_quantizer(dim):
    values = drawn(9, dim)
    values[2] = 0
    values[3, 0] = torch.inf
    stored, scales = to_fp8(values)
    theirs = quantize(values, QuantSpec(tile=(1, 128), scale="po2"))
    is_finite = torch.arange(9) != 3  # the sign of a NaN is nobody's business
    ours = stored.view(torch.uint8)[is_finite]
    assert torch.equal(ours, theirs.data.view(torch.uint8)[is_finite])
    assert torch.equal(scales, theirs.scale.view(torch.uint8))
    back = from_fp8(stored.view(torch.uint8), scales, torch.float32)
    assert torch.equal(back[is_finite], theirs.dequantize()[is_finite])
    assert back[3, : min(dim, 128)].isnan().all()


def test_a_second_journey_in_fp8_changes_nothing():
    once = from_fp8(*_bytes(drawn(64, 300)), torch.float32)
    assert torch.equal(from_fp8(*_bytes(once), torch.float32), once)


def _bytes(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    stored, scales = to_fp8(values)
    return stored.view(torch.uint8), scales


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dim, k", [(37, 3), (130, 1), (8, 0)])
def test_rows_carry_values_weights_and_experts(format, dtype, dim, k):
    rows = RowFormat(dim=dim, dtype=dtype, format=format, n_weights=k, n_experts=k)
    values, weights = drawn(5, dim).to(dtype), drawn(5, k, seed=1)
    experts = torch.arange(5 * k).view(5, k)
    packed = rows.pack(values, weights, experts)
    assert packed.shape == (5, rows.n_bytes)
    assert torch.equal(rows.weights(packed), weights)
    assert torch.equal(rows.experts(packed), experts)
    expected = {
        "fp32": values,
        "bf16": values.bfloat16().to(dtype),
        "fp8": from_fp8(*_bytes(values), dtype),
    }
    assert rows.values(packed).dtype == dtype
    assert torch.equal(rows.values(packed), expected[format])


def test_no_rows_are_no_bytes():
    rows = RowFormat(dim=5, format="fp8", n_weights=2, n_experts=2)
    nothing = torch.empty(0, 2)
    packed = rows.pack(torch.empty(0, 5), nothing, nothing.long())
    assert packed.shape == (0, rows.n_bytes)
    assert rows.values(packed).shape == (0, 5)


def test_payloads_have_names():
    assert payload_of("fp8") == Payload(there="fp8", back="bf16")
    assert payload_of(Payload(there="bf16", back="fp32")).back == "fp32"
    assert list(PAYLOADS) == ["fp32", "bf16", "fp8"]


def test_other_payloads_are_refused():
    rule = "payload must be one of 'fp32', 'bf16', 'fp8'; got 'int8'"
    with pytest.raises(ValueError, match=rule):
        payload_of("int8")


def test_other_formats_are_refused():
    rule = "back must be one of 'fp32', 'bf16', 'fp8'; got 'e5m2'. Set back='fp32'"
    with pytest.raises(ValueError, match=rule):
        Payload(back="e5m2")
