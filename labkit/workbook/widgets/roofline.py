"""The product explorer: does a matrix product compute or wait, on which machine?

    explorer = ProductExplorer(measure())
    widgets.explore(explorer.draw, explorer.describe, caption="…",
                    **explorer.controls())

The least time of a product is that of the roofline; starting a kernel is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ipywidgets import ValueWidget
from matplotlib.figure import Figure

from labkit.hardware import Roofline, accelerator
from labkit.hardware.gemm import Gemm
from labkit.workbook.figures.roofline import Ceiling, product_under_roofs
from labkit.workbook.spelling import spell
from labkit.workbook.widgets.controls import choice, steps

HERE = "this machine"

ACCELERATORS: Mapping[str, str] = MappingProxyType(
    {"H800": "h800", "H20": "h20", "A100": "a100-80g", "B200": "b200"}
)
"""What to set this machine beside, and its name in `data/hardware.csv`."""

ITEMSIZE: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "fp8": 1})
"""Bytes of one element of each dtype to choose from."""

FALLBACK = "bfloat16"
"""Multiplied by every machine above, and by this one."""

ROWS = tuple(2**power for power in range(17))
WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096, 7168, 16_384, 65_536)


@dataclass(frozen=True, slots=True)
class ProductExplorer:
    """Draws and describes a product under the roofs of this machine and others."""

    here: Roofline

    def controls(self) -> dict[str, ValueWidget]:
        """Return controls that start at 8 tokens in an expert of DeepSeek-V3."""
        return {
            "machine": choice("machine", [*ACCELERATORS, HERE]),
            "dtype": choice("dtype", list(ITEMSIZE), value="bfloat16"),
            "m": steps("m", ROWS, value=8, unit="rows: tokens"),
            "k": steps("k", WIDTHS, value=7168, unit="width that is summed over"),
            "n": steps("n", WIDTHS, value=2048, unit="width of the result"),
        }

    def draw(self, machine: str, dtype: str, m: int, k: int, n: int) -> Figure:
        """Return the product on the machine's roof, beside the published ones.

        This machine's roof is drawn only if chosen, so that the stored figure, at the
        starting values, is the same wherever the book was run.
        """
        used = self.usable(machine, dtype)
        product = Gemm(m=m, k=k, n=n, itemsize=ITEMSIZE[used])
        others = [
            self.ceiling(name, self.usable(name, used))
            for name in ACCELERATORS
            if name != machine
        ]
        return product_under_roofs(product, self.ceiling(machine, used), others)

    def describe(self, machine: str, dtype: str, m: int, k: int, n: int) -> str:
        """Return the product's intensity, what limits it, and its least time."""
        used = self.usable(machine, dtype)
        note = f"No {dtype} units, so products run in {used}. " * (used != dtype)
        product = Gemm(m=m, k=k, n=n, itemsize=ITEMSIZE[used])
        return note + sentence(product, self.ceiling(machine, used), used)

    def usable(self, machine: str, dtype: str) -> str:
        """Return the dtype, or the fallback where the machine has no units for it."""
        has = self.here.gemm_flops
        if machine != HERE:
            has = accelerator(ACCELERATORS[machine]).dtypes
        return dtype if dtype in has else FALLBACK

    def ceiling(self, machine: str, dtype: str) -> Ceiling:
        """Return a machine's two ceilings: measured here, published elsewhere."""
        if machine == HERE:
            peak, traffic = self.here.gemm_flops, self.here.copy_bytes_per_second
            return Ceiling(name=HERE, peak_flops=peak[dtype], bytes_per_second=traffic)
        other = accelerator(ACCELERATORS[machine])
        return Ceiling(
            name=machine,
            peak_flops=other.flops(dtype),
            bytes_per_second=other.memory_bytes_per_second,
        )


def sentence(product: Gemm, ceiling: Ceiling, dtype: str) -> str:
    """Return what limits a product and for how long, in words.

    >>> v3 = Ceiling(name="H800", peak_flops=990e12, bytes_per_second=3.35e12)
    >>> sentence(Gemm(m=8, k=7168, n=2048), v3, "bfloat16")
    'H800 in bfloat16: 7.96 FLOP per byte, below its ridge at 296: memory-bound. At \
least 8.81 µs, of which the arithmetic needs 237 ns: 2.7 % of the peak.'
    """
    arithmetic = product.n_flops / ceiling.peak_flops
    traffic = product.n_bytes / ceiling.bytes_per_second
    name = ceiling.name[0].upper() + ceiling.name[1:]
    head = f"{name} in {dtype}: {spell(product.intensity)} FLOP per byte,"
    ridge = spell(ceiling.ridge)
    if arithmetic > traffic:
        return (
            f"{head} above its ridge at {ridge}: compute-bound. At least "
            f"{duration(arithmetic)}, behind which the traffic's {duration(traffic)} "
            "can hide: up to 100 % of the peak."
        )
    share = 100 * arithmetic / traffic
    return (
        f"{head} below its ridge at {ridge}: memory-bound. At least "
        f"{duration(traffic)}, of which the arithmetic needs {duration(arithmetic)}: "
        f"{spell(share, digits=2)} % of the peak."
    )


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it.

    >>> duration(8.81e-6), duration(0.0123), duration(7.5), duration(2e-9)
    ('8.81 µs', '12.3 ms', '7.5 s', '2 ns')
    """
    units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9, "ps": 1e-12}
    unit = next((unit for unit, size in units.items() if seconds >= size), "ps")
    return f"{spell(seconds / units[unit])} {unit}"
