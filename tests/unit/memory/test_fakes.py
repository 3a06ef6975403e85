"""Fake weights stand for those of a model as it was built."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from labkit.memory import faked


def test_a_weight_that_modules_share_stays_one():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight

    with FakeTensorMode(allow_non_fake_inputs=True):
        faked(model)

    assert model[1].weight is model[0].weight
    assert [*model.parameters()] == [model[0].weight]
