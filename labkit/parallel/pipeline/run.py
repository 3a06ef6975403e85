"""A model cut into the stages of a pipeline, and one training step through them.

Every rank of a pipeline calls `step` with the same sequences, in as many micro-batches,
and gets the figures of its own stages; they add up over ranks to those of the whole
model in one process, as the gradients do.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor, nn

from labkit.config import Layout
from labkit.config.checks import require_at_least, require_instance, require_whole
from labkit.model import Transformer
from labkit.model.checks import (
    require_positions,
    require_target_vocabulary,
    require_targets,
    require_tokens,
    require_vocabulary,
)
from labkit.model.transformer import LossParts, require_depth
from labkit.parallel.mesh import Mesh
from labkit.parallel.pipeline import engine
from labkit.parallel.pipeline.orders import (
    V_SHAPED,
    chunks_per_rank,
    name_in_torch,
    require_fit,
)
from labkit.parallel.pipeline.stage import Stage, Terms
from labkit.parallel.pipeline.tied import TiedEmbedding
from labkit.parallel.stages import layers_of_stages, stages_of_rank


class Pipeline:
    """The stages of a model on this rank, and the schedule that runs them.

    Transforms go over each of `modules` before the first step. Gradients are summed
    over micro-batches, and over data-parallel ranks only by what a transform does.

    Args:
        model: the whole model, the same on every rank; its modules go to the stages.
        mesh: of the layout, whose `pp * vpp` is the number of stages.
        schedule: one of `SCHEDULES`, without dualpipe, which PyTorch has not.
        layers_per_stage: main layers of each stage, in order; None cuts by work.

    Attributes:
        modules: the stages on this rank, in the order of the model, with its names.
        stages: which these are.
        meshes: which mesh each module's transforms take. Passes that run at the same
            time must not share groups, so that overlapped stages with parts on other
            ranks have two.
        copies: names of parameters here that another rank owns.
        overlaps: whether DualPipeV runs its pairs at the same time. With tensor
            parallelism it does not, for both stages read one embedding then.
        dtype: of hidden states between stages; that of the weights at first.
        n_shares: ranks that share the positions of a hidden state between stages, as
            sequence parallelism has it.

    Raises:
        ValueError: the schedule does not fit the layout, or the layers the stages.
    """

    def __init__(
        self,
        model: Transformer,
        mesh: Mesh,
        *,
        schedule: str = "1f1b",
        layers_per_stage: Sequence[int] | None = None,
    ) -> None:
        require_instance({"model": model}, Transformer)
        layout, cfg = mesh.layout, model.cfg
        vpp = chunks_per_rank(schedule, layout.vpp)
        name_in_torch(schedule, vpp)
        self.cfg, self.mesh, self.schedule = cfg, mesh, schedule
        self.n_stages = layout.pp * vpp
        self.stages = stages_of_rank(
            schedule, layout.pp, mesh.pp.get_local_rank(), vpp=vpp
        )
        layers = layers_of_stages(cfg, self.n_stages, layers_per_stage)
        self.n_routers = len(model.routers())
        self.modules: list[nn.Module] = [
            self._cut(model, layers[i], i) for i in self.stages
        ]
        reader = 0 if schedule in V_SHAPED else layout.pp - 1
        self._group = _message_group(layout)
        self._tied = TiedEmbedding(
            self.modules, model.embed, self._group, reader=reader
        )
        self.copies = self._tied.copies
        self.overlaps = schedule == "dualpipev" and layout.tp == 1 < layout.pp
        self.meshes = [mesh] * vpp
        if self.overlaps and layout.dp > 1:
            device = mesh.pp.device_type
            self.meshes[1] = Mesh(layout, device=device, replicate=mesh.replicate)
        self.dtype = model.embed.weight.dtype
        self.n_shares = 1
        self._built: dict[tuple, engine.Schedule] = {}

    def step(  # noqa: PLR0913  the terms of a step, each with a name
        self,
        tokens: Int[Tensor, "b s"],
        targets: Int[Tensor, "b s"],
        *,
        n_tokens: int,
        n_sequences: int,
        n_micro_batches: int = 1,
        mtp_weight: float | None = None,
    ) -> LossParts:
        """Run all micro-batches forward and backward; return this rank's figures.

        Gradients are added to what the parameters have. Figures of other ranks' stages
        are zero; `load` has a row for each router of the whole model.

        Args:
            tokens: of all micro-batches, the same on all ranks of the pipeline.
            targets: as for `Transformer.loss`.
            n_tokens: targets of the whole step, all ranks and micro-batches.
            n_sequences: sequences of the whole step.
            n_micro_batches: equal parts to cut the sequences into.
            mtp_weight: lambda, else the config's.

        Raises:
            ValueError: before anything is sent: sequences that the model would refuse
                or that do not divide, or too few micro-batches for the schedule.
        """
        self._check_schedule(n_micro_batches)
        terms = self._terms(tokens, targets, n_tokens, n_sequences, mtp_weight)
        with self._tied.summed():
            self._run(n_micro_batches, (tokens, targets), terms)
        return self._summed(terms)

    @torch.no_grad()
    def evaluate(  # noqa: PLR0913  the terms of a step, each with a name
        self,
        tokens: Int[Tensor, "b s"],
        targets: Int[Tensor, "b s"],
        *,
        n_tokens: int,
        n_sequences: int,
        n_micro_batches: int = 1,
        mtp_weight: float | None = None,
    ) -> LossParts:
        """Return this rank's figures of forward passes alone; arguments as for `step`.

        Raises:
            ValueError: sequences that the model would refuse, or that do not divide.
        """
        terms = self._terms(tokens, targets, n_tokens, n_sequences, mtp_weight)
        self._run(n_micro_batches, (tokens, targets), terms)
        return self._summed(terms)

    def update_router_bias(self, load: Int[Tensor, "l e"], rate: float) -> None:
        """Move the biases of this rank's routers by `rate` towards even load.

        Args:
            load: of the whole model and all ranks, a row for each router.
            rate: of one optimizer step.

        Raises:
            ValueError: `load` has not one row per router, or `rate` is negative.
        """
        require_at_least({"rate": rate}, 0)
        if len(load) != self.n_routers:
            raise ValueError(
                f"load must have one row per router of the whole model; got {len(load)}"
                f" rows for {self.n_routers} routers. Pass the sum over ranks of "
                "LossParts.load."
            )
        for stage in self.modules:
            stage.update_router_bias(load[stage.router_rows], rate)

    def _cut(self, model: Transformer, layers: range, index: int) -> Stage:
        is_last = index == self.n_stages - 1
        return Stage(model, layers, is_first=index == 0, is_last=is_last)

    def _check_schedule(self, n_micro_batches: int) -> None:
        name, pp, vpp = "n_micro_batches", self.mesh.layout.pp, len(self.modules)
        require_whole({name: n_micro_batches})
        require_fit(self.schedule, pp, n_micro_batches, vpp, name=name)

    def _terms(  # noqa: PLR0913  of a step
        self,
        tokens: Int[Tensor, "b s"],
        targets: Int[Tensor, "b s"],
        n_tokens: int,
        n_sequences: int,
        mtp_weight: float | None,
    ) -> Terms:
        """Check on every rank what else one of them would stumble over alone."""
        require_tokens(tokens)
        require_targets(targets, tuple(tokens.shape))
        seq_len = tokens.shape[1]
        require_positions(seq_len, self.cfg)
        require_depth(seq_len, self.cfg.n_mtp)
        require_whole({"n_tokens": n_tokens, "n_sequences": n_sequences})
        if tokens.is_cpu:
            require_vocabulary(tokens, self.cfg.vocab_size)
            require_target_vocabulary(targets, self.cfg.vocab_size)
        if mtp_weight is not None:
            require_at_least({"mtp_weight": mtp_weight}, 0)
        return Terms(
            n_tokens=n_tokens,
            n_sequences=n_sequences,
            seq_len=seq_len,
            mtp_weight=mtp_weight,
        )

    def _run(
        self, n_micro_batches: int, batch: tuple[Tensor, Tensor], terms: Terms
    ) -> None:
        shape = engine.Shape(
            n_micro_batches=n_micro_batches,
            n_sequences=_equal_part(len(batch[0]), n_micro_batches),
            seq_len=terms.seq_len,
        )
        key = shape, torch.is_grad_enabled()
        if key not in self._built:
            self._built[key] = self._build(shape)
        self._built[key].run(batch, terms)

    def _build(self, shape: engine.Shape) -> engine.Schedule:
        chunks = engine.Chunks(
            modules=self.modules,
            indices=self.stages,
            n_stages=self.n_stages,
            device=torch.device(self.mesh.pp.device_type),
            group=self._group,
            hidden=self._hidden(shape.n_sequences, shape.seq_len),
        )
        if not torch.is_grad_enabled():
            return engine.build_forward(self.schedule, chunks, shape)
        return engine.build(self.schedule, chunks, shape, overlaps=self.overlaps)

    def _hidden(self, n_sequences: int, seq_len: int) -> Tensor:
        """Return what travels between stages, without values."""
        n_positions = -(-seq_len // self.n_shares)
        shape = n_sequences, n_positions, self.cfg.dim
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)

    def _summed(self, terms: Terms) -> LossParts:
        """Return the figures of all stages here and all micro-batches."""
        names = ("main", "mtp", "balance", "load")
        main, mtp, balance, load = (
            torch.stack([getattr(made, name) for made in terms.figures]).sum(0)
            for name in names
        )
        return LossParts(main + mtp + balance, main, mtp, balance, load)


def _message_group(layout: Layout) -> dist.ProcessGroup:
    """Return the ranks of this rank's pipeline, for messages between stages alone.

    Stages send unequally many; PyTorch, where it checks collectives, counts messages
    with them, and would take ranks of one group to be out of step.
    """
    n = layout.dp * layout.tp
    pipelines = [list(range(first, n * layout.pp, n)) for first in range(n)]
    group, _ = dist.new_subgroups_by_enumeration(pipelines)
    return group


def _equal_part(n_sequences: int, n_micro_batches: int) -> int:
    require_whole({"n_micro_batches": n_micro_batches})
    if n_sequences % n_micro_batches:
        raise ValueError(
            "sequences must divide into equal micro-batches, because the messages "
            f"between stages have one size; got {n_sequences} sequences for "
            f"n_micro_batches={n_micro_batches}. Drop {n_sequences % n_micro_batches} "
            "of them, or change n_micro_batches."
        )
    return n_sequences // n_micro_batches
