"""Gradients of weights in the second part of a backward pass, against one in a piece.

The embedding of MTP in small: `shared` is read behind `first`, and again, further on,
behind `second`.
"""

import pytest
import torch
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)

from labkit.parallel.pipeline import parted

N_MICRO_BATCHES = 2


def weights():
    generator = torch.Generator().manual_seed(0)
    names = ("first", "between", "second", "shared")
    return {n: torch.nn.Parameter(torch.randn(3, generator=generator)) for n in names}


def loss(x, w):
    near = (x * x) + w["first"] * w["shared"]
    far = near * w["between"] + w["second"] * w["shared"]
    return far.square().sum()


def in_one_piece(x):
    w = weights()
    for _ in range(N_MICRO_BATCHES):
        loss(x, w).backward()
    return {name: weight.grad for name, weight in w.items()}


def in_two_parts(x, accumulate):
    w = weights()
    for _ in range(N_MICRO_BATCHES):
        of_micro_batch = x.clone().requires_grad_()
        given = [loss(of_micro_batch, w)]
        _, groups = stage_backward_input(given, None, [of_micro_batch], w.values())
        accumulate(w.values(), groups)
    return {name: weight.grad for name, weight in w.items()}


def test_a_weight_read_in_two_places_gets_its_gradient_once():
    x = torch.tensor([1.0, -2.0, 3.0])
    ours = in_two_parts(x, parted.accumulate)
    for name, theirs in in_one_piece(x).items():
        torch.testing.assert_close(ours[name], theirs)


def test_pytorch_alone_still_stumbles_over_it():
    def as_pytorch(parameters, groups):
        stage_backward_weight(iter(parameters), groups)

    # Once this runs, `parted` can go.
    with pytest.raises(RuntimeError, match="a second time"):
        in_two_parts(torch.ones(3), as_pytorch)


def test_weights_read_in_one_place_are_left_to_pytorch():
    w = weights()
    x = torch.ones(3, requires_grad=True)
    given = [(x * w["first"] * w["between"]).sum()]
    _, groups = stage_backward_input(given, None, [x], w.values())
    assert not parted.has_shared_weights(groups)
