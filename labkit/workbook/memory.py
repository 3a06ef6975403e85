"""What the memory notebook adds up: states by recipe, kept bytes by kind, margins."""

from collections.abc import Mapping, Sequence

from labkit.memory import AllocationCount, MemoryReport, States, first_fit_bytes
from labkit.memory.overheads import BLOCK_BYTES
from labkit.memory.persistent import STATE_BYTES
from labkit.memory.report import PARTS, PERSISTENT
from labkit.workbook.figures.charts import Part
from labkit.workbook.table import Row

MEANINGS = {
    "weights": "weights",
    "master": "optimizer",
    "gradients": "gradients",
    "moments": "optimizer",
}
"""What each lasting part is, as a key of `figures.COLOURS`."""

KINDS = {
    "attention": ("attn",),
    "routed experts": ("experts",),
    "shared experts": ("shared_experts",),
    "router": ("gate",),
    "norms": ("attn_norm", "ffn_norm", "norm", "enorm", "hnorm"),
    "dense networks": ("ffn",),
    "embedding, head, loss": ("embed", "head", "loss", "eh_proj"),
    "copies of weights": ("casts",),
}
"""Kinds of module, and the words of a module's name that tell them, the first wins."""


def bytes_per_param(states: States) -> dict[str, int]:
    """Return the bytes that each lasting part takes per parameter.

    >>> from labkit.memory import STATES
    >>> bytes_per_param(STATES["deepseek-v3"])
    {'weights': 2, 'master': 4, 'gradients': 4, 'moments': 4}
    """
    dtypes = {part: getattr(states, part) for part in PERSISTENT}
    return {
        part: STATE_BYTES[dtype] * (2 if part == "moments" else 1)
        for part, dtype in dtypes.items()
        if dtype is not None
    }


def state_bars(amounts: Mapping[str, float]) -> list[Part]:
    """Return lasting parts as parts of a stacked bar."""
    return [
        Part(name=part, amount=amount, meaning=MEANINGS[part])
        for part, amount in amounts.items()
    ]


def kind_of(module: str) -> str:
    """Return the kind of a module that keeps activations, by its name.

    >>> kind_of("layers.3.attn.q_norm"), kind_of("layers.3.ffn.experts")
    ('attention', 'routed experts')
    >>> kind_of("mtp.0.norm"), kind_of("layers.0.ffn.w1")
    ('norms', 'dense networks')
    """
    words = module.split(".")
    return next(kind for kind, names in KINDS.items() if {*names} & {*words})


def by_kind(by_module: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes that each kind of module keeps, in the order of `KINDS`."""
    sums = dict.fromkeys(KINDS, 0)
    for module, n_bytes in by_module.items():
        sums[kind_of(module)] += n_bytes
    return {kind: n_bytes for kind, n_bytes in sums.items() if n_bytes}


def difference_rows(
    predicted: Mapping[str, int], measured: Mapping[str, int], *, name: str = "part"
) -> list[Row]:
    """Return a row for each entry: bytes predicted, measured, and their difference."""
    names = [*predicted, *(entry for entry in measured if entry not in predicted)]
    rows: list[Row] = []
    for entry in names:
        ours, theirs = predicted.get(entry, 0), measured.get(entry, 0)
        row = {name: entry, "predicted (bytes)": ours, "measured (bytes)": theirs}
        rows.append(row | {"difference": ours - theirs})
    return rows


def at(report: MemoryReport, name: str) -> dict[str, int]:
    """Return what lives at the last instant of that name, in the order of `PARTS`."""
    found = [instant for instant in report.timeline if instant.name == name][-1]
    return {part: found.by_part[part] for part in PARTS if part in found.by_part}


def rounding_bytes(sizes: Sequence[int]) -> int:
    """Return what tensors of these sizes lose in whole blocks of 512 bytes.

    >>> rounding_bytes([512, 513, 8])
    1015
    """
    return sum(-size % BLOCK_BYTES for size in sizes)


def heap_share(count: AllocationCount) -> float:
    """Return the space that a step's tensors need in a first-fit heap, by their peak.

    >>> import torch
    >>> with AllocationCount() as count:
    ...     a, b = torch.zeros(128), torch.zeros(128)  # 512 bytes each
    ...     del a
    ...     c = torch.zeros(129)  # 516 bytes: too many for the hole, and rounded up
    >>> round(heap_share(count), 1)
    2.0
    """
    return first_fit_bytes(count.events) / count.peak_bytes
