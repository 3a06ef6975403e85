"""Multi-token prediction: which token each module sees, and which it must name."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from labkit.config import PRESETS, MTPConfig
from labkit.model import Transformer

TINY = replace(PRESETS["tiny"], vocab_size=31, n_layers=2, init_std=0.1)


def built(depth=1, **changes):
    cfg = replace(TINY, mtp=MTPConfig(depth=depth), **changes)
    return Transformer(cfg, generator=torch.Generator().manual_seed(0))


def random_batch(batch=2, seq_len=8):
    sequence = torch.randint(0, TINY.vocab_size, (batch, seq_len + 1))
    return sequence[:, :-1], sequence[:, 1:].clone()


def watch(module):
    """Return a list that fills with the inputs of a module as it runs."""
    seen = []
    module.register_forward_pre_hook(lambda _, args: seen.append(args))
    return seen


def test_module_k_reads_position_i_and_the_embedding_of_token_i_plus_k():
    model = built(depth=2)
    tokens, targets = random_batch(seq_len=6)
    sequence = torch.cat((tokens, targets[:, -1:]), dim=1)
    calls = [watch(module) for module in model.mtp]
    model.loss(tokens, targets)
    (first,), (second,) = calls
    assert torch.equal(first[1], model.embed(sequence[:, 1:6]))
    assert torch.equal(second[1], model.embed(sequence[:, 2:6]))
    x, _ = model.hidden(tokens)
    torch.testing.assert_close(first[0], model.norm(x)[:, :5])


def test_module_k_names_token_i_plus_k_plus_1():
    model = built(depth=2)
    tokens, targets = random_batch(seq_len=6)
    outputs = []
    model.head.register_forward_hook(lambda _, __, out: outputs.append(out))
    parts = model.loss(tokens, targets)
    _, first, second = outputs
    total = F.cross_entropy(first.mT, targets[:, 1:], reduction="sum")
    total = total + F.cross_entropy(second.mT, targets[:, 2:], reduction="sum")
    expected = 0.3 / 2 * total / tokens.numel()
    torch.testing.assert_close(parts.mtp, expected.detach())


def test_the_projection_reads_the_embedding_first_and_the_hidden_state_second():
    model = built()
    module, dim = model.mtp[0], TINY.dim
    joined = watch(module.eh_proj)
    hidden, embedded = torch.randn(2, 1, 5, dim)
    module(hidden, embedded, model.turns(torch.arange(5)))
    ((projected,),) = joined
    norm = torch.nn.functional.rms_norm
    torch.testing.assert_close(projected[..., :dim], norm(embedded, (dim,), eps=1e-6))
    torch.testing.assert_close(projected[..., dim:], norm(hidden, (dim,), eps=1e-6))


def test_embedding_and_head_are_the_models_own():
    model = built(depth=2)
    names = [name for name, _ in model.named_parameters() if name.startswith("mtp.")]
    assert not any("embed" in name or "head" in name for name in names)
    _, targets = random_batch()
    hidden = torch.randn(2, 8, TINY.dim)  # so that only the modules embed anything
    loss, _ = model.mtp_loss_sum(hidden, targets)
    loss.backward()
    assert (model.head.weight.grad != 0).any()
    embedded = targets[:, :-1].unique()
    assert (model.embed.weight.grad != 0).any(dim=1).nonzero().flatten().tolist() == (
        embedded.tolist()
    )


@pytest.mark.parametrize("changed", [3, 5])
def test_a_prediction_sees_nothing_of_the_token_it_predicts(changed):
    model = built()
    tokens, targets = random_batch(1, 8)
    logits = []
    model.head.register_forward_hook(lambda _, __, out: logits.append(out))
    other_tokens, other_targets = tokens.clone(), targets.clone()
    other_targets[:, changed] = (targets[:, changed] + 1) % 31
    other_tokens[:, changed + 1] = other_targets[:, changed]
    model.loss(tokens, targets)
    model.loss(other_tokens, other_targets)
    _, before, _, after = logits
    # Position i reads tokens up to i + 1, that is targets up to i.
    torch.testing.assert_close(before[:, :changed], after[:, :changed])
    assert (before[:, changed:] != after[:, changed:]).any(-1).all()


def test_a_position_without_a_next_token_predicts_nothing():
    model = built()
    tokens, targets = random_batch(1, 8)
    targets[:, 4:] = -100
    short = model.loss(tokens[:, :4], targets[:, :4])
    whole = model.loss(tokens, targets)
    torch.testing.assert_close(whole.mtp, short.mtp)
    torch.testing.assert_close(whole.main, short.main)


def test_a_hole_in_the_targets_silences_the_two_predictions_that_need_it():
    model = built()
    tokens, targets = random_batch(1, 8)
    logits = []
    model.head.register_forward_hook(lambda _, __, out: logits.append(out))
    targets[:, 3] = -100
    parts = model.loss(tokens, targets, mtp_weight=1.0)
    # Position 3 embeds the missing token, and position 2 would have to name it.
    kept = torch.tensor([0, 1, 4, 5, 6])
    expected = F.cross_entropy(
        logits[1][0, kept], targets[0, 1:][kept], reduction="sum"
    )
    torch.testing.assert_close(parts.mtp, (expected / 7).detach())


def test_sequences_are_longer_than_the_depth():
    model = built(depth=3)
    assert model.loss(*random_batch(2, 4)).mtp > 0
    with pytest.raises(ValueError) as caught:
        model.loss(*random_batch(2, 3))
    assert str(caught.value) == (
        "sequences must be longer than the depth of multi-token prediction, 3, because "
        "its last module names a token that far ahead; got 3 tokens. Use 4 or more, "
        "or set mtp=None in the model's config."
    )


def test_modules_are_dense_where_the_model_is():
    model = built(moe=None)
    assert model.routers() == []
    assert model.loss(*random_batch()).mtp > 0


def test_a_model_without_modules_has_no_such_loss():
    model = Transformer(replace(TINY, mtp=None))
    assert len(model.mtp) == 0
    assert model.loss(*random_batch()).mtp == 0


def test_logits_do_not_depend_on_the_modules():
    model = built()
    tokens, _ = random_batch()
    before = model(tokens)
    with torch.no_grad():
        for parameter in model.mtp.parameters():
            parameter.zero_()
    assert torch.equal(model(tokens), before)
