"""What lives while the backward plays a tape: kept storages go, gradients come.

The tape is played from its end. An operator's backward needs all that is still kept,
makes gradients, and gives back what it kept; so the fullest instant is that of one
operator, and neither the end of the forward nor a sum of parts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from labkit.memory.tape import Op

COUNTED_AS = {
    "activations": "activations",
    "casts": "activations",
    "logits": "logits",
    "dispatch": "dispatch",
}
"""The part of a report that a kept storage is counted in, by its own."""

_Parameter = tuple[str, str]
"""Whose forward uses it, and its name there."""


def fullest_instant(
    ops: Sequence[Op], *, has_gradients: bool = False, has_buffer: bool = False
) -> dict[str, int]:
    """Return the bytes of each part when most live at once in forward and backward.

    Weights and moments, which do not change, are not counted. Two gradients of one
    parameter are added into a third; autograd does so while a dispatch mode watches
    it, and otherwise adds some of them in place.

    Args:
        ops: of the forward pass, in its order.
        has_gradients: whether an earlier micro-batch left gradients to add to.
        has_buffer: whether each gradient is added to a buffer as soon as it is made,
            and gone; the buffer is not counted.
    """
    has_gradients = has_gradients and not has_buffer
    live = kept_by_part(ops)
    live["gradients"] = gradient_bytes(ops) if has_gradients else 0
    live["temporaries"] = sum([op.early_bytes for op in ops])
    n_live = sum(live.values())
    n_uses_left = Counter([(op.module, op.parameter) for op in ops])
    made: dict[_Parameter, int] = {}
    most, fullest = 0, dict.fromkeys(live, 0)
    for op in reversed(ops):
        name = op.module, op.parameter
        own, working, before = op.gradient_bytes, op.working_bytes, made.get(name, 0)
        if has_buffer:
            own, working = 0, working + own
        added = own if own == before else 0
        if n_live + own + added + working > most:
            most = n_live + own + added + working
            fullest = dict(live)
            fullest["gradients"] += own + added
            fullest["temporaries"] += working
        made[name] = own
        n_uses_left[name] -= 1
        # The last one is added to what there is, and gone.
        is_left = n_uses_left[name] or not has_gradients
        left = (own if is_left else 0) - before
        live["gradients"] += left
        live["temporaries"] -= op.early_bytes
        n_live += left - op.early_bytes
        for storage in op.kept:
            live[COUNTED_AS[storage.part]] -= storage.n_bytes
            n_live -= storage.n_bytes
    return fullest


def gradient_bytes(ops: Sequence[Op]) -> int:
    """Return the bytes of all parameters' gradients, once the backward has ended."""
    first_uses = {(op.module, op.parameter): op.gradient_bytes for op in reversed(ops)}
    return sum(first_uses.values())


def kept_by_part(ops: Iterable[Op]) -> dict[str, int]:
    """Return the bytes of each part that lives at the end of the forward."""
    by_part = dict.fromkeys(COUNTED_AS.values(), 0)
    for op in ops:
        for storage in op.kept:
            by_part[COUNTED_AS[storage.part]] += storage.n_bytes
    return by_part
