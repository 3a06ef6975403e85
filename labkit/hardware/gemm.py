"""One matrix product: what it costs, which ceiling it meets, and its real time.

The roofline model (Williams, Waterman and Patterson, 2009): arithmetic and traffic
overlap, so a product takes at least the longer of the two. Which one that is depends
on its arithmetic intensity, the FLOPs it does for each byte it moves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from time import perf_counter
from typing import Literal

import torch

GEMM_DTYPES = ("float32", "bfloat16", "float16")
"""What torch multiplies on every kind of device."""

WEIGHT_BYTES = 128 * 2**20
"""Weights that timed products walk through: several times any last-level cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm:
    """The product of an (m, k) and a (k, n) matrix.

    >>> expert = Gemm(m=8, k=7168, n=2048)  # 8 tokens in an expert of DeepSeek-V3
    >>> expert.n_flops, expert.n_bytes, round(expert.intensity, 1)
    (234881024, 29507584, 8.0)
    >>> expert.limit(peak_flops=990e12, bytes_per_second=3.35e12)  # an H800 in BF16
    'memory'
    """

    m: int
    """Rows of the left factor: tokens, where the right one holds weights."""

    k: int
    n: int

    itemsize: int = 2
    """Bytes of one element, alike in both factors and the result."""

    @property
    def n_flops(self) -> int:
        """FLOPs; a multiply-add counts 2."""
        return 2 * self.m * self.k * self.n

    @property
    def n_bytes(self) -> int:
        """Least bytes of traffic: each factor read once, the result written once."""
        n_elements = self.m * self.k + self.k * self.n + self.m * self.n
        return n_elements * self.itemsize

    @property
    def intensity(self) -> float:
        """FLOPs per byte of the least traffic."""
        return self.n_flops / self.n_bytes

    def seconds(self, *, peak_flops: float, bytes_per_second: float) -> float:
        """Return the least time that two ceilings leave."""
        return max(self.n_flops / peak_flops, self.n_bytes / bytes_per_second)

    def limit(
        self, *, peak_flops: float, bytes_per_second: float
    ) -> Literal["compute", "memory"]:
        """Return which of two ceilings the product meets."""
        is_compute = self.intensity > peak_flops / bytes_per_second
        return "compute" if is_compute else "memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedGemm:
    """A product and its fastest run on this machine."""

    gemm: Gemm
    seconds: float

    @property
    def flops(self) -> float:
        """FLOP/s."""
        return self.gemm.n_flops / self.seconds


def time_rows(
    rows: Sequence[int],
    *,
    size: int = 2048,
    dtype: str = "float32",
    seconds: float = 1.5,
) -> tuple[TimedGemm, ...]:
    """Time (m, size) by (size, size) products on the CPU, for several m.

    Each run takes the next of many weight matrices, as the layers of a model do, so
    that no cache holds the weights. Fastest of repeated, alternating runs.

    Args:
        rows: values of m, at least one.
        size: rows and columns of each weight matrix.
        dtype: of all matrices.
        seconds: about how long to measure, after two runs of each.

    Raises:
        ValueError: no time or no m is given, or another dtype than `GEMM_DTYPES`.
    """
    require_seconds(seconds)
    require_dtype(dtype)
    if not rows or min(rows) < 1:
        raise ValueError(
            f"rows must hold whole numbers of at least 1; got {list(rows)}. "
            "Set rows=(1, 64) or so."
        )
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    n_weights = max(2, WEIGHT_BYTES // (size * size * kind.itemsize))
    weights = cycle(torch.rand(n_weights, size, size, generator=generator).to(kind))
    inputs = [torch.rand(m, size, generator=generator).to(kind) for m in rows]
    outputs = [torch.empty_like(each) for each in inputs]

    def run(place: int) -> float:
        weight = next(weights)
        start = perf_counter()
        torch.matmul(inputs[place], weight, out=outputs[place])
        return perf_counter() - start

    places = range(len(rows))
    spent = [run(place) for place in places]  # chooses kernels: it does not count
    fastest = [run(place) for place in places]
    deadline = perf_counter() + seconds
    while perf_counter() < deadline:
        place = spent.index(min(spent))
        elapsed = run(place)
        fastest[place] = min(fastest[place], elapsed)
        spent[place] += elapsed
    return tuple(
        TimedGemm(gemm=Gemm(m=m, k=size, n=size, itemsize=kind.itemsize), seconds=least)
        for m, least in zip(rows, fastest, strict=True)
    )


def require_seconds(seconds: float) -> None:
    """Raise ValueError unless this is a time to measure for."""
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"seconds must be above 0 and finite; got {seconds}. Set seconds=2 or so."
        )


def require_dtype(name: str) -> None:
    """Raise ValueError unless the products of this dtype can be timed."""
    if name not in GEMM_DTYPES:
        raise ValueError(
            f"dtype must be one of {', '.join(map(repr, GEMM_DTYPES))}; got {name!r}. "
            "Set dtype='float32' or another of these."
        )
