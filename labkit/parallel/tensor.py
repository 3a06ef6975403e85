"""Tensor and sequence parallelism: one model, cut by heads, hidden units and words.

Every rank of a `tp` group sees the same sequences. What is cut runs on all positions;
what is whole runs on the rank's own share of them, if sequences are shared out:

    cut by heads            wq or wq_b, wkv_b, wo; in GQA wq, wk, wv, wo
    cut by hidden units     w1, w3, w2 of MLPs and of shared experts; eh_proj of MTP
    cut by words            embedding, head, and with it the loss
    whole                   norms, wq_a, wkv_a, routers

So MLA's latents are computed once, not by every rank, and only these, narrower than the
stream, are gathered. Routed experts stay whole and run on the rank's own share:
to them, tensor-parallel ranks are data-parallel ranks, which hold experts of their own
(`apply_expert_parallel`) and sum their gradients over `mesh.edp`
(`apply_data_parallel`). All other gradients are complete after each backward pass.

On GPUs and with NCCL this has not been run.
"""

import math
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from labkit.config import GQAConfig, ModelConfig
from labkit.model.attention import GQA, MLA, LayerCache
from labkit.model.checks import IGNORED, require_target_vocabulary, require_vocabulary
from labkit.model.moe import MoE, Routing
from labkit.model.transformer import (
    Block,
    MTPModule,
    Transformer,
    deeper_targets,
    require_depth,
)
from labkit.parallel.mesh import Mesh
from labkit.parallel.tensor_stream import Stream
from labkit.parallel.tensor_styles import Placed, columns, rows, whole
from labkit.parallel.vocabulary import cut_cross_entropy_sum

Plan = dict[str, ParallelStyle]


def apply_tensor_parallel(
    model: nn.Module, mesh: Mesh, *, sequence_parallel: bool = True
) -> None:
    """Cut a model, or a stage of one, over `mesh.tp`; each rank gets the same loss.

    The model is changed in place. Parameters keep their names and, but for experts,
    become DTensors of `mesh.tp`. With one rank nothing changes. Policies of
    recomputation and FP8 come before, experts and data parallelism after.

    Args:
        model: a `Transformer`, or what holds some of its parts under their names.
        mesh: the processes; those of `mesh.tp` must be given the same sequences.
        sequence_parallel: whether each rank keeps its share of the positions between
            cut modules, else all of them.

    Raises:
        ValueError: the ranks do not divide the heads, or are too many for a width.
    """
    if mesh.layout.tp == 1:
        return
    require_cuts(model.cfg, mesh.layout.tp)
    stream = Stream(mesh.tp, sequence_parallel)
    for module in list(model.modules()):
        if isinstance(module, Block):
            _cut_block(module, stream)
        elif isinstance(module, MTPModule):
            parallelize_module(module, mesh.tp, _mtp_plan(stream))
    _cut_ends(model, stream)


