"""What autograd keeps of a training step's forward pass: by operator, by module.

Arithmetic on a config. On a CPU it equals, to the byte, what `saved_tensors_hooks`
sees of `Transformer.loss`, once each expert's load is known; the batch itself, which
belongs to the caller, is not counted. For a GPU the same list is made of fused
kernels for norms and attention, and has not been compared with one.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from labkit.config import ModelConfig, MoEConfig
from labkit.config.checks import require_whole
from labkit.memory.fp8_tape import fp8_tape
from labkit.memory.kept_attention import attention_tape, rotations
from labkit.memory.kept_ffn import mlp_tape, moe_tape, padded_rows, padding_multiple
from labkit.memory.tape import (
    EXACT_BYTES,
    INDEX_BYTES,
    Kept,
    Op,
    Pass,
    activation,
    linear,
    norm,
)

Load = Sequence[Sequence[int]]
"""Tokens of each expert, a row per router, as `LossParts.load.tolist()` gives it."""


def block_tape(
    cfg: ModelConfig,
    step: Pass,
    *,
    is_dense: bool,
    stream: torch.dtype,
    load: Sequence[int] | None = None,
) -> Iterator[Op]:
    """Yield the operators of one layer, names relative to its own.

    Args:
        cfg: the model.
        step: the pass.
        is_dense: whether its feed-forward network is.
        stream: dtype of the residual stream.
        load: tokens of each expert; None takes even routing.
    """
    yield from attention_half(cfg, step, stream)
    yield from ffn_half(cfg, step, is_dense=is_dense, stream=stream, load=load)


def attention_half(cfg: ModelConfig, step: Pass, stream: torch.dtype) -> list[Op]:
    """Return a layer's attention and the norm before it."""
    ops = attention_tape(cfg.attention, cfg.dim, step.within("attn"))
    return _half(cfg, step, "attn", ops, stream)


def ffn_half(
    cfg: ModelConfig,
    step: Pass,
    *,
    is_dense: bool,
    stream: torch.dtype,
    load: Sequence[int] | None = None,
) -> list[Op]:
    """Return a layer's feed-forward network and the norm before it."""
    inner = step.within("ffn")
    if is_dense or cfg.moe is None:
        ops = mlp_tape((cfg.dim, cfg.inter_dim), inner)
    else:
        n_rows = None
        if load is not None:
            n_rows = padded_rows(load, padding_multiple(cfg.moe, step))
        ops = moe_tape(cfg.moe, cfg.dim, inner, n_rows=n_rows)
    return _half(cfg, step, "ffn", ops, stream)


def _half(
    cfg: ModelConfig, step: Pass, name: str, ops: Iterable[Op], stream: torch.dtype
) -> list[Op]:
    x = activation("input", step.n_tokens * cfg.dim, stream)
    first = norm(step, f"{name}_norm", cfg.dim, dtype=stream, kept=(x,))
    ops = [first, *_within(name, ops)]
    # The stream's gradient passes by all of them.
    narrowed = fp8_tape(ops, cfg, step) if step.formats else ops
    return [op.beside(x.n_bytes) for op in narrowed]


