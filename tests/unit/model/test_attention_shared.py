"""Attention over shared keys and values, whole and in parts, is the definition."""

import pytest
import torch

from labkit.model.attention_shared import MANY_KEYS, attend_shared


def by_definition(q, entries, scale, mask=None):
    scores = q.double() @ entries.double().mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(dim=-1) @ entries.double()).type_as(q)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("n_keys", [1, 5, MANY_KEYS, MANY_KEYS + 1, MANY_KEYS + 2])
def test_one_sequence_is_attended_alike_on_any_number_of_cores(n_threads, n_keys):
    torch.set_num_threads(n_threads)
    q, entries = 3 * torch.randn(1, 6, 10), torch.randn(1, n_keys + 3, 10)[:, :n_keys]
    out = attend_shared(q, entries, scale=0.7)
    expected = by_definition(q, entries, 0.7)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_large_scores_in_one_part_leave_no_other_overflow():
    torch.set_num_threads(2)
    q, entries = torch.ones(1, 1, 4), torch.zeros(1, 2 * MANY_KEYS, 4)
    entries[0, 0] = 200.0
    entries[0, -1] = 200.0
    out = attend_shared(q, entries, scale=1.0)
    torch.testing.assert_close(out, torch.full_like(q, 200.0))


def test_a_mask_hides_keys_of_a_batch():
    q, entries = torch.randn(2, 6, 10), torch.randn(2, 9, 10)
    mask = torch.rand(2, 6, 9) < 0.5
    mask[..., 0] = True
    out = attend_shared(q, entries, scale=0.3, mask=mask)
    expected = by_definition(q, entries, 0.3, mask)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
