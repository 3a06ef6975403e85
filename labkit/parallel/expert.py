"""Expert parallelism: each rank holds some experts, and tokens go to them.

Every rank routes its own tokens, with the whole router, and so counts its own load;
data-parallel and tensor-parallel ranks alike. Routed experts are cut over `mesh.ep`,
whole and in order. Tokens and results go the way of
`labkit.parallel.communication.exchange`; the shared expert is computed meanwhile.

Gradients of experts come out complete for the tokens of all ranks of `mesh.ep`; the sum
over `mesh.edp`, the other ranks that hold the same experts, is data parallelism's.

Tested with gloo on CPUs; on GPUs and with NCCL it has not been run.
"""

from types import MethodType

import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from labkit.config.checks import require_flag
from labkit.model.moe import MoE
from labkit.parallel.communication.exchange import Arrived, Exchange, expert_exchange
from labkit.parallel.communication.exchange_trip import sum_by
from labkit.parallel.communication.payload import Payload, payload_of
from labkit.parallel.mesh import Mesh
from labkit.parallel.tensor_styles import place, read_locally


def apply_expert_parallel(
    model: nn.Module,
    mesh: Mesh,
    *,
    payload: str | Payload = "fp32",
    n_nodes: int = 1,
    overlap_shared: bool = True,
) -> None:
    """Spread the routed experts of a model, or a stage of one, over `mesh.ep`.

    The model is changed in place; `w13` and `w2` of experts become DTensors that are
    cut over `mesh.ep`, under the names they had. Rank i gets experts from i c on, with
    c = ceil(n_experts / ep), so that the last rank may have fewer. With `ep` 1 nothing
    changes. FP8 and tensor parallelism come before, data parallelism after.

    Args:
        model: a `Transformer` or what holds some of its blocks.
        mesh: the processes; all of an `ep` group call this alike.
        payload: "fp32" sends rows as they are computed, "bf16" halves them, and "fp8"
            is DeepSeek-V3's: rows to experts in FP8, and back in BF16. Or formats for
            each direction.
        n_nodes: that the ranks of an `ep` group are on, in order; then tokens cross
            to each node once (two hops).
        overlap_shared: whether to compute shared experts while tokens travel.

    Raises:
        ValueError: no such payload, more ranks than experts go round, unequal nodes, or
            experts that are spread already.
    """
    payload = payload_of(payload)
    require_flag({"overlap_shared": overlap_shared})
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    if mesh.layout.ep == 1 or not mixtures:
        return
    weights = [weight for moe in mixtures for weight in moe.experts.parameters()]
    if any(isinstance(weight, DTensor) for weight in weights):
        raise ValueError(
            "experts are spread once, before data parallelism; got a model whose "
            "experts are spread or cut already. Build it anew."
        )
    exchange = expert_exchange(
        dist.get_process_group_ranks(mesh.ep.get_group()),
        mixtures[0].gate.moe.n_routed_experts,
        payload=payload,
        n_nodes=n_nodes,
    )
    for moe in mixtures:
        place(moe.experts, mesh.ep, Shard(0))
        read_locally(moe.experts, is_summed=False)
        join(moe, exchange, overlap_shared=overlap_shared)


def join(moe: MoE, exchange: Exchange, *, overlap_shared: bool = True) -> None:
    """Let a layer, which has its own experts alone, use those of other ranks too."""

    def mixture(
        moe: MoE,
        x: Float[Tensor, "n d"],
        weights: Float[Tensor, "n k"],
        experts: Int[Tensor, "n k"],
    ) -> Float[Tensor, "n d"]:
        journey, shared = exchange.send(x, weights, experts), None
        if moe.shared_experts is not None and overlap_shared:
            shared = moe.shared_experts(x)
        own = of_own_experts(moe.experts, journey.arrived(), exchange.own)
        out = journey.back(own)
        if moe.shared_experts is not None and not overlap_shared:
            shared = moe.shared_experts(x)
        return out if shared is None else out + shared

    # A method of this layer alone: copies of the model get one of their own.
    moe.mixture = MethodType(mixture, moe)


def of_own_experts(
    module: nn.Module, arrived: Arrived, own: range
) -> Float[Tensor, "q d"]:
    """Return, for each row that arrived, the weighted sum of experts on this rank.

    Rows are repeated for each of their choices here, so that `module` is told of one
    expert a row. If none came, a row of zeros does as if: every rank's weights get
    gradients, and whoever sums these over ranks waits for nobody.

    Args:
        module: takes rows, weights and experts, as `Experts` does.
        arrived: what came.
        own: which experts the module has.
    """
    values, weights, experts = arrived
    is_own = (experts >= own.start) & (experts < own.stop)
    row, choice = is_own.nonzero(as_tuple=True)  # (p,)
    each = weights[row, choice], experts[row, choice] - own.start
    rows = values if len(row) == len(values) else values.index_select(0, row)
    spare = (0, int(not len(row)))
    weight, expert = (F.pad(part, spare).unsqueeze(1) for part in each)
    out = module(F.pad(rows, (0, 0, *spare)), weight, expert)[: len(row)]
    return out if rows is values else sum_by(out, row, len(values))
