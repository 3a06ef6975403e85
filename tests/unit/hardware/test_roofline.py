from time import perf_counter

import pytest
import torch

from labkit.hardware import GemmSample, Roofline, measure, roofline


def made_up(**flops_by_dtype: float) -> Roofline:
    samples = [
        GemmSample(dtype=dtype, size=size, flops=share * flops, n_runs=3)
        for dtype, flops in flops_by_dtype.items()
        for size, share in ((256, 0.5), (512, 1.0), (1024, 0.9))
    ]
    return Roofline(
        device="cpu",
        n_threads=2,
        samples=tuple(samples),
        copy_bytes_per_second=20e9,
        fp8_cast_elements_per_second=2e9,
    )


@pytest.fixture(scope="module")
def measured() -> tuple[Roofline, float]:
    start = perf_counter()
    found = measure(seconds=0.2, dtypes=("float32", "bfloat16"))
    return found, perf_counter() - start


def test_the_best_size_counts():
    assert made_up(float32=100e9).gemm_flops == {"float32": 100e9}


def test_a_dtype_is_fast_from_a_fifth_more_than_float32():
    found = made_up(float32=100e9, bfloat16=120e9, float16=119e9)

    assert found.fast_dtypes == ("bfloat16",)


def test_the_ridge_is_arithmetic_over_traffic():
    assert made_up(float32=100e9).ridge("float32") == 5.0


def test_the_repr_holds_every_ceiling():
    assert repr(made_up(float32=100e9, float16=2e9)) == (
        "Roofline(cpu, 2 threads: float32 100 GFLOP/s, float16 2 GFLOP/s; "
        "copy 20 GB/s; cast to FP8 2 Gvalues/s)"
    )


def test_measured_rates_are_those_of_a_computer(measured):
    found, _ = measured

    assert set(found.gemm_flops) == {"float32", "bfloat16"}
    # From a busy single board to sixty-four cores with matrix units.
    assert all(1e7 < flops < 1e14 for flops in found.gemm_flops.values())
    assert 1e7 < found.copy_bytes_per_second < 1e13
    assert found.fp8_cast_elements_per_second > 1e5
    assert all(sample.n_runs >= 1 for sample in found.samples)
    assert found.n_threads == torch.get_num_threads()


def test_the_time_given_bounds_the_measurement(measured):
    _, elapsed = measured

    assert elapsed < 5  # 0.2 s asked for; set-up and a busy machine come on top


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    measure(seconds=0.01, dtypes=("float32",))

    assert torch.equal(torch.get_rng_state(), before)


class Clock:
    """A clock that only the timed work moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def work(self, *durations: float):
        remaining = list(durations)

        def run() -> None:
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return run


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(roofline, "perf_counter", clock)
    return clock


def test_the_fastest_run_counts_and_the_first_does_not(clock):
    run = roofline._Timed(clock.work(0.5, 3.0, 2.0, 4.0), torch.device("cpu"))
    run.once()
    run.once()

    assert (run.fastest, run.n) == (2.0, 3)


def test_slow_and_fast_work_get_the_same_time(clock):
    device = torch.device("cpu")
    slow = roofline._Timed(clock.work(1.0), device)
    fast = roofline._Timed(clock.work(0.1), device)
    roofline._alternate([slow, fast], deadline=clock.now + 20)

    assert slow.spent == pytest.approx(fast.spent, abs=1.1)
    assert fast.n > 8 * slow.n


def test_no_time_is_refused():
    with pytest.raises(ValueError) as caught:
        measure(seconds=0)
    assert str(caught.value) == (
        "seconds must be above 0 and finite; got 0. Set seconds=2 or so."
    )


def test_a_dtype_that_no_product_is_timed_in_is_refused():
    with pytest.raises(ValueError) as caught:
        measure(dtypes=("float32", "fp8"))
    assert str(caught.value) == (
        "dtype must be one of 'float32', 'bfloat16', 'float16'; got 'fp8'. "
        "Set dtype='float32' or another of these."
    )


def test_the_reference_dtype_is_needed():
    with pytest.raises(ValueError) as caught:
        measure(dtypes=("bfloat16",))
    assert str(caught.value) == (
        "dtypes must include 'float32', which the others are compared with; got "
        "['bfloat16']. Add 'float32'."
    )
