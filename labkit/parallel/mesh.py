"""Where each process stands: its place on every axis of a layout.

Ranks are numbered tensor-parallel first, then data-parallel, then by stage:

    rank = (pp_i * dp + dp_i) * tp + tp_i

so that ranks which talk most are neighbours. Experts are spread over the ranks of one
stage, s = dp_i * tp + tp_i, whole and `ep` neighbours at a time:

    ep_i = s % ep        edp_i = s // ep

Ranks of one `ep` group hold all experts together; ranks of one `edp` group hold the
same experts and sum their gradients.
"""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from labkit.config import Layout
from labkit.config.checks import require_whole


class Mesh:
    """The groups of processes that a layout makes, built once.

    Every process makes it at the same time, because each group is made by all.

    Args:
        layout: the degrees; `cp` must be 1, and the product the number of ranks.
        device: "cpu", or "cuda", on which it has not been run.
        replicate: copies of the data-parallel shards (HSDP); `dp / replicate` ranks
            share the weights, and each share is on `replicate` of them.

    Attributes:
        layout: the degrees.
        rank: this process.
        world: how many there are.
        replicate: copies of the data-parallel shards.
        pp: the stages of one pipeline.
        dp: the ranks that see other sequences with the same cut of a stage.
        tp: the ranks that share one cut of a stage.
        ep: the ranks that hold all experts of a stage together.
        edp: the ranks of a stage that hold the same experts.
        stage: all ranks of a stage, in the order of s.
        dense: axes ("dp", "tp"), or ("replicate", "shard", "tp") with HSDP.
        expert: axes ("edp", "ep"), or ("replicate", "shard", "ep") with HSDP.

    Raises:
        ValueError: no process group, context parallelism, another number of ranks,
            or copies that do not divide the data-parallel ranks.
    """

    def __init__(
        self, layout: Layout, *, device: str = "cpu", replicate: int = 1
    ) -> None:
        _require_group()
        layout.check_world(dist.get_world_size())
        check_cuts(layout, replicate)
        self.layout, self.replicate = layout, replicate
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        pp, dp, tp, ep = layout.pp, layout.dp, layout.tp, layout.ep
        edp = dp * tp // ep
        if replicate == 1:
            dense = _build(device, {"pp": pp, "dp": dp, "tp": tp})
            expert = _build(device, {"pp": pp, "edp": edp, "ep": ep})
            self.dense, self.expert = dense["dp", "tp"], expert["edp", "ep"]
            self.dp, self.edp = dense["dp"], expert["edp"]
        else:
            copies = {"pp": pp, "replicate": replicate}
            dense = _build(device, copies | {"shard": dp // replicate, "tp": tp})
            expert = _build(device, copies | {"shard": edp // replicate, "ep": ep})
            self.dense = dense["replicate", "shard", "tp"]
            self.expert = expert["replicate", "shard", "ep"]
            self.dp = dense["replicate", "shard"]._flatten("dp")
            self.edp = expert["replicate", "shard"]._flatten("edp")
        self.pp, self.tp, self.ep = dense["pp"], dense["tp"], expert["ep"]
        self.stage = self.dense._flatten("stage")

    def __repr__(self) -> str:
        layout = self.layout
        degrees = {"pp": layout.pp, "dp": layout.dp, "tp": layout.tp, "ep": layout.ep}
        places = [
            f"{name} {getattr(self, name).get_local_rank()}/{degree}"
            for name, degree in degrees.items()
        ]
        return f"Mesh(rank {self.rank}/{self.world}: {', '.join(places)})"


def check_cuts(layout: Layout, replicate: int = 1) -> None:
    """Raise ValueError unless processes can take the cuts of this layout."""
    require_whole({"replicate": replicate})
    if layout.cp > 1:
        raise ValueError(
            "cp must be 1, because processes do not share sequences that way here; "
            f"got cp={layout.cp}. Set cp=1, and tp for long sequences."
        )
    if layout.dp % replicate:
        raise ValueError(
            "replicate must divide dp, because each copy takes as many ranks; got "
            f"replicate={replicate} and dp={layout.dp}. Set replicate=1."
        )
    n_ranks = layout.dp // replicate * layout.tp
    if n_ranks % layout.ep:
        raise ValueError(
            "ep must divide dp / replicate * tp, because each copy holds all experts; "
            f"got ep={layout.ep} and {layout.dp} / {replicate} * {layout.tp} = "
            f"{n_ranks}. Set replicate=1 or a smaller ep."
        )


def _require_group() -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "a mesh joins processes, and this one is in no group. Make it in a "
            "function that labkit.parallel.launch runs."
        )


def _build(device: str, degrees: dict[str, int]) -> DeviceMesh:
    shape, names = tuple(degrees.values()), tuple(degrees)
    return init_device_mesh(device, shape, mesh_dim_names=names)
