"""What autograd keeps under a recompute policy: the plain tape, less what runs again.

Arithmetic on a config, in step with the modules that `apply_recompute` makes. As for
the plain tape, what is said of a GPU has not been compared with one.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from labkit.config import MLAConfig, ModelConfig
from labkit.memory.tape import EXACT_BYTES, Op, Pass

COPY = "input in FP32"
"""Of a norm on a GPU, in place of its input."""

INSIDE_NORM = frozenset({"inverse scales", COPY})
READ = frozenset({"input"})
NOTHING: frozenset[str] = frozenset()
ALL = frozenset({"everything"})
"""But what is given to a module, or what others read of it."""

SELECTIVE: Mapping[str, frozenset[str]] = {
    "attn_norm": INSIDE_NORM,
    "attn.wq_a": READ,
    "attn.wkv_a": READ,
    "attn.wk": READ,
    "attn.wv": READ,
    "attn.q_norm": INSIDE_NORM,
    "attn.wq_b": ALL,
    "attn.kv_norm": INSIDE_NORM,
    "attn.wkv_b": ALL,
    "ffn_norm": INSIDE_NORM,
    "ffn.w1": READ,
    "ffn.w3": READ,
    "ffn": frozenset({"silu"}),
    "ffn.w2": READ,
    "ffn.gate": ALL,
    "ffn.shared_experts": frozenset({"silu"}),
    "ffn.shared_experts.w2": READ,
    "enorm": INSIDE_NORM,
    "hnorm": INSIDE_NORM,
    "eh_proj": READ,
    "norm": INSIDE_NORM,
}
"""What each part of a block or MTP module does not keep, beside the attention core."""

IN_BLOCK = re.compile(r"(layers|mtp)\.(\d+)\.(.+)")


class Place(NamedTuple):
    """Where a module is."""

    kind: str
    """Of its block: "layers" or "mtp"."""

    number: int
    """Of its block, within its kind."""

    part: str
    """Its name within the block."""


@cache
def place_in_block(module: str) -> Place | None:
    """Return the place of a module by its name, None if it lies outside of blocks.

    >>> place_in_block("mtp.0.block.attn").part, place_in_block("head")
    ('block.attn', None)
    """
    match = IN_BLOCK.fullmatch(module)
    return Place(match[1], int(match[2]), match[3]) if match else None


def kept_ops(
    ops: Iterable[Op], cfg: ModelConfig, step: Pass, policies: Sequence[str]
) -> list[Op]:
    """Return what these operators keep, of all of a model's or of those at its end.

    Args:
        ops: of `model_tape`, or of `last_tape`; or what a rank runs of them.
        cfg: the model.
        step: the pass.
        policies: of each block, as from `block_policies`.
    """
    head_inputs = iter(_kept_head_inputs(cfg, policies))
    tape = []
    for op in ops:
        place = place_in_block(op.module)
        if place:
            index = place.number + (cfg.n_layers if place.kind == "mtp" else 0)
            name = _policy_of(index, policies, cfg)
            left = under_policy(name, Op(place.part, op.kept), cfg, step)
        elif op.module == "norm" and "selective" in policies:
            left = under_policy("selective", op, cfg, step)
        elif op.module == "head" and _has_input(op) and not next(head_inputs):
            left = Op(op.module, tuple(x for x in op.kept if x.what != "input"))
        else:
            left = op
        tape.append(Op(op.module, left.kept))
    return tape


def _policy_of(index: int, policies: Sequence[str], cfg: ModelConfig) -> str:
    """Return a block's policy; a dense one among sparse ones has no experts."""
    is_dense = cfg.moe is None or index < cfg.n_dense_layers
    return "none" if policies[index] == "moe" and is_dense else policies[index]


def _has_input(op: Op) -> bool:
    return any(storage.what == "input" for storage in op.kept)


def under_policy(policy: str, op: Op, cfg: ModelConfig, step: Pass) -> Op:
    """Return a block's operator with what it keeps under the policy of its block.

    Args:
        policy: of the block; "moe" is for one that has experts.
        op: its module's name is relative to the block, or to the MTP module.
        cfg: the model.
        step: the pass.
    """
    dropped = _dropped(cfg, step, policy, op.module) if op.kept else NOTHING
    if not dropped:
        return op
    is_balanced = cfg.moe is not None and cfg.moe.balance_loss_weight
    kept = []
    for storage in op.kept:
        what = storage.what
        is_others = what == "rotations" or (what == "affinity" and is_balanced)
        if is_others or (dropped is not ALL and what not in dropped):
            kept.append(storage)
        elif what == COPY and dropped is INSIDE_NORM and op.module != "hnorm":
            # What the copy was made from. That of `hnorm` is the head's to keep.
            n_bytes = storage.n_bytes * step.compute.itemsize // EXACT_BYTES
            kept.append(storage._replace(what="input", n_bytes=n_bytes))
    return Op(op.module, tuple(kept), *op[2:])


def _dropped(cfg: ModelConfig, step: Pass, policy: str, part: str) -> frozenset[str]:
    """Return what a part of a block, or of an MTP module, does not keep."""
    if policy == "full":
        first, outside = ("attn_norm", "enorm"), ("norm",)
        return NOTHING if part in outside else INSIDE_NORM if part in first else ALL
    part = part.removeprefix("block.")
    if policy == "selective":
        return _selective(cfg, step, part)
    branch = {"attention": "attn", "moe": "ffn"}.get(policy)
    if branch is None:
        return NOTHING
    if part == f"{branch}_norm":
        return INSIDE_NORM
    return ALL if part.split(".")[0] == branch else NOTHING


def _selective(cfg: ModelConfig, step: Pass, part: str) -> frozenset[str]:
    attention = cfg.attention
    if part == "attn.wq":
        return ALL if isinstance(attention, MLAConfig) else READ
    if part != "attn":
        return SELECTIVE.get(part, NOTHING)
    if not isinstance(attention, MLAConfig):
        return NOTHING
    if step.device == "cpu":
        return frozenset({"queries", "keys", "values"})
    # What is narrower is padded for a GPU's kernel, which keeps the padded copy.
    are_wide = attention.qk_head_dim >= attention.v_head_dim
    dropped = {"queries", "keys"} if are_wide else set()
    if attention.v_head_dim >= attention.qk_head_dim:
        dropped.add("values")
    return frozenset(dropped)


def _kept_head_inputs(cfg: ModelConfig, policies: Sequence[str]) -> Iterator[bool]:
    """Yield whether each call of the head leaves its input kept, MTP's after the first.

    That is the result of a norm, which the next MTP module reads too.
    """
    modules = policies[cfg.n_layers :]
    for depth in range(cfg.n_mtp + 1):
        maker = "selective" if depth == 0 else modules[depth - 1]
        readers = modules[depth : depth + 1]
        is_rebuilt = "selective" in policies and {maker, *readers} == {"selective"}
        yield not is_rebuilt
