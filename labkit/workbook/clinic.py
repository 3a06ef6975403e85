"""The clinic: small runs on real text, healthy ones and six with a fault each.

Every run is done for real. One that trains has a small DeepSeek-V3, AdamW and the
standard library's source; one that serves reads a prompt into a cache in each step,
and writes an answer. A sick run differs from its healthy parent in one method or two.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from labkit.config import PRESETS, ModelConfig
from labkit.memory import LeakReport, LeakWatch
from labkit.model import LatentCache, Transformer
from labkit.model.transformer import LossParts
from labkit.training import RECIPES, corpus
from labkit.training.optimizer import build_optimizer
from labkit.training.windows import Batch, Windows

BATCH, SEQ_LEN = 2, 64

PROMPT, ANSWER = 12, 4
"""Tokens of each conversation of a run that serves."""

N_STEPS = 14
"""As many conversations as fit into the 256 positions of `tiny`, and two to spare."""


class Training:
    """Trains, and keeps the loss of each step as a number. Healthy."""

    def __init__(self, cfg: ModelConfig = PRESETS["tiny"]) -> None:
        self.model = Transformer(cfg, generator=torch.Generator().manual_seed(0))
        self.optimizer = build_optimizer(self.model, RECIPES["tiny"])
        text = corpus.standard_library()
        self.text = Windows(text.train, SEQ_LEN)
        self.held_out = Windows(text.valid, SEQ_LEN).take(0, BATCH)
        self.n_steps = 0
        self.losses = []

    def step(self) -> None:
        """Learn from one batch."""
        batch = self.text.take(BATCH * self.n_steps, BATCH)
        parts = self.model.loss(batch.tokens, batch.targets)
        parts.total.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.n_steps += 1
        self.note(batch, parts)

    def note(self, batch: Batch, parts: LossParts) -> None:
        """Keep what shall be known of a step."""
        self.losses.append(parts.total.item())


class KeepsGraphs(Training):
    """Keeps the loss on held-out text, as it comes."""

    def note(self, batch: Batch, parts: LossParts) -> None:
        held_out = self.model.loss(self.held_out.tokens, self.held_out.targets)
        self.losses.append(held_out.total)


class AddsHooks(Training):
    """Logs in a hook how far the last norm has moved."""

    def note(self, batch: Batch, parts: LossParts) -> None:
        before = self.model.norm.weight.detach().clone()
        self.model.norm.register_forward_hook(
            lambda norm, args, out: self.log(norm.weight - before)
        )

    def log(self, moved: Float[Tensor, "d"]) -> None:
        """Note how far weights have moved."""
        self.moved = moved.norm().item()


class KeepsMetrics(Training):
    """Keeps the parts of the loss and the load of all experts, for a plot."""

    def note(self, batch: Batch, parts: LossParts) -> None:
        self.losses.append({"main": parts.main, "load": parts.load})


class KeepsClosures(Training):
    """Puts off what it wants to print to the end of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.reports = []

    def note(self, batch: Batch, parts: LossParts) -> None:
        with torch.no_grad():
            logits = self.model(batch.tokens)
        self.reports.append(lambda: f"it expects {logits[0, -1].argmax()}")


class Serving:
    """Answers a prompt in each step, with one cache for all of them. Healthy."""

    def __init__(self, cache: LatentCache | None = None) -> None:
        cfg = PRESETS["tiny"]
        self.model = Transformer(cfg, generator=torch.Generator().manual_seed(0))
        self.prompts = Windows(corpus.standard_library().valid, PROMPT)
        self.cache = cache or LatentCache(cfg, 1, PROMPT + ANSWER, dtype=torch.float32)
        self.n_steps = 0

    @torch.inference_mode()
    def step(self) -> None:
        """Read a prompt and answer it, a token at a time."""
        self.begin()
        tokens = self.prompts.take(self.n_steps, 1).tokens
        for _ in range(ANSWER):
            tokens = self.model(tokens, self.cache)[:, -1:].argmax(-1)
        self.n_steps += 1

    def begin(self) -> None:
        """Forget the conversation before."""
        self.cache.rewind(0)


class TrustingCache(LatentCache):
    """Believes where it is told to write, and makes room for it."""

    def seek(self, *lengths: int) -> None:
        """Go on after so many tokens of each sequence, whatever it holds."""
        self._lengths = lengths

    def reserve(self, batch: int, n_new: int) -> object:
        """Return the window for new tokens; one that is full is no obstacle."""
        missing = max(self.lengths) + n_new - self.max_seq
        if missing > 0:
            self.entries = F.pad(self.entries, (0, 0, 0, missing))
        return super().reserve(batch, n_new)


class NeverRewinds(Serving):
    """Lets a cache that makes room go on from where the last answer ended."""

    def __init__(self) -> None:
        room = PROMPT + ANSWER
        super().__init__(TrustingCache(PRESETS["tiny"], 1, room, dtype=torch.float32))

    def begin(self) -> None:
        pass


