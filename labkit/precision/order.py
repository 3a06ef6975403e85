"""In which order a scheduler makes modules bolder.

Layers in the middle come before those at the ends, whose rounding reaches more, or is
mended by less; the module for multi-token prediction follows the layers, and the head
is last. Of each range of layers routed experts are first: they are most of the work,
and what one of them rounds few tokens see.
"""

from collections.abc import Iterable

N_RANGES = 4
"""Most ranges that layers are divided into, by how far the nearer end is."""


def groups_by_boldness(
    names: Iterable[str], n_layers: int
) -> tuple[tuple[str, ...], ...]:
    """Return modules in groups, of which each is made bolder after the one before.

    >>> names = ("layers.0.attn.wo", "layers.1.ffn.experts", "layers.1.attn.wo", "head")
    >>> groups_by_boldness(names, n_layers=3)
    (('layers.1.ffn.experts',), ('layers.1.attn.wo',), ('layers.0.attn.wo',), ('head',))
    """
    groups: dict[tuple[int, int, int], list[str]] = {}
    for name in names:
        groups.setdefault(_place(name.split("."), n_layers), []).append(name)
    return tuple(tuple(groups[place]) for place in sorted(groups))


def _place(words: list[str], n_layers: int) -> tuple[int, int, int]:
    """Return where a module stands in the order."""
    part = 0 if words[-1] == "experts" else 1
    if words[0] == "mtp":
        return 1, 0, part
    if words[0] != "layers":
        return 2, 0, part
    depth, farthest = int(words[1]), (n_layers - 1) // 2
    from_end = min(depth, n_layers - 1 - depth)
    return 0, (farthest - from_end) * N_RANGES // (farthest + 1), part
