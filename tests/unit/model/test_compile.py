"""A dense model is one graph; a router's choice depends on data and is not."""

from dataclasses import replace

import pytest
import torch

from labkit.config import PRESETS
from labkit.model import Transformer

pytestmark = pytest.mark.compile


def test_a_dense_model_compiles_as_one_graph_with_equal_gradients():
    cfg = replace(PRESETS["tiny"], moe=None, mtp=None, n_layers=2, dim=64)
    model = Transformer(cfg, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(1))
    # The graph is taken and differentiated; no C++ compiler is needed.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    results = []
    for run in (model, compiled):
        logits = run(tokens)
        logits.square().mean().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        results.append([logits.detach(), *grads])
        model.zero_grad(set_to_none=True)

    torch.testing.assert_close(results[0], results[1])
