"""One query against a cache of keys: heads that share them, and no copy of them."""

import pytest
import torch

from labkit.memory import AllocationCount
from labkit.model.attention_core import attend


@pytest.mark.parametrize("n_kv_heads", [8, 2, 1])
def test_heads_that_share_keys_give_what_repeated_keys_give(n_kv_heads):
    torch.manual_seed(0)
    q = torch.randn(2, 8, 1, 6)
    k, v = torch.randn(2, n_kv_heads, 5, 6), torch.randn(2, n_kv_heads, 5, 4)
    mask = torch.tensor([[[1, 1, 1, 0, 0]], [[1, 1, 1, 1, 1]]]).bool()

    repeated_k, repeated_v = (x.repeat_interleave(8 // n_kv_heads, 1) for x in (k, v))
    scores = (q @ repeated_k.transpose(-1, -2)) * 0.3
    scores = scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
    torch.testing.assert_close(
        attend(q, k, v, scale=0.3, mask=mask), scores.softmax(-1) @ repeated_v
    )


@pytest.mark.parametrize("n_kv_heads", [8, 2])
def test_decoding_reads_cached_keys_where_they_lie(n_kv_heads):
    q = torch.randn(1, 8, 1, 16)
    cached = torch.randn(1, 1000, 2 * n_kv_heads, 16).transpose(1, 2)
    k, v = cached.chunk(2, dim=1)
    mask = torch.ones(1, 1, 1000, dtype=torch.bool)

    with AllocationCount() as count:
        attend(q, k, v, scale=0.25, mask=mask)
    assert count.peak_bytes < k.untyped_storage().nbytes() / 2
