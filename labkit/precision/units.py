"""What a device does with FP8: multiply it, in which tiles, or only keep it.

Read from the makers' descriptions and from PyTorch's checks; it says what a plan needs,
not what has run. labkit itself multiplies FP8 on Hopper alone, and elsewhere what FP8
operands stand for, as BF16: on a CPU to see what FP8 does to a model (`emulate`), on a
card to keep fewer bytes (`storage`).
"""

from dataclasses import dataclass
from typing import Literal

from labkit.config.checks import require_choice
from labkit.hardware import ACCELERATORS, accelerator
from labkit.precision.quantize import QuantSpec

Backend = Literal["hopper", "mxfp8", "rowwise", "emulate", "storage"]

HOPPER = ("h100", "h100-pcie", "h200", "h800", "h20")
"""Accelerators of compute capability 9, the only one with PyTorch's 128-wide tiles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Units:
    """How a device takes FP8."""

    device: str
    backend: Backend
    inputs: QuantSpec
    """Tiles of activations and of their gradients; dispatched rows have the same."""

    weights: QuantSpec

    multiple: int
    """Sides of matrices are padded to multiples of this; shorter ones stay BF16."""

    high: Literal["bf16", "fp32"]
    """What it has for BF16."""

    reason: str
    """Why it is so, in a sentence."""

    @property
    def multiplies(self) -> bool:
        """Whether its matrix units multiply FP8, which is what makes it faster."""
        return self.backend in ("hopper", "mxfp8", "rowwise")


def fp8_units(device: str, *, scale: str = "po2") -> Fp8Units:
    """Return how a device takes FP8.

    Args:
        device: "cpu", or the name of an accelerator of data/hardware.csv.
        scale: what scales are stored in, where the device leaves a choice.

    >>> for name in ("a100-80g", "h800", "b200", "cpu"):
    ...     units = fp8_units(name)
    ...     print(name, units.backend, units.inputs.tile, units.multiplies)
    a100-80g storage (1, 128) False
    h800 hopper (1, 128) True
    b200 mxfp8 (1, 32) True
    cpu emulate (1, 128) False

    Raises:
        ValueError: no device has this name.
    """
    name = device.lower() if isinstance(device, str) else device
    require_choice({"hardware": name}, ("cpu", *ACCELERATORS))
    high, backend, reason = _backend(name)
    if backend in ("mxfp8", "emulate"):
        scale = "po2"
    tiles = {"mxfp8": ((1, 32), (1, 32)), "rowwise": ("row", "row")}
    inputs, weights = tiles.get(backend, ((1, 128), (128, 128)))
    return Fp8Units(
        device=name,
        backend=backend,
        inputs=QuantSpec(tile=inputs, scale=scale),
        weights=QuantSpec(tile=weights, scale=scale),
        multiple={"hopper": 128, "mxfp8": 32, "rowwise": 16}.get(backend, 1),
        high=high,
        reason=reason,
    )


def _backend(name: str) -> tuple[Literal["bf16", "fp32"], Backend, str]:
    """Return what stands for BF16, the backend, and the reason for it."""
    if name == "cpu":
        return (
            "bf16",
            "emulate",
            "a CPU has no FP8 units: operands are rounded to FP8 and multiplied as "
            "BF16, exactly, as scales are powers of two; it is not faster",
        )
    card = accelerator(name)
    high = "fp32" if card.bf16_flops is None else "bf16"
    if card.fp8_flops is None:
        return high, "storage", "no FP8 units: FP8 is kept and sent, never multiplied"
    if card.fp8_format == "e4m3fnuz":
        return (
            high,
            "storage",
            "its FP8 units read E4M3FNUZ, in which the same bytes are other numbers: "
            "E4M3 is kept and sent, never multiplied",
        )
    if card.fp8_format == "e4m3fn+mx":
        return (
            high,
            "mxfp8",
            "its FP8 units scale blocks of 1x32 by powers of two, which labkit has no "
            "product for",
        )
    if name in HOPPER:
        return (
            high,
            "hopper",
            "FP8 units with 22-bit sums: tiles of 128, promoted to FP32 at each",
        )
    return (
        high,
        "rowwise",
        "FP8 units, but PyTorch's tiles of 128 are for Hopper: a scale for each row, "
        "which labkit has no product for",
    )
