"""Narrow numbers against a search among all values that a format has."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from labkit.precision import FORMATS
from labkit.precision.formats import decode, encode

NARROW = ("e4m3", "e5m2", "e5m6")


def all_values(name: str) -> np.ndarray:
    """Return the finite values of a format that are not negative, in order of code.

    From the definition: a code is an exponent and a mantissa, the lowest exponent has
    no leading one, and E5M2 and E5M6 leave the highest to infinity and NaN, E4M3 its
    last mantissa alone.
    """
    fmt = FORMATS[name]
    bias = 2 ** (fmt.exponent_bits - 1) - 1
    n_mantissas = 2**fmt.mantissa_bits
    values = []
    for exponent in range(2**fmt.exponent_bits):
        for mantissa in range(n_mantissas):
            leading = 1 if exponent else 0
            share = leading + mantissa / n_mantissas
            values.append(share * 2.0 ** (max(exponent, 1) - bias))
    n_special = 1 if name == "e4m3" else n_mantissas
    return np.array(values[:-n_special])


def nearest(x: np.ndarray, name: str) -> np.ndarray:
    """Return the nearest values, ties to even codes, too large ones the largest."""
    values = all_values(name)
    middles = (values[1:] + values[:-1]) / 2
    magnitude = np.abs(x.astype(np.float64))
    above = np.searchsorted(middles, magnitude, side="left")
    is_tie = middles[np.minimum(above, len(middles) - 1)] == magnitude
    code = above + (is_tie & (above % 2 == 1))
    return np.copysign(values[code], x)


def stored_and_read(x: torch.Tensor, name: str) -> torch.Tensor:
    fmt = FORMATS[name]
    return decode(encode(x, fmt), fmt, x.shape[-1], torch.float32)


@pytest.mark.parametrize(
    ("name", "largest", "smallest_normal", "smallest"),
    [
        ("e4m3", 448.0, 2.0**-6, 2.0**-9),
        ("e5m2", 57344.0, 2.0**-14, 2.0**-16),
        ("e5m6", 65024.0, 2.0**-14, 2.0**-20),
    ],
)
def test_a_format_has_the_range_of_its_definition(
    name, largest, smallest_normal, smallest
):
    fmt, values = FORMATS[name], all_values(name)
    assert values[-1] == fmt.largest == largest
    assert values[1] == fmt.smallest == smallest
    assert fmt.smallest_normal == smallest_normal


@pytest.mark.parametrize("name", NARROW)
def test_a_million_values_become_their_nearest(name):
    generator = torch.Generator().manual_seed(0)
    fmt = FORMATS[name]
    # From far below the smallest value to beyond the largest.
    exponents = torch.empty(10**6).uniform_(
        math.log2(fmt.smallest) - 3, math.log2(fmt.largest) + 1, generator=generator
    )
    x = torch.exp2(exponents) * torch.randn(10**6, generator=generator).sign()
    expected = nearest(x.numpy(), name)
    assert (stored_and_read(x, name).numpy() == expected).all()


@pytest.mark.parametrize("name", NARROW)
def test_every_value_is_kept_and_every_middle_goes_to_the_even_code(name):
    values = all_values(name)
    middles = (values[1:] + values[:-1]) / 2
    x = torch.tensor(np.concatenate((values, -values, middles))).float()
    assert (stored_and_read(x, name).numpy() == nearest(x.numpy(), name)).all()


@pytest.mark.parametrize("name", NARROW)
def test_infinity_becomes_the_largest_and_nan_stays(name):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    largest = FORMATS[name].largest
    got = stored_and_read(x, name)
    assert got[:2].tolist() == [largest, -largest]
    assert got[2].isnan()
    assert got[3:].tolist() == [0.0, 0.0]
    assert got[4].signbit()


def test_bf16_keeps_infinity():
    x = torch.tensor([torch.inf, 1 + 2**-9])
    assert stored_and_read(x, "bf16").tolist() == [torch.inf, 1.0]


@given(st.integers(1, 9), st.integers(1, 3))
def test_twelve_bits_take_three_bytes_for_two_values_of_a_row(n_columns, n_rows):
    x = torch.linspace(-3, 3, n_rows * n_columns).view(n_rows, n_columns)
    stored = encode(x, FORMATS["e5m6"])
    assert stored.dtype == torch.uint8
    assert stored.shape == (n_rows, -(-n_columns // 2) * 3)
    assert (stored_and_read(x, "e5m6").numpy() == nearest(x.numpy(), "e5m6")).all()


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_tables_read_any_two_bytes_as_the_cast_does(name, dtype):
    byte = torch.arange(256, dtype=torch.uint8)
    codes = torch.stack((byte.repeat(256), byte.repeat_interleave(256)), -1).flatten()
    stored = codes.view(FORMATS[name].dtype)
    # All of them; one byte less; from the second byte on; turned.
    for part in (stored, stored[:-1], stored[1:-1], stored.view(256, 512).T):
        read = decode(part, FORMATS[name], part.shape[-1], dtype)
        assert read.shape == part.shape
        torch.testing.assert_close(read, part.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_what_has_no_values_is_cast():
    with FakeTensorMode():
        stored = torch.empty(4, 6, dtype=torch.float8_e4m3fn)
        read = decode(stored, FORMATS["e4m3"], 6, torch.bfloat16)
    assert read.shape == (4, 6)
    assert isinstance(read, FakeTensor)
    # No table was made without values, and kept.
    one = torch.ones(1, 2).to(torch.float8_e4m3fn)
    assert decode(one, FORMATS["e4m3"], 2, torch.bfloat16).tolist() == [[1.0, 1.0]]
