"""The cache of a decoder: one block, allocated once and filled by position.

Each layer keeps one row per token. For MLA it holds the latent after its norm and
the shared key after RoPE (DeepSeek-V2, section 2.1.2), for GQA the keys after RoPE
and the values, so a row is read as it lies; or, in FP8, what its bytes stand for. Rows
past a sequence's length are stale and hidden; `rewind` is therefore only a shorter
length.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from labkit.config import MLAConfig, ModelConfig
from labkit.config.checks import require_whole
from labkit.model.cache_fp8 import Fp8Rows
from labkit.model.checks import as_whole

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, "fp8")


class LatentCache:
    """Rows of the tokens so far, for every main layer and `batch` sequences.

    MTP modules are not included: speculative decoding keeps caches of its own.

    Args:
        cfg: the model; its layers and `cache_width` fix the shape.
        batch: sequences, which may differ in length.
        max_seq: tokens that each sequence has room for.
        dtype: dtype of the stored rows, whatever the model computes in. "fp8" is for
            MLA: rows of bytes in a published layout, see `Fp8Rows`. A row is quantized
            once, when it is written; each forward pass dequantizes all rows of one
            layer after the other, its new tokens' too, into the dtype it computes in.
        device: where they are stored.

    >>> from labkit.config import PRESETS
    >>> tiny = PRESETS["tiny"]
    >>> LatentCache(tiny, 2, 100).nbytes == 200 * tiny.kv_bytes_per_token("bfloat16")
    True
    >>> LatentCache(tiny, 2, 100, dtype="fp8").nbytes
    54400
    >>> LatentCache(tiny, 2, 100, dtype="fp8").nbytes == (
    ...     200 * tiny.kv_bytes_per_token("fp8")
    ... )
    True
    """

    def __init__(
        self,
        cfg: ModelConfig,
        batch: int,
        max_seq: int,
        *,
        dtype: torch.dtype | str = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        require_whole({"batch": batch, "max_seq": max_seq})
        if dtype not in CACHE_DTYPES:
            names = ", ".join(map(repr, CACHE_DTYPES))
            raise ValueError(
                f"dtype must be a cache dtype; got {dtype!r}. Use one of {names}."
            )
        self.cfg = cfg
        self.dtype = dtype
        self._fp8, stored, width = None, dtype, cfg.attention.cache_width
        if dtype == "fp8":
            self._fp8 = Fp8Rows(cfg.attention, device=device)
            stored, width = torch.uint8, self._fp8.n_bytes
        shape = (cfg.n_layers, batch, max_seq, width)
        # Zeros, because a hidden row is multiplied by 0, and 0 · NaN is NaN.
        self.entries = torch.zeros(shape, dtype=stored, device=device)
        self._lengths = (0,) * batch
        self._ahead: dict[int, tuple[int, ...]] = {}

    def __repr__(self) -> str:
        n_layers, batch, max_seq, _ = self.entries.shape
        return (
            f"LatentCache({n_layers} layers, {batch} sequences of {max_seq} tokens, "
            f"{self.cfg.attention.cache_width} wide, {self.dtype}, "
            f"lengths={list(self._lengths)})"
        )

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.entries.shape[1]

    @property
    def max_seq(self) -> int:
        """Tokens that each sequence has room for."""
        return self.entries.shape[2]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence that all layers hold."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """Bytes stored: the config's bytes per token × batch × max_seq, exactly."""
        return self.entries.nbytes

    def require_fit(self, cfg: ModelConfig) -> None:
        """Raise ValueError unless the layers of `cfg` write the rows of this cache."""
        if cfg is not self.cfg and layers_of_rows(cfg) != layers_of_rows(self.cfg):
            raise ValueError(
                "a cache must be made for the model's own layers; the model has "
                f"{layers_of_rows(cfg)}, the cache {layers_of_rows(self.cfg)}. "
                "Build LatentCache(model.cfg, batch, max_seq)."
            )

    def require_batch(self, batch: int) -> None:
        """Raise ValueError unless the cache is one of `batch` sequences."""
        if batch != self.batch:
            raise ValueError(
                "there must be one row per sequence of the cache; got "
                f"{batch} for a cache of {self.batch}. Build "
                f"LatentCache(cfg, {batch}, max_seq), or pass {self.batch}."
            )

    def reserve(self, batch: int, n_new: int) -> "Window":
        """Return the window through which a forward pass adds `n_new` tokens.

        Nothing counts as held until the window's `commit`.

        Raises:
            ValueError: not one row per sequence, or no room.
        """
        self.require_batch(batch)
        if self._ahead:
            layers = ", ".join(map(str, sorted(self._ahead)))
            raise ValueError(
                "all layers must hold the same tokens before a forward pass; layers "
                f"{layers} were updated and the others not. Update every layer, or "
                "call rewind."
            )
        starts = self._lengths
        end = max(starts) + n_new
        if end > self.max_seq:
            self._raise_full(starts.index(max(starts)), n_new)
        ends = tuple(start + n_new for start in starts)
        if min(starts) == max(starts):
            return self._uniform_window(starts[0], end, ends)
        return self._ragged_window(n_new, end, ends)

    def rewind(self, lengths: int | Sequence[int]) -> None:
        """Forget all tokens past `lengths`, one for all or one per sequence.

        Raises:
            ValueError: not one whole number per sequence, or more than are held.
        """
        is_many = isinstance(lengths, Iterable)
        wanted = tuple(lengths) if is_many else (lengths,) * self.batch
        self.require_batch(len(wanted))
        whole = tuple(map(as_whole, wanted))
        for sequence, held in enumerate(self._lengths):
            if whole[sequence] is None or not 0 <= whole[sequence] <= held:
                raise ValueError(
                    "rewind must go back, to a whole number of tokens; sequence "
                    f"{sequence} holds {held}, and {wanted[sequence]} were asked for. "
                    f"Pass 0 to {held}."
                )
        self._lengths = whole
        self._ahead.clear()

    def update(
        self,
        layer: int,
        entries: Float[Tensor, "b s w"],
        positions: Int[Tensor, "b s"],
    ) -> Float[Tensor, "b t w"]:
        """Write rows of one layer at `positions`; return all that it holds.

        A forward pass does the same for all layers at once, and checks once. The
        new tokens count as held when every layer has them. Of a sequence shorter
        than the longest, the last rows returned are stale.

        Raises:
            ValueError: wrong batch or width, or positions that do not follow on
                those the layer holds, one by one and within `max_seq`.
        """
        self.require_batch(len(entries))
        starts = self._ahead.get(layer, self._lengths)
        self._check_rows(layer, entries, positions)
        for sequence, (start, row) in enumerate(
            zip(starts, positions.tolist(), strict=True)
        ):
            self._check_positions(layer, sequence, start, row)
        ends = tuple(start + positions.shape[1] for start in starts)
        visible = self.entries[layer, :, : max(ends)]
        scattered = _Scattered(visible, _rows(positions), positions, None)
        held = self._readable([scattered])[0].extend(entries)
        self._ahead[layer] = ends
        if [*self._ahead.values()] == [ends] * len(self.entries):
            self._lengths = ends
            self._ahead.clear()
        return held

    def _uniform_window(self, start: int, end: int, ends: tuple[int, ...]) -> "Window":
        positions = torch.arange(start, end, device=self.entries.device)
        mask = None
        if start > 0 and end - start > 1:
            mask = _visible(positions.expand(self.batch, -1), end)
        # Views of all layers in one call: a slice per layer costs 2 µs each.
        every = self.entries.narrow(2, 0, end).unbind()
        fresh = self.entries.narrow(2, start, end - start).unbind()
        layers = [_Sliced(*views, mask) for views in zip(every, fresh, strict=True)]
        return Window(self, positions, self._readable(layers), ends)

    def _ragged_window(self, n_new: int, end: int, ends: tuple[int, ...]) -> "Window":
        device = self.entries.device
        starts = torch.tensor(self._lengths, device=device).unsqueeze(-1)
        positions = starts + torch.arange(n_new, device=device)  # (b, s)
        mask, rows = _visible(positions, end), _rows(positions)
        layers = [
            _Scattered(every, rows, positions, mask)
            for every in self.entries[:, :, :end].unbind()
        ]
        return Window(self, positions, self._readable(layers), ends)

    def _readable(
        self, layers: "list[_Sliced] | list[_Scattered]"
    ) -> "list[_Sliced] | list[_Scattered] | list[_Quantized]":
        """Return what takes and gives values, not bytes."""
        if self._fp8 is None:
            return layers
        return [_Quantized(layer, self._fp8) for layer in layers]

    def _check_rows(self, layer: int, entries: Tensor, positions: Tensor) -> None:
        n_layers, width = len(self.entries), self.cfg.attention.cache_width
        if not 0 <= layer < n_layers:
            raise ValueError(
                f"layer must be one of {n_layers} layers; got {layer}. "
                f"Pass 0 to {n_layers - 1}."
            )
        if entries.shape != (*positions.shape, width):
            raise ValueError(
                f"entries must have a row of cfg.attention.cache_width={width} values "
                f"for each of {tuple(positions.shape)} positions; got "
                f"{tuple(entries.shape)}. For MLA join latent and rotary key."
            )

    def _check_positions(
        self, layer: int, sequence: int, start: int, row: list[int]
    ) -> None:
        if start + len(row) > self.max_seq:
            self._raise_full(sequence, len(row), start)
        if row != list(range(start, start + len(row))):
            raise ValueError(
                "positions must follow on those held, without gap or repeat; layer "
                f"{layer} holds {start} tokens of sequence {sequence}, so the next are "
                f"{list(range(start, start + len(row)))}; got {row}. "
                "To write a position again, rewind to it first."
            )

    def _raise_full(self, sequence: int, n_new: int, held: int | None = None) -> None:
        held = self._lengths[sequence] if held is None else held
        raise ValueError(
            f"positions must be below max_seq={self.max_seq}; sequence {sequence} "
            f"holds {held} tokens and {n_new} more were given. Build the cache with "
            f"max_seq={held + n_new} or more, or rewind it."
        )


