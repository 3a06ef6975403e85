"""What is waited for later gives what plain calls give, on two processes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.parallel.communication.count import count_communication
from labkit.parallel.communication.exchange import expert_exchange
from labkit.parallel.communication.forms import form
from labkit.parallel.communication.overlap import (
    GradientBuckets,
    interleave,
    measure_overlap,
    through_experts,
)
from labkit.parallel.launch import launch

N_RANKS = 2
N_EXPERTS, K, DIM = 6, 2, 5
BUCKET_BYTES = 200


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = (8, 12, 12, 4)
    pairs = zip(sizes, sizes[1:], strict=False)
    model = nn.Sequential(*(nn.Linear(n_in, n_out) for n_in, n_out in pairs))
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return model


def batch(rank: int, micro_batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + micro_batch)
    return torch.randn(6, 8, generator=generator)


def buckets() -> dict:
    """Two steps of two micro-batches, beside one process with all of them."""
    model, alone = layers(), layers()
    sums = GradientBuckets(
        model.parameters(), dist.group.WORLD, bucket_bytes=BUCKET_BYTES
    )
    starts = []
    for _ in range(2):
        model.zero_grad()
        with count_communication() as found:
            for index in range(2):
                with sums.micro_batch(is_last=index == 1):
                    loss = model(batch(dist.get_rank(), index)).square().sum()
                    loss.backward()
                starts.append(found.sum("n_calls"))
            sums.finish()
    for rank in range(N_RANKS):
        for index in range(2):
            alone(batch(rank, index)).square().sum().backward()
    alone.unused.grad = torch.zeros(3)
    pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
    error = max(float((ours.grad - theirs.grad).abs().max()) for ours, theirs in pairs)
    sums.close()
    with count_communication() as after:
        model(batch(0, 0)).sum().backward()
    return {
        "n_buckets": len(sums.buckets),
        "starts": starts,
        "sent": found.sent_bytes,
        "n_bytes": 4 * sum(p.numel() for p in model.parameters()),
        "after": after.n_messages,
        "error": error,
    }


def tokens(micro_batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5 * dist.get_rank() + micro_batch)
    x = torch.randn(7, DIM, generator=generator, requires_grad=True)
    weights = torch.rand(7, K, generator=generator, requires_grad=True)
    order = torch.rand(7, N_EXPERTS, generator=generator).argsort(dim=1)
    return x, weights, order[:, :K]


def mixed(matrices, x, weights, experts, own=range(N_EXPERTS)) -> torch.Tensor:
    """Return, for each row, the weighted sum of those of its experts that are ours."""
    out = torch.zeros_like(x)
    for choice in range(experts.shape[1]):
        chosen = experts[:, choice]
        is_own = (chosen >= own.start) & (chosen < own.stop)
        each = torch.einsum("nd,ndf->nf", x, matrices[chosen.clamp(0, N_EXPERTS - 1)])
        out = out + (is_own * weights[:, choice]).unsqueeze(1) * each.tanh()
    return out


def two_micro_batches() -> dict:
    """Experts of two micro-batches in turn, beside one process that has them all."""
    generator = torch.Generator().manual_seed(9)
    matrices = torch.randn(N_EXPERTS, DIM, DIM, generator=generator)
    ours, theirs = (nn.Parameter(matrices.clone()) for _ in range(2))
    exchange = expert_exchange(list(range(N_RANKS)), N_EXPERTS)
    log = []

    def compute(arrived, own):
        return mixed(ours, *arrived, own)

    def one(index):
        parts = tokens(index)
        log.append(f"{index} sends")
        out = yield from through_experts(exchange, compute, *parts)
        log.append(f"{index} is back")
        return parts, out

    passes = interleave(one(0), one(1))
    sum(out.square().sum() for _, out in passes).backward()
    dist.all_reduce(ours.grad)
    errors = []
    for index, (parts, out) in enumerate(passes):
        again = tokens(index)
        expected = mixed(theirs, *again)
        expected.square().sum().backward()
        pairs = [
            (out, expected),
            *((a.grad, b.grad) for a, b in zip(parts[:2], again[:2], strict=True)),
        ]
        errors += [float((a - b).abs().max()) for a, b in pairs]
    dist.all_reduce(theirs.grad)
    errors.append(float((ours.grad - theirs.grad).abs().max()))
    return {"log": log, "error": max(errors)}


class Late:
    """Something under way whose end is written down."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait(self) -> None:
        self.log.append(f"{self.name} waited for")


def order_of_handles() -> tuple[list, list[str]]:
    log = []

    def work(name, n_steps):
        for step in range(n_steps):
            log.append(f"{name}{step} started")
            yield Late(f"{name}{step}", log)
        return name

    return interleave(work("a", 2), work("b", 1)), log


def work_of_a_rank() -> dict:
    overlap = measure_overlap(lambda: None, lambda: None, lambda: None, n_repeats=1)
    return {
        "buckets": buckets(),
        "experts": two_micro_batches(),
        "handles": order_of_handles(),
        "hidden": overlap.hidden,
    }


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return launch(work_of_a_rank, N_RANKS, timeout=400)


def test_gradients_are_the_sums_over_ranks_and_micro_batches(found):
    assert all(rank["buckets"]["error"] < 1e-4 for rank in found)


def test_buckets_start_in_the_last_backward_pass_and_not_before(found):
    for rank in found:
        n_buckets = rank["buckets"]["n_buckets"]
        assert n_buckets > 2
        # The last holds the parameter that gets no gradient, and starts at the end.
        assert rank["buckets"]["starts"] == [0, n_buckets - 1, 0, n_buckets - 1]


def test_buckets_send_what_one_all_reduce_would(found):
    for rank in found:
        expected = form("all_reduce", N_RANKS).share * rank["buckets"]["n_bytes"]
        assert rank["buckets"]["sent"] == expected


def test_closed_buckets_leave_gradients_alone(found):
    assert all(rank["buckets"]["after"] == 0 for rank in found)


def test_experts_of_two_micro_batches_in_turn_are_those_of_one_process(found):
    for rank in found:
        assert rank["experts"]["log"] == [
            "0 sends",
            "1 sends",
            "0 is back",
            "1 is back",
        ]
        assert rank["experts"]["error"] < 1e-5


def test_passes_go_on_in_turn_and_wait_before_they_do(found):
    assert found[0]["handles"] == (
        ["a", "b"],
        [
            "a0 started",
            "b0 started",
            "a0 waited for",
            "a1 started",
            "b0 waited for",
            "a1 waited for",
        ],
    )