def require_load(cfg: ModelConfig, step: Pass, load: Load) -> None:
    """Raise ValueError unless the routers of a pass may have this load."""
    depths = [0] * cfg.n_moe_layers
    depths += range(1, cfg.n_mtp + 1) if cfg.moe is not None else ()
    fix = "Give LossParts.load.tolist() of one micro-batch, or leave load out."
    if not _is_sequence(load) or not all(map(_is_sequence, load)):
        raise ValueError(
            "load must list the tokens of each expert, a row per router; got a "
            f"{type(load).__name__}. {fix}"
        )
    if len(load) != len(depths):
        raise ValueError(
            "load must have a row for each router of the model, MTP's last, which are "
            f"{len(depths)}; got {len(load)}. {fix}"
        )
    for index, (row, depth) in enumerate(zip(load, depths, strict=True)):
        _require_row(cfg.moe, step.n_tokens - depth * step.batch, f"load[{index}]", row)


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _require_row(moe: MoEConfig, n_tokens: int, name: str, row: Sequence[int]) -> None:
    """Raise ValueError unless tokens may be spread over experts like this."""
    if len(row) != moe.n_routed_experts:
        raise ValueError(
            f"{name} must have a number for each of {moe.n_routed_experts} routed "
            f"experts; got {len(row)}. Give that of each, 0 included."
        )
    require_whole({f"{name}[{index}]": n for index, n in enumerate(row)}, at_least=0)
    most = n_tokens * moe.n_activated_experts
    if sum(row) > most or max(row) > n_tokens:
        raise ValueError(
            f"{name} must be that of one micro-batch, whose {n_tokens} tokens choose "
            f"{moe.n_activated_experts} experts each: at most {most} in all, and "
            f"{n_tokens} of one expert; got {sum(row)}, and {max(row)}. Give the last "
            "micro-batch's, not the sum of a step's."
        )


def model_tape(cfg: ModelConfig, step: Pass, *, load: Load | None = None) -> list[Op]:
    """Return the operators of `Transformer.loss`, in the order of the forward pass.

    Args:
        cfg: the model.
        step: the pass.
        load: tokens of each expert, a row per router, MTP's last; None takes even
            routing.

    Raises:
        ValueError: sequences are not longer than the MTP modules are many.
    """
    if step.seq_len <= cfg.n_mtp:
        raise ValueError(
            "sequences must be longer than the depth of multi-token prediction, "
            f"{cfg.n_mtp}; got {step.seq_len} tokens. Use {cfg.n_mtp + 1} or more."
        )
    loads = iter(load or ())
    ops = [embedding(cfg, step)]
    ops += _within("layers.0", [rotations(cfg.attention, step)])
    for index in range(cfg.n_layers):
        is_dense = index < cfg.n_layers - cfg.n_moe_layers
        layer = block_tape(
            cfg,
            step.within(f"layers.{index}"),
            is_dense=is_dense,
            stream=step.weights,
            load=None if is_dense else next(loads, None),
        )
        ops += _within(f"layers.{index}", layer)
    ops += last_tape(cfg, step, loads=list(loads))
    return ops + balance_tape(cfg, step, cfg.n_moe_layers, cfg.n_mtp)


def last_tape(cfg: ModelConfig, step: Pass, *, loads: Load = ()) -> list[Op]:
    """Return what follows the layers: norm, head and cross-entropy, then MTP's.

    Args:
        cfg: the model.
        step: the pass.
        loads: tokens of each expert of each MTP module; none takes even routing.
    """
    x = activation("input", step.n_tokens * cfg.dim, step.weights)
    ops = [norm(step, "norm", cfg.dim, dtype=step.weights, kept=(x,))]
    ops += _head_tape(cfg, step)
    for depth in range(1, cfg.n_mtp + 1):
        shorter = step.shorter(depth)
        tokens = Kept("tokens", shorter.n_tokens * INDEX_BYTES)
        ops.append(embedding(cfg, shorter)._replace(kept=(tokens,)))
        load = loads[depth - 1] if loads else None
        inner = shorter.within(f"mtp.{depth - 1}")
        ops += _within(f"mtp.{depth - 1}", _mtp_tape(cfg, inner, load=load))
        ops += _head_tape(cfg, shorter, depth)
    return ops


def balance_tape(cfg: ModelConfig, step: Pass, n_main: int, n_mtp: int) -> list[Op]:
    """Return the balance losses of so many routers of layers and of MTP modules."""
    if cfg.moe is None or not cfg.moe.balance_loss_weight:
        return []
    lengths = [step.seq_len] * n_main
    lengths += [step.seq_len - depth for depth in range(1, n_mtp + 1)]
    shares = Kept(
        "shares of choices", step.batch * cfg.moe.n_routed_experts * EXACT_BYTES
    )
    sums = (step.batch * length * EXACT_BYTES for length in lengths)
    return [Op("loss", (Kept("sums of affinities", n), shares)) for n in sums]


