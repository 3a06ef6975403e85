"""The three products of a linear layer in FP8, on each backend."""

import math
import re

import pytest
import torch
from torch.nn.functional import ScalingType

from labkit.precision import QTensor, QuantSpec, quantize
from labkit.precision.accumulate import fp22_mm
from labkit.precision.products import (
    Backend,
    backend_of,
    choose_backend,
    fp8_mm,
    hopper_operand,
    transposed,
)

ROW, COLUMN, SQUARE = (1, 128), (128, 1), (128, 128)


def drawn(n_rows: int, n_columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n_rows, n_columns, generator=generator)


def tiled(x: torch.Tensor, tile: tuple[int, int] | str, scale: str = "po2") -> QTensor:
    return quantize(x, QuantSpec(tile=tile, scale=scale))


def sqnr(exact: torch.Tensor, got: torch.Tensor) -> float:
    """Return the ratio of signal to error in dB."""
    return 20 * math.log10(exact.norm() / (exact - got).norm())


def difference(exact: torch.Tensor, got: torch.Tensor) -> float:
    """Return how far two tensors are from equal, as DeepGEMM's tests measure it."""
    exact, got = exact.double(), got.double()
    squares = (exact * exact).sum() + (got * got).sum()
    return (1 - 2 * (exact * got).sum() / squares).item()


@pytest.mark.parametrize("backend", ["emulate", "fp22"])
def test_a_product_by_hand(backend):
    x, w = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 4.0], [0.5, 0.0]])
    got = fp8_mm(tiled(x, ROW), tiled(w, SQUARE), backend=backend)
    assert got.dtype == torch.bfloat16
    assert got.tolist() == [[-5.0, 0.5]]


@pytest.mark.parametrize(
    ("backend", "tokens"), [("emulate", 256), ("emulate", 150), ("fp22", 130)]
)
def test_outputs_and_both_gradients_pass_28_db(backend, tokens):
    x, w, dy = drawn(tokens, 256, 0), drawn(384, 256, 1), drawn(tokens, 384, 2)
    qx, qw, qdy = tiled(x, ROW), tiled(w, SQUARE), tiled(dy, ROW)
    along_tokens = [transposed(q.retile(COLUMN)) for q in (qdy, qx)]
    products = {
        "y": (x @ w.T, fp8_mm(qx, qw, backend=backend)),
        "dx": (dy @ w, fp8_mm(qdy, transposed(qw), backend=backend)),
        "dw": (
            dy.T @ x,
            fp8_mm(*along_tokens, backend=backend, out_dtype=torch.float32),
        ),
    }
    for exact, got in products.values():
        assert got.shape == exact.shape
        assert sqnr(exact, got.float()) >= 28
        assert difference(exact, got.float()) < 1e-3


def test_emulation_in_bf16_is_the_exact_product_rounded_once():
    qx, qw = tiled(drawn(64, 640, 0), ROW), tiled(drawn(96, 640, 1), SQUARE)
    exact = qx.dequantize().double() @ qw.dequantize().double().T
    got = fp8_mm(qx, qw, out_dtype=torch.float32)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)
    rounded = fp8_mm(qx, qw).double()
    # Half a step of BF16, and FP32's own error where that decides a tie.
    assert ((rounded - exact).abs() <= exact.abs() / 255 + 1e-4).all()


def test_scales_that_are_no_powers_of_two_are_emulated_in_fp32():
    qx = tiled(drawn(64, 256, 0), ROW, "fp32")
    qw = tiled(drawn(96, 256, 1), SQUARE, "fp32")
    in_fp32 = torch.mm(qx.dequantize(), qw.dequantize().T)
    assert torch.equal(fp8_mm(qx, qw, out_dtype=torch.float32), in_fp32)
    assert torch.equal(fp8_mm(qx, qw), in_fp32.bfloat16())


