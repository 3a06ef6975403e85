"""Bytes that a step is said to move, against what its operators read and write."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.config import PRESETS, Layout, TrainConfig
from labkit.memory.cost import BLOCK_POLICIES, step_times
from labkit.memory.recompute import apply_recompute
from labkit.memory.tape import Pass
from labkit.memory.work import Work, block_work, moved, rank_work
from labkit.model import Transformer

CFG = replace(PRESETS["tiny"], n_layers=2)
N_BLOCKS = CFG.n_layers + CFG.n_mtp

BYTES_ALONE = 1e12
"""A balance at which no FLOP takes time."""

UNWRITTEN = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "detach"})
UNREAD = frozenset({"copy_", "fill_", "zero_", "new_zeros", "new_full", "baddbmm"})
"""Operators that do not read their first argument; `baddbmm` as it is called here."""


class Traffic(TorchDispatchMode):
    """Counts bytes of the tensors that operators read and write, views excepted."""

    n_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.is_view or name in UNWRITTEN:
            return result
        others = {key: value for key, value in kwargs.items() if key != "out"}
        read = tree_leaves((args[name in UNREAD :], others))
        written = tree_leaves(kwargs.get("out", result))
        tensors = [x for x in (*read, *written) if isinstance(x, Tensor)]
        self.n_bytes += sum(x.numel() * x.element_size() for x in tensors)
        return result


def counted(policy, precision):
    model = Transformer(CFG, generator=torch.Generator().manual_seed(0))
    apply_recompute(model, policy)
    tokens = torch.randint(256, (4, 129), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", enabled=precision == "bf16"), Traffic() as forward:
        loss = model.loss(tokens[:, :-1], tokens[:, 1:]).total
    with Traffic() as backward:
        loss.backward()
    return forward.n_bytes + backward.n_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.usefixtures("unchecked")
def test_bytes_moved_are_those_that_operators_read_and_write(precision):
    train = TrainConfig(micro_batch=4, global_batch=4, seq_len=128, precision=precision)
    times = step_times(CFG, train, balance=BYTES_ALONE)
    update = times.stages[0].update
    predicted, measured = {}, {}
    for policy in BLOCK_POLICIES:
        total = times.total([policy] * N_BLOCKS)
        predicted[policy] = (total - update) / BYTES_ALONE
        measured[policy] = counted(policy, precision)
    assert predicted["none"] == pytest.approx(measured["none"], rel=0.15)
    for policy in BLOCK_POLICIES[1:]:
        again, seen = (
            amounts[policy] - amounts["none"] for amounts in (predicted, measured)
        )
        assert again == pytest.approx(seen, rel=0.25)


def test_an_operator_takes_as_long_as_its_flops_or_its_bytes():
    work = Work("", 100, 10, 200, 30)

    assert (work.forward_time(2), work.backward_time(2)) == (100, 200)
    assert (work.forward_time(20), work.backward_time(20)) == (200, 600)
    assert moved("", 8, (2, 3)) == Work("", 0, 16, 0, 24)


def test_ranks_share_what_they_do_not_each_compute_whole():
    step = Pass(batch=1, seq_len=32)
    whole = list(block_work(CFG, step, is_dense=True))
    halves = list(rank_work(whole, Layout(tp=2)))

    for all_of_it, half in zip(whole, halves, strict=True):
        is_latent = all_of_it.part in (
            "attn.wq_a",
            "attn.q_norm",
            "attn.wkv_a",
            "attn.kv_norm",
        )
        assert half == (all_of_it if is_latent else all_of_it.over(2))
