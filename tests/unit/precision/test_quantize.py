"""Tiles against a loop over them, and what scales of powers of two leave alone."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.precision import FORMATS, QTensor, QuantSpec, dequantize, quantize
from labkit.precision.quantize import BLOCK, TILES

NARROW = ("e4m3", "e5m2", "e5m6")
SIZES = {(1, 128): "1x128", (128, 1): "128x1", (128, 128): "128x128"}


def tile_by_tile(x: np.ndarray, spec: QuantSpec) -> np.ndarray:
    """Return what the tiles of a matrix stand for, each in its turn, in FP64.

    Values are rounded by hand: to a multiple of the step that their exponent has.
    """
    fmt = spec.numbers
    rows, columns = spec.tile_of(*x.shape)
    out = np.empty_like(x)
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], columns):
            block = np.s_[top : top + rows, left : left + columns]
            largest = max(np.abs(x[block]).max(), np.float32(spec.least))
            scale = np.float64(np.float32(largest) / np.float32(fmt.largest))
            if spec.scale == "po2":
                scale = 2.0 ** np.ceil(np.log2(scale))
            # The quotient is an FP32 number, as it is on every device.
            quotient = (x[block].astype(np.float32) / np.float32(scale)).astype(float)
            exponent = np.frexp(quotient)[1] - 1
            lowest = np.log2(fmt.smallest_normal)
            step = 2.0 ** (np.maximum(exponent, lowest) - fmt.mantissa_bits)
            rounded = np.rint(quotient / step) * step
            rounded = np.clip(rounded, -fmt.largest, fmt.largest)
            out[block] = (rounded * scale).astype(np.float32)
    return out


def drawn(n_rows: int, n_columns: int, seed: int = 0) -> torch.Tensor:
    """Return values whose rows and columns differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n_rows, n_columns, generator=generator)
    x *= torch.exp(3 * torch.randn(n_rows, 1, generator=generator))
    return x * torch.exp(torch.randn(n_columns, generator=generator))


@pytest.mark.parametrize("scale", ["po2", "fp32"])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: SIZES.get(tile, tile))
@pytest.mark.parametrize("name", NARROW)
def test_a_million_values_equal_those_of_a_loop_over_tiles(name, tile, scale):
    # 2,048 x 512 = 1,048,576 values.
    x = drawn(2048, 512)
    spec = QuantSpec(format=name, tile=tile, scale=scale)
    expected = tile_by_tile(x.double().numpy(), spec)
    assert (quantize(x, spec).dequantize().numpy() == expected).all()


