"""Hopper's sums against a loop of whole numbers, and the errors that are published."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.precision.accumulate import AT_ONCE, STEP, add_step, fp22_mm

E4M3 = torch.float8_e4m3fn


def split(byte: int) -> tuple[int, int, int]:
    """Return the sign, exponent and significand (in eighths) of an E4M3 code."""
    sign = -1 if byte & 0x80 else 1
    field, mantissa = (byte >> 3) & 0xF, byte & 7
    return (sign, field - 7, 8 + mantissa) if field else (sign, -6, mantissa)


def one_by_one(a: list[int], b: list[int], promote: int | None, bits: int) -> float:
    """Return the sum of products of E4M3 codes, by shifts of whole numbers."""
    promoted, register, exponent = 0.0, 0, None  # register: in 2 ** (exponent - bits)
    for start in range(0, len(a), 32):
        terms = []
        for left, right in zip(*(c[start : start + 32] for c in (a, b)), strict=True):
            (s, e, x), (t, f, y) = split(left), split(right)
            if x * y:
                terms.append((s * t, e + f, x * y))  # in 2 ** (e + f - 6)
        seen = [e for _, e, _ in terms] + ([exponent] if register else [])
        if seen:
            largest = max(seen)
            total = 0
            for sign, e, product in terms:
                total += sign * ((product << bits) >> (6 + largest - e))
            if register:
                sign = 1 if register > 0 else -1
                total += sign * (abs(register) >> (largest - exponent))
            sign, total = (1, total) if total > 0 else (-1, -total)
            excess = total.bit_length() - (bits + 1)
            total = total >> excess if excess > 0 else total << -excess
            register, exponent = sign * total, largest + excess
        if promote and (start + 32) % promote == 0:
            moved = register * 2.0 ** (exponent - bits) if register else 0.0
            promoted = torch.tensor(promoted + moved, dtype=torch.float32).item()
            register, exponent = 0, None
    last = register * 2.0 ** (exponent - bits) if register else 0.0
    return torch.tensor(promoted + last, dtype=torch.float32).item()


def drawn_codes(n_rows: int, n_columns: int, span: int, seed: int) -> torch.Tensor:
    """Return E4M3 codes whose exponents lie within `span` of one another."""
    generator = torch.Generator().manual_seed(seed)
    shape = (n_rows, n_columns)
    magnitude = torch.randint(8 * span, shape, generator=generator)
    sign = torch.randint(2, shape, generator=generator) << 7
    return (magnitude.clamp_max(126) + sign).to(torch.uint8)


@given(
    st.integers(1, 300),
    st.integers(1, 16),
    st.sampled_from([None, 32, 64, 128]),
    st.sampled_from([10, 13, 14, 16]),
    st.integers(0, 10**6),
)
def test_every_bit_is_that_of_a_loop_over_whole_numbers(k, span, promote, bits, seed):
    a, b = drawn_codes(2, k, span, seed), drawn_codes(3, k, span, seed + 1)
    got = fp22_mm(a.view(E4M3), b.view(E4M3), promote=promote, fraction_bits=bits)
    a, b = a.tolist(), b.tolist()
    expected = [[one_by_one(x, y, promote, bits) for y in b] for x in a]
    assert got.tolist() == expected


def test_rows_computed_at_a_time_change_nothing():
    a, b = (drawn_codes(200, 96, 16, seed).view(E4M3) for seed in (0, 1))
    assert a.shape[0] > AT_ONCE // (STEP * b.shape[0])
    alone = torch.cat([fp22_mm(row, b) for row in a.split(13)])
    assert torch.equal(fp22_mm(a, b), alone)


def test_a_step_cuts_what_lies_below_the_largest_exponent():
    x, ones = torch.zeros(32, 1), torch.ones(32, 1)
    # The unit is 2 ** (7 - 13): of each 1.75 units one is left, of each -1.75 too.
    x[0], x[1], x[2] = 128.0, 1.75 * 2**-6, 1.5 * 2**-6
    assert add_step(torch.zeros(1, 1), x, ones).item() == 128 + 2 * 2**-6
    assert add_step(torch.zeros(1, 1), -x, ones).item() == -128 - 2 * 2**-6


def test_the_register_is_cut_with_the_products():
    x = torch.zeros(32, 1)
    x[0] = 256.0
    register = torch.tensor([[1 + 2**-13]])
    assert add_step(register, x, torch.ones(32, 1)).item() == 257.0
    assert add_step(register, torch.zeros(32, 1), x).item() == 1 + 2**-13


def drawn(n_rows: int, k: int, seed: int, *, is_normal: bool = False) -> torch.Tensor:
    """Return E4M3 values that fill the format's range, as a scale per tensor has it."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn if is_normal else torch.rand)(n_rows, k, generator=generator)
    return (x * (448 / x.abs().max())).to(E4M3)


@pytest.mark.parametrize(
    ("k", "promote", "percent"),
    [
        # Largest errors of K products whose factors are drawn from [0, 1).
        (1024, None, 1.73),
        (2048, None, 3.80),
        (4096, None, 7.89),
        (1024, 128, 0.075),
        (4096, 128, 0.066),
        (4096, 256, 0.22),
        (4096, 1024, 1.6),
    ],
)
def test_sums_of_one_sign_are_as_wrong_as_published(k, promote, percent):
    a, b = drawn(48, k, 0), drawn(48, k, 1)
    exact = a.double() @ b.double().T
    error = (fp22_mm(a, b, promote=promote) - exact).abs() / exact
    # The largest of 2,304: a few percent of it are the draw's.
    assert 100 * error.max().item() == pytest.approx(percent, rel=0.04)


def test_the_error_is_a_bias_without_promotion():
    a, b = drawn(32, 4096, 0), drawn(32, 4096, 1)
    exact = a.double() @ b.double().T
    error = (fp22_mm(a, b, promote=None) - exact) / exact
    assert (error < 0).all()
    assert 100 * error.mean().item() == pytest.approx(-7.45, rel=0.01)


def test_sums_of_both_signs_are_off_by_two_percent_of_a_mean_result():
    a = drawn(64, 4096, 0, is_normal=True)
    b = drawn(64, 4096, 1, is_normal=True)
    exact = a.double() @ b.double().T
    error = {
        every: ((fp22_mm(a, b, promote=every) - exact).abs().max() / exact.abs().mean())
        for every in (None, 128)
    }
    assert 1.0 < 100 * error[None].item() < 2.0
    assert 100 * error[128].item() < 0.1


def test_nan_spoils_its_own_row_alone():
    a = torch.ones(2, 40).to(E4M3)
    a[0, 3] = torch.nan
    got = fp22_mm(a, torch.ones(3, 40).to(E4M3))
    assert got[0].isnan().all()
    assert got[1].eq(40).all()


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (
            torch.float32,
            {},
            "a must hold E4M3 values, which multiply exactly; got torch.float32. Pass "
            "a.to(torch.float8_e4m3fn), or the data of a QTensor.",
        ),
        (
            E4M3,
            {"fraction_bits": 25},
            "fraction_bits must be 16 at most, because terms are added in FP32; got "
            "25. For wider registers use torch.mm of FP32 values.",
        ),
        (
            E4M3,
            {"promote": 100},
            "promote must be a multiple of 32, the products of one step; got 100. Set "
            "promote=128, or None for no promotion.",
        ),
    ],
)
def test_what_hopper_cannot_do_is_refused(dtype, options, message):
    x = torch.ones(1, 32).to(dtype)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fp22_mm(x, x, **options)
