"""The clinic: every fault is really there and gets its name; healthy runs get none."""

import pytest
import torch

from labkit.config import PRESETS
from labkit.model import LatentCache, Transformer
from labkit.workbook import clinic

PLANTED = {
    "keeps graphs": ("graph", "`losses` of KeepsGraphs"),
    "adds hooks": ("hook", "forward hooks of `norm`"),
    "keeps metrics": ("container", "`losses` of KeepsMetrics"),
    "keeps closures": ("closure", "`reports` of KeepsClosures"),
    "concatenates": ("concatenation", "`rows` of ConcatenatingCache"),
    "never rewinds": ("positions", "`entries` of TrustingCache"),
}

pytestmark = pytest.mark.usefixtures("unchecked")  # the runs take much longer otherwise


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named_with_its_holder(name):
    report = clinic.examine(clinic.PATIENTS[name](), n_steps=9)

    assert [(leak.cause, leak.holder) for leak in report.leaks] == [PLANTED[name]]


@pytest.mark.parametrize("name", sorted(clinic.PATIENTS.keys() - PLANTED.keys()))
def test_a_healthy_run_is_not_accused_of_its_first_step(name):
    run = clinic.PATIENTS[name]()
    report = clinic.examine(run, n_steps=9)

    assert report.leaks == ()
    assert report.bytes_per_step == 0
    if name == "training, healthy":
        weights = list(run.model.parameters())
        moments = sum(2 * weight.nbytes for weight in weights)
        step_counts = 4 * len(weights)
        assert report.live_bytes == (moments + step_counts,) * 9


def test_all_runs_serve_the_same_answers_to_the_first_prompt():
    prompt = torch.arange(10, 22)[None]
    caches = [run().cache for name, run in clinic.PATIENTS.items() if name in SERVES]
    model = clinic.Serving().model
    with torch.inference_mode():
        expected = model(prompt)
        for cache in caches:
            torch.testing.assert_close(model(prompt, cache), expected)


SERVES = ("serving, healthy", "concatenates", "never rewinds")


def model() -> Transformer:
    # Weights as large as learnt ones, so that answers depend on what is read.
    generator = torch.Generator().manual_seed(0)
    made = Transformer(PRESETS["tiny"], generator=generator)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim > 1:
                weight.mul_(4)
    return made


def test_rewound_and_at_their_own_lengths_two_prompts_are_read_as_without_a_cache():
    effect = clinic.place_tokens(model(), lambda lengths: lengths, n_batches=3)

    assert effect.difference < 1e-3
    assert effect.n_places == 3 * 2 * 12
    assert effect.cache_bytes == 2 * 24 * PRESETS["tiny"].kv_bytes_per_token("float32")


def test_a_cache_that_is_never_rewound_is_as_large_as_all_it_has_read():
    effect = clinic.place_tokens(
        model(), lambda lengths: lengths, rewinds=False, n_batches=3
    )

    per_token = PRESETS["tiny"].kv_bytes_per_token("float32")
    assert effect.cache_bytes == 3 * 2 * 24 * per_token
    assert effect.difference > 0.01


@pytest.mark.parametrize(
    "place",
    [
        lambda lengths: tuple(length + 1 for length in lengths),
        lambda lengths: tuple(length - 1 for length in lengths),
        lambda lengths: (max(lengths),) * len(lengths),
    ],
    ids=["too late", "too early", "after the longest"],
)
def test_wrong_places_change_logits_and_raise_nothing(place):
    effect = clinic.place_tokens(model(), place, n_batches=3)

    assert effect.difference > 0.01


def test_a_cache_that_trusts_writes_what_the_real_one_refuses():
    trusting = clinic.TrustingCache(PRESETS["tiny"], 1, 4, dtype=torch.float32)
    trusting.seek(9)
    trusting.reserve(1, 2)

    assert trusting.max_seq == 11
    with pytest.raises(ValueError, match="positions must be below max_seq=4"):
        LatentCache(PRESETS["tiny"], 1, 4).reserve(1, 5)
