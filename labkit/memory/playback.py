"""What lives while the backward plays a tape: kept storages go, gradients come.

The tape is played from its end. An operator's backward needs all that is still kept,
makes gradients, and gives back what it kept; so the fullest instant is that of one
operator, and neither the end of the forward nor a sum of parts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from labkit.memory.tape import Op


def fullest_instant(
    ops: Sequence[Op], *, has_gradients: bool = False
) -> dict[str, int]:
    """Return the bytes of each part when most live at once in forward and backward.

    Weights and moments, which do not change, are not counted. Two gradients of one
    parameter are added into a third; autograd does so while a dispatch mode watches
    it, and otherwise adds some of them in place.

    Args:
        ops: of the forward pass, in its order.
        has_gradients: whether an earlier micro-batch left gradients to add to.
    """
    live = kept_by_part(ops)
    live["gradients"] = gradient_bytes(ops) if has_gradients else 0
    live["temporaries"] = sum(op.early_bytes for op in ops)
    n_uses_left = Counter(map(_parameter, ops))
    made: Counter[_Parameter] = Counter()
    fullest: dict[str, int] = {}
    for op in reversed(ops):
        name = _parameter(op)
        own, before = op.gradient_bytes, made[name]
        added = own if own == before else 0
        instant = dict(live)
        instant["gradients"] += own + added
        instant["temporaries"] += op.working_bytes
        if sum(instant.values()) > sum(fullest.values()):
            fullest = instant
        made[name] = own
        n_uses_left[name] -= 1
        # The last one is added to what there is, and gone.
        is_left = n_uses_left[name] or not has_gradients
        live["gradients"] += (own if is_left else 0) - before
        live["temporaries"] -= op.early_bytes
        for part, n_bytes in kept_by_part([op]).items():
            live[part] -= n_bytes
    return fullest


def gradient_bytes(ops: Iterable[Op]) -> int:
    """Return the bytes of all parameters' gradients, once the backward has ended."""
    first_uses = {_parameter(op): op.gradient_bytes for op in reversed(list(ops))}
    return sum(first_uses.values())


def kept_by_part(ops: Iterable[Op]) -> dict[str, int]:
    """Return the bytes of each part that lives at the end of the forward."""
    by_part = {"activations": 0, "logits": 0, "dispatch": 0}
    for op in ops:
        for storage in op.kept:
            part = "activations" if storage.part == "casts" else storage.part
            by_part[part] += storage.n_bytes
    return by_part


_Parameter = tuple[str, str]


def _parameter(op: Op) -> _Parameter:
    return op.module, op.parameter
