"""What the backward of a feed-forward network waits for, dense or of experts."""

from collections.abc import Iterator, Sequence

import torch

from labkit.config import MoEConfig
from labkit.memory.tape import (
    EXACT_BYTES,
    INDEX_BYTES,
    Kept,
    Op,
    Pass,
    activation,
    fp8_copies,
    linear,
    shared_gradient,
)


def mlp_tape(
    widths: tuple[int, int], step: Pass, *, keeps_input: bool = True
) -> Iterator[Op]:
    """Yield the operators of a SwiGLU network, names relative to its own.

    Args:
        widths: of the residual stream, and of the hidden layer.
        step: the pass.
        keeps_input: False where others kept its input before.
    """
    dim, hidden = widths
    normed = activation("input", step.n_tokens * dim, step.compute)
    size, dtype = step.n_tokens * hidden, step.compute
    at_input, at_hidden = (step.n_tokens * w * dtype.itemsize for w in widths)
    inputs = (normed,) if keeps_input else ()
    beside = at_input + max(at_input - at_hidden, 0)
    yield from linear(step, "w1", (dim, hidden), kept=inputs, beside=beside)
    gate = activation("gate", size, dtype)
    yield Op("", (gate,), working_bytes=at_input + 2 * at_hidden)
    yield from linear(step, "w3", (dim, hidden), beside=at_hidden)
    factors = activation("silu", size, dtype), activation("up", size, dtype)
    yield Op("", factors, working_bytes=3 * at_hidden)
    product = activation("input", size, dtype)
    beside = -shared_gradient(step, dim)
    yield from linear(step, "w2", (hidden, dim), kept=(product,), beside=beside)


def moe_tape(
    moe: MoEConfig, dim: int, step: Pass, *, n_rows: float | None = None
) -> Iterator[Op]:
    """Yield the operators of router, routed and shared experts.

    Args:
        moe: its sizes.
        dim: width of the residual stream.
        step: the pass.
        n_rows: rows that the routed experts compute, padding included; None takes
            the pass's.
    """
    yield from _router_tape(moe, dim, step)
    if n_rows is None:
        n_rows = expected_rows(moe, step) if step.n_rows is None else step.n_rows
    yield from _experts(moe, dim, step, round(n_rows))
    if moe.n_shared_experts:
        widths = (dim, moe.n_shared_experts * moe.moe_inter_dim)
        inner = step.within("shared_experts")
        for op in mlp_tape(widths, inner, keeps_input=False):  # the router kept it
            yield op.within("shared_experts")


def _router_tape(moe: MoEConfig, dim: int, step: Pass) -> Iterator[Op]:
    """Yield the router's operators; it computes in FP32 whatever the precision."""
    n, k, exact = step.n_tokens, moe.n_activated_experts, torch.float32
    n_weights = moe.n_routed_experts * dim
    kept = [
        activation("input", n * dim, step.compute),
        activation("affinity", n * moe.n_routed_experts, exact),
        Kept("experts", n * k * INDEX_BYTES),
    ]
    if moe.norm_topk_prob:
        kept += [
            activation("sum of the chosen", n, exact),
            activation("chosen affinities", n * k, exact),
        ]
    at_affinity = n * moe.n_routed_experts * EXACT_BYTES
    at_input = n * dim * (EXACT_BYTES + step.compute.itemsize)
    if step.compute != exact:
        at_input += n * dim * step.compute.itemsize
    yield Op(
        "gate",
        tuple(kept),
        gradient_bytes=n_weights * step.weights.itemsize,
        working_bytes=at_input + 3 * at_affinity,
        early_bytes=at_affinity if moe.balance_loss_weight else 0,
    )


def _experts(moe: MoEConfig, dim: int, step: Pass, n_rows: int) -> Iterator[Op]:
    n_pairs, dtype = step.n_tokens * moe.n_activated_experts, step.compute
    n_weights = 3 * moe.n_routed_experts * dim * moe.moe_inter_dim
    kept = []
    if step.ep > 1:
        arrived = n_rows * dim * dtype.itemsize
        kept.append(Kept("received rows", arrived, "dispatch"))
    is_fp8 = step.formats.of("experts") is not None
    if step.is_mixed and not is_fp8:
        kept.append(Kept("weights", n_weights * dtype.itemsize, "casts"))
    kept += [
        activation("gates and ups", n_rows * 2 * moe.moe_inter_dim, dtype),
        activation("routing weights", n_pairs, dtype),
        Kept("token of each row", n_rows * INDEX_BYTES),
        Kept("row of each choice", n_pairs * INDEX_BYTES),
    ]
    # Rows and their gradients; of one block at a time, six of the hidden layer.
    block = n_rows / moe.n_routed_experts * 6 * moe.moe_inter_dim
    rows = 2 * n_rows * dim + max(round(block), step.n_tokens * dim)
    at_input = step.n_tokens * dim * (2 if step.is_mixed else 1) * dtype.itemsize
    working = rows * dtype.itemsize + at_input
    if is_fp8:
        working += fp8_copies(step, (dim, dim), n_rows)
    if is_fp8 or not step.is_mixed:
        # FP8 experts quantize the weights themselves, and autocast copies none.
        gradient = n_weights * step.weights.itemsize
        yield Op("experts", tuple(kept), gradient, working)
        return
    up, down = n_weights // 3 * 2, n_weights // 3
    for name, size in (("w13", up), ("w2", down)):
        yield Op("experts", (), size * step.weights.itemsize, at_input, parameter=name)
    # One operator, whose two gradients are cast one after the other.
    up, down = up * dtype.itemsize, down * dtype.itemsize
    yield Op("experts", tuple(kept), down, working, parameter="w2")
    yield Op("experts", (), up, parameter="w13")


def padding_multiple(moe: MoEConfig, step: Pass) -> int:
    """Return the multiple to which each expert's rows are padded."""
    if step.device != "cpu" or step.compute != torch.bfloat16:
        return 1
    n_pairs = step.n_tokens * moe.n_activated_experts
    return max(n_pairs // (8 * moe.n_routed_experts), 1)


def padded_rows(load: Sequence[int], multiple: int) -> int:
    """Return the rows that experts of this load compute, each padded.

    >>> padded_rows([5, 0, 4], 4)
    12
    """
    return sum(-(-n_tokens // multiple) * multiple for n_tokens in load)


def expected_rows(moe: MoEConfig, step: Pass) -> float:
    """Return the rows of routed experts if each is padded by half a multiple."""
    n_pairs = step.n_tokens * moe.n_activated_experts
    return n_pairs + moe.n_routed_experts * (padding_multiple(moe, step) - 1) / 2
