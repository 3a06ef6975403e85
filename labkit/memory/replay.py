"""A tape under a recompute policy: storages that come back while it is played.

What a policy does not keep is rebuilt when the backward reaches the part of the block
that needs it: the whole block if all of it runs again, else attention or the
feed-forward network. From there on the backward needs and frees what it would have
without a policy. So the plain tape is played, with a debt at the end of each part:
before it is reached, its bytes are taken off what lives.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from labkit.config import Layout, ModelConfig
from labkit.memory.activations import Load, model_tape
from labkit.memory.ranks import rank_tape
from labkit.memory.recompute import block_policies
from labkit.memory.recompute_kept import kept_ops, place_in_block
from labkit.memory.tape import Kept, Op, Pass

REBUILT = "rebuilt"
"""The parameter that debts are given, for operators have one: none of the model's."""


def replay_tape(
    cfg: ModelConfig,
    step: Pass,
    policy: str | Sequence[str] = "none",
    *,
    layout: Layout | None = None,
    load: Load | None = None,
) -> list[Op]:
    """Return the operators of `Transformer.loss` with debts, to be played back.

    Args:
        cfg: the model.
        step: the pass.
        policy: as for `apply_recompute`.
        layout: the tape is that of one of its ranks; None is one rank alone.
        load: tokens of each expert, as for `model_tape`.
    """
    policies = block_policies(policy, cfg.n_layers + cfg.n_mtp)
    plain = list(rank_tape(model_tape(cfg, step, load=load), layout or Layout()))
    return with_debts(plain, kept_ops(plain, cfg, step, policies), cfg, policies)


def with_debts(
    plain: Sequence[Op], left: Sequence[Op], cfg: ModelConfig, policies: Sequence[str]
) -> list[Op]:
    """Return operators with debts at the end of each part that comes back as one.

    Args:
        plain: the operators.
        left: the same with what they keep, as `kept_ops` returns them.
        cfg: the model.
        policies: of each block, as from `block_policies`.
    """
    if {*policies} == {"none"}:
        return list(plain)
    pairs = zip(plain, left, strict=True)
    tape: list[Op] = []
    for name, group in groupby(pairs, lambda x: _rebuilt_with(x[0], cfg, policies)):
        ops, kept = zip(*group, strict=True)
        tape += [*ops, *debt_of(name, ops, kept)]
    return tape


def _rebuilt_with(op: Op, cfg: ModelConfig, policies: Sequence[str]) -> str:
    """Return the part of the model whose storages come back with the operator's."""
    place = place_in_block(op.module)
    if place is None:
        return op.module
    index = place.number + (cfg.n_layers if place.kind == "mtp" else 0)
    return f"{place.kind}.{place.number}.{_branch(place.part, policies[index])}"


def _branch(module: str, policy: str) -> str:
    """Return which part of a block comes back as one: half of it, or all."""
    half = module.removeprefix("block.").split(".")[0].removesuffix("_norm")
    return "" if policy == "full" else half


def debt_of(name: str, ops: Sequence[Op], left: Sequence[Op]) -> Iterator[Op]:
    """Yield what is rebuilt of these operators, as bytes that do not live before."""
    missing: Counter[tuple[str, str]] = Counter()
    for op, kept in zip(ops, left, strict=True):
        if op.kept == kept.kept:
            continue  # as most are, outside of blocks
        for sign, storages in ((-1, op.kept), (1, kept.kept)):
            for storage in storages:
                missing[storage.what, storage.part] += sign * storage.n_bytes
    debts = tuple(Kept(what, n, part) for (what, part), n in missing.items() if n)
    if debts:
        yield Op(name, debts, parameter=REBUILT)


def rebuilt_casts(tape: Iterable[Op]) -> int:
    """Return the bytes of autocast's copies of weights that the backward makes again.

    It holds the first ones to the end of a micro-batch's forward: not those of experts,
    which make their own.
    """
    return -sum(
        storage.n_bytes
        for op in tape
        for storage in op.kept
        if op.parameter == REBUILT
        and (storage.what, storage.part) == ("weight", "casts")
    )
