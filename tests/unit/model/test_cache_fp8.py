"""A cache in FP8: its bytes, and that it changes what is cached, not how it is used.

Runs that must agree to the byte are in FP64. What differs between them is the order
of sums, and in FP32 that alone moves some values to the FP8 number beside them.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from labkit.config import PRESETS, GQAConfig, MTPConfig
from labkit.model import LatentCache, Transformer, generate
from labkit.model.absorbed import AbsorbedModel
from labkit.model.attention import MLA
from labkit.model.cache_fp8 import Fp8Rows
from labkit.precision.quantize import QuantSpec, quantize

TINY, V3 = PRESETS["tiny"], PRESETS["v3-671b"]
PUBLISHED = QuantSpec(tile=(1, 128), scale="fp32")


def latents_of(rank, key=16):
    """Return tiny's attention with latents and rotary keys of these widths."""
    return replace(TINY.attention, kv_lora_rank=rank, qk_rope_head_dim=key)


MODELS = {
    "experts": TINY,
    "dense": replace(TINY, moe=None),
    "many scales": replace(TINY, moe=None, attention=latents_of(261, 6)),
}


@pytest.fixture(params=MODELS)
def model(request):
    return build(MODELS[request.param])


def build(cfg, dtype=torch.float64):
    # A router computes in FP32; nothing that is cached comes after the one here.
    cfg = replace(cfg, n_layers=2, n_dense_layers=1, init_std=0.1)
    generator = torch.Generator().manual_seed(0)
    return Transformer(cfg, generator=generator).to(dtype).eval()


def draw_tokens(*shape):
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(1))


def fp8_cache(model, batch, max_seq):
    return LatentCache(model.cfg, batch, max_seq, dtype="fp8")


def run(model, cache, *chunks):
    with torch.inference_mode():
        return torch.cat([model(chunk, cache) for chunk in chunks], dim=1)


def assert_same(result, expected):
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


def refused(action):
    with pytest.raises(ValueError) as caught:
        action()
    return str(caught.value)


# Bytes


@pytest.mark.parametrize("name", ["tiny", "small", "v2-lite-16b", "v3-671b"])
def test_storage_is_exactly_the_bytes_per_token_times_tokens(name):
    cfg = PRESETS[name]
    cache = LatentCache(cfg, 3, 5, dtype="fp8", device="meta")
    assert cache.nbytes == cfg.kv_bytes_per_token("fp8") * 3 * 5
    assert cache.entries.untyped_storage().nbytes() == cache.nbytes


def test_one_token_of_v3_takes_656_bytes_a_layer():
    cache = LatentCache(V3, 1, 1, dtype="fp8", device="meta")
    assert cache.entries.shape[-1] == 512 + 4 * 4 + 64 * 2 == 656
    assert cache.nbytes == V3.kv_bytes_per_token("fp8") == 61 * 656 == 40_016


@pytest.mark.parametrize(
    ("rank", "n_scales"), [(1, 1), (128, 1), (129, 2), (512, 4), (513, 5)]
)
def test_every_128_values_have_a_scale_and_so_have_the_rest(rank, n_scales):
    cfg = replace(TINY, n_layers=3, attention=latents_of(rank, 6))
    assert cfg.kv_bytes_per_token("fp8") == 3 * (rank + 4 * n_scales + 2 * 6)


def test_a_row_has_values_then_scales_then_the_key():
    entries = torch.zeros(1, 1, 576)
    entries[..., 0], entries[..., 1], entries[..., 2] = 448, 104, -0.001
    entries[..., 384] = 1.75
    entries[..., 512], entries[..., 575] = -2, 3.14159
    row = Fp8Rows(V3.attention).encode(entries)[0, 0].numpy()
    # 104 = 1.625 · 2⁶ has the exponent 6 + 7 and the mantissa 101; -0.001 is beyond
    # half of the smallest number, 2⁻⁹.
    assert row[:3].tolist() == [0b0_1111_110, 0b0_1101_101, 0b1_0000_001]
    assert row[384] == 0b0_1111_110
    assert not row[3:384].any() and not row[385:512].any()
    scales = row[512:528].view("<f4")
    zero = np.float32(1e-12) / np.float32(448)
    assert scales.tolist() == [1, zero, zero, np.float32(1.75 / 448)]
    key = row[528:].view("<u2")
    assert (key[0], key[63]) == (0xC000, 0x4049)
    assert not key[1:63].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [512, 261, 32])
