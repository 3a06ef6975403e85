"""Every policy gives the same gradients to the bit, and can be taken back."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.memory.recompute import (
    RECOMPUTE_POLICIES,
    apply_recompute,
    block_policies,
    recompute_policies,
)
from labkit.model import LatentCache, Transformer, generate, load_hf, save_hf
from labkit.precision.transform import to_fp8

BATCH, SEQ = 2, 16

SAVING = [name for name in RECOMPUTE_POLICIES if name != "none"]
PRECISIONS = {"FP32": torch.float32, "BF16": torch.bfloat16}


def build(cfg, policy="none", *, k=4):
    model = Transformer(cfg, generator=torch.Generator().manual_seed(0))
    return apply_recompute(model, policy, k=k)


def batch(n_sequences=BATCH):
    source = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 32, (n_sequences, SEQ + 1), generator=source)
    return tokens[:, :-1], tokens[:, 1:]


def losses_and_gradients(model, *, dtype=torch.float32, n_micro_batches=2):
    """Accumulate a step of sequences one by one; return all that it gives."""
    tokens, targets = batch(n_micro_batches * BATCH)
    losses = []
    for part in range(n_micro_batches):
        rows = slice(part * BATCH, (part + 1) * BATCH)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = model.loss(
                tokens[rows],
                targets[rows],
                n_tokens=targets.numel(),
                n_sequences=len(tokens),
            )
        loss.total.backward()
        losses += [loss.total.detach(), loss.mtp, loss.balance, loss.load]
    return losses + [parameter.grad for parameter in model.parameters()]


def are_equal(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_loads_and_gradients_are_the_same_to_the_bit(small_model, precision):
    cfg, dtype = small_model, PRECISIONS[precision]
    expected = losses_and_gradients(build(cfg), dtype=dtype)
    for policy in SAVING:
        if policy == "moe" and cfg.moe is None:
            continue
        model = build(cfg, policy, k=2)
        assert are_equal(losses_and_gradients(model, dtype=dtype), expected), policy


@pytest.mark.parametrize("policy", SAVING)
def test_a_single_sequence_gives_the_same_gradients(policy, small_models):
    # Its heads lie side by side already, so that nothing copies values.
    cfg = small_models["multi-token"]
    tokens, targets = batch(1)
    gradients = []
    for name in ("none", policy):
        model = build(cfg, name)
        model.loss(tokens, targets).total.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])

    assert are_equal(*gradients)


@settings(max_examples=8)
@given(data=st.data())
def test_any_mixture_of_policies_gives_the_same_gradients(small_models, data):
    cfg = small_models[data.draw(st.sampled_from([*small_models]))]
    policies = ["none", "full", "selective", "attention"]
    policies += [] if cfg.moe is None else ["moe"]
    n_blocks = cfg.n_layers + cfg.n_mtp
    mixture = data.draw(
        st.lists(st.sampled_from(policies), min_size=n_blocks, max_size=n_blocks)
    )
    expected = losses_and_gradients(build(cfg), n_micro_batches=1)

    found = losses_and_gradients(build(cfg, mixture), n_micro_batches=1)
    assert are_equal(found, expected)


@pytest.mark.parametrize("policy", SAVING)
def test_names_weights_and_modules_modes_stay(policy, small_models):
    plain, model = (build(small_models["multi-token"]) for _ in range(2))
    model.layers[0].eval()
    apply_recompute(model, policy)

    assert list(model.state_dict()) == list(plain.state_dict())
    assert are_equal(model.parameters(), plain.parameters())
    assert [name for name, _ in model.named_modules()] == [
        name for name, _ in plain.named_modules()
    ]
    assert not model.layers[0].training
    assert model.layers[1].training


@pytest.mark.parametrize("policy", SAVING)
def test_the_next_policy_takes_the_place_of_the_last(policy, small_models):
    cfg = small_models["multi-token"]
    model = build(cfg, policy)
    plain = [type(module) for module in build(cfg).modules()]
    for other in RECOMPUTE_POLICIES:
        assert apply_recompute(model, other) is model
        fresh = build(cfg, other)
        assert [*map(type, model.modules())] == [*map(type, fresh.modules())]
    apply_recompute(model, "none")

    assert [type(module) for module in model.modules()] == plain


@pytest.mark.parametrize("policy", SAVING)
def test_a_copy_is_under_the_same_policy_and_has_weights_of_its_own(
    policy, small_models
):
    cfg = small_models["multi-token"]
    model = build(cfg, policy)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    expected = losses_and_gradients(build(cfg))

    assert are_equal(losses_and_gradients(twin), expected)
    assert type(twin.layers[0]) is type(model.layers[0])


@pytest.mark.parametrize("policy", SAVING)
def test_passes_without_gradients_and_with_a_cache_are_as_before(policy, small_models):
    cfg = small_models["multi-token"]
    tokens, _ = batch()
    logits = []
    for name in ("none", policy):
        model = build(cfg, name)
        cache = LatentCache(cfg, BATCH, SEQ, dtype=torch.float32)
        with torch.no_grad():
            plain = model(tokens)
            cached = [model(part, cache) for part in tokens.split(SEQ // 2, dim=1)]
        logits.append([plain, *cached])

    assert are_equal(*logits)


@pytest.mark.parametrize("policy", SAVING)
def test_the_same_text_is_generated_with_drafts_of_the_mtp_modules(
    policy, small_models
):
    cfg = small_models["multi-token"]
    tokens, _ = batch()
    texts = [
        generate(build(cfg, name), tokens, 4, speculative=True).tokens
        for name in ("none", policy)
    ]
    assert are_equal(*texts)


def test_a_cache_is_written_once_although_gradients_are_on(dense):
    # Frozen keys, so that the cache takes them; the head still learns.
    gradients = []
    for policy in ("none", "full", "attention", "selective"):
        model = build(dense, policy)
        cache = LatentCache(dense, BATCH, SEQ, dtype=torch.float32)
        model.requires_grad_(False)
        model.layers[-1].ffn.requires_grad_(True)
        loss = model(batch()[0], cache).sum()
        cache.entries.zero_()
        loss.backward()
        assert not cache.entries.any()
        gradients.append(model.layers[-1].ffn.w1.weight.grad)

    assert all(torch.equal(found, gradients[0]) for found in gradients)


@pytest.mark.parametrize("policy", SAVING)
def test_a_saved_model_is_read_as_a_plain_one(policy, small_models, tmp_path):
    cfg = small_models["multi-token"]
    model = build(cfg, policy)
    save_hf(model, tmp_path)
    read = load_hf(tmp_path)

    assert type(read.layers[0]) is type(build(cfg).layers[0])
    assert are_equal(read.state_dict().values(), model.state_dict().values())
    assert are_equal(
        losses_and_gradients(apply_recompute(read, policy)), losses_and_gradients(model)
    )


def test_hooks_see_a_module_that_runs_again_twice(dense):
    calls = []
    model = build(dense, "full")
    model.layers[0].attn.register_forward_hook(lambda *_: calls.append("attn"))
    loss = model.loss(*batch()).total
    assert calls == ["attn"]
    loss.backward()

    assert calls == ["attn"] * 2


def test_every_policy_has_a_sentence_and_a_plan():
    for policy, sentence in RECOMPUTE_POLICIES.items():
        assert sentence.endswith(".")
        assert len(block_policies(policy, 3)) == 3


def test_every_first_of_k_blocks_runs_again():
    assert block_policies("every_k", 5, k=2) == ("full", "none", "full", "none", "full")
    assert block_policies("every_k", 3, k=1) == ("full",) * 3
    assert block_policies("every_k", 2, k=9) == ("full", "none")


@pytest.mark.parametrize(
    ("policy", "k", "message"),
    [
        ("half", 4, "policy must be one of 'none', 'full', .*; got 'half'. Set policy"),
        (None, 4, "policy must be one of 'none', 'full', .*; got None. Set policy="),
        ("every_k", 0, "k must be a whole number of at least 1; got 0. Set k to 1"),
        (["full"], 4, "one for each of 2 blocks .* got 1 names. Pass 2."),
        (["full", "every_k"], 4, r"policy\[1\] must be one of 'none'.*got 'every_k'"),
        ("moe", 4, "'moe' runs experts again, .*; got a dense model. Choose 'select"),
    ],
)
def test_what_cannot_be_is_refused_and_the_model_is_as_before(
    policy, k, message, dense, unchecked
):
    model = build(dense, "attention")
    before = [*map(type, model.modules())]
    with pytest.raises(ValueError, match=message):
        apply_recompute(model, policy, k=k)

    assert [*map(type, model.modules())] == before


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_a_model_in_fp8_is_refused_and_nothing_is_changed(policy, dense):
    model = build(dense, "attention")
    to_fp8(model.layers[1].attn.wo)
    before = [*map(type, model.modules())]
    with pytest.raises(ValueError) as error:
        apply_recompute(model, policy)

    assert str(error.value) == (
        "a recompute policy must come before other transforms, because it changes the "
        "classes of modules; layers.1.attn.wo is a Fp8Linear. Call apply_recompute "
        "first."
    )
    assert [*map(type, model.modules())] == before


def test_a_block_of_another_transform_is_refused_and_nothing_is_changed(dense):
    model = build(dense, "selective")
    before = [*map(type, model.layers[0].modules())]
    model.layers[1].attn.__class__ = type("OtherMLA", (type(model.layers[1].attn),), {})
    for policy in ("none", "attention"):
        with pytest.raises(ValueError, match="must come before other transforms, .*"):
            apply_recompute(model, policy)
    plain = build(dense)
    plain.layers[1].__class__ = type("OtherBlock", (type(plain.layers[1]),), {})
    with pytest.raises(ValueError, match=r"layers\.1 is a OtherBlock\. Call apply_rec"):
        apply_recompute(plain, "full")

    assert type(plain.layers[0]).__name__ == "Block"
    assert [*map(type, model.layers[0].modules())] == before


@pytest.mark.usefixtures("unchecked")
def test_a_model_of_another_library_is_refused():
    rule = "model must be a Transformer of labkit.model, whose blocks are known; got a"
    with pytest.raises(ValueError, match=rule):
        apply_recompute(torch.nn.Linear(2, 2), "full")


@pytest.mark.usefixtures("unchecked")
def test_a_compiled_model_is_taken_as_the_one_inside(dense):
    model = build(dense)
    apply_recompute(torch.compile(model), "full")
    assert recompute_policies(model) == ("full",) * len(model.layers)
