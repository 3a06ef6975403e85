"""Products of FP8 tiles: the three of a linear layer, and what computes them where.

    y  = x wᵀ    Fprop   1x128 · 128x128   rows of x, outputs; sums over inputs
    dx = dy w    Dgrad   1x128 · 128x128   rows of dy, inputs; sums over outputs
    dw = dyᵀ x   Wgrad   1x128 · 1x128     outputs, inputs; sums over tokens

Each is a bᵀ of two matrices whose tiles lie along the sum (DeepSeek-V3, section 3.3):
the weight is `transposed` for Dgrad; for Wgrad dy and x are tiled along the tokens
first. No product of raw FP8 tensors occurs: PyTorch's own would answer in FP8.

    backend  where          how it sums
    emulate  anywhere       dequantized to BF16, without an error, and summed in FP32
    fp22     anywhere, slow as Hopper's tensor cores do, for study
    hopper   9.x            in the tensor cores, by `torch.nn.functional.scaled_mm`
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import ScalingType

from labkit.config.checks import require_choice
from labkit.precision.accumulate import PROMOTE, fp22_mm
from labkit.precision.quantize import QTensor

BACKENDS = ("emulate", "fp22", "hopper")

CUDA_VERSION = (12, 9)
"""First CUDA whose cuBLAS multiplies tiles of 128 on Hopper."""

ROW, SQUARE = (1, 128), (128, 128)

ROWS = 16
"""Multiple of rows to which its operands are filled up."""


@dataclass(frozen=True, slots=True)
class Backend:
    """What multiplies on a device, and why it and no other."""

    name: str
    reason: str


def choose_backend(device: torch.device | str) -> Backend:
    """Return the fastest backend of a device.

    >>> choose_backend("cpu")
    Backend(name='emulate', reason='cpu has no FP8 units')

    Raises:
        ValueError: a GPU with FP8 units that cannot multiply tiles of 128 as it is.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return Backend("emulate", f"{device.type} has no FP8 units")
    capability = torch.cuda.get_device_capability(device)
    return backend_of(capability, torch.version.cuda)


def backend_of(capability: tuple[int, int], cuda: str | None) -> Backend:
    """Return the backend of a GPU by its compute capability and PyTorch's CUDA.

    >>> backend_of((9, 0), "13.0").name, backend_of((8, 0), "13.0").name
    ('hopper', 'emulate')

    Raises:
        ValueError: Blackwell, or Hopper with a CUDA before 12.9.
    """
    major, minor = capability
    gpu = f"compute capability {major}.{minor}"
    if major < 9:
        return Backend("emulate", f"{gpu} has no products of FP8 tiles")
    if major > 9:
        raise ValueError(
            "FP8 products in tiles of 128 must run on compute capability 9.x; got "
            f"{major}.{minor}, whose tensor cores scale tiles of 1x32, which are not "
            "provided. Set backend='emulate', or train in BF16."
        )
    if cuda is None or tuple(map(int, cuda.split(".")[:2])) < CUDA_VERSION:
        raise ValueError(
            f"FP8 products in tiles of 128 must have CUDA 12.9 or later; got {cuda}. "
            "Install a PyTorch built with it, or set backend='emulate'."
        )
    return Backend("hopper", f"{gpu} multiplies FP8 tiles of 128")


def transposed(q: QTensor) -> QTensor:
    """Return the transposed matrix, its tiles turned with it; nothing is rounded."""
    if q.spec.numbers.is_packed or isinstance(q.spec.tile, str):
        raise ValueError(
            "q must hold one value per entry in tiles (rows, columns); got "
            f"{q.spec.format} in tiles {q.spec.tile!r}. Call q.retile((1, 128)), or "
            "quantize the transposed matrix."
        )
    spec = replace(q.spec, tile=q.spec.tile[::-1])
    data, scale = q.data.mT.contiguous(), q.scale.mT.contiguous()
    return QTensor(data, scale, spec, q.data.shape[-2])


def fp8_mm(
    a: QTensor,
    b: QTensor,
    *,
    backend: str = "auto",
    promote: int | None = PROMOTE,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Float[Tensor, "m n"]:
    """Return a bᵀ, summed in FP32 and rounded to `out_dtype` once.

    Args:
        a: a matrix in E4M3, of m rows.
        b: another, of n rows, with as many columns.
        backend: one of `BACKENDS`, or "auto": that of `choose_backend(a's device)`.
            Only "emulate" takes any tiles. It computes in FP32 instead of BF16 where
            scales are no powers of two, or `out_dtype` is FP32.
        promote: of "fp22" alone, as in `fp22_mm`: the products after which sums move
            into FP32. Scales apply outside, and so never last for less.
        out_dtype: BF16 or FP32.

    >>> from labkit.precision.quantize import QuantSpec, quantize
    >>> x, w = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [0.5, 0.0]])
    >>> fp8_mm(quantize(x, QuantSpec()), quantize(w, QuantSpec(tile=(128, 128))))
    tensor([[11.0000,  0.5000]], dtype=torch.bfloat16)

    Raises:
        ValueError: shapes, formats, tiles or a device that the backend cannot take.
    """
    _check(a, b, out_dtype)
    require_choice({"backend": backend}, ("auto", *BACKENDS))
    if backend == "auto":
        backend = choose_backend(a.data.device).name
    if backend == "emulate":
        return _emulated(a, b, out_dtype)
    if backend == "fp22":
        return _in_fp22(a, b, promote).to(out_dtype)
    return _on_hopper(a, b, out_dtype)


def _check(a: QTensor, b: QTensor, out_dtype: torch.dtype) -> None:
    if {a.spec.format, b.spec.format} != {"e4m3"}:
        raise ValueError(
            f"a and b must be in E4M3; got {a.spec.format} and {b.spec.format}. "
            "Quantize with QuantSpec(format='e4m3')."
        )
    is_pair = len(a.shape) == len(b.shape) == 2
    if not is_pair or a.n_columns != b.n_columns:
        raise ValueError(
            "a and b must be matrices with as many columns; got shapes "
            f"{tuple(a.shape)} and {tuple(b.shape)}. Transpose one with transposed(q)."
        )
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"out_dtype must be torch.bfloat16 or torch.float32; got {out_dtype}. "
            "Set out_dtype=torch.bfloat16."
        )