def test_values_and_scales_are_those_of_the_quantizer(rank, dtype):
    chance = torch.Generator().manual_seed(2)
    entries = torch.randn(3, 50, rank + 16, generator=chance)
    # Magnitudes of 1e-15, which counts as zero, to 1e15; and a tile of zeros.
    entries *= 10 ** torch.linspace(-15, 15, 50).unsqueeze(-1)
    entries[1, 7] = 0
    entries = entries.to(dtype)
    rows = Fp8Rows(latents_of(rank))
    stored = rows.encode(entries)
    values, scales, key = rows.parts(stored)
    expected = quantize(entries[..., :rank], PUBLISHED)
    assert values.dtype == torch.float8_e4m3fn
    assert values.untyped_storage().data_ptr() == stored.data_ptr()
    assert torch.equal(values.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(scales, expected.scale)
    assert torch.equal(key, entries[..., rank:].bfloat16())

    read = rows.decode(stored, torch.float32)
    assert torch.equal(read[..., :rank], expected.dequantize())
    assert torch.equal(rows.decode(stored, torch.bfloat16), read.bfloat16())


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_shows_in_its_tile_and_in_no_other(value):
    entries = torch.ones(1, 1, 576)
    entries[..., 130] = value
    rows = Fp8Rows(V3.attention)
    read = rows.decode(rows.encode(entries), torch.float32)[0, 0]
    assert read[128:256].isnan().all()
    assert torch.equal(read[:128], torch.ones(128))
    assert torch.equal(read[256:], torch.ones(320))


def test_update_returns_what_was_stored_and_rounds_it_once():
    cache = LatentCache(replace(TINY, n_layers=1), 2, 8, dtype="fp8")
    first, second = torch.randn(2, 3, 48), torch.randn(2, 1, 48)
    held = cache.update(0, first, torch.arange(3).expand(2, -1))
    stored = cache.entries.clone()
    again = cache.update(0, second, torch.full((2, 1), 3))
    assert torch.equal(again[:, :3], held)
    assert torch.equal(cache.entries[:, :, :3], stored[:, :, :3])
    assert cache.lengths == (4, 4)
    rows = Fp8Rows(TINY.attention)
    both = rows.decode(rows.encode(torch.cat((first, second), dim=1)), torch.float32)
    assert torch.equal(again, both)


# Use


def test_cached_logits_are_those_of_rounded_latents_without_a_cache(model, monkeypatch):
    tokens = draw_tokens(2, 24)
    cached = run(model, fp8_cache(model, 2, 24), *tokens.split([12, 1, 11], dim=1))
    exact_latents = MLA.latents

    def rounded(self, x, turns):
        latent, key = exact_latents(self, x, turns)
        kept = quantize(latent.float(), PUBLISHED)
        return kept.dequantize().to(x), key.bfloat16().to(x)

    monkeypatch.setattr(MLA, "latents", rounded)
    with torch.inference_mode():
        assert_same(cached, model(tokens))


@pytest.mark.parametrize("sizes", [[24], [5, 1, 18], [1] * 24])
def test_chunks_store_the_bytes_and_give_the_logits_of_the_whole(model, sizes):
    tokens = draw_tokens(2, 24)
    whole, chunked = fp8_cache(model, 2, 24), fp8_cache(model, 2, 24)
    expected = run(model, whole, tokens)
    assert_same(run(model, chunked, *tokens.split(sizes, dim=1)), expected)
    assert torch.equal(chunked.entries, whole.entries)


def test_in_fp32_chunks_differ_from_the_whole_by_less_than_fp8_from_fp32():
    model, tokens = build(replace(TINY, moe=None), torch.float32), draw_tokens(2, 64)
    whole, chunked = fp8_cache(model, 2, 64), fp8_cache(model, 2, 64)
    expected = run(model, whole, tokens)
    error = run(model, chunked, *tokens.split([20, 1, 43], dim=1)) - expected
    assert error.norm() < 1e-3 * expected.norm()
    values = [
        Fp8Rows(TINY.attention).parts(cache.entries.flatten(0, 1))[0].float()
        for cache in (whole, chunked)
    ]
    assert (values[0] != values[1]).float().mean() < 0.002


def test_a_ragged_batch_equals_its_sequences_one_by_one(model):
    lengths, prompts, more = [3, 7, 1], draw_tokens(3, 7), draw_tokens(3, 4)
    cache = fp8_cache(model, 3, 12)
    run(model, cache, prompts)
    cache.rewind(lengths)
    together = run(model, cache, *more.split([1, 3], dim=1))
    for row, length in enumerate(lengths):
        one = fp8_cache(model, 1, 12)
        alone = run(model, one, prompts[row : row + 1, :length], more[row : row + 1])
        assert_same(together[row], alone[0, length:])
        end = length + 4
        assert torch.equal(cache.entries[:, row, :end], one.entries[:, 0, :end])


@pytest.mark.parametrize("kept", [0, 3, 5])
def test_a_rewound_cache_equals_one_that_never_went_on(model, kept):
    tokens, more = draw_tokens(2, 5), draw_tokens(2, 8)[:, 5:]
    rewound, straight = fp8_cache(model, 2, 8), fp8_cache(model, 2, 8)
    run(model, rewound, tokens)
    rewound.rewind(kept)
    expected = run(model, straight, torch.cat((tokens[:, :kept], more), dim=1))
    assert_same(run(model, rewound, more), expected[:, kept:])
    end = kept + 3
    assert torch.equal(rewound.entries[:, :, :end], straight.entries[:, :, :end])


def test_what_was_reserved_and_not_committed_is_not_held():
    model, tokens = build(TINY), draw_tokens(1, 4)
    cache, clean = fp8_cache(model, 1, 8), fp8_cache(model, 1, 8)
    with torch.inference_mode():
        cache.reserve(1, 2).layer(0).extend(torch.ones(1, 2, 48).double())
    assert cache.lengths == (0,)
    assert torch.equal(run(model, cache, tokens), run(model, clean, tokens))
    assert torch.equal(cache.entries, clean.entries)


@pytest.mark.parametrize("lengths", [None, [3, 6]])
def test_generate_continues_as_if_it_read_everything_at_each_token(model, lengths):
    prompts = draw_tokens(2, 6)
    cache = fp8_cache(model, 2, 13)
    new = generate(model, prompts, 8, cache=cache, lengths=lengths).tokens
    for row, length in enumerate(lengths or [6, 6]):
        tokens = prompts[row : row + 1, :length]
        for _ in range(8):
            logits = run(model, fp8_cache(model, 1, tokens.shape[1]), tokens)
            tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), dim=1)
        assert torch.equal(new[row], tokens[0, length:])
        assert cache.lengths[row] == length + 7


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("lengths", [None, [3, 6]])
def test_speculative_decoding_gives_the_tokens_and_bytes_of_plain(depth, lengths):
    model = build(replace(TINY, mtp=MTPConfig(depth=depth)))
    prompts, caches, results = draw_tokens(2, 6), [], []
    for is_speculative in (False, True):
        caches.append(fp8_cache(model, 2, 17))
        options = {"lengths": lengths, "speculative": is_speculative}
        results.append(generate(model, prompts, 12, cache=caches[-1], **options))
    assert results[1].n_drafted > 0
    assert torch.equal(results[1].tokens, results[0].tokens)
    assert caches[1].lengths == caches[0].lengths
    for row, end in enumerate(caches[0].lengths):
        ours, plain = (cache.entries[:, row, :end] for cache in caches)
        assert torch.equal(ours, plain)


