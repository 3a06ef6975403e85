"""Which operator of PyTorch is which collective, and how many bytes it was given.

Operators of `c10d` are what `torch.distributed` calls, those of `_c10d_functional` what
DTensor and traced code call. Bytes are those of `forms`: a rank's buffer in all-reduce
and all-to-all, the result in all-gather, the input in reduce-scatter; and for what has
one source or target, what a rank is to have of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from labkit.parallel.communication.forms import COLLECTIVES, form

NAMES = {
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::allgather_coalesced_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::alltoall_": "all_to_all",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::broadcast_": "broadcast",
    "c10d::reduce_": "reduce",
    "c10d::gather_": "gather",
    "c10d::scatter_": "scatter",
    "c10d::send": "send",
    "c10d::recv_": "receive",
    "c10d::recv_any_source_": "receive",
    "c10d::barrier": "barrier",
    "c10d::monitored_barrier_": "barrier",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_reduce_coalesced": "all_reduce",
    "_c10d_functional::all_reduce_coalesced_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_gather_into_tensor_coalesced": "all_gather",
    "_c10d_functional::all_gather_into_tensor_out": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_out": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "_c10d_functional::broadcast": "broadcast",
    "_c10d_functional::broadcast_": "broadcast",
    "_c10d_functional::isend": "send",
    "_c10d_functional::irecv": "receive",
}
"""What an operator does."""

GROUP_ARGUMENTS = ("process_group", "group_name")
"""What operators that communicate are given; those that only wait are not."""

OUTPUT_FIRST = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""What c10d gives the output before the input; all else works in place."""

AXIS_PREFIX = "mesh_"
"""How a DeviceMesh calls the group of an axis."""

WORLD = "world"


class Call(NamedTuple):
    """One call of a collective, or of a send or receive, by this rank."""

    collective: str
    axis: str
    n_ranks: int

    n_bytes: float
    """Of the whole, as `forms` counts them."""

    n_messages: float
    sent_bytes: float
    """That this rank sends, by the usual algorithm: a ring, or straight away."""


def call_of(
    name: str, arguments: dict[str, object], axes: dict[str, str]
) -> Call | None:
    """Return what an operator is about to send, or None if it sends nothing.

    Args:
        name: as `c10d::allreduce_`.
        arguments: by the operator's own names.
        axes: names of groups by PyTorch's names of them; others are called as their
            mesh calls the axis.

    Raises:
        ValueError: an operator that nothing is known about.
    """
    if not any(each in arguments for each in GROUP_ARGUMENTS):
        return None
    if name not in NAMES:
        raise ValueError(
            f"only operators that collective_ops lists can be counted; got {name}. "
            "Add it to collective_ops.NAMES."
        )
    collective = NAMES[name]
    group = _group(arguments)
    buffer = _bytes(_buffer(name, collective, arguments))
    axis = axes.get(group.group_name) or _axis(group)
    messages, sent = _sent(collective, group, buffer, arguments)
    n_bytes = buffer * group.size() if collective == "all_gather" else buffer
    return Call(collective, axis, group.size(), n_bytes, messages, sent)


def _sent(
    collective: str,
    group: dist.ProcessGroup,
    n_bytes: float,
    arguments: dict[str, object],
) -> tuple[float, float]:
    """Return messages and bytes that this rank sends."""
    n = group.size()
    if collective == "all_to_all":
        return n - 1, _to_others(group, n_bytes, arguments)
    if collective in COLLECTIVES:
        usual = form(collective, n)
        whole = n_bytes * n if collective == "all_gather" else n_bytes
        return usual.n_messages, usual.share * whole
    if collective in ("receive", "barrier"):
        return 0, 0
    is_root = group.rank() == arguments.get("root_rank", arguments.get("src"))
    if collective == "broadcast":
        return (n - 1, (n - 1) * n_bytes) if is_root else (0, 0)
    if collective == "scatter":
        return (n - 1, n_bytes - n_bytes / n) if is_root else (0, 0)
    return (0, 0) if is_root else (1, n_bytes)


def _to_others(
    group: dist.ProcessGroup, n_bytes: float, arguments: dict[str, object]
) -> float:
    """Return what an all-to-all sends away: all but what stays on this rank."""
    listed = arguments.get("input_tensors")
    if listed is not None:
        return n_bytes - _bytes(listed[group.rank()])
    splits = arguments["input_split_sizes"]
    if not splits:
        return n_bytes - n_bytes // group.size()
    n_rows = sum(splits)
    return n_bytes // n_rows * (n_rows - splits[group.rank()]) if n_rows else 0


def _buffer(name: str, collective: str, arguments: dict[str, object]) -> object:
    """Return the tensor or tensors that a rank has before, or all but all of it."""
    if collective == "barrier":
        return ()
    values = list(arguments.values())
    is_second = name.startswith("c10d::") and collective in OUTPUT_FIRST
    return values[1] if is_second else values[0]


def _bytes(tensors: object) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    if isinstance(tensors, Sequence):
        return sum(_bytes(each) for each in tensors)
    return 0


def _group(arguments: dict[str, object]) -> dist.ProcessGroup:
    if "process_group" in arguments:
        return dist.ProcessGroup.unbox(arguments["process_group"])
    return _resolve_process_group(arguments["group_name"])


def _axis(group: dist.ProcessGroup) -> str:
    """Return what a mesh calls the axis of a group, or how PyTorch describes it."""
    if group == dist.group.WORLD:
        return WORLD
    described = group.group_desc
    if described in ("", "undefined"):
        return str(group.group_name)
    return described.removeprefix(AXIS_PREFIX)