@given(
    st.sampled_from(NARROW),
    st.sampled_from(TILES),
    st.integers(1, 300),
    st.integers(1, 300),
    st.integers(0, 9),
)
def test_tiles_at_the_edges_are_cut(name, tile, n_rows, n_columns, seed):
    x = drawn(n_rows, n_columns, seed)
    spec = QuantSpec(format=name, tile=tile)
    q = quantize(x, spec)
    rows, columns = spec.tile_of(n_rows, n_columns)
    assert q.shape == x.shape
    assert q.scale.shape == (-(-n_rows // rows), -(-n_columns // columns))
    assert (q.dequantize().numpy() == tile_by_tile(x.double().numpy(), spec)).all()


@pytest.mark.parametrize(
    "tile", [*TILES, (100, 36)], ids=lambda t: SIZES.get(t, str(t))
)
@pytest.mark.parametrize("name", ["e4m3", "e5m6"])
def test_blocks_end_where_tiles_do(name, tile):
    # Of 4.1 blocks; the last rows, and the last columns, are cut tiles.
    x = drawn(2801, 389)
    spec = QuantSpec(format=name, tile=tile)
    q = quantize(x, spec)
    assert x.numel() > 4 * BLOCK
    assert (q.dequantize().numpy() == tile_by_tile(x.double().numpy(), spec)).all()
    assert torch.equal(q.dequantize(torch.bfloat16).float(), q.dequantize())


@pytest.mark.parametrize(
    "shape", [(7, 300, 261), (2, 900, 389), (2, 6, 130, 200)], ids=str
)
@pytest.mark.parametrize("tile", [(1, 128), (128, 128), "tensor"], ids=str)
def test_blocks_of_a_stack_are_whole_matrices_or_rows_of_one(shape, tile):
    x = drawn(math.prod(shape[:-1]), shape[-1]).view(shape)
    spec = QuantSpec(tile=tile)
    q = quantize(x, spec)
    matrices = x.flatten(0, -3)
    alone = [quantize(matrix, spec) for matrix in matrices]
    assert x.numel() > BLOCK
    assert torch.equal(q.scale.float().flatten(0, -3), stacked(alone, "scale"))
    assert torch.equal(q.data.float().flatten(0, -3), stacked(alone, "data"))
    dequantized = torch.stack([part.dequantize() for part in alone])
    assert torch.equal(q.dequantize().flatten(0, -3), dequantized)


def stacked(parts: list[QTensor], field: str) -> torch.Tensor:
    return torch.stack([getattr(part, field).float() for part in parts])


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_value_that_is_not_finite_leaves_other_tiles_of_its_block_alone(bad):
    x = drawn(1000, 389)
    whole = quantize(x, QuantSpec()).dequantize()
    x[900, 300] = bad
    q = quantize(x, QuantSpec())
    expected = whole.clone()
    expected[900, 256:384] = torch.nan
    assert q.n_nonfinite_tiles() == 1
    torch.testing.assert_close(q.dequantize(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("turn", [lambda x: x.T, lambda x: x[:, ::2]])
def test_the_order_in_memory_does_not_matter(turn):
    x = turn(drawn(700, 600))
    q, alike = (quantize(y, QuantSpec()) for y in (x, x.contiguous()))
    assert q.data.is_contiguous()
    assert q.scale.is_contiguous()
    assert torch.equal(q.data.view(torch.uint8), alike.data.view(torch.uint8))
    assert torch.equal(q.scale.float(), alike.scale.float())


def test_what_is_quantized_of_a_parameter_has_no_gradient():
    weight = torch.nn.Parameter(drawn(300, 300))
    assert not quantize(weight, QuantSpec()).dequantize().requires_grad


def test_a_stack_is_quantized_matrix_by_matrix():
    x = torch.stack((drawn(130, 200), drawn(130, 200, seed=1)))
    spec = QuantSpec(tile=(128, 128))
    stack = quantize(x, spec).dequantize()
    alone = [quantize(matrix, spec).dequantize() for matrix in x]
    assert torch.equal(stack, torch.stack(alone))


def test_bytes_are_those_of_values_and_scales():
    x = torch.randn(256, 384)
    n = x.numel()
    assert quantize(x, QuantSpec()).nbytes == n + n // 128
    assert quantize(x, QuantSpec(scale="fp32")).nbytes == n + 4 * n // 128
    weights = QuantSpec(tile=(128, 128), scale="fp32")
    assert quantize(x, weights).nbytes == n + 4 * 6
    assert quantize(x, QuantSpec(format="e5m6")).nbytes == n * 3 // 2 + n // 128
    assert quantize(x, QuantSpec(format="bf16")).nbytes == 2 * n


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_powers_of_two_are_tiled_anew_without_a_change(name):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 512, generator=generator)
    q = quantize(x, QuantSpec(format=name))
    anew = q.retile((128, 1))
    assert anew.spec.tile == (128, 1)
    kept = q.dequantize()
    # What a column's largest value pushes below the smallest one may change.
    floor = anew.scale.float().repeat_interleave(128, 0) * FORMATS[name].smallest_normal
    is_normal = kept.abs() >= floor
    assert is_normal.float().mean() > 0.99
    assert torch.equal(anew.dequantize()[is_normal], kept[is_normal])


def test_other_scales_are_rounded_again():
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    q = quantize(x, QuantSpec(scale="fp32"))
    changed = q.retile((128, 1)).dequantize() != q.dequantize()
    assert changed.float().mean() > 0.9


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: SIZES.get(tile, tile))
def test_bf16_holds_what_powers_of_two_scale(tile):
    q = quantize(drawn(256, 256), QuantSpec(tile=tile))
    assert torch.equal(q.dequantize(torch.bfloat16).float(), q.dequantize())


def test_a_scale_is_no_larger_than_it_must_be():
    x = drawn(256, 256)
    q = quantize(x, QuantSpec())
    largest = x.unflatten(-1, (-1, 128)).abs().amax(-1)
    scale = q.scale.float()
    assert (largest <= 448 * scale).all()
    assert (largest > 224 * scale).all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("scale", ["po2", "fp32"])
def test_a_tile_with_a_value_that_is_not_finite_is_nan_and_counted(scale, bad):
    x = torch.ones(2, 256)
    x[1, 130] = bad
    q = quantize(x, QuantSpec(scale=scale))
    assert q.n_nonfinite_tiles() == 1
    got = q.dequantize()
    assert got[1, 128:].isnan().all()
    assert got[0].eq(1).all()
    assert got[1, :128].eq(1).all()


def test_zeros_stay_zeros():
    q = quantize(torch.zeros(3, 200), QuantSpec())
    assert q.n_nonfinite_tiles() == 0
    assert torch.equal(dequantize(q), torch.zeros(3, 200))


def test_small_gradients_live_as_long_as_the_least_magnitude_is_below_them():
    x = 1e-9 * torch.randn(4, 128, generator=torch.Generator().manual_seed(0))

    def lost(least: float) -> float:
        kept = quantize(x, QuantSpec(least=least)).dequantize()
        return (kept == 0).float().mean().item()

    assert lost(1e-12) == 0
    assert lost(1e-4) > 0.1


def test_bf16_is_a_cast():
    x = drawn(5, 7)
    q = quantize(x, QuantSpec(format="bf16"))
    assert isinstance(q, QTensor)
    assert torch.equal(q.dequantize(), x.bfloat16().float())
    assert q.dequantize(torch.bfloat16).data_ptr() != q.data.data_ptr()
    assert q.n_nonfinite_tiles() == 0


def test_bf16_values_are_widened_before_they_are_divided():
    x = drawn(256, 256).bfloat16()
    spec = QuantSpec(scale="fp32")
    assert torch.equal(
        quantize(x, spec).dequantize(), quantize(x.float(), spec).dequantize()
    )


@pytest.mark.compile
@pytest.mark.parametrize("scale", ["po2", "fp32"])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: SIZES.get(tile, tile))
def test_compiled_bytes_are_the_same(tile, scale):
    x = drawn(300, 261)
    spec = QuantSpec(tile=tile, scale=scale)
    eager, compiled = quantize(x, spec), quantize(x, spec, is_compiled=True)
    assert torch.equal(eager.data.view(torch.uint8), compiled.data.view(torch.uint8))
    assert torch.equal(eager.scale.float(), compiled.scale.float())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tile": (0, 128)},
            "tile must be (rows, columns), each 1 or more, 'row' or 'tensor'; got "
            "(0, 128). Set tile=(1, 128) for activations, (128, 128) for weights.",
        ),
        (
            {"format": "e3m4"},
            "format must be one of 'e4m3', 'e5m2', 'e5m6', 'bf16'; got 'e3m4'. "
            "Set format='e4m3' or another of these.",
        ),
        (
            {"scale": "int8"},
            "scale must be one of 'po2', 'fp32'; got 'int8'. Set scale='po2' or "
            "another of these.",
        ),
        (
            {"least": 0.0},
            "least must be above 1e-30 and finite; got 0.0. Set least to a number "
            "above 1e-30.",
        ),
    ],
)
def test_a_spec_says_what_it_must_be(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        QuantSpec(**fields)


def test_a_matrix_without_values_is_refused():
    message = (
        "x must be a matrix, or a stack of them, with one value at least; got shape "
        "(0, 3). Pass a vector as x.unsqueeze(0)."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        quantize(torch.ones(0, 3), QuantSpec())


def test_values_that_would_be_rounded_twice_are_refused():
    message = (
        "x must be in FP32, BF16 or FP16, which FP32 holds exactly; got float64. "
        "Pass x.float()."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        quantize(torch.ones(2, 3, dtype=torch.float64), QuantSpec())


def test_two_quantized_tensors_are_equal_only_if_they_are_the_same():
    first, second = (quantize(torch.ones(2, 3), QuantSpec()) for _ in range(2))
    assert first == first and first != second