def test_modules_that_draft_cache_in_fp8_too(monkeypatch):
    model, made = build(replace(TINY, mtp=MTPConfig(depth=2))), []
    cache = fp8_cache(model, 1, 12)
    reserve = LatentCache.reserve

    def recording(self, *shape):
        made.append(self.dtype)
        return reserve(self, *shape)

    monkeypatch.setattr(LatentCache, "reserve", recording)
    generate(model, draw_tokens(1, 6), 6, cache=cache, speculative=True)
    assert len(made) > 6 and set(made) == {"fp8"}


def test_the_form_for_one_token_reads_and_writes_fp8_too():
    model = build(replace(TINY, moe=None), torch.float32)
    tokens, results = draw_tokens(1, 9), []
    for forward in (AbsorbedModel(model), model):
        cache = fp8_cache(model, 1, 9)
        run(model, cache, tokens[:, :6])
        results.append((run(forward, cache, *tokens[:, 6:].split(1, dim=1)), cache))
    (absorbed, ours), (by_modules, theirs) = results
    torch.testing.assert_close(absorbed, by_modules, rtol=1e-4, atol=1e-5)
    differing = (ours.entries != theirs.entries).sum() / ours.entries.numel()
    assert differing < 0.01  # scales and keys to their last bit, values but for ties