def require_cuts(cfg: ModelConfig, tp: int) -> None:
    """Raise ValueError unless `tp` ranks can share the model's cut modules.

    Heads are dealt out evenly. Other widths may be odd: the last rank takes less, but
    no rank nothing.
    """
    heads = {"n_heads": cfg.attention.n_heads}
    if isinstance(cfg.attention, GQAConfig):
        heads["n_kv_heads"] = cfg.attention.n_kv_heads
    for name, n in heads.items():
        if n % tp:
            raise ValueError(
                f"tp must divide {name}, because each rank takes as many whole heads; "
                f"got tp={tp} and {n}. Set tp={math.gcd(tp, n)}."
            )
    widths = {"vocab_size": cfg.vocab_size, "inter_dim": cfg.inter_dim}
    if cfg.moe is not None and cfg.moe.n_shared_experts:
        width = cfg.moe.n_shared_experts * cfg.moe.moe_inter_dim
        widths["n_shared_experts * moe_inter_dim"] = width
    for name, width in widths.items():
        if -(-width // tp) * (tp - 1) >= width:
            raise ValueError(
                f"{name} must leave a part for every tensor-parallel rank; got {width} "
                f"for tp={tp}. Set a smaller tp."
            )


def _cut_block(block: Block, stream: Stream) -> None:
    outside = whole(is_summed=stream.is_shared)
    plan = {"attn_norm": outside, "ffn_norm": outside}
    if isinstance(block.attn, MLA):
        plan |= _mla_plan(block.attn, stream)
    else:
        plan |= _gqa_plan(block.attn, stream)
    if isinstance(block.ffn, MoE):
        plan |= _moe_plan(block.ffn, stream)
    else:
        plan |= _mlp_plan("ffn", stream)
    _keep_positions(block, stream)  # before the stream enters attention
    parallelize_module(block, stream.mesh, plan)


def _mla_plan(attn: MLA, stream: Stream) -> Plan:
    """Down-projections run on the rank's share; their results go to all heads."""
    n_heads = attn.mla.n_heads // stream.mesh.size()
    attn.mla = replace(attn.mla, n_heads=n_heads)
    outside = whole(is_summed=stream.is_shared)
    plan = {
        "attn.wkv_a": whole(is_summed=stream.is_shared, after=stream.enter),
        # Read by this rank's heads alone, so that its gradient is a part.
        "attn.kv_norm": whole(is_summed=True),
        "attn.wkv_b": columns(),
        "attn.wo": rows(after=stream.leave),
    }
    if attn.mla.q_lora_rank is None:
        return plan | {"attn.wq": columns(before=stream.enter)}
    return plan | {
        "attn.wq_a": outside,
        "attn.q_norm": outside,
        "attn.wq_b": columns(before=stream.enter),
    }


def _gqa_plan(attn: GQA, stream: Stream) -> Plan:
    size, gqa = stream.mesh.size(), attn.gqa
    attn.gqa = replace(
        gqa, n_heads=gqa.n_heads // size, n_kv_heads=gqa.n_kv_heads // size
    )
    return {
        "attn": Placed(before=stream.enter),
        "attn.wq": columns(),
        "attn.wk": columns(),
        "attn.wv": columns(),
        "attn.wo": rows(after=stream.leave),
    }


def _mlp_plan(name: str, stream: Stream) -> Plan:
    return {
        name: Placed(before=stream.enter, after=stream.leave),
        f"{name}.w1": columns(),
        f"{name}.w3": columns(),
        f"{name}.w2": rows(),
    }


def _moe_plan(moe: MoE, stream: Stream) -> Plan:
    """Tokens are routed by the rank whose share they are in, whoever holds them."""

    def whole_again(given: tuple[Tensor, Routing]) -> tuple[Tensor, Routing]:
        out, routing = given
        return stream.unshare(out), stream.whole_routing(routing)

    plan = {
        "ffn": Placed(before=stream.share, after=whole_again),
        "ffn.gate": whole(is_summed=True),
    }
    if moe.shared_experts is not None:
        within = replace(stream, is_shared=True)
        plan |= _mlp_plan("ffn.shared_experts", within)
    return plan


def _mtp_plan(stream: Stream) -> Plan:
    outside = whole(is_summed=stream.is_shared)
    return {
        "enorm": outside,
        "hnorm": outside,
        "eh_proj": rows(before=stream.own_part, after=stream.leave),
        "norm": outside,
    }


def _keep_positions(block: Block, stream: Stream) -> None:
    """Let attention see as many positions as the stream has, the router's what is real.

    The stream may be longer than the sequences, so that all ranks have equal shares.
    """

    def pad(
        module: nn.Module, inputs: tuple[Tensor, Tensor, LayerCache | None]
    ) -> tuple[Tensor, Tensor, None]:
        x, turns, *cache = inputs
        if any(cache):
            raise ValueError(
                "a model cut by tensor parallelism keeps no cache; got one. Generate "
                "with the whole model."
            )
        return x, stream.padded_turns(turns, x.shape[1])

    def drop(
        module: nn.Module,
        inputs: tuple[Tensor, Tensor, LayerCache | None],
        output: tuple[Tensor, Routing | None],
    ) -> tuple[Tensor, Routing | None]:
        x, routing = output
        return x, None if routing is None else first(routing, inputs[1].shape[-2])

    block.attn.register_forward_pre_hook(pad)
    block.register_forward_hook(drop)


def first(routing: Routing, n_tokens: int) -> Routing:
    """Return what was decided on the first tokens of each sequence."""
    if routing.affinity.shape[1] == n_tokens:
        return routing
    # Copies: FSDP2 warns of views among a module's results.
    return Routing(*(part[:, :n_tokens].clone() for part in routing))


def _cut_ends(model: nn.Module, stream: Stream) -> None:
    """Cut embedding, norm and head, those that there are, and with them the loss."""
    embed = getattr(model, "embed", None)
    if embed is not None and not isinstance(embed.weight, DTensor):
        _cut_embedding(embed, stream)  # unless another stage did, whose it is
    if getattr(model, "norm", None) is not None:
        outside = whole(is_summed=stream.is_shared)
        parallelize_module(model, stream.mesh, {"norm": outside})
    if getattr(model, "head", None) is not None:
        head = columns(before=stream.enter)
        parallelize_module(model, stream.mesh, {"head": head})
        cls = type(model)
        model.__class__ = type(f"Cut{cls.__name__}", (CutLoss, cls), {})
        model.stream = stream
    if type(model).forward is Transformer.forward:
        model.register_forward_hook(_whole_logits)


def _cut_embedding(embed: nn.Embedding, stream: Stream) -> None:
    n_words = embed.num_embeddings

    def pad(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        (tokens,) = inputs
        if tokens.is_cpu:  # where the lookup of a whole embedding would raise
            require_vocabulary(tokens, n_words)
        return (stream.padded_tokens(tokens),)

    embed.register_forward_pre_hook(pad)
    after = Shard(1) if stream.is_shared else Replicate()
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=after)
    parallelize_module(embed, stream.mesh, style)


def _whole_logits(
    model: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor
) -> Tensor:
    """Return the logits of all words and of all tokens that were given."""
    mesh, n_words = model.stream.mesh, model.cfg.vocab_size
    shape = (*logits.shape[:-1], n_words)
    stride = (shape[1] * n_words, n_words, 1)
    parts = DTensor.from_local(
        logits,
        mesh,
        [Shard(2)],
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )
    gathered = parts.redistribute(placements=[Replicate()]).to_local()
    return gathered[:, : inputs[0].shape[1]]


class CutLoss:
    """The losses of a model whose vocabulary is cut: no rank ever has all logits."""

    stream: Stream

    def token_loss_sum(
        self, normed: Float[Tensor, "b t d"], targets: Int[Tensor, "b s"]
    ) -> Float[Tensor, ""]:
        """Return the summed cross-entropy of the head's words on normed states."""
        if targets.is_cpu:
            require_target_vocabulary(targets, self.cfg.vocab_size)
        logits = self.head(normed)  # (b, t, v)
        padding = logits.shape[1] - targets.shape[1]
        targets = F.pad(targets, (0, padding), value=IGNORED)
        return cut_cross_entropy_sum(logits, targets, self.stream, self.cfg.vocab_size)

    def mtp_loss_sum(
        self, normed: Float[Tensor, "b t d"], targets: Int[Tensor, "b s"]
    ) -> tuple[Float[Tensor, ""], list[Routing]]:
        """Return the summed cross-entropy of all MTP modules, and their routings.

        Shares of positions stay as they are: the last positions of each sequence are
        computed as well, but they predict nothing, and nothing else sees them.
        """
        seq_len = targets.shape[1]
        require_depth(seq_len, len(self.mtp))
        turns = self.turns(torch.arange(seq_len, device=targets.device))
        total, routings = normed.new_zeros((), dtype=torch.float32), []
        for depth, module in enumerate(self.mtp, start=1):
            given, wanted = deeper_targets(targets, depth)
            x, routing = module(normed, self.embed(F.pad(given, (0, depth))), turns)
            normed = module.norm(x)
            total = total + self.token_loss_sum(normed, wanted)
            if routing is not None:
                routings.append(first(routing, seq_len - depth))
        return total, routings
