import math
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.hardware.gemm import Gemm, TimedGemm, time_rows

sizes = st.integers(1, 100_000)


def test_a_product_of_known_sizes_has_known_costs():
    product = Gemm(m=2, k=3, n=4, itemsize=4)

    assert product.n_flops == 48
    assert product.n_bytes == 4 * (6 + 12 + 8)


def test_one_row_does_one_flop_per_byte_of_bf16_at_most():
    assert Gemm(m=1, k=4096, n=4096).intensity == pytest.approx(1.0, rel=1e-3)


@given(sizes)
def test_a_square_product_has_a_third_of_its_size_as_intensity(size):
    assert Gemm(m=size, k=size, n=size).intensity == pytest.approx(size / 3)


@given(sizes, sizes, sizes)
def test_intensity_is_below_each_of_the_three_sizes(m, k, n):
    assert Gemm(m=m, k=k, n=n).intensity < min(m, k, n)


@given(sizes, sizes, sizes)
def test_the_limit_is_what_takes_longer(m, k, n):
    product = Gemm(m=m, k=k, n=n)
    seconds = product.seconds(peak_flops=1e12, bytes_per_second=1e10)
    limit = product.limit(peak_flops=1e12, bytes_per_second=1e10)

    expected = {"compute": product.n_flops / 1e12, "memory": product.n_bytes / 1e10}
    assert seconds == max(expected.values())
    assert expected[limit] == pytest.approx(seconds)


def test_a_rate_is_work_over_time():
    assert TimedGemm(gemm=Gemm(m=1, k=5, n=10), seconds=0.5).flops == 200


def test_more_rows_use_a_weight_more_often_and_run_faster():
    start = perf_counter()
    one, many = time_rows((1, 256), size=1024, seconds=0.2)

    assert perf_counter() - start < 20  # a busy machine included
    assert (one.gemm.m, many.gemm.m) == (1, 256)
    assert many.flops > one.flops


@pytest.mark.parametrize("seconds", [0, math.nan, math.inf])
def test_a_time_must_be_given_that_ends(seconds):
    rule = f"seconds must be above 0 and finite; got {seconds}"
    with pytest.raises(ValueError, match=rule):
        time_rows((1,), seconds=seconds)


@pytest.mark.parametrize("rows", [(), (4, 0)])
def test_rows_must_be_given(rows):
    with pytest.raises(ValueError) as caught:
        time_rows(rows)
    assert str(caught.value) == (
        f"rows must hold whole numbers of at least 1; got {list(rows)}. "
        "Set rows=(1, 64) or so."
    )


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype must be one of 'float32', 'bfloat16'"):
        time_rows((1,), dtype="fp8")