def layers_of_rows(cfg: ModelConfig) -> str:
    """Return in words what determines the shape and the meaning of a cache's rows.

    >>> from labkit.config import PRESETS
    >>> layers_of_rows(PRESETS["v3-671b"])
    '61 layers of latents of 512 and rotary keys of 64'
    """
    attention = cfg.attention
    if isinstance(attention, MLAConfig):
        latent, key = attention.kv_lora_rank, attention.qk_rope_head_dim
        row = f"latents of {latent} and rotary keys of {key}"
    else:
        row = f"keys and values of {attention.n_kv_heads} x {attention.head_dim}"
    return f"{cfg.n_layers} layers of {row}"


@dataclass(slots=True)
class Window:
    """The place of one forward pass's new tokens in a cache."""

    cache: LatentCache
    positions: Int[Tensor, "*b s"]
    """Without a batch dimension while all sequences are equally long."""

    layers: list["_Sliced"] | list["_Scattered"] | list["_Quantized"]
    ends: tuple[int, ...]

    def layer(self, index: int) -> "LayerView":
        """Return the view that one attention layer reads and writes."""
        return self.layers[index]

    def commit(self) -> None:
        """Count the new tokens as held, after every layer has stored its rows."""
        self.cache._lengths = self.ends


@dataclass(slots=True)
class _Sliced:
    """One layer while all sequences are equally long: plain slices."""

    every: Shaped[Tensor, "b t w"]
    fresh: Shaped[Tensor, "b s w"]
    mask: Bool[Tensor, "b s t"] | None

    def extend(self, entries: Shaped[Tensor, "b s w"]) -> Shaped[Tensor, "b t w"]:
        _require_no_grad(entries)
        self.fresh.copy_(entries)
        return self.every