def copied_targets(step: Pass) -> list[Op]:
    """Return what the loss keeps of targets that it copies, to have them in a row.

    They are views of windows one token longer: those of a single window are in a row.
    """
    if step.batch == 1:
        return []
    return [Op("loss", (Kept("targets", step.n_tokens * INDEX_BYTES),))]


def embedding(cfg: ModelConfig, step: Pass) -> Op:
    """Return the look-up, which keeps the tokens: the caller's own, except MTP's."""
    size = step.weights.itemsize
    return Op(
        "embed",
        gradient_bytes=cfg.vocab_size * cfg.dim * size,
        working_bytes=step.n_tokens * cfg.dim * size,
    )


def _mtp_tape(
    cfg: ModelConfig, step: Pass, *, load: Sequence[int] | None
) -> Iterator[Op]:
    size, dtype = step.n_tokens * cfg.dim, step.compute
    embedded = activation("input", size, step.weights)
    yield norm(step, "enorm", cfg.dim, dtype=step.weights, kept=(embedded,))
    yield norm(step, "hnorm", cfg.dim, dtype=dtype)  # the head kept its input
    joined = _input_of(step, "eh_proj", 2 * cfg.dim)
    yield from linear(step, "eh_proj", (2 * cfg.dim, cfg.dim), kept=(joined,))
    yield from _within("block", [rotations(cfg.attention, step)])
    # The projection's result starts a new residual stream, in its own dtype.
    is_dense = cfg.moe is None
    inner = step.within("block")
    block = block_tape(cfg, inner, is_dense=is_dense, stream=dtype, load=load)
    yield from _within("block", block)
    last = activation("input", size, dtype)
    yield norm(step, "norm", cfg.dim, dtype=dtype, kept=(last,))


def _input_of(step: Pass, module: str, width: int) -> Kept:
    """Return what a linear layer outside of blocks keeps of what it reads."""
    kept = step.formats.of(module)
    if kept is None:
        return activation("input", step.n_tokens * width, step.compute)
    return Kept("input", step.formats.n_bytes(kept, step.n_tokens, width))


def _head_tape(cfg: ModelConfig, step: Pass, depth: int = 0) -> list[Op]:
    """Return head and cross-entropy; MTP uses the head that is there already.

    The next MTP module reads what the head does, and in BF16 whatever the head keeps.
    """
    n, is_first = step.n_tokens, depth == 0
    kept = (_input_of(step, "head", cfg.dim),)
    if step.formats.of("head") is not None:
        kept = (kept[0]._replace(what="input in FP8"),)
        if depth < cfg.n_mtp:
            kept += (activation("input", n * cfg.dim, step.compute),)
    head = list(linear(step, "head", (cfg.dim, cfg.vocab_size), kept=kept))
    if not is_first:
        head = [head[-1]._replace(kept=kept)]
    logits = Kept("log-probabilities", n * cfg.vocab_size * EXACT_BYTES, "logits")
    kept = [logits]
    if not is_first:
        kept.append(Kept("targets", n * INDEX_BYTES))
    kept.append(Kept("total weight", EXACT_BYTES))
    return [*head, Op("loss", tuple(kept), working_bytes=2 * logits.n_bytes)]


def _within(module: str, ops: Iterable[Op]) -> list[Op]:
    return [op.within(module) for op in ops]


def bytes_by_module(ops: Iterable[Op]) -> dict[str, int]:
    """Return the bytes of activations by the module that keeps them first.

    Copies of weights are one entry, "casts"; logits and what other ranks sent are
    parts of their own, and not among them.
    """
    by_module: dict[str, int] = {}
    for op in ops:
        for kept in op.kept:
            if kept.part in ("activations", "casts"):
                name = "casts" if kept.part == "casts" else op.module
                by_module[name] = by_module.get(name, 0) + kept.n_bytes
    return by_module
