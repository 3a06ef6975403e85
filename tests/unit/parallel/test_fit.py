"""A link is found from times on it, with an error that says how well."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.parallel.communication import Link, fit, form

SIZES = [2**k for k in range(8, 27, 2)]


@given(
    latency=st.floats(1e-7, 1e-2),
    speed=st.floats(1e6, 1e12),
    n_ranks=st.integers(2, 16),
    collective=st.sampled_from(["all_reduce", "all_gather", "all_to_all", "send"]),
)
def test_exact_times_give_the_link_back(latency, speed, n_ranks, collective):
    link = Link(latency_seconds=latency, bytes_per_second=speed)
    timed = form(collective, n_ranks)
    # Sizes around the one where latency and bandwidth count the same.
    sizes = [latency * speed * 4.0**k for k in range(-3, 4)]
    found = fit(sizes, [timed.seconds(link, n) for n in sizes], form=timed)

    assert found.link.latency_seconds == pytest.approx(latency, rel=1e-6)
    assert found.link.bytes_per_second == pytest.approx(speed, rel=1e-6)
    assert found.worst < 1e-6


def test_it_is_the_least_squares_of_numpy():
    generator = torch.Generator().manual_seed(0)
    noise = (1 + 0.1 * torch.rand(len(SIZES), generator=generator)).tolist()
    seconds = [(2e-5 + n / 1e9) * e for n, e in zip(SIZES, noise, strict=True)]
    rows = np.array([[1 / t, n / t] for n, t in zip(SIZES, seconds, strict=True)])
    (alpha, beta), (residual,), *_ = np.linalg.lstsq(rows, np.ones(len(rows)))
    errors = np.sqrt(np.diag(np.linalg.inv(rows.T @ rows)) * residual / (len(rows) - 2))
    found = fit(SIZES, seconds)

    assert found.link.latency_seconds == pytest.approx(alpha)
    assert found.link.bytes_per_second == pytest.approx(1 / beta)
    assert found.error == pytest.approx(np.sqrt(residual / len(rows)))
    assert found.latency_error == pytest.approx(errors[0])
    assert found.bandwidth_error == pytest.approx(errors[1] / beta)


def test_the_stated_error_covers_the_truth_as_often_as_it_should():
    generator = torch.Generator().manual_seed(1)
    n_covered = 0
    for _ in range(200):
        noise = (1 + 0.05 * torch.randn(len(SIZES), generator=generator)).tolist()
        found = fit(
            SIZES, [(2e-5 + n / 1e9) * e for n, e in zip(SIZES, noise, strict=True)]
        )
        off = found.link.latency_seconds - 2e-5
        n_covered += abs(off) <= 2 * found.latency_error

    assert 0.85 <= n_covered / 200 <= 0.99


def test_a_short_message_counts_as_much_as_a_long_one():
    # Twice 10 us for short messages; seconds for the long ones, a percent of which is
    # a thousand times more.
    sizes, seconds = [0, 100, 10**9, 2 * 10**9], [1e-5, 1e-5, 1.01, 1.98]
    found = fit(sizes, seconds)

    assert found.link.latency_seconds == pytest.approx(1e-5, rel=0.01)


def test_a_latency_is_never_negative():
    found = fit([1e6, 2e6, 4e6], [0.8e-3, 2e-3, 4.4e-3])

    assert found.link.latency_seconds == 0
    assert 0.9e9 < found.link.bytes_per_second < 1.3e9
    assert found.worst > 0.1


def test_a_fit_reads_as_a_sentence():
    found = fit([0, 1000, 10**6], [2e-6, 3e-6, 1.1e-3])

    assert repr(found) == (
        "Fit(1.97 ± 0.044 us, 918 MB/s ± 2.5%; off by 1.5%, at worst 2.1%)"
    )


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        (
            [1, 2],
            [1.0, 2.0],
            "a fit needs a time for each size, and three different sizes to show an "
            "error; got 2 sizes, 2 of them different, and 2 times. Time more sizes.",
        ),
        ([1, 2, 2], [1.0, 2.0, 2.0], "got 3 sizes, 2 of them different, and 3 times."),
        ([1, 2, 3], [1.0, 2.0], "got 3 sizes, 3 of them different, and 2 times."),
        (
            [1, 2, 3],
            [1.0, 0.0, 2.0],
            "seconds[1] must be above 0 and finite; got 0.0.",
        ),
        ([1, -2, 3], [1.0, 1.0, 2.0], "sizes[1] must be at least 0 and finite; got -2"),
        (
            [1, 2, 3],
            [3.0, 2.0, 1.0],
            "seconds must grow with sizes to tell a bandwidth; the best line falls or "
            "is level. Time longer messages, or repeat more and take medians.",
        ),
    ],
)
def test_times_that_tell_nothing_are_refused(sizes, seconds, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        fit(sizes, seconds)


def test_a_collective_of_one_rank_cannot_be_fitted():
    with pytest.raises(ValueError, match="form.n_messages must be above 0 and finite"):
        fit([1, 2, 3], [1.0, 2.0, 3.0], form=form("all_reduce", 1))