@dataclass(slots=True)
class _Scattered:
    """One layer while sequences differ in length: rows at indexed positions."""

    every: Shaped[Tensor, "b t w"]
    rows: Int[Tensor, "b 1"]
    positions: Int[Tensor, "b s"]
    mask: Bool[Tensor, "b s t"] | None

    def extend(self, entries: Shaped[Tensor, "b s w"]) -> Shaped[Tensor, "b t w"]:
        _require_no_grad(entries)
        self.every[self.rows, self.positions] = entries.type_as(self.every)
        return self.every


@dataclass(slots=True)
class _Quantized:
    """One layer in FP8: encoded on its way in, and all of it decoded on its way out."""

    stored: _Sliced | _Scattered
    rows: Fp8Rows

    @property
    def mask(self) -> Bool[Tensor, "b s t"] | None:
        return self.stored.mask

    def extend(self, entries: Float[Tensor, "b s w"]) -> Float[Tensor, "b t w"]:
        _require_no_grad(entries)
        held = self.stored.extend(self.rows.encode(entries))
        return self.rows.decode(held, entries.dtype)


LayerView = _Sliced | _Scattered | _Quantized


def _require_no_grad(entries: Tensor) -> None:
    if entries.requires_grad:
        raise ValueError(
            "a cache must be filled without gradients, which do not flow through it; "
            "got entries that require them. Call the model under "
            "torch.inference_mode(), or train without a cache."
        )


def _visible(positions: Int[Tensor, "b s"], n_keys: int) -> Bool[Tensor, "b s t"]:
    """Return True where a key's position is not after the query's."""
    keys = torch.arange(n_keys, device=positions.device)
    return keys <= positions.unsqueeze(-1)


def _rows(positions: Int[Tensor, "b s"]) -> Int[Tensor, "b 1"]:
    return torch.arange(len(positions), device=positions.device).unsqueeze(-1)
