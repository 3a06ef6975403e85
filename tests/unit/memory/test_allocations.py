"""Counting what operators allocate: by hand, on two devices, through a backward."""

import gc
import weakref

import pytest
import torch
from torch import nn

from labkit.memory import AllocationCount, Event, measure
from labkit.memory.births import BirthCount
from labkit.memory.measure import StepWatch


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_each_new_storage_counts_with_its_bytes_and_its_end(device):
    with AllocationCount() as count:
        first = torch.zeros(100, device=device)
        second = first + 1
        del first
        third = second.double()

    assert count.events == [
        Event(1, 400),
        Event(2, 400),
        Event(1, -400),
        Event(3, 800),
    ]
    assert count.sizes == [400, 400, 800]
    assert (count.n_allocations, count.total_bytes) == (3, 1600)
    assert (count.live_bytes, count.peak_bytes) == (1200, 1200)
    del second, third
    assert count.live_bytes == 0


def test_views_and_writes_in_place_allocate_nothing():
    rows = torch.zeros(4, 4)
    with AllocationCount() as count:
        rows[1] = 2.0
        rows.view(2, 8).transpose(0, 1).add_(1)
        rows[:, :2].copy_(rows[:, 2:])

    assert count.events == []


def test_what_was_there_before_does_not_count_when_it_ends():
    rows = torch.zeros(4)
    with AllocationCount() as count:
        view = rows[1:]
        del rows, view

    assert (count.events, count.live_bytes) == ([], 0)


@pytest.mark.parametrize(
    ("kind", "n_bytes"),
    [
        (AllocationCount, 0),
        (BirthCount, 8),
        (lambda: StepWatch(nn.Module()), 8),
    ],
)
def test_values_given_in_python_count_where_each_storage_is_to_be_known(kind, n_bytes):
    with kind() as count:
        given = torch.tensor([1.0, 2.0])

    assert count.live_bytes == n_bytes
    del given
    assert count.live_bytes == 0


def test_after_a_backward_pass_the_gradients_are_all_that_is_left():
    layer = nn.Linear(8, 4)
    with AllocationCount() as count:
        layer(torch.randn(16, 8)).square().sum().backward()

    assert count.live_bytes == sum(p.grad.nbytes for p in layer.parameters())
    assert count.peak_bytes > count.live_bytes


def test_its_repr_says_what_it_saw():
    with AllocationCount() as count:
        torch.zeros(3)

    assert repr(count) == (
        "AllocationCount(n_allocations=1, total_bytes=12, live_bytes=0, peak_bytes=12)"
    )


def test_what_was_there_can_be_adopted():
    rows = torch.zeros(4)
    count = AllocationCount()

    assert count.number_of(rows) is None
    assert count.adopt(rows[1:]) == count.adopt(rows) == count.number_of(rows) == 1
    assert count.live_bytes == 16
    assert count.adopt(torch.zeros(0)) == 0
    del rows
    assert count.live_bytes == 0


def test_a_closed_count_does_not_live_as_long_as_what_it_counted():
    with AllocationCount() as count:
        rows = torch.zeros(4)
    count.close()
    alive = weakref.ref(count)
    del count
    gc.collect()

    assert alive() is None
    assert rows.sum() == 0


@pytest.mark.filterwarnings("ignore:Sparse CS.* tensor support is in beta")
@pytest.mark.parametrize(
    ("make", "n_bytes"),
    [
        (torch.Tensor.to_sparse, 3 * (2 * 8 + 4)),
        (torch.Tensor.to_sparse_csr, 4 * 8 + 3 * (8 + 4)),
        (torch.Tensor.to_sparse_csc, 4 * 8 + 3 * (8 + 4)),
    ],
)
def test_a_sparse_tensor_counts_as_what_it_consists_of(make, n_bytes):
    given = make(torch.eye(3))
    with AllocationCount() as count:
        sparse = given.clone()
    assert count.live_bytes == n_bytes
    assert count.number_of(sparse) == count.adopt(sparse) is not None
    del sparse
    assert count.live_bytes == 0


def test_rows_that_gradients_of_an_embedding_consist_of_are_gradients():
    embed = nn.Embedding(100, 8, sparse=True)
    tokens = torch.tensor([1, 2])

    report = measure(lambda: embed(tokens).sum().backward(), embed)

    assert report.by_part["gradients"] == 2 * 8 * 4