class ConcatenatingCache(LatentCache):
    """Joins the rows of new tokens to those of each layer, and never lets go."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__(cfg, 1, 1, dtype=torch.float32)
        empty = torch.empty(1, 0, cfg.attention.cache_width)
        self.rows = [empty for _ in range(cfg.n_layers)]

    def reserve(self, batch: int, n_new: int) -> "_Joining":
        """Return the window for new tokens."""
        return _Joining(self, self.rows[0].shape[1], n_new)


class _Joining:
    """The place of new tokens behind all that were there."""

    def __init__(self, cache: ConcatenatingCache, start: int, n_new: int) -> None:
        self.cache = cache
        self.ends = (start + n_new,)
        self.positions = torch.arange(start, start + n_new)
        keys = torch.arange(start + n_new)
        self.mask = (keys <= self.positions[:, None])[None]

    def layer(self, index: int) -> "_JoinedLayer":
        return _JoinedLayer(self.cache.rows, index, self.mask)

    def commit(self) -> None:
        """Do nothing: the rows themselves tell how many there are."""


@dataclass(frozen=True, slots=True)
class _JoinedLayer:
    rows: list[Float[Tensor, "1 t w"]]
    index: int
    mask: Bool[Tensor, "1 s t"]

    def extend(self, entries: Float[Tensor, "1 s w"]) -> Float[Tensor, "1 t w"]:
        self.rows[self.index] = torch.cat([self.rows[self.index], entries], dim=1)
        return self.rows[self.index]


class Concatenates(Serving):
    """Has a cache that cannot forget."""

    def __init__(self) -> None:
        super().__init__(ConcatenatingCache(PRESETS["tiny"]))

    def begin(self) -> None:
        pass


PATIENTS: Mapping[str, type[Training] | type[Serving]] = MappingProxyType(
    {
        "training, healthy": Training,
        "keeps graphs": KeepsGraphs,
        "adds hooks": AddsHooks,
        "keeps metrics": KeepsMetrics,
        "keeps closures": KeepsClosures,
        "serving, healthy": Serving,
        "concatenates": Concatenates,
        "never rewinds": NeverRewinds,
    }
)
"""The runs, by what they do."""


def examine(run: Training | Serving, n_steps: int = N_STEPS) -> LeakReport:
    """Watch a run for some steps, and return what grew and who holds it."""
    with LeakWatch(run.model) as watch:
        for _ in range(n_steps):
            run.step()
            watch.end_step()
    report = watch.report()
    watch.close()
    return report


LENGTHS = (12, 7)
"""Tokens of two prompts in one batch."""

N_READ = 12
"""Tokens that are read after each prompt, one at a time."""

Place = Callable[[tuple[int, ...]], tuple[int, ...]]
"""From the lengths of the prompts to the positions after them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """What a way to place tokens in a cache does to answers."""

    cache_bytes: int
    difference: float
    """The largest in any logit."""

    n_changed: int
    """Places where another byte is the most likely one."""

    n_places: int
    nats: float
    """Mean loss on the text that really follows."""


@torch.inference_mode()
def place_tokens(
    model: Transformer, place: Place, *, rewinds: bool = True, n_batches: int = 10
) -> Effect:
    """Read batches of two prompts and what follows them; compare with no cache at all.

    Args:
        model: a model that has learnt something.
        place: where each sequence goes on.
        rewinds: whether each batch begins at position 0.
        n_batches: read with one cache, one after the other.
    """
    room = max(LENGTHS) + N_READ
    cache = TrustingCache(model.cfg, len(LENGTHS), room, dtype=torch.float32)
    windows = Windows(corpus.standard_library().valid, room)
    differences, changed, losses = [], [], []
    for number in range(n_batches):
        batch = windows.take(len(LENGTHS) * number, len(LENGTHS))
        if rewinds:
            cache.rewind(0)
        logits = _read_on(model, cache, batch.tokens, place)
        for row, length in enumerate(LENGTHS):
            part = slice(length, length + N_READ)
            right = model(batch.tokens[row : row + 1, : length + N_READ])[0, length:]
            differences.append((logits[row] - right).abs().max().item())
            changed.append(logits[row].argmax(-1) != right.argmax(-1))
            losses.append(F.cross_entropy(logits[row], batch.targets[row, part]))
    return Effect(
        cache_bytes=cache.nbytes,
        difference=max(differences),
        n_changed=int(torch.cat(changed).sum()),
        n_places=len(torch.cat(changed)),
        nats=float(torch.stack(losses).mean()),
    )


def _read_on(
    model: Transformer, cache: TrustingCache, text: Int[Tensor, "b s"], place: Place
) -> Float[Tensor, "b n v"]:
    """Return the logits of the tokens after the prompts."""
    before = cache.lengths
    prompts = text[:, : max(LENGTHS)].clone()
    for row, length in enumerate(LENGTHS):
        prompts[row, length:] = corpus.SEPARATOR  # the shorter prompt is filled up
    model(prompts, cache)
    cache.seek(*map(sum, zip(before, place(LENGTHS), strict=True)))
    columns = []
    for n in range(N_READ):
        tokens = [text[row, length + n] for row, length in enumerate(LENGTHS)]
        columns.append(model(torch.stack(tokens)[:, None], cache))
    return torch.cat(columns, dim=1)