def test_autocast_does_not_round_an_exact_product():
    qx, qw = tiled(drawn(4, 256, 0), ROW), tiled(drawn(6, 256, 1), SQUARE)
    exact = fp8_mm(qx, qw, out_dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = fp8_mm(qx, qw, out_dtype=torch.float32)
    assert torch.equal(got, exact)


@pytest.mark.parametrize("tile", [ROW, SQUARE])
def test_partial_sums_are_scaled_outside_of_the_tensor_core(tile):
    qa, qb = tiled(drawn(5, 300, 0), ROW), tiled(drawn(130, 300, 1), tile)
    expected = torch.zeros(5, 130)
    for block in range(3):
        columns = slice(128 * block, 128 * (block + 1))
        part = fp22_mm(qa.data[:, columns], qb.data[:, columns], promote=None)
        for row in range(130):
            scale_row = row // tile[0]
            scale = qa.scale[:, block].float() * qb.scale[scale_row, block].float()
            expected[:, row] += part[:, row] * scale
    got = fp8_mm(qa, qb, backend="fp22", out_dtype=torch.float32)
    assert torch.equal(got, expected)


def test_sums_without_promotion_need_scales_that_last():
    a, b = drawn(4, 1024, 0).abs(), drawn(4, 1024, 1).abs()

    def error(**options) -> float:
        qa, qb = tiled(a, "row"), tiled(b, "row")
        exact = fp8_mm(qa, qb, out_dtype=torch.float32)
        got = fp8_mm(qa, qb, backend="fp22", out_dtype=torch.float32, **options)
        return ((got - exact).abs() / exact).max().item()

    assert error(promote=None) > 0.01
    assert error(promote=128) < 0.001
    message = (
        "scales must last for whole promotions, or for all columns; got tiles (1, 128) "
        "and (1, 128) with promote=None. Set promote=128 with tiles of 128 columns, or "
        "tile='row'."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fp8_mm(tiled(a, ROW), tiled(b, ROW), backend="fp22", promote=None)


@pytest.mark.parametrize("tile", [ROW, COLUMN, SQUARE])
def test_a_transposed_matrix_stands_for_the_same_values(tile):
    q = tiled(drawn(150, 300, 0), tile)
    turned = transposed(q)
    assert turned.shape == (300, 150)
    assert turned.spec.tile == tile[::-1]
    assert torch.equal(turned.dequantize(), q.dequantize().T)


@pytest.mark.parametrize("tokens", [128, 150])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_pytorch_takes_the_layouts_of_all_three_products_for_hopper(tokens, out_dtype):
    def meta(n_rows, n_columns, tile):
        return tiled(torch.empty(n_rows, n_columns, device="meta"), tile)

    x, w, dy = meta(tokens, 640, ROW), meta(200, 640, SQUARE), meta(tokens, 200, ROW)
    pairs = [
        (x, w),
        (dy, transposed(w)),
        tuple(transposed(q.retile(COLUMN)) for q in (dy, x)),
    ]
    shapes = [
        fp8_mm(a, b, backend="hopper", out_dtype=out_dtype).shape for a, b in pairs
    ]
    assert shapes == [(tokens, 200), (tokens, 640), (200, 640)]


@pytest.mark.parametrize("tile", [ROW, SQUARE])
def test_operands_laid_out_for_hopper_hold_the_same_product(tile):
    qa, qb = tiled(drawn(30, 640, 0), ROW), tiled(drawn(200, 640, 1), tile)
    a, b = hopper_operand(qa), hopper_operand(qb)
    assert a.scale.stride() == (1, 32)
    assert b.scale.stride() == ((1, 208) if tile == ROW else (1, 8))
    total = torch.zeros(len(a.values), len(b.values))
    for block in range(5):
        columns = slice(128 * block, 128 * (block + 1))
        part = a.values[:, columns].float() @ b.values[:, columns].float().T
        if b.recipe == ScalingType.BlockWise128x128:
            scale_b = b.scale[block].repeat_interleave(128)
        else:
            scale_b = b.scale[:, block]
        total += part * a.scale[:, block].unsqueeze(1) * scale_b
    expected = fp8_mm(qa, qb, out_dtype=torch.float32)
    torch.testing.assert_close(total[:30, :200], expected, rtol=1e-4, atol=1e-4)


def test_a_device_gets_the_backend_that_it_can_run():
    assert choose_backend("cpu") == Backend("emulate", "cpu has no FP8 units")
    assert backend_of((9, 0), "12.9").name == "hopper"
    ampere = backend_of((8, 0), "12.9")
    assert ampere.name == "emulate"
    assert ampere.reason == "compute capability 8.0 has no products of FP8 tiles"


@pytest.mark.parametrize(
    ("capability", "cuda", "message"),
    [
        (
            (10, 0),
            "13.0",
            "FP8 products in tiles of 128 must run on compute capability 9.x; got 10.0,"
            " whose tensor cores scale tiles of 1x32, which are not provided. Set "
            "backend='emulate', or train in BF16.",
        ),
        (
            (9, 0),
            "12.6",
            "FP8 products in tiles of 128 must have CUDA 12.9 or later; got 12.6. "
            "Install a PyTorch built with it, or set backend='emulate'.",
        ),
    ],
)
def test_a_gpu_that_cannot_is_refused(capability, cuda, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        backend_of(capability, cuda)


def wrong_calls():
    x = torch.ones(4, 256)
    a, b = tiled(x, ROW), tiled(x, SQUARE)
    yield (
        (a, quantize(x, QuantSpec(format="e5m6"))),
        {},
        "a and b must be in E4M3; got e4m3 and e5m6. Quantize with "
        "QuantSpec(format='e4m3').",
    )
    yield (
        (a, transposed(b)),
        {},
        "a and b must be matrices with as many columns; got shapes (4, 256) and "
        "(256, 4). Transpose one with transposed(q).",
    )
    yield (
        (a, b),
        {"out_dtype": torch.float16},
        "out_dtype must be torch.bfloat16 or torch.float32; got torch.float16. Set "
        "out_dtype=torch.bfloat16.",
    )
    yield (
        (a, b),
        {"backend": "deepgemm"},
        "backend must be one of 'auto', 'emulate', 'fp22', 'hopper'; got 'deepgemm'. "
        "Set backend='auto' or another of these.",
    )
    yield (
        (a, b),
        {"backend": "hopper"},
        "backend='hopper' must have a GPU of compute capability 9.x; the operands lie "
        "on cpu. Move them there, or set backend='emulate'.",
    )
    meta = torch.ones(4, 256, device="meta")
    yield (
        (tiled(meta, (1, 32)), tiled(meta, ROW)),
        {"backend": "hopper"},
        "backend='hopper' must have tiles (1, 128) in a, and (1, 128) or (128, 128) in "
        "b; got (1, 32) and (1, 128). Call retile((1, 128)), or set backend='emulate'.",
    )


@pytest.mark.parametrize(("pair", "options", "message"), list(wrong_calls()))
def test_what_cannot_be_multiplied_is_refused(pair, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fp8_mm(*pair, **options)


def test_a_matrix_in_rows_of_any_length_is_not_transposed():
    message = (
        "q must hold one value per entry in tiles (rows, columns); got e4m3 in tiles "
        "'row'. Call q.retile((1, 128)), or quantize the transposed matrix."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        transposed(tiled(torch.ones(2, 2), "row"))
