"""The cache as storage: its bytes, its positions, and what it refuses."""

from dataclasses import replace

import pytest
import torch

from labkit.config import PRESETS, GQAConfig
from labkit.model import LatentCache, Transformer, generate

TINY = PRESETS["tiny"]


@pytest.fixture
def cache():
    return LatentCache(replace(TINY, n_layers=2), 2, 8, dtype=torch.float32)


def entries(cache, n_new):
    return torch.randn(cache.batch, n_new, cache.entries.shape[-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["tiny", "small", "v2-lite-16b"])
def test_storage_is_exactly_the_bytes_per_token_times_tokens(name, dtype):
    cfg = PRESETS[name]
    cache = LatentCache(cfg, 3, 5, dtype=dtype, device="meta")
    per_token = cfg.kv_bytes_per_token(str(dtype).removeprefix("torch."))
    assert cache.nbytes == per_token * 3 * 5
    assert cache.entries.untyped_storage().nbytes() == cache.nbytes


def test_one_token_of_v3_takes_70272_bytes():
    cache = LatentCache(PRESETS["v3-671b"], 1, 1, device="meta")
    assert cache.nbytes == 61 * (512 + 64) * 2 == 70_272


def test_grouped_query_attention_caches_keys_and_values():
    gqa = GQAConfig(n_heads=8, n_kv_heads=2, head_dim=16)
    cache = LatentCache(replace(TINY, attention=gqa), 1, 1, device="meta")
    assert cache.nbytes == TINY.n_layers * 2 * (2 * 16) * 2


def test_decoding_never_allocates_the_cache_again():
    model = Transformer(TINY)
    cache = LatentCache(TINY, 1, 6, dtype=torch.float32)
    address = cache.entries.data_ptr()
    with torch.inference_mode():
        for _ in range(6):
            model(torch.tensor([[7]]), cache)
    assert cache.entries.data_ptr() == address
    assert cache.lengths == (6,)


def test_update_writes_each_layer_at_its_positions(cache):
    first, second = entries(cache, 3), entries(cache, 1)
    positions = torch.arange(3).expand(2, -1)
    for layer in (0, 1):
        held = cache.update(layer, first + layer, positions)
        assert torch.equal(held, first + layer)
    assert cache.lengths == (3, 3)
    held = cache.update(0, second, torch.full((2, 1), 3))
    assert torch.equal(held, torch.cat((first, second), dim=1))
    assert not cache.entries[:, :, 4:].any()


def test_update_counts_tokens_when_every_layer_has_them(cache):
    positions = torch.arange(2).expand(2, -1)
    cache.update(1, entries(cache, 2), positions)
    assert cache.lengths == (0, 0)
    cache.update(0, entries(cache, 2), positions)
    assert cache.lengths == (2, 2)


def test_update_follows_each_sequence_after_a_ragged_rewind(cache):
    for layer in (0, 1):
        cache.update(layer, entries(cache, 4), torch.arange(4).expand(2, -1))
    cache.rewind([1, 4])
    new = entries(cache, 1)
    for layer in (0, 1):
        held = cache.update(layer, new, torch.tensor([[1], [4]]))
    assert held.shape[1] == 5
    assert torch.equal(held[0, 1], new[0, 0])
    assert torch.equal(held[1, 4], new[1, 0])
    assert cache.lengths == (2, 5)


def test_rewind_forgets_updates_that_not_all_layers_had(cache):
    cache.update(0, entries(cache, 2), torch.arange(2).expand(2, -1))
    cache.rewind(0)
    cache.reserve(2, 8)


def test_repr_tells_shape_and_fill(cache):
    assert repr(cache) == (
        "LatentCache(2 layers, 2 sequences of 8 tokens, 48 wide, torch.float32, "
        "lengths=[0, 0])"
    )


def refused(action):
    with pytest.raises(ValueError) as caught:
        action()
    return str(caught.value)


def held(cache, *lengths):
    """Return the cache holding so many tokens of each sequence."""
    for layer in (0, 1):
        n = max(lengths)
        cache.update(layer, entries(cache, n), torch.arange(n).expand(2, -1))
    cache.rewind(lengths)
    return cache


def test_positions_past_the_end_are_refused(cache):
    held(cache, 2, 5)
    assert refused(lambda: cache.reserve(2, 4)) == (
        "positions must be below max_seq=8; sequence 1 holds 5 tokens and 4 more were "
        "given. Build the cache with max_seq=9 or more, or rewind it."
    )
    last = torch.tensor([[2, 3, 4, 5], [5, 6, 7, 8]])
    assert "sequence 1 holds 5 tokens and 4 more" in refused(
        lambda: cache.update(0, entries(cache, 4), last)
    )


@pytest.mark.parametrize(
    "second",
    [[3, 4], [5, 4], [4, 4], [4, 6], [-1, 0]],
    ids=["occupied", "backwards", "duplicate", "gap", "negative"],
)
def test_positions_that_do_not_follow_on_are_refused(cache, second):
    held(cache, 2, 4)
    positions = torch.tensor([[2, 3], second])
    before = cache.entries.clone()
    assert refused(lambda: cache.update(1, entries(cache, 2), positions)) == (
        "positions must follow on those held, without gap or repeat; layer 1 holds 4 "
        f"tokens of sequence 1, so the next are [4, 5]; got {second}. "
        "To write a position again, rewind to it first."
    )
    assert torch.equal(cache.entries, before)


def test_another_batch_is_refused(cache):
    expected = (
        "there must be one row per sequence of the cache; got 3 for a cache of 2. "
        "Build LatentCache(cfg, 3, max_seq), or pass 2."
    )
    assert refused(lambda: cache.reserve(3, 1)) == expected
    assert refused(lambda: cache.rewind([0, 0, 0])) == expected
    rows, positions = torch.randn(3, 1, 48), torch.zeros(3, 1, dtype=torch.int64)
    assert refused(lambda: cache.update(0, rows, positions)) == expected


def test_rows_of_another_width_are_refused(cache):
    rows = torch.randn(2, 1, 47)
    positions = torch.zeros(2, 1, dtype=torch.int64)
    assert refused(lambda: cache.update(0, rows, positions)) == (
        "entries must have a row of cfg.attention.cache_width=48 values for each of "
        "(2, 1) positions; got (2, 1, 47). For MLA join latent and rotary key."
    )


def test_an_unknown_layer_is_refused(cache):
    positions = torch.zeros(2, 1, dtype=torch.int64)
    assert refused(lambda: cache.update(2, entries(cache, 1), positions)) == (
        "layer must be one of 2 layers; got 2. Pass 0 to 1."
    )


def test_a_forward_pass_between_updates_of_layers_is_refused(cache):
    cache.update(0, entries(cache, 1), torch.zeros(2, 1, dtype=torch.int64))
    assert refused(lambda: cache.reserve(2, 1)) == (
        "all layers must hold the same tokens before a forward pass; layers 0 were "
        "updated and the others not. Update every layer, or call rewind."
    )


def test_rewinding_forwards_is_refused(cache):
    held(cache, 2, 4)
    assert refused(lambda: cache.rewind(3)) == (
        "rewind must go back, to a whole number of tokens; sequence 0 holds 2, and 3 "
        "were asked for. Pass 0 to 2."
    )


def test_rewinding_to_a_part_of_a_token_is_refused(cache, unchecked):
    held(cache, 2, 4)
    assert refused(lambda: cache.rewind([1, 3.0])) == (
        "rewind must go back, to a whole number of tokens; sequence 1 holds 4, and 3.0 "
        "were asked for. Pass 0 to 4."
    )
    assert "and 1.5 were asked for" in refused(lambda: cache.rewind(1.5))
    assert cache.lengths == (2, 4)


@pytest.mark.parametrize(
    ("changes", "described"),
    [
        ({"n_layers": 5}, "5 layers of latents of 32 and rotary keys of 16"),
        ({"n_layers": 3}, "3 layers of latents of 32 and rotary keys of 16"),
        (
            {"attention": replace(TINY.attention, kv_lora_rank=40, qk_rope_head_dim=8)},
            "4 layers of latents of 40 and rotary keys of 8",
        ),
        (
            {"attention": GQAConfig(n_heads=2, n_kv_heads=1, head_dim=24)},
            "4 layers of keys and values of 1 x 24",
        ),
    ],
    ids=["more layers", "fewer layers", "as wide but split elsewhere", "another kind"],
)
def test_a_cache_for_other_layers_is_refused(changes, described):
    model, tokens = Transformer(TINY), torch.tensor([[1]])
    cache = LatentCache(replace(TINY, **changes), 1, 8)
    expected = (
        "a cache must be made for the model's own layers; the model has 4 layers of "
        f"latents of 32 and rotary keys of 16, the cache {described}. "
        "Build LatentCache(model.cfg, batch, max_seq)."
    )
    with torch.inference_mode():
        assert refused(lambda: model(tokens, cache)) == expected
    assert refused(lambda: generate(model, tokens, 2, cache=cache)) == expected


def test_filling_with_gradients_is_refused():
    model = Transformer(TINY)
    cache = LatentCache(TINY, 1, 4, dtype=torch.float32)
    assert refused(lambda: model(torch.tensor([[1]]), cache)) == (
        "a cache must be filled without gradients, which do not flow through it; got "
        "entries that require them. Call the model under torch.inference_mode(), or "
        "train without a cache."
    )


def test_an_empty_cache_and_another_dtype_are_refused():
    assert refused(lambda: LatentCache(TINY, 0, 4)) == (
        "batch must be a whole number of at least 1; got 0. Set batch to 1 or more."
    )
    assert refused(lambda: LatentCache(TINY, 1, 4, dtype=torch.int8)) == (
        "dtype must be a cache dtype; got torch.int8. "
        "Use one of torch.bfloat16, torch.float16, torch.float32, 'fp8'."
    )


def test_a_size_that_is_no_whole_number_is_refused(unchecked):
    assert refused(lambda: LatentCache(TINY, 1, 4.5)) == (
        "max_seq must be a whole number of at least 1; got 4.5. "
        "Set max_seq to 1 or more."
    )
