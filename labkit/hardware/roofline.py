"""What this machine really reaches: matrix products by dtype, and memory bandwidth.

Each figure is the fastest of repeated runs, because other work on the machine can only
slow a run down. Square matrix products are tried at several sizes and the best counts.
The runs of all dtypes and sizes alternate, so that a busy moment befalls all alike.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from labkit.hardware.gemm import GEMM_DTYPES, require_dtype, require_seconds
from labkit.hardware.units import rate

CPU_SIZES = (256, 512, 1024, 2048)
ACCELERATOR_SIZES = (1024, 2048, 4096, 8192)

COPY_BYTES = 128 * 2**20
"""Size of each of the two buffers: several times any last-level cache."""

CAST_ELEMENTS = 4 * 2**20

FAST = 1.2
"""A dtype is fast here if its products run at this multiple of float32's."""

LONGEST = 1 / 5
"""Of the time given: a product expected to take longer is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmSample:
    """The fastest product of two square matrices of one size."""

    dtype: str
    size: int
    """Rows and columns of both factors."""

    flops: float
    """FLOP/s; a multiply-add counts 2."""

    n_runs: int


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Roofline:
    """The two ceilings of a machine, measured: arithmetic and memory traffic."""

    device: str
    n_threads: int
    samples: tuple[GemmSample, ...]

    copy_bytes_per_second: float
    """Bytes read plus bytes written while one buffer is copied to another."""

    fp8_cast_elements_per_second: float
    """BF16 values rounded to `float8_e4m3fn`. A CPU stores FP8 and multiplies it in
    another dtype, so that this is a cost to set against the halved traffic.
    """

    @property
    def gemm_flops(self) -> dict[str, float]:
        """Best FLOP/s of each dtype, over the sizes."""
        best: dict[str, float] = {}
        for sample in self.samples:
            best[sample.dtype] = max(sample.flops, best.get(sample.dtype, 0.0))
        return best

    @property
    def fast_dtypes(self) -> tuple[str, ...]:
        """Dtypes whose products are at least 1.2 times as fast as float32's."""
        best = self.gemm_flops
        floor = FAST * best["float32"]
        return tuple(dtype for dtype, flops in best.items() if flops >= floor)

    def ridge(self, dtype: str) -> float:
        """Return the FLOPs per byte of traffic above which arithmetic is the limit."""
        return self.gemm_flops[dtype] / self.copy_bytes_per_second

    def __repr__(self) -> str:
        rates = ", ".join(
            f"{dtype} {rate(flops, 'FLOP/s')}"
            for dtype, flops in self.gemm_flops.items()
        )
        copy = rate(self.copy_bytes_per_second, "B/s")
        cast = rate(self.fp8_cast_elements_per_second, "values/s")
        threads = f"{self.n_threads} thread{'s' if self.n_threads != 1 else ''}"
        return (
            f"Roofline({self.device}, {threads}: {rates}; copy {copy}; "
            f"cast to FP8 {cast})"
        )


def measure(
    *,
    seconds: float = 5.0,
    device: str | torch.device = "cpu",
    dtypes: Sequence[str] = GEMM_DTYPES,
) -> Roofline:
    """Time matrix products, copies and casts on one device for about `seconds`.

    A dtype whose products are slow is measured at the smaller sizes only. The global
    random state is left alone. On accelerators this has not been run.

    Raises:
        ValueError: no time is given, a dtype is none of `GEMM_DTYPES`, or float32,
            which the rest is compared with, is missing.
    """
    require_seconds(seconds)
    for dtype in dtypes:
        require_dtype(dtype)
    if "float32" not in dtypes:
        raise ValueError(
            "dtypes must include 'float32', which the others are compared with; got "
            f"{list(dtypes)}. Add 'float32'."
        )
    device = torch.device(device)
    sizes = CPU_SIZES if device.type == "cpu" else ACCELERATOR_SIZES
    deadline = perf_counter() + seconds
    copy, cast = _copy(device), _cast(device)
    products = {
        (dtype, size): run
        for dtype in dtypes
        for size, run in _products(dtype, sizes, device, LONGEST * seconds)
    }
    _alternate([copy, cast, *products.values()], deadline)
    return Roofline(
        device=str(device),
        n_threads=torch.get_num_threads(),
        samples=tuple(
            GemmSample(
                dtype=dtype, size=size, flops=2 * size**3 / run.fastest, n_runs=run.n
            )
            for (dtype, size), run in products.items()
        ),
        copy_bytes_per_second=2 * COPY_BYTES / copy.fastest,
        fp8_cast_elements_per_second=CAST_ELEMENTS / cast.fastest,
    )


class _Timed:
    """Something to run again and again, with its fastest time and its time in all."""

    def __init__(self, run: Callable[[], object], device: torch.device) -> None:
        self.run, self.device = run, device
        self.spent = 0.0
        self.fastest = float("inf")
        self.n = 0
        self.once()
        self.once()  # the first run allocates and picks kernels: it does not count
        self.fastest, self.n = self.last, 1

    def once(self) -> None:
        _synchronize(self.device)
        start = perf_counter()
        self.run()
        _synchronize(self.device)
        self.last = perf_counter() - start
        self.spent += self.last
        self.fastest = min(self.fastest, self.last)
        self.n += 1


def _alternate(runs: Sequence[_Timed], deadline: float) -> None:
    """Give every run about the same share of the time that is left."""
    while perf_counter() < deadline:
        min(runs, key=lambda run: run.spent).once()


def _products(
    dtype: str, sizes: Sequence[int], device: torch.device, longest: float
) -> Iterator[tuple[int, _Timed]]:
    """Yield products of growing size, up to the first that would take `longest`."""
    for size in sizes:
        run = _Timed(_product(size, dtype, device), device)
        yield size, run
        if run.fastest * 2**3 > longest:  # the next size is twice this one
            return


def _product(size: int, dtype: str, device: torch.device) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.rand(size, size, generator=generator).to(device, getattr(torch, dtype))
        for _ in range(2)
    )
    product = torch.empty_like(left)
    return lambda: torch.matmul(left, right, out=product)


def _copy(device: torch.device) -> _Timed:
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.zeros_like(source)
    return _Timed(lambda: target.copy_(source), device)


def _cast(device: torch.device) -> _Timed:
    values = torch.ones(CAST_ELEMENTS, dtype=torch.bfloat16, device=device)
    return _Timed(lambda: values.to(torch.float8_e4m3fn), device)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
