"""A model on many processes: all transforms in their order, and one step of training.

    mesh = Mesh(Layout(pp=2, dp=2, ep=2))
    run = parallelize(model, mesh, zero=1)
    optimizer = torch.optim.AdamW(run.parameters())
    parts = run.step(tokens, targets, n_tokens=…, n_sequences=…)
    run.clip_gradients(1.0)
    optimizer.step()
    run.update_router_bias(parts.load, rate=1e-3)

Every step is that of the same model in one process on the sequences of all ranks:
losses, gradients, their norm, and so the weights. On GPUs and with NCCL this has not
been run.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Int, Shaped
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from labkit.config.checks import require_whole
from labkit.model import Transformer
from labkit.model.checks import IGNORED
from labkit.model.transformer import LossParts
from labkit.parallel.clip import gradient_norm, scale_gradients
from labkit.parallel.data import DataParallel, apply_data_parallel
from labkit.parallel.expert import apply_expert_parallel
from labkit.parallel.mesh import Mesh
from labkit.parallel.pipeline.run import Pipeline
from labkit.parallel.tensor import apply_tensor_parallel
from labkit.parallel.whole import from_all_stages, whole

PARTED = ("zero-bubble", "zbv", "dualpipev")
"""Schedules that compute gradients of weights some time after those of inputs."""

LOSSES = ("total", "main", "mtp", "balance")


def parallelize(  # noqa: PLR0913  one name for each choice
    model: Transformer,
    mesh: Mesh,
    *,
    zero: int = 0,
    mixed: torch.dtype | None = None,
    schedule: str = "1f1b",
    layers_per_stage: Sequence[int] | None = None,
    sequence_parallel: bool = True,
    payload: str = "fp32",
) -> "Parallel":
    """Cut a model over the processes of a mesh; return what trains it.

    First into stages; then each stage over tensor-parallel ranks, its experts over
    expert-parallel ranks, and last over data-parallel ranks. What an axis of the mesh
    with one rank would do is left out. The model is taken apart: use it no more.

    Args:
        model: built alike on every rank, with recomputation or FP8 already applied.
        mesh: the processes of the layout.
        zero: what data-parallel ranks cut, see `apply_data_parallel`; at most 2 with
            schedules of `PARTED`.
        mixed: the dtype to compute in, beside weights in their own.
        schedule: of the pipeline, see `Pipeline`.
        layers_per_stage: main layers of each stage; None cuts by work.
        sequence_parallel: whether tensor-parallel ranks share out positions too.
        payload: how tokens travel to experts, see `apply_expert_parallel`.

    Raises:
        ValueError: a transform cannot cut this model so.
    """
    if mesh.layout.pp > 1:
        require_whole_weights(schedule, zero)
    names = list(model.state_dict())
    pipeline, modules, meshes = None, [model], [mesh]
    if mesh.layout.pp > 1:
        pipeline = Pipeline(
            model, mesh, schedule=schedule, layers_per_stage=layers_per_stage
        )
        pipeline.dtype = mixed or pipeline.dtype
        pipeline.n_shares = mesh.layout.tp if sequence_parallel else 1
        modules, meshes = pipeline.modules, pipeline.meshes
    data = []
    for module, own in zip(modules, meshes, strict=True):
        apply_tensor_parallel(module, own, sequence_parallel=sequence_parallel)
        apply_expert_parallel(module, own, payload=payload)
        data.append(apply_data_parallel(module, own, zero=zero, mixed=mixed))
    return Parallel(mesh, modules, data, names=names, pipeline=pipeline)


def require_whole_weights(schedule: str, zero: int) -> None:
    """Raise ValueError if weights were freed between the parts of a backward pass."""
    if zero == 3 and schedule in PARTED:
        raise ValueError(
            f"zero must be at most 2 with schedule={schedule!r}, because FSDP2 frees "
            "weights after a backward pass and loses gradients of its second part; "
            "got zero=3. Set zero=2 or schedule='1f1b'."
        )


class Parallel:
    """A model on many processes, and what training does with all of it.

    Every rank calls every method, at the same time.

    Attributes:
        mesh: the processes.
        modules: what this rank holds: the model, or its stages in their order.
        pipeline: what runs the stages, if the model is cut into some.
        copies: names of parameters here that another stage's rank owns. They are
            trained alike, and counted there.
    """

    def __init__(
        self,
        mesh: Mesh,
        modules: Sequence[nn.Module],
        data: Sequence[DataParallel],
        *,
        names: Sequence[str],
        pipeline: Pipeline | None = None,
    ) -> None:
        self.mesh, self.modules, self.pipeline = mesh, modules, pipeline
        self.copies = frozenset() if pipeline is None else pipeline.copies
        self._data, self._names = data, names

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what this rank holds, copies too, by the serial model's names."""
        for module in self.modules:
            yield from module.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield what this rank's optimizer moves."""
        for _, parameter in self.named_parameters():
            yield parameter

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
        """Add the gradients of one step; return the losses and load of all ranks.

        Args:
            tokens: this data-parallel rank's sequences; ranks that differ in stage or
                in tensor-parallel place only are given the same.
            targets: as for `Transformer.loss`.
            n_tokens: targets of the whole step, all ranks and micro-batches.
            n_sequences: sequences of the whole step.
            n_micro_batches: parts to cut this rank's sequences into, as many on every
                rank.
            mtp_weight: lambda, else the config's.

        Raises:
            ValueError: fewer sequences than micro-batches, or what the model or the
                pipeline would refuse.
        """
        terms = {
            "n_tokens": n_tokens,
            "n_sequences": n_sequences,
            "mtp_weight": mtp_weight,
        }
        if self.pipeline is None:
            parts = self._accumulated(tokens, targets, n_micro_batches, terms)
        else:
            terms["n_micro_batches"] = n_micro_batches
            parts = self.pipeline.step(tokens, targets, **terms)
        for data in self._data:
            data.finish()
        return self._of_all_ranks(parts)

    @torch.no_grad()
    def evaluate(
        self,
        tokens: Int[Tensor, "b s"],
        targets: Int[Tensor, "b s"],
        *,
        n_micro_batches: int = 1,
    ) -> LossParts:
        """Return losses and load on the sequences of all ranks, without gradients.

        Args:
            tokens: as for `step`.
            targets: as for `step`.
            n_micro_batches: of a pipeline; without one the batch is taken as a whole.
        """
        counts = torch.tensor([int((targets != IGNORED).sum()), len(tokens)])
        counts = counts.to(self.mesh.dp.device_type)
        dist.all_reduce(counts, group=self.mesh.dp.get_group())
        n_tokens, n_sequences = counts.clamp(min=1).tolist()
        terms = {"n_tokens": n_tokens, "n_sequences": n_sequences}
        if self.pipeline is None:
            parts = self.modules[0].loss(tokens, targets, **terms)
        else:
            terms["n_micro_batches"] = n_micro_batches
            parts = self.pipeline.evaluate(tokens, targets, **terms)
        self._reshard()
        return self._of_all_ranks(parts)

    def clip_gradients(self, max_norm: float) -> float:
        """Scale gradients to a global norm of at most `max_norm`; return the norm.

        It is that of the serial model's gradient.
        """
        owned = [p for name, p in self.named_parameters() if name not in self.copies]
        norm = gradient_norm(owned, self.mesh)
        scale_gradients(self.parameters(), norm, max_norm)
        return norm

    def update_router_bias(self, load: Int[Tensor, "l e"], rate: float) -> None:
        """Move each router's bias by `rate` towards even load.

        Args:
            load: what `step` returned, a row for each router of the serial model.
            rate: of one optimizer step.
        """
        runner = self.modules[0] if self.pipeline is None else self.pipeline
        runner.update_router_bias(load, rate)

    def full_tensors(self) -> dict[str, Shaped[Tensor, "..."]]:
        """Return the serial model's `state_dict`, whole on every rank."""
        held = [pair for each in self.modules for pair in each.state_dict().items()]
        return self._whole(held)

    def full_gradients(self) -> dict[str, Shaped[Tensor, "..."]]:
        """Return the gradient of each parameter that has one, whole on every rank."""
        gradients = [(n, p.grad) for n, p in self.named_parameters()]
        return self._whole([(n, g) for n, g in gradients if g is not None])

    def _whole(self, held: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
        tensors = {name: whole(part) for name, part in held if name not in self.copies}
        if self.pipeline is None:
            return tensors
        return from_all_stages(tensors, self._names, self.mesh.pp)

    def _accumulated(
        self,
        tokens: Int[Tensor, "b s"],
        targets: Int[Tensor, "b s"],
        n_micro_batches: int,
        terms: dict[str, int | float | None],
    ) -> LossParts:
        """Run micro-batches one after the other; return what they add up to."""
        require_whole({"n_micro_batches": n_micro_batches})
        if n_micro_batches > len(tokens):
            raise ValueError(
                "every micro-batch needs a sequence; got "
                f"n_micro_batches={n_micro_batches} for {len(tokens)} sequences. Set "
                f"n_micro_batches={len(tokens)} or less."
            )
        pairs = zip(
            tokens.tensor_split(n_micro_batches),
            targets.tensor_split(n_micro_batches),
            strict=True,
        )
        (model,), (data,), total = self.modules, self._data, None
        for index, pair in enumerate(pairs):
            with data.micro_batch(is_last=index == n_micro_batches - 1):
                parts = model.loss(*pair, **terms)
                parts.total.backward()
            total = _sum(total, parts)
        return total

    def _of_all_ranks(self, parts: LossParts) -> LossParts:
        """Return the sum over ranks with other sequences, and over stages."""
        losses = [getattr(parts, name).detach().double() for name in LOSSES]
        load = parts.load
        # Counts are exact in FP64, so that one message carries all.
        message = torch.cat([torch.stack(losses), load.double().flatten()])
        for axis in (self.mesh.dp, self.mesh.pp):
            dist.all_reduce(message, group=axis.get_group())
        n = len(LOSSES)
        summed = message[n:].view_as(load).type_as(load)
        return LossParts(*message[:n].float(), load=summed)

    def _reshard(self) -> None:
        """Free weights that a forward pass without a backward pass left whole."""
        for module in self.modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()


def _sum(total: LossParts | None, parts: LossParts) -> LossParts:
    names = (*LOSSES, "load")
    values = {name: getattr(parts, name).detach() for name in names}
    if total is None:
        return LossParts(**values)
    return LossParts(**{name: getattr(total, name) + values[name] for name in names})
