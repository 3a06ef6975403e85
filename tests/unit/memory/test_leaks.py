"""Planted leaks are found and named; clean runs, also untidy ones, are not accused."""

import gc
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labkit.memory.leaks import LeakReport, LeakWatch

N_STEPS = 9
"""As many as `watch` runs."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def only(report: LeakReport) -> tuple[str, str, int]:
    assert len(report.leaks) == 1, str(report)
    leak = report.leaks[0]
    return leak.cause, leak.holder, leak.bytes_per_step


def test_a_loss_kept_with_its_graph(model, watch):
    losses = []

    def step() -> None:
        losses.append(model(torch.ones(2, 8)).sum())

    report = watch(model, step)

    # The loss, the batch, the hidden layer after its tanh: 1 + 2·8 + 2·16 values.
    name = "`losses` in test_a_loss_kept_with_its_graph()"
    assert only(report) == ("graph", name, 4 * (1 + 16 + 32))
    assert report.bytes_per_step == 4 * (1 + 16 + 32)
    assert "Keep the number, loss.item()" in str(report)


def test_a_sum_of_losses_that_carries_every_graph(model, watch):
    class Meter:
        total = 0.0

    meter = Meter()

    def step() -> None:
        meter.total = meter.total + model(torch.ones(2, 8)).sum()

    assert only(watch(model, step))[:2] == ("graph", "`total` of Meter")


def test_a_hook_registered_at_every_step(model, watch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model[1].register_forward_hook(lambda module, args, out: None)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    report = watch(model, step)

    assert only(report) == ("hook", "forward hooks of `1`", 0)
    assert report.leaks[0].grown == "1 hooks"


def test_a_hook_that_captures_a_tensor(model, watch):
    def step() -> None:
        scale = torch.ones(64)
        model[0].weight.register_hook(lambda gradient: gradient * scale.mean())

    assert only(watch(model, step)) == ("hook", "backward hooks of `0.weight`", 256)


class Cache:
    """Keys of the tokens so far."""

    def __init__(self) -> None:
        self.keys = torch.zeros(2, 0, 4)

    def append(self, new: torch.Tensor) -> None:
        self.keys = torch.cat((self.keys, new), dim=1)

    def update(self, new: torch.Tensor, positions: torch.Tensor) -> None:
        missing = int(positions.max()) + 1 - self.keys.shape[1]
        if missing > 0:
            self.keys = F.pad(self.keys, (0, 0, 0, missing))
        self.keys[:, positions] = new

    def update_slice(self, new: torch.Tensor, start: int) -> None:
        grown = self.keys.new_zeros(2, max(start + 3, self.keys.shape[1]), 4)
        grown[:, : self.keys.shape[1]] = self.keys
        grown[:, start : start + 3] = new
        self.keys = grown


def test_a_cache_that_concatenates(model, watch):
    cache = Cache()
    report = watch(model, lambda: cache.append(torch.ones(2, 3, 4)))

    assert only(report) == ("concatenation", "`keys` of Cache", 4 * 2 * 3 * 4)
    assert report.leaks[0].grown == "now (2, 27, 4) float32"


def test_caches_of_many_layers_are_one_leak(model, watch):
    caches = [Cache(), Cache()]

    def step() -> None:
        for cache in caches:
            cache.append(torch.ones(2, 3, 4))

    name = "`keys` of Cache, in `caches` in test_caches_of_many_layers_are_one_leak()"
    assert only(watch(model, step)) == ("concatenation", name, 2 * 4 * 2 * 3 * 4)


def test_a_cache_that_keeps_graphs_is_one_leak(model, watch):
    cache = Cache()

    def step() -> None:
        cache.append(model[2](model[0](torch.ones(2, 3, 8))))

    assert only(watch(model, step))[:2] == ("graph", "`keys` of Cache")


def test_a_cache_that_concatenates_by_hand(model, watch):
    cache = Cache()

    def step() -> None:
        cache.update_slice(torch.ones(2, 3, 4), cache.keys.shape[1])

    assert only(watch(model, step))[:2] == ("concatenation", "`keys` of Cache")


def test_a_cache_written_always_at_its_end(model, watch):
    cache = Cache()

    def step() -> None:
        start = cache.keys.shape[1]  # of the last batch, whose positions began at 0
        cache.update(torch.ones(2, 3, 4), torch.arange(start, start + 3))

    report = watch(model, step)

    assert only(report) == ("positions", "`keys` of Cache", 4 * 2 * 3 * 4)
    assert "Start the positions of each batch at 0" in str(report)


def test_the_same_cache_written_from_position_0_is_clean(model, watch):
    cache = Cache()
    step = lambda: cache.update(torch.ones(2, 3, 4), torch.arange(3))  # noqa: E731

    assert str(watch(model, step)) == "no leak in 9 steps"


def test_a_list_of_metrics_that_are_tensors(model, watch):
    class Monitor:
        def __init__(self) -> None:
            self.history = []

    monitor = Monitor()

    def step() -> None:
        monitor.history.append({"loss": model(torch.ones(2, 8)).mean().detach()})

    assert only(watch(model, step)) == ("container", "`history` of Monitor", 4)


def test_a_list_of_results_is_one_leak_whatever_their_parts(model, watch):
    class Result:
        __slots__ = ("loss", "load")

    results = []

    def step() -> None:
        results.append(Result())
        results[-1].loss, results[-1].load = torch.zeros(1), torch.zeros(4)

    name = "`results` in test_a_list_of_results_is_one_leak_whatever_their_parts()"
    assert only(watch(model, step)) == ("container", name, 4 * (1 + 4))


def test_a_monitor_that_stands_in_a_list_is_named_with_it(model, watch):
    class Monitor:
        def __init__(self) -> None:
            self.history = []

    monitors = [Monitor()]

    def step() -> None:
        monitors[0].history.append(torch.zeros(1))

    name = "test_a_monitor_that_stands_in_a_list_is_named_with_it()"
    holder = f"`history` of Monitor, in `monitors` in {name}"
    assert only(watch(model, step)) == ("container", holder, 4)


def test_a_dictionary_by_step_in_the_model(model, watch):
    model.seen = {}

    def step() -> None:
        model.seen[len(model.seen)] = torch.tensor([1.0, 2.0])

    assert only(watch(model, step)) == (
        "container",
        "`seen` of the model (Sequential)",
        8,
    )


def test_closures_that_keep_a_tensor(model, watch):
    callbacks = []

    def step() -> None:
        with torch.no_grad():
            hidden = model[0](torch.ones(2, 8))
        callbacks.append(lambda: hidden.mean().item())

    cause, holder, n_bytes = only(watch(model, step))

    assert (cause, n_bytes) == ("closure", 4 * 2 * 16)
    assert holder == "`callbacks` in test_closures_that_keep_a_tensor()"


def test_two_leaks_are_two_and_the_larger_comes_first(model, watch):
    small, large = [], []

    def step() -> None:
        small.append(torch.zeros(4))
        large.append(torch.zeros(64))

    report = watch(model, step)

    assert [leak.bytes_per_step for leak in report.leaks] == [256, 16]
    assert [leak.holder.split()[0] for leak in report.leaks] == ["`large`", "`small`"]
    assert report.bytes_per_step == 272
    # All but the memory of the list that was there is counted, step by step.
    assert report.live_bytes == tuple(272 * (step + 1) for step in range(N_STEPS))


def test_every_second_step_is_often_enough(model, watch):
    snapshots = []

    def step() -> None:
        step.n += 1
        if step.n % 2 == 0:
            snapshots.append(model[0].weight.detach().clone())

    step.n = 0

    assert only(watch(model, step))[0] == "container"


def test_a_collection_with_a_length_is_no_leak(model, watch):
    recent = deque(maxlen=100)

    assert watch(model, lambda: recent.append(torch.zeros(4))).leaks == ()


def test_state_made_late_for_each_parameter_is_no_leak(watch):
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(N_STEPS))
    optimizer = torch.optim.AdamW(experts.parameters())
    chosen = iter(experts)

    def step() -> None:
        next(chosen)(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        # Gradients stay: there is at most one for each parameter.
        optimizer.zero_grad(set_to_none=False)

    assert watch(experts, step).leaks == ()


def test_a_cache_that_has_filled_up_is_no_leak(model, watch):
    cache = {}

    def step() -> None:
        step.n += 1
        if step.n <= 5:
            cache[step.n] = torch.zeros(4)

    step.n = 0

    assert watch(model, step).leaks == ()


def test_a_window_that_slides_is_no_leak(model):
    recent = []
    with LeakWatch(model) as leak_watch:
        for _ in range(14):
            recent.append(torch.zeros(4))
            del recent[:-5]
            leak_watch.end_step()

    assert leak_watch.report().leaks == ()


def test_what_only_the_collector_of_cycles_frees_is_no_leak(model, watch):
    gc.collect()
    gc.disable()
    try:
        assert watch(model, lambda: Cycle(torch.zeros(100))).leaks == ()
    finally:
        gc.enable()


class Cycle:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.itself = tensor, self


def test_steps_that_nobody_watches_are_not_called_clean(model):
    leak_watch = LeakWatch(model)
    kept = []
    for _ in range(N_STEPS):
        kept.append(torch.zeros(4))
        leak_watch.end_step()

    rule = "steps must run where they are watched, within `with watch:` and in one thr"
    with pytest.raises(ValueError, match=rule):
        leak_watch.report()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("n_warm_up", [-1, 1.5, True, None])
def test_a_warm_up_of_no_number_of_steps_is_refused(model, n_warm_up):
    with pytest.raises(ValueError, match="n_warm_up must be a whole number of at le"):
        LeakWatch(model, n_warm_up=n_warm_up)


def test_too_few_steps_are_refused(model):
    leak_watch = LeakWatch(model)
    leak_watch.end_step()

    with pytest.raises(ValueError, match="a leak shows after at least 8 steps, 2 of"):
        leak_watch.report()
