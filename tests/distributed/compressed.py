"""What each rank of the tests of compressed sums does, and what it reports."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from labkit.parallel.communication.checksum import diverged
from labkit.parallel.communication.compress import (
    Coded,
    compress_replicas,
    finish,
)
from labkit.parallel.communication.compress_codec import Int8, Narrow, TopK
from labkit.parallel.communication.compress_power import PowerSGD
from labkit.parallel.communication.compress_shards import compress_shards
from labkit.parallel.communication.count import count_communication

N_RANKS = 4
N_STEPS = 5

SHAPES = ((24, 18), (7,), (3, 20, 12))
"""A matrix, a vector, a stack of matrices: not a multiple of four values together."""

MAKERS = {
    "fp32": lambda feedback: Coded(Narrow("fp32"), feedback),
    "bf16": lambda feedback: Coded(Narrow("bf16"), feedback),
    "fp8": lambda feedback: Coded(Narrow("fp8"), feedback),
    "int8": lambda feedback: Coded(Int8(), feedback),
    "top-k": lambda feedback: Coded(TopK(0.05), feedback),
    "power": lambda feedback: PowerSGD(rank=2, error_feedback=feedback),
}


def gradients(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    n_values = sum(int(np.prod(shape)) for shape in SHAPES)
    return torch.randn(n_values, generator=generator)


def exact_sum(step: int) -> torch.Tensor:
    return sum(gradients(step, rank).double() for rank in range(N_RANKS))


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm())


def kept(compression, parameters) -> torch.Tensor:
    """Return what all ranks still hold, summed."""
    rests = [
        compression.rest.get(p, torch.zeros(p.numel())).flatten() for p in parameters
    ]
    held = torch.cat(rests).double()
    dist.all_reduce(held)
    return held


def several_steps(make, feedback: bool) -> dict:
    """Sum the gradients of several steps, without DDP."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    compression = make(feedback)
    applied = exact = 0
    errors = []
    with count_communication() as found:
        for step in range(N_STEPS):
            flat = gradients(step, dist.get_rank())
            total = finish(compression.sum(flat, parameters, dist.group.WORLD))
            errors.append(distance(total, exact_sum(step)))
            applied, exact = applied + total.double(), exact + exact_sum(step)
    sums = [torch.empty_like(total) for _ in range(N_RANKS)]
    dist.all_gather(sums, total)
    expected = compression.expected(SHAPES, N_RANKS)
    return {
        "first": errors[0],
        "applied": distance(applied, exact),
        "lost": distance(applied + kept(compression, parameters), exact),
        "is_same": all(torch.equal(sums[0], each) for each in sums),
        "counted": (found.n_messages, found.sent_bytes),
        "expected": (N_STEPS * expected.n_messages, N_STEPS * expected.n_bytes),
        "state_bytes": compression.state_bytes,
    }


def unchecked_group() -> dist.ProcessGroup:
    """Return a group whose collectives are not checked: DDP cannot bear the checks."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)
    group = dist.new_group()
    dist.set_debug_level(level)
    return group


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = (24, 40, 40, 40, 8)
    pairs = zip(sizes, sizes[1:], strict=False)
    return nn.Sequential(*(nn.Linear(n_in, n_out) for n_in, n_out in pairs))


def batch(step: int) -> torch.Tensor:
    return batch_of(step, dist.get_rank())


def batch_of(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * N_RANKS + rank)
    return torch.randn(6, 24, generator=generator)


def replicas(make) -> dict:
    """Train under DDP with several buckets, and count the last step."""
    ddp = DistributedDataParallel(
        layers(), process_group=unchecked_group(), bucket_cap_mb=0.004
    )
    compression = make(True)
    sums = compress_replicas(ddp, compression)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        with count_communication() as found:
            ddp(batch(step)).square().sum().backward()
        optimizer.step()
    alone = alone_layers()
    return {
        "n_buckets": len(sums.buckets),
        "counted": (found.n_messages, found.sent_bytes),
        "expected": tuple(sums.expected()),
        "diverged": diverged(ddp),
        "state_bytes": compression.state_bytes,
        "n_values": sum(p.numel() for p in ddp.parameters()),
        "first": first_gradients(make, alone),
    }


def first_gradients(make, alone: nn.Module) -> float:
    ddp = DistributedDataParallel(layers(), process_group=unchecked_group())
    compress_replicas(ddp, make(True))
    ddp(batch(0)).square().sum().backward()
    return distance(flat_gradients(ddp), flat_gradients(alone).double())


def alone_layers() -> nn.Sequential:
    """Return layers with the gradients that all ranks' first batches give together."""
    alone = layers()
    sum(alone(batch_of(0, rank)).square().sum() for rank in range(N_RANKS)).backward()
    return alone


