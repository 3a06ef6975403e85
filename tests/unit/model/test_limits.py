"""What the model refuses to read: tokens in another form, and too many of them."""

from dataclasses import replace

import pytest
import torch

from labkit.config import PRESETS
from labkit.model import LatentCache, Transformer, generate

SHORT = replace(PRESETS["tiny"], n_layers=1, max_seq_len=8)


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def refused(action):
    with pytest.raises(ValueError) as caught:
        action()
    return str(caught.value)


def too_long(n_positions):
    return (
        "sequences must be at most max_seq_len long, cached tokens included; got "
        f"{n_positions} positions, and max_seq_len=8. Shorten them, or set "
        f"max_seq_len={n_positions} or more in the model's config."
    )


def test_a_sequence_is_at_most_max_seq_len_long():
    model = Transformer(SHORT)
    assert model(zeros(2, 8)).shape == (2, 8, 256)
    assert model.loss(zeros(2, 8), zeros(2, 8)).total > 0
    assert refused(lambda: model(zeros(2, 9))) == too_long(9)
    assert refused(lambda: model.loss(zeros(2, 9), zeros(2, 9))) == too_long(9)


@torch.inference_mode()
def test_tokens_in_a_cache_count_towards_max_seq_len():
    model, cache = Transformer(SHORT), LatentCache(SHORT, 2, 20, dtype=torch.float32)
    model(zeros(2, 6), cache)
    cache.rewind([2, 6])
    assert refused(lambda: model(zeros(2, 3), cache)) == too_long(9)
    assert cache.lengths == (2, 6)
    assert model(zeros(2, 2), cache).shape == (2, 2, 256)


def test_generating_fills_max_seq_len_but_for_the_last_token():
    model = Transformer(SHORT)
    assert generate(model, zeros(1, 4), 5).tokens.shape == (1, 5)
    assert "its max_seq_len is 8" in refused(lambda: generate(model, zeros(1, 4), 6))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (
            zeros(3),
            "tokens must have two dimensions, sequences and their tokens; got shape "
            "(3,). Pass one sequence as tokens[None].",
        ),
        (
            zeros(1, 0),
            "tokens must hold at least one sequence of one token; got shape (1, 0). "
            "Start from a separator token if there is no text.",
        ),
        (
            zeros(0, 3),
            "tokens must hold at least one sequence of one token; got shape (0, 3). "
            "Start from a separator token if there is no text.",
        ),
        (
            zeros(1, 3).float(),
            "tokens must be int64 or int32; got torch.float32. "
            "Convert them with tokens.long().",
        ),
    ],
    ids=["one dimension", "no token", "no sequence", "floats"],
)
def test_tokens_in_another_form_are_refused(unchecked, tokens, expected):
    model = Transformer(SHORT)
    assert refused(lambda: model(tokens)) == expected
    assert refused(lambda: generate(model, tokens, 2)) == expected
    assert refused(lambda: model.loss(tokens, tokens)) == expected


def test_a_list_is_no_tensor_of_tokens(unchecked):
    model, tokens = Transformer(SHORT), [[1, 2, 3]]
    expected = (
        "tokens must be a tensor of whole numbers; got a list. "
        "Convert them with torch.tensor(tokens)."
    )
    assert refused(lambda: model(tokens)) == expected
    assert refused(lambda: generate(model, tokens, 2)) == expected
    assert refused(lambda: model.loss(tokens, tokens)) == expected


@pytest.mark.parametrize("token", [-1, 256])
def test_tokens_outside_the_vocabulary_are_named(token):
    model, tokens = Transformer(SHORT), zeros(2, 3)
    tokens[1, 1] = token
    expected = (
        f"tokens must lie between 0 and 255, padding too; got {token}. "
        "Encode the text for this model's vocabulary of 256."
    )
    assert refused(lambda: model(tokens)) == expected
    assert refused(lambda: model.loss(tokens, zeros(2, 3))) == expected


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (
            zeros(3, 2),
            "targets must have the shape of tokens, one for each; got (3, 2) for "
            "tokens of shape (2, 3). Take both from one sequence: its tokens but the "
            "last, and its tokens but the first.",
        ),
        (
            zeros(2, 3).float(),
            "targets must be int64 or int32; got torch.float32. "
            "Convert them with targets.long().",
        ),
        (
            [[0, 0, 0]],
            "targets must be a tensor of whole numbers; got a list. "
            "Convert them with torch.tensor(targets).",
        ),
        (
            torch.tensor([[0, -100, 256], [1, 2, 3]]),
            "targets must lie between 0 and 255, or be -100 where none is; got 256. "
            "Encode the text for this model's vocabulary of 256.",
        ),
        (
            torch.tensor([[0, -100, -1], [1, 2, 3]]),
            "targets must lie between 0 and 255, or be -100 where none is; got -1. "
            "Encode the text for this model's vocabulary of 256.",
        ),
    ],
    ids=["another shape", "floats", "a list", "too high", "too low"],
)
def test_targets_unlike_tokens_are_refused(unchecked, targets, expected):
    model = Transformer(SHORT)
    assert refused(lambda: model.loss(zeros(2, 3), targets)) == expected


def test_targets_may_be_int32_as_tokens_may():
    model, tokens = Transformer(SHORT), torch.randint(0, 256, (2, 6))
    targets = tokens.roll(1, dims=1)
    targets[0, 2] = -100
    expected = model.loss(tokens, targets).total
    assert torch.equal(model.loss(tokens.int(), targets.int()).total, expected)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64, torch.bool]
)
def test_weights_are_of_a_dtype_that_is_computed_in(dtype):
    assert refused(lambda: Transformer(SHORT, dtype=dtype)) == (
        f"dtype must be one that weights are computed in; got {dtype}. Use one of "
        "torch.float32, torch.bfloat16, torch.float16, torch.float64."
    )
