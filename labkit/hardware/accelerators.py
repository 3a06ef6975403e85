"""Data sheets of the accelerators that models of this class are trained on."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from labkit.data import read_rows
from labkit.hardware.units import memory, rate

DTYPES = ("float32", "float16", "bfloat16", "fp8")


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Accelerator:
    """One accelerator, as its maker describes it.

    Rates are dense (no sparsity), in FLOP/s with a multiply-add counting 2; links are
    bytes per second in one direction. None means that there is no such unit.
    """

    name: str
    label: str

    memory_bytes: int
    """What the driver reports, which is a little under the label."""

    memory_bytes_per_second: float

    fp32_flops: float
    """Without TF32."""

    fp16_flops: float
    bf16_flops: float | None

    fp8_flops: float | None
    """None: FP8 can be stored and converted here, but not multiplied."""

    fp8_format: str | None
    """`e4m3fn` of OCP, with `+mx` where blocks of 32 have hardware scales, or AMD's
    `e4m3fnuz`, whose bytes mean other numbers.
    """

    link: str
    """What joins the accelerators of one node."""

    link_bytes_per_second: float
    gpus_per_node: int

    network_bytes_per_second: float
    """Between nodes, per accelerator; an assumption, which `note` states."""

    source: str
    note: str

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Number formats that its matrix units multiply.

        >>> ACCELERATORS["a100-80g"].dtypes
        ('float32', 'float16', 'bfloat16')
        """
        return tuple(dtype for dtype in DTYPES if self._rate(dtype) is not None)

    def flops(self, dtype: str) -> float:
        """Return the peak FLOP/s of matrix products in `dtype`.

        >>> ACCELERATORS["h800"].flops("bfloat16") / 1e12
        990.0

        Raises:
            ValueError: its matrix units have no such format.
        """
        if dtype not in self.dtypes:
            raise ValueError(
                f"dtype must be one that {self.name} multiplies; got {dtype!r}. "
                f"Use one of {', '.join(self.dtypes)}."
            )
        return self._rate(dtype)

    def _rate(self, dtype: str) -> float | None:
        return {
            "float32": self.fp32_flops,
            "float16": self.fp16_flops,
            "bfloat16": self.bf16_flops,
            "fp8": self.fp8_flops,
        }.get(dtype)

    def __repr__(self) -> str:
        rates = ", ".join(f"{d} {rate(self.flops(d), 'FLOP/s')}" for d in self.dtypes)
        return (
            f"Accelerator({self.label}: {memory(self.memory_bytes)} at "
            f"{rate(self.memory_bytes_per_second, 'B/s')}; {rates}; {self.link} "
            f"{rate(self.link_bytes_per_second, 'B/s')}, network "
            f"{rate(self.network_bytes_per_second, 'B/s')} a direction)"
        )


def accelerator(name: str) -> Accelerator:
    """Return the accelerator of that name, in any case.

    >>> accelerator("H200").gpus_per_node
    8

    Raises:
        ValueError: no such name.
    """
    if name.lower() not in ACCELERATORS:
        raise ValueError(
            f"accelerator must be one of {', '.join(ACCELERATORS)}; got {name!r}. "
            "Add a row to data/hardware.csv for another."
        )
    return ACCELERATORS[name.lower()]


def _from_row(row: Mapping[str, str]) -> Accelerator:
    def tera(field: str) -> float | None:
        return float(row[field]) * 1e12 if row[field] else None

    return Accelerator(
        name=row["name"],
        label=row["label"],
        memory_bytes=int(row["memory_mib"]) * 2**20,
        memory_bytes_per_second=float(row["memory_gb_per_s"]) * 1e9,
        fp32_flops=tera("fp32_tflops"),
        fp16_flops=tera("fp16_tflops"),
        bf16_flops=tera("bf16_tflops"),
        fp8_flops=tera("fp8_tflops"),
        fp8_format=row["fp8_format"] or None,
        link=row["link"],
        link_bytes_per_second=float(row["link_gb_per_s"]) * 1e9,
        gpus_per_node=int(row["gpus_per_node"]),
        network_bytes_per_second=float(row["network_gb_per_s"]) * 1e9,
        source=row["source"],
        note=row["note"],
    )


ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {row["name"]: _from_row(row) for row in read_rows("hardware.csv")}
)
"""All accelerators by name, from `data/hardware.csv`."""
