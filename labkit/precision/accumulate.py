"""The sum that Hopper's tensor cores make of FP8 products, to the bit.

FP8 values multiply exactly; what loses is the sum. A step of WGMMA takes 32 products
and the register that they are added to, and shifts all to the largest exponent among
them, a product's being the sum of its factors' exponents. Of each term 13 fraction bits
stay, the rest is cut off; the sum, exact by itself, is cut to 13 fraction bits again: a
register of 1 sign, 8 exponent and 13 fraction bits, FP22 (DeepSeek-V3, section 3.5.2;
"Insights into DeepSeek-V3", section 3.1.1). Cuts go towards zero, so that sums of like
sign come out too small, the more the longer they are.

DeepSeek-V3 therefore moves the register every 128 products, four steps, into FP32 sums
outside the tensor core (section 3.3.2). The rule is the published one of MMA-Sim (arXiv
2511.10909), which says that it equals Hopper's; this file has not been compared with a
GPU.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from labkit.config.checks import require_whole

STEP = 32
"""Products that a step aligns with the register."""

FRACTION_BITS = 13
"""Bits after the leading one that a step keeps: FP22."""

PROMOTE = 128
"""Products after which DeepSeek-V3 moves the register into FP32."""

SMALLEST = -6
"""Exponent of E4M3's smallest normal value, and of all below it."""

NOTHING = -64
"""Exponent of a zero: low enough that no sum of two raises a largest one."""

AT_ONCE = 1 << 17
"""Products computed at a time: what a core's cache holds."""


def fp22_mm(
    a: Shaped[Tensor, "m k"],
    b: Shaped[Tensor, "n k"],
    *,
    promote: int | None = PROMOTE,
    fraction_bits: int = FRACTION_BITS,
) -> Float[Tensor, "m n"]:
    """Return a bᵀ of E4M3 values without scales, in FP32, as Hopper sums it.

    For study: a CPU core does some 10⁸ of its products a second.

    Args:
        a: in `torch.float8_e4m3fn`.
        b: likewise.
        promote: products after which the register moves into FP32, a multiple of 32;
            None: never before the end.
        fraction_bits: of each term and of the register, 16 at most: more would not add
            exactly in FP32.

    >>> a = torch.full((1, 4096), 1.125).to(torch.float8_e4m3fn)
    >>> [fp22_mm(a, a, promote=every).item() for every in (None, 128)]
    [4923.5, 5184.0]

    Raises:
        ValueError: other dtypes, or numbers beyond the above.
    """
    _check(a, b, promote, fraction_bits)
    left, right = _by_step(a), _by_step(b)  # (k/32, 32, m), (k/32, 32, n)
    out = torch.empty(len(a), len(b), device=a.device)
    n_rows = max(AT_ONCE // (STEP * len(b)), 1)
    for start in range(0, len(a), n_rows):
        rows = slice(start, start + n_rows)
        out[rows] = _sum(left[..., rows], right, promote, fraction_bits)
    return out


def _check(a: Tensor, b: Tensor, promote: int | None, fraction_bits: int) -> None:
    for name, x in (("a", a), ("b", b)):
        if x.dtype != torch.float8_e4m3fn:
            raise ValueError(
                f"{name} must hold E4M3 values, which multiply exactly; got {x.dtype}. "
                f"Pass {name}.to(torch.float8_e4m3fn), or the data of a QTensor."
            )
    require_whole({"fraction_bits": fraction_bits})
    if fraction_bits > 16:
        raise ValueError(
            "fraction_bits must be 16 at most, because terms are added in FP32; got "
            f"{fraction_bits}. For wider registers use torch.mm of FP32 values."
        )
    if promote is None:
        return
    require_whole({"promote": promote})
    if promote % STEP:
        raise ValueError(
            f"promote must be a multiple of {STEP}, the products of one step; got "
            f"{promote}. Set promote={PROMOTE}, or None for no promotion."
        )


def _by_step(x: Shaped[Tensor, "r k"]) -> Float[Tensor, "steps 32 r"]:
    """Return FP32 values with the products of a step first; zeros fill the last one."""
    x = F.pad(x.float(), (0, -x.shape[1] % STEP))
    return x.T.contiguous().unflatten(0, (-1, STEP))


def _sum(
    left: Float[Tensor, "steps 32 m"],
    right: Float[Tensor, "steps 32 n"],
    promote: int | None,
    fraction_bits: int,
) -> Float[Tensor, "m n"]:
    """Return the sum over all steps, promoted now and then."""
    register = left.new_zeros(left.shape[-1], right.shape[-1])
    promoted = torch.zeros_like(register)
    for step, (x, y) in enumerate(zip(left, right, strict=True), start=1):
        register = add_step(register, x, y, fraction_bits)
        if promote is not None and step * STEP % promote == 0:
            promoted += register
            register = torch.zeros_like(register)
    return promoted + register


def add_step(
    register: Float[Tensor, "m n"],
    x: Float[Tensor, "32 m"],
    y: Float[Tensor, "32 n"],
    fraction_bits: int = FRACTION_BITS,
) -> Float[Tensor, "m n"]:
    """Return the registers after one step: 32 products of E4M3 values more.

    A product that lies 14 binary orders below the largest is lost whole.

    >>> x = torch.zeros(32, 1)
    >>> x[:3, 0] = torch.tensor([128.0, 2**-6, 2**-7])
    >>> y = torch.full((32, 1), 1.0)
    >>> add_step(torch.zeros(1, 1), x, y).item() - 128
    0.015625
    """
    x_exponent, y_exponent = _factor_exponents(x), _factor_exponents(y)
    of_products = x_exponent.unsqueeze(-1) + y_exponent.unsqueeze(-2)  # (32, m, n)
    largest = torch.maximum(of_products.amax(0), _exponents(register))
    largest = largest.clamp_min_(NOTHING)  # of zeros alone
    unit = _power(fraction_bits - largest)
    terms = (x.unsqueeze(-1) * y.unsqueeze(-2)).mul_(unit).trunc_()
    total = terms.sum(0).add_((register * unit).trunc_())  # whole numbers below 2**24
    cut = _power(fraction_bits - _exponents(total).clamp_min_(0))
    return (total * cut).trunc_().div_(cut).div_(unit)


def _factor_exponents(x: Float[Tensor, "32 r"]) -> Int[Tensor, "32 r"]:
    """Return the exponents of E4M3 values as their bits have them."""
    return _exponents(x).clamp_min_(SMALLEST).masked_fill_(x == 0, NOTHING)


def _exponents(x: Float[Tensor, "*b"]) -> Int[Tensor, "*b"]:
    """Return the exponents of FP32 values; what a zero gives is below all others."""
    return (((x.view(torch.int32) >> 23) & 0xFF) - 127).to(torch.int16)


def _power(exponent: Int[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    return ((exponent.int() + 127) << 23).view(torch.float32)