@pytest.mark.parametrize(("name", "measured"), [("tiny", 0.0174), ("small", 0.0328)])
def test_logits_move_by_less_than_one_rounding_to_e4m3(name, measured):
    cfg = replace(PRESETS[name], moe=None)  # a router could flip an expert instead
    model = Transformer(cfg, generator=torch.Generator().manual_seed(0)).eval()
    tokens = draw_tokens(2, 96)
    cached = run(model, fp8_cache(model, 2, 96), *tokens.split([60, 1, 35], dim=1))
    with torch.inference_mode():
        exact = model(tokens)
    error = float((cached - exact).norm() / exact.norm())
    assert error == pytest.approx(measured, rel=0.1)
    assert error < 2**-4  # half a unit in the last place of E4M3, per value


# Refusals


def test_attention_without_latents_is_refused():
    cfg = replace(TINY, attention=GQAConfig(n_heads=4, n_kv_heads=2, head_dim=8))
    expected = (
        "an FP8 cache must be one of MLA, whose latent its published layout quantizes; "
        "got attention of kind 'gqa'. Cache in BF16, or set attention=MLAConfig(...)."
    )
    assert refused(lambda: LatentCache(cfg, 1, 4, dtype="fp8")) == expected
    assert refused(lambda: cfg.kv_bytes_per_token("fp8")) == expected


@pytest.mark.parametrize("dtype", ["float8", torch.float8_e4m3fn])
def test_another_spelling_is_answered_with_the_right_one(dtype):
    assert refused(lambda: LatentCache(TINY, 1, 4, dtype=dtype)) == (
        f"dtype must be a cache dtype; got {dtype!r}. Use one of torch.bfloat16, "
        "torch.float16, torch.float32, 'fp8'."
    )


def test_filling_with_gradients_is_refused():
    model = build(TINY)
    cache = fp8_cache(model, 1, 4)
    assert refused(lambda: model(torch.tensor([[1]]), cache)).startswith(
        "a cache must be filled without gradients, which do not flow through it; got"
    )
    assert not cache.entries.any()


def test_rows_are_counted_in_values_not_in_bytes():
    cache = LatentCache(replace(TINY, n_layers=1), 1, 8, dtype="fp8")
    assert refused(
        lambda: cache.update(0, torch.randn(1, 1, 68), torch.zeros(1, 1).long())
    ) == (
        "entries must have a row of cfg.attention.cache_width=48 values for each of "
        "(1, 1) positions; got (1, 1, 68). For MLA join latent and rotary key."
    )


def test_repr_tells_the_values_of_a_row_and_their_storage():
    cache = LatentCache(replace(TINY, n_layers=2), 2, 8, dtype="fp8")
    assert repr(cache) == (
        "LatentCache(2 layers, 2 sequences of 8 tokens, 48 wide, fp8, lengths=[0, 0])"
    )
