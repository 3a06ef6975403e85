"""Gathered weights against PyTorch's FSDP, and by hand."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.config import PRESETS, Layout
from labkit.memory.gathered import Gathered, gathered_weights
from labkit.memory.persistent import STATES
from labkit.memory.shards import whole
from labkit.memory.stages import Chunk, Stage
from labkit.model import Transformer

TINY, V3 = PRESETS["tiny"], PRESETS["v3-671b"]
MANY = Layout(pp=16, dp=128, ep=64)


def gathered_by_fsdp(units: list[nn.Module]) -> int:
    """Return the bytes of weights that are whole now, or on their way."""
    n_bytes = 0
    for unit in units:
        group = unit._get_fsdp_state()._fsdp_param_group
        arriving = group._all_gather_result
        if arriving is not None:
            n_bytes += arriving.all_gather_output.untyped_storage().nbytes()
        for parameter in group.fsdp_params:
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is not None:
                n_bytes += unsharded.untyped_storage().nbytes()
    return n_bytes


@pytest.fixture
def four_fake_ranks() -> Iterator[None]:
    """Make this process the first of four whose messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_pytorchs_fsdp_gathers_as_much(four_fake_ranks):
    model = Transformer(TINY)
    mesh = init_device_mesh("cpu", (4,))
    units = [*model.layers, *(mtp.block for mtp in model.mtp), model]
    for unit in units:
        fully_shard(unit, mesh=mesh)
    register_fsdp_forward_method(model, "loss")
    seen = {"backward": 0}

    def note(*_):
        seen["backward"] = max(seen["backward"], gathered_by_fsdp(units))

    for layer in model.layers:
        layer.attn.register_full_backward_hook(note)
    tokens = torch.randint(0, 256, (1, 8))
    loss = model.loss(tokens, tokens).total
    seen["end of forward"] = gathered_by_fsdp(units)
    loss.backward()
    seen["after"] = gathered_by_fsdp(units)

    layout = Layout(dp=4)
    outside, blocks = gathered_weights(TINY, layout, whole(TINY), STATES["trainer"])
    assert seen["end of forward"] == outside
    assert seen["backward"] == outside + blocks
    assert seen["after"] == 0


def test_a_middle_stage_has_nothing_outside_its_blocks():
    stage = Stage(chunks=(Chunk(layers=range(4, 8)),))
    norms = 2 * 7168  # those of MLA's latents are counted with it
    layer = 187_107_328 + norms + 256 * 7168 + (1 + 4) * 44_040_192

    gathered = gathered_weights(V3, MANY, stage, STATES["deepseek-v3"])

    # Two blocks of two bytes a value; experts are on two ranks each, dense on 128.
    assert gathered == Gathered(outside=0, blocks=2 * 2 * layer)


def test_the_largest_neighbours_are_dense_where_experts_are_spread_thin():
    stage = Stage(chunks=(Chunk(layers=range(0, 4), is_first=True),))
    layer = 187_107_328 + 2 * 7168 + 3 * 7168 * 18_432

    gathered = gathered_weights(V3, MANY, stage, STATES["deepseek-v3"])

    assert gathered == Gathered(outside=2 * 129_280 * 7168, blocks=2 * 2 * layer)


def test_what_no_other_rank_holds_is_not_gathered():
    dense = replace(TINY, moe=None, mtp=None)
    alone = gathered_weights(dense, Layout(), whole(dense), STATES["trainer"])
    by_ep = [
        gathered_weights(TINY, Layout(dp=8, ep=ep), whole(TINY), STATES["trainer"])
        for ep in (4, 8)
    ]

    assert alone == Gathered()
    # The dense block and one with experts: with a rank for each of these none is
    # shared out, and with half as many ranks both that a rank has are.
    expert = 3 * 128 * 96 * 4
    assert by_ep[0].blocks - by_ep[1].blocks == 2 * expert