def flat_gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def shards(make) -> dict:
    """Train under FSDP2, in which each rank sums its part."""
    mesh = init_device_mesh("cpu", (N_RANKS,), mesh_dim_names=("dp",))
    model = layers()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    compression = make(True)
    compress_shards(model, compression)
    with count_communication() as found:
        model(batch(0)).square().sum().backward()
    alone = alone_layers()
    ours = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    # FSDP2 pads the first axis of each parameter to a multiple of the ranks.
    sizes = [
        sum(-(-len(p) // N_RANKS) * N_RANKS * p[0].numel() for p in layer.parameters())
        for layer in alone
    ]
    expected = [compression.expected_scatter(n, N_RANKS) for n in sizes]
    return {
        "first": distance(ours, flat_gradients(alone).double()),
        "counted": tuple(
            found.sum(what, collective="all_to_all")
            for what in ("n_messages", "sent_bytes")
        ),
        "expected": tuple(map(sum, zip(*expected, strict=True))),
        "scattered": found.sum("n_calls", collective="reduce_scatter"),
    }


def overflow(make) -> dict:
    """One rank's gradient has an infinity in one step; the next is as the first."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    compression = make(True)
    flat = gradients(0, dist.get_rank())
    flat[100] = torch.inf if dist.get_rank() == 1 else 1.0
    broken = finish(compression.sum(flat, parameters, dist.group.WORLD))
    is_seen = not broken.isfinite().all()
    is_kept_finite = bool(kept(compression, parameters).isfinite().all())
    flat = gradients(1, dist.get_rank())
    after = finish(compression.sum(flat, parameters, dist.group.WORLD))
    return {
        "is_seen": is_seen,
        "is_kept_finite": is_kept_finite,
        "is_finite_after": bool(after.isfinite().all()),
    }


def low_rank() -> float:
    """Return how far a sum of low rank is off after two steps, a step of zeros among
    them."""
    power = PowerSGD(rank=2)
    parameter = nn.Parameter(torch.zeros(3, 20, 12))
    torch.manual_seed(dist.get_rank())
    thin = torch.randn(3, 20, 2, generator=torch.Generator().manual_seed(1))
    mine = thin @ torch.randn(3, 2, 12)
    exact = mine.clone()
    dist.all_reduce(exact)
    for flat in (torch.zeros(720), mine.flatten()):
        total = finish(power.sum(flat.clone(), [parameter], dist.group.WORLD))
    return distance(total, exact.flatten().double())


def beside_torch() -> list[float]:
    """Return how far PyTorch's own PowerSGD is from ours in two steps, in means."""
    ddp = DistributedDataParallel(
        nn.Linear(24, 16, bias=False), process_group=unchecked_group()
    )
    state = torch_power.PowerSGDState(
        process_group=ddp.process_group,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        use_error_feedback=False,
    )
    ddp.register_comm_hook(state, torch_power.powerSGD_hook)
    ours = PowerSGD(rank=2, error_feedback=False)
    parameter = ddp.module.weight
    errors = []
    for step in range(4):
        x = batch(step)
        if step == 2:  # the matrix that theirs begins with
            drawn = np.random.RandomState(0).randint(1_000_000_000)
            generator = torch.Generator().manual_seed(int(drawn))
            ours.start[parameter] = torch.randn(1, 24, 2, generator=generator)
        ddp.zero_grad()
        ddp(x).square().sum().backward()
        if step >= 2:
            mine = nn.Linear(24, 16, bias=False)
            mine.weight.data.copy_(parameter.data)
            mine(x).square().sum().backward()
            flat = mine.weight.grad.flatten()
            total = finish(ours.sum(flat, [parameter], dist.group.WORLD))
            errors.append(distance(total / N_RANKS, parameter.grad.flatten().double()))
    return errors


def silent_hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def unsummed() -> tuple[str, ...]:
    """Train with a hook that sums nothing, and return what is not the same."""
    ddp = DistributedDataParallel(layers(), process_group=unchecked_group())
    ddp.register_comm_hook(None, silent_hook)
    for parameter in ddp.module[0].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    ddp(batch(0)).square().sum().backward()
    optimizer.step()
    return diverged(ddp.module)


def work_of_a_rank() -> dict:
    found = {"low rank": low_rank(), "torch": beside_torch(), "unsummed": unsummed()}
    for name, make in MAKERS.items():
        found[name] = {
            "steps": several_steps(make, True),
            "forgetful": several_steps(make, False),
            "overflow": overflow(make),
            "replicas": replicas(make),
        }
        if name != "power":
            found[name]["shards"] = shards(make)
    return found
