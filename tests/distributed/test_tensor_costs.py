"""What two tensor-parallel ranks send each other, and what they keep: counted."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from labkit.config import Layout, ModelConfig
from labkit.model import Transformer
from labkit.parallel.communication.count import count_communication
from labkit.parallel.launch import launch
from labkit.parallel.mesh import Mesh
from labkit.parallel.tensor import apply_tensor_parallel
from tests.distributed import serial

N_RANKS, BATCH, SEQ_LEN = 2, 2, 12
N = BATCH * SEQ_LEN
"""Tokens; all divide evenly here, so that bytes can be told in advance."""

FP32 = 4

DENSE, SPARSE = 0, 1


def config() -> ModelConfig:
    cfg = serial.drawn(1).cfg
    attention = replace(cfg.attention, q_lora_rank=12)
    return replace(cfg, dim=32, inter_dim=64, vocab_size=60, attention=attention)


@dataclass
class Costs:
    """Calls and bytes by collective, of a forward and a backward pass; bytes kept."""

    forward: dict[str, tuple[int, int]]
    backward: dict[str, tuple[int, int]]
    kept: int


def traffic(work: Callable[[], object]) -> tuple[dict[str, tuple[int, int]], object]:
    with count_communication() as counted:
        result = work()
    calls = {row.collective: (row.n_calls, int(row.n_bytes)) for row in counted.traffic}
    return calls, result


def costs(work: Callable[[], Tensor]) -> Costs:
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward, out = traffic(work)
    # A storage that several operators keep is there once.
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in kept}
    n_bytes = sum(storage.nbytes() for storage in storages.values())
    backward, _ = traffic(out.backward)
    return Costs(forward, backward, n_bytes)


def of_block(model: Transformer, index: int, *, is_shared: bool) -> Costs:
    n_own = SEQ_LEN // N_RANKS if is_shared else SEQ_LEN
    x = torch.randn(BATCH, n_own, model.cfg.dim, requires_grad=True)
    turns = model.turns(torch.arange(SEQ_LEN))

    def work() -> Tensor:
        out, routing = model.layers[index](x, turns)
        return out.sum() if routing is None else out.sum() + routing.affinity.sum()

    return costs(work)


def of_loss(model: Transformer) -> Costs:
    x = torch.randn(BATCH, SEQ_LEN // N_RANKS, model.cfg.dim, requires_grad=True)
    targets = torch.randint(model.cfg.vocab_size, (BATCH, SEQ_LEN))
    return costs(lambda: model.token_loss_sum(x, targets))


def work() -> dict[object, Costs]:
    mesh, found = Mesh(Layout(tp=dist.get_world_size())), {}
    for is_shared in (True, False):
        model = replace(serial.drawn(1), cfg=config()).model()
        apply_tensor_parallel(model, mesh, sequence_parallel=is_shared)
        for index in (DENSE, SPARSE):
            found[index, is_shared] = of_block(model, index, is_shared=is_shared)
        if is_shared:
            found["loss"] = of_loss(model)
    return found


@pytest.fixture(scope="module")
def found() -> dict[object, Costs]:
    of_ranks = launch(work, N_RANKS, timeout=300)
    assert of_ranks[0] == of_ranks[1]  # equal shares, so equal costs
    return of_ranks[0]


def latents(cfg: ModelConfig) -> int:
    """Values of a token that all heads read: queries' latent, keys' and values'."""
    return cfg.attention.q_lora_rank + cfg.attention.cache_width


def whole_weights(cfg: ModelConfig) -> int:
    """Values of a layer that every rank holds: norms, and projections to latents."""
    mla = cfg.attention
    norms = 2 * cfg.dim + mla.q_lora_rank + mla.kv_lora_rank
    return norms + cfg.dim * latents(cfg)


def test_a_dense_layer_gathers_its_stream_and_scatters_sums(found):
    cfg = config()
    gathered = FP32 * N * (latents(cfg) + cfg.dim)  # latents, and the MLP's input
    scattered = 2 * FP32 * N * cfg.dim  # of attention, and of the MLP
    layer = found[DENSE, True]
    assert layer.forward == {
        "all_gather": (3, gathered),
        "reduce_scatter": (2, scattered),
    }
    # Backwards each is the other; gradients of whole weights are summed beside.
    assert layer.backward == {
        "reduce_scatter": (3, gathered),
        "all_gather": (2, scattered),
        "all_reduce": (6, FP32 * whole_weights(cfg)),
    }


def test_without_shares_a_dense_layer_reduces_twice_in_each_direction(found):
    cfg = config()
    layer = found[DENSE, False]
    assert layer.forward == {"all_reduce": (2, 2 * FP32 * N * cfg.dim)}
    # Latents' gradients apart, and that of the norm which only own heads read.
    n_values = N * (latents(cfg) + cfg.dim) + cfg.attention.kv_lora_rank
    assert layer.backward == {"all_reduce": (4, FP32 * n_values)}


def test_a_sparse_layer_also_gathers_what_its_router_decided(found):
    cfg = config()
    decided = FP32 * N * (cfg.moe.n_routed_experts + cfg.moe.n_activated_experts)
    dense, sparse = found[DENSE, True].forward, found[SPARSE, True].forward
    calls, n_bytes = dense["all_gather"]
    assert sparse == dense | {"all_gather": (calls + 1, n_bytes + decided)}


def test_the_loss_gathers_states_and_three_numbers_a_token_but_no_logits(found):
    cfg = config()
    stream = FP32 * N * cfg.dim
    assert found["loss"].forward == {
        "all_gather": (1, stream),
        "all_reduce": (2, 3 * FP32 * N),
    }
    assert found["loss"].backward == {"reduce_scatter": (1, stream)}


@pytest.mark.parametrize("index", [DENSE, SPARSE])
def test_shares_of_the_stream_are_kept_instead_of_all_of_it(found, index):
    cfg = config()
    # What norms and projections to latents read, and three norms' inverses.
    n_values = 3 * cfg.dim + cfg.attention.q_lora_rank + 3
    saved = found[index, False].kept - found[index, True].kept
    assert saved == FP32 * N * n_values * (N_RANKS - 1) / N_RANKS
