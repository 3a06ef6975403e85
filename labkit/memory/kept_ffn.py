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
    linear,
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
    yield linear(step, "w1", (dim, hidden), kept=(normed,) if keeps_input else ())
    yield Op("", (activation("gate", size, dtype),))
    yield linear(step, "w3", (dim, hidden))
    yield Op("", (activation("silu", size, dtype), activation("up", size, dtype)))
    yield linear(step, "w2", (hidden, dim), kept=(activation("input", size, dtype),))


def moe_tape(
    moe: MoEConfig, dim: int, step: Pass, *, n_rows: float | None = None
) -> Iterator[Op]:
    """Yield the operators of router, routed and shared experts.

    Args:
        moe: its sizes.
        dim: width of the residual stream.
        step: the pass.
        n_rows: rows that the routed experts compute, padding included; None takes
            what even routing gives.
    """
    yield from _router_tape(moe, dim, step)
    if n_rows is None:
        n_rows = expected_rows(moe, step)
    yield _experts(moe, dim, step, round(n_rows))
    if moe.n_shared_experts:
        widths = (dim, moe.n_shared_experts * moe.moe_inter_dim)
        for op in mlp_tape(widths, step, keeps_input=False):
            yield op._replace(module=f"shared_experts.{op.module}".rstrip("."))


def _router_tape(moe: MoEConfig, dim: int, step: Pass) -> Iterator[Op]:
    """Yield the router's operators; it computes in FP32 whatever the precision."""
    n, k, exact = step.n_tokens, moe.n_activated_experts, torch.float32
    n_weights = moe.n_routed_experts * dim
    kept = [
        activation("input in FP32", n * dim, exact),
        activation("affinity", n * moe.n_routed_experts, exact),
        Kept("experts", n * k * INDEX_BYTES),
    ]
    if step.weights != exact:
        kept.insert(0, Kept("weight", n_weights * EXACT_BYTES, "casts"))
    if moe.norm_topk_prob:
        kept += [
            activation("sum of the chosen", n, exact),
            activation("chosen affinities", n * k, exact),
        ]
    yield Op("gate", tuple(kept), gradient_bytes=n_weights * step.weights.itemsize)


def _experts(moe: MoEConfig, dim: int, step: Pass, n_rows: int) -> Op:
    n_pairs, dtype = step.n_tokens * moe.n_activated_experts, step.compute
    n_weights = 3 * moe.n_routed_experts * dim * moe.moe_inter_dim
    kept = []
    if dtype != torch.float32:  # else it is what the router kept
        kept.append(activation("input", step.n_tokens * dim, dtype))
    if step.is_mixed:
        kept.append(Kept("weights", n_weights * dtype.itemsize, "casts"))
    kept += [
        activation("gates and ups", n_rows * 2 * moe.moe_inter_dim, dtype),
        activation("routing weights", n_pairs, dtype),
        Kept("token of each row", n_rows * INDEX_BYTES),
        Kept("row of each choice", n_pairs * INDEX_BYTES),
    ]
    gradients = n_weights * step.weights.itemsize
    return Op("experts", tuple(kept), gradient_bytes=gradients)


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