def _emulated(a: QTensor, b: QTensor, out_dtype: torch.dtype) -> Tensor:
    """Return the product of dequantized matrices."""
    is_exact = a.spec.scale == b.spec.scale == "po2"
    # A product of BF16 matrices sums in FP32, but answers in BF16.
    dtype = out_dtype if is_exact else torch.float32
    left, right = a.dequantize(dtype), b.dequantize(dtype)
    known = "cpu" if left.is_meta else left.device.type  # to autocast
    with torch.autocast(known, enabled=False):
        return torch.mm(left, right.T).to(out_dtype)


def _in_fp22(a: QTensor, b: QTensor, promote: int | None) -> Float[Tensor, "m n"]:
    """Return the FP32 sum of Hopper's partial sums, each times its tiles' scales."""
    width = _common_width(a, b, promote)
    out = torch.zeros(a.shape[0], b.shape[0], device=a.data.device)
    for start in range(0, a.n_columns, width):
        columns = slice(start, start + width)
        part = fp22_mm(a.data[:, columns], b.data[:, columns], promote=promote)
        out += part * (_scale_at(a, start).unsqueeze(1) * _scale_at(b, start))
    return out


def _common_width(a: QTensor, b: QTensor, promote: int | None) -> int:
    """Return the columns for which scales of both last, whole promotions long."""
    widths = [min(q.spec.tile_of(*q.shape)[1], q.n_columns) for q in (a, b)]
    width = min(widths)
    is_whole = all(other % width == 0 for other in widths)
    if is_whole and (width == a.n_columns or (promote and width % promote == 0)):
        return width
    raise ValueError(
        "scales must last for whole promotions, or for all columns; got tiles "
        f"{a.spec.tile!r} and {b.spec.tile!r} with promote={promote}. Set promote=128 "
        "with tiles of 128 columns, or tile='row'."
    )


def _scale_at(q: QTensor, column: int) -> Float[Tensor, "r"]:
    """Return the scales of all rows in a column."""
    n_rows, n_columns = q.spec.tile_of(*q.shape)
    scale = q.scale[:, column // n_columns].float()
    return scale.repeat_interleave(n_rows)[: q.shape[0]]


def _on_hopper(a: QTensor, b: QTensor, out_dtype: torch.dtype) -> Tensor:
    """Return the product of a Hopper GPU; this has not been run on one.

    Its layouts are those that PyTorch checks for tensors without values too.
    """
    device = a.data.device
    if device.type == "cuda":
        choose_backend(device)
    elif device.type != "meta":
        raise ValueError(
            "backend='hopper' must have a GPU of compute capability 9.x; the operands "
            f"lie on {device}. Move them there, or set backend='emulate'."
        )
    if a.spec.tile != ROW or b.spec.tile not in (ROW, SQUARE):
        raise ValueError(
            "backend='hopper' must have tiles (1, 128) in a, and (1, 128) or "
            f"(128, 128) in b; got {a.spec.tile!r} and {b.spec.tile!r}. Call "
            "retile((1, 128)), or set backend='emulate'."
        )
    left, right = hopper_operand(a), hopper_operand(b)
    out = F.scaled_mm(
        left.values,
        right.values.T,
        left.scale,
        left.recipe,
        right.scale,
        right.recipe,
        output_dtype=out_dtype,
    )
    return out[: a.shape[0], : b.shape[0]]


class HopperOperand(NamedTuple):
    """A matrix as cuBLAS reads it: filled up with zeros, its scales column by column.

    PyTorch wants scales of squares transposed, with a multiple of 4 of them a column.
    """

    values: Shaped[Tensor, "r k"]
    scale: Float[Tensor, "tr tc"]
    recipe: ScalingType


def hopper_operand(q: QTensor) -> HopperOperand:
    """Return a matrix, in tiles of `ROW` or `SQUARE`, laid out for Hopper."""
    is_square = q.spec.tile == SQUARE
    n_rows, n_columns = q.shape
    edge = -n_rows % (128 if is_square else ROWS)
    values = _filled_up(q.data, edge, -n_columns % 128)
    if is_square:
        scale = _filled_up(q.scale.float(), 0, -q.scale.shape[1] % 4).T
        return HopperOperand(values, scale, ScalingType.BlockWise128x128)
    scale = _filled_up(q.scale.float(), edge, 0).T.contiguous().T
    return HopperOperand(values, scale, ScalingType.BlockWise1x128)


def _filled_up(x: Shaped[Tensor, "r c"], rows: int, columns: int) -> Tensor:
    # `F.pad` copies also where there is nothing to add.
    return F.pad(x, (0, columns, 0, rows)) if rows or columns else x
