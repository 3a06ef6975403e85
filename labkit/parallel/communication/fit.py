"""Alpha and beta of a link, from collectives that were timed on it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.config.checks import require_above, require_at_least
from labkit.hardware.units import rate
from labkit.parallel.communication.cluster import Link
from labkit.parallel.communication.forms import Form

ONE_MESSAGE = Form(1, 1)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Fit:
    """A link, and how well it tells the times that it was fitted to."""

    link: Link

    form: Form
    """Of the collective that was timed."""

    error: float
    """Root mean square of predicted over measured seconds, less 1."""

    worst: float
    """The largest of these in size."""

    latency_error: float
    """Standard error of `link.latency_seconds`, in seconds."""

    bandwidth_error: float
    """Standard error of `link.bytes_per_second`, as a share of it."""

    def seconds(self, n_bytes: float) -> float:
        """Return what the same collective takes for another size."""
        return self.form.seconds(self.link, n_bytes)

    def __repr__(self) -> str:
        alpha, error = self.link.latency_seconds * 1e6, self.latency_error * 1e6
        speed = rate(self.link.bytes_per_second, "B/s")
        return (
            f"Fit({alpha:.3g} ± {error:.2g} us, {speed} ± {self.bandwidth_error:.1%}; "
            f"off by {self.error:.1%}, at worst {self.worst:.1%})"
        )


def fit(
    sizes: Sequence[float], seconds: Sequence[float], *, form: Form = ONE_MESSAGE
) -> Fit:
    """Return the link that tells these times best, and how far it is off.

    Least squares of the *relative* error, so that short messages count as much as long
    ones; a latency that would be negative is 0. Give the median of repeats: an average
    follows its outliers.

    Args:
        sizes: bytes, as `form` counts them; some short and some long.
        seconds: what each took.
        form: what was timed, as `form("all_reduce", 4)`; one message by itself.

    >>> found = fit([0, 1000, 10**6], [2e-6, 3e-6, 1.002e-3])
    >>> found.link
    Link(2 us, 1 GB/s)
    >>> round(found.seconds(5000) * 1e6, 3)
    7.0

    Raises:
        ValueError: too few sizes, times that are no times, or that do not grow.
    """
    _require_samples(sizes, seconds, form)
    # Relative errors: each sample is divided by its time, so that all aim at 1.
    rows = [
        (form.n_messages / t, form.share * n / t)
        for n, t in zip(sizes, seconds, strict=True)
    ]
    alpha, beta = _least_squares(rows)
    if beta <= 0:
        raise ValueError(
            "seconds must grow with sizes to tell a bandwidth; the best line falls or "
            "is level. Time longer messages, or repeat more and take medians."
        )
    off = [alpha * a + beta * b - 1 for a, b in rows]
    variance = sum(e * e for e in off) / max(len(rows) - 2, 1)
    aa, ab, bb = _products(rows)
    determinant = aa * bb - ab * ab
    return Fit(
        link=Link(latency_seconds=alpha, bytes_per_second=1 / beta),
        form=form,
        error=math.sqrt(sum(e * e for e in off) / len(off)),
        worst=max(map(abs, off)),
        latency_error=math.sqrt(variance * bb / determinant),
        bandwidth_error=math.sqrt(variance * aa / determinant) / beta,
    )


def _products(rows: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    return (
        sum(a * a for a, _ in rows),
        sum(a * b for a, b in rows),
        sum(b * b for _, b in rows),
    )


def _least_squares(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return alpha, not negative, and beta with alpha a + beta b nearest to 1."""
    aa, ab, bb = _products(rows)
    a, b = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    alpha = (a * bb - b * ab) / determinant
    if alpha < 0:
        return 0.0, b / bb
    return alpha, (b * aa - a * ab) / determinant


def _require_samples(
    sizes: Sequence[float], seconds: Sequence[float], form: Form
) -> None:
    if len(sizes) != len(seconds) or len(set(sizes)) < 3:
        raise ValueError(
            "a fit needs a time for each size, and three different sizes to show an "
            f"error; got {len(sizes)} sizes, {len(set(sizes))} of them different, and "
            f"{len(seconds)} times. Time more sizes."
        )
    for index, (n_bytes, time) in enumerate(zip(sizes, seconds, strict=True)):
        require_at_least({f"sizes[{index}]": n_bytes}, 0)
        require_above({f"seconds[{index}]": time}, 0)
    require_above({"form.n_messages": form.n_messages, "form.share": form.share}, 0)
