"""Memory that runs out, really or by a limit, and the answer to it."""

import pickle
import re
import weakref
from dataclasses import replace

import pytest
import torch
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode

from labkit.config import PRESETS, MLAConfig, MoEConfig, TrainConfig
from labkit.hardware.units import memory
from labkit.memory import States, apply_recompute, measure, predict
from labkit.memory.out_of_memory import (
    ALONE,
    OutOfMemory,
    is_out_of_memory,
    memory_guard,
)
from labkit.memory.recompute import RECOMPUTE_POLICIES, recompute_policies
from labkit.model import Transformer

MIB = 2**20
TINY = replace(
    PRESETS["tiny"],
    dim=32,
    n_layers=2,
    inter_dim=64,
    attention=MLAConfig(
        n_heads=2,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=16,
    ),
    moe=MoEConfig(n_routed_experts=4, n_activated_experts=2, moe_inter_dim=16),
)
TRAIN = TrainConfig(micro_batch=4, global_batch=4, seq_len=64)
PEAK = predict(TINY, TRAIN).peak
CPU_TEXT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate "

pytestmark = pytest.mark.usefixtures("unchecked")  # each of very many operators


@pytest.fixture
def model() -> Transformer:
    return Transformer(TINY, generator=torch.Generator().manual_seed(0))


def steps(model, train=TRAIN, optimizer=None):
    """Return a function that does one step as `train` says."""
    tokens = torch.randint(256, (train.global_batch, train.seq_len + 1))
    parts = tokens.split(train.micro_batch)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[train.precision]

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for part in parts:
            with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
                loss = model.loss(part[:, :-1], part[:, 1:])
            loss.total.backward()
        if optimizer is not None:
            optimizer.step()

    return step


def adamw(model, **options) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), **({"fused": True} | options))


def out_of_memory(model, step, train=TRAIN, optimizer=None, **options) -> OutOfMemory:
    guard = memory_guard(model, train, optimizer, **options)
    with pytest.raises(OutOfMemory) as caught, guard:
        step()
    return caught.value


def asks_for_too_much(*_: object) -> None:
    torch.empty(2**50)


def says_cuda_is_full(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\n")


def test_a_cpu_without_memory_is_answered_with_where_it_happened(model):
    model.layers[1].ffn.register_forward_pre_hook(asks_for_too_much)
    error = out_of_memory(model, steps(model))
    first = str(error).splitlines()[0]
    assert first.startswith(
        f"out of memory, forward of layers.1.ffn: {CPU_TEXT}{2**52} by"
    )
    assert CPU_TEXT in str(error.__cause__)
    assert error.report == predict(TINY, TRAIN)
    assert error.is_undone


@pytest.mark.parametrize("fault", [says_cuda_is_full, asks_for_too_much])
def test_an_error_in_the_backward_is_placed_there(model, fault):
    model.layers[0].attn.register_full_backward_hook(fault)
    first = str(out_of_memory(model, steps(model))).splitlines()[0]
    assert first.startswith("out of memory, backward: ")


def test_an_error_in_what_is_computed_again_names_the_module(model):
    def fault(*_: object) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise MemoryError("no more")

    apply_recompute(model, "full")
    model.layers[1].attn.register_forward_pre_hook(fault)
    text = str(out_of_memory(model, steps(model)))
    assert text.startswith("out of memory, backward of layers.1.attn: no more\n")


def test_an_error_in_an_optimizer_leaves_weights_in_doubt(model):
    optimizer = adamw(model)
    optimizer.register_step_pre_hook(says_cuda_is_full)
    error = out_of_memory(model, steps(model, optimizer=optimizer))
    assert not error.is_undone
    assert str(error).startswith("out of memory, optimizer: CUDA out of memory.")
    assert str(error).endswith("changed: go on from what was saved before")


def test_other_errors_pass_and_leave_gradients_alone(model):
    def fail() -> None:
        model.norm.weight.grad = torch.ones(32)
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"), memory_guard(model, TRAIN):
        fail()
    assert model.norm.weight.grad is not None


def test_what_says_that_no_memory_is_left():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError())
    assert is_out_of_memory(RuntimeError(f"[enforce fail] {CPU_TEXT}1 bytes"))
    assert not is_out_of_memory(RuntimeError("expected Float but found Double"))


def test_a_step_that_would_fit_is_not_blamed(model):
    text = str(out_of_memory(model, says_cuda_is_full))
    assert "and would fit: look for what else holds memory" in text
    assert "remedies" not in text


@pytest.mark.parametrize("share", [0.4, 0.6, 0.99])
def test_a_step_ends_at_the_first_storage_that_passes_the_limit(model, share):
    optimizer = adamw(model)
    step = steps(model, optimizer=optimizer)
    step()
    limit = int(share * measure(step, model, optimizer).peak)
    report = out_of_memory(model, step, optimizer=optimizer, limit=limit).report
    lived = report.peak_instant
    biggest = 4 * TRAIN.micro_batch * TRAIN.seq_len * TINY.vocab_size
    assert limit < report.peak <= limit + biggest
    assert report.timeline[-1].total == report.peak
    assert lived.by_part["weights"] == sum(
        tensor.nbytes for tensor in (*model.parameters(), *model.buffers())
    )
    assert lived.by_part["moments"] == sum(
        value.nbytes for state in optimizer.state.values() for value in state.values()
    )


def test_until_it_ends_a_step_is_counted_as_measure_counts_it(model):
    step = steps(model)
    whole = measure(step, model)
    model.zero_grad(set_to_none=True)
    report = out_of_memory(model, step, limit=whole.peak - 1).report
    assert report.by_module == whole.by_module
    assert report.timeline[:4] == whole.timeline[:4]


def test_a_forward_that_ends_early_tells_what_its_modules_kept(model):
    whole = measure(steps(model), model)
    limit = whole.timeline[0].total + whole.by_part["activations"] // 2
    error = out_of_memory(model, steps(model), limit=limit)
    kept = error.report.by_module
    assert sum(kept.values()) == error.report.peak_instant.by_part["activations"]
    assert kept.items() <= whole.by_module.items() | {
        (name, kept[name])
        for name in list(kept)[-2:]  # where it was still running
    }
    assert f"of the activations: {max(kept, key=kept.get)} " in str(error)


def test_what_the_step_held_is_free_again(model):
    held = []
    model.layers[0].register_forward_hook(
        lambda module, args, out: held.append(weakref.ref(out[0]))
    )
    error = out_of_memory(model, steps(model), limit=PEAK // 2)
    assert held and all(ref() is None for ref in held)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert error.is_undone


def test_a_limit_changes_no_result(model):
    generator = torch.Generator().manual_seed(0)
    other = Transformer(TINY, generator=generator)
    for trained, limit in ((model, None), (other, 10**9)):
        optimizer = adamw(trained)
        torch.manual_seed(1)
        step = steps(trained, optimizer=optimizer)
        for _ in range(2):
            with memory_guard(trained, TRAIN, optimizer, limit=limit):
                step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two) and torch.equal(one.grad, two.grad)


def test_without_a_limit_nothing_is_watched(model):
    hooks = [dict(module_hooks._global_forward_pre_hooks)]
    with memory_guard(model, TRAIN, adamw(model)):
        hooks.append(dict(module_hooks._global_forward_pre_hooks))
        assert _get_current_dispatch_mode() is None
        assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    assert hooks[0] == hooks[1]


def test_after_the_answer_nothing_is_watched_any_more(model):
    out_of_memory(model, steps(model), limit=MIB)
    assert _get_current_dispatch_mode() is None
    assert not module_hooks._global_forward_pre_hooks
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_real_error_under_a_limit_is_answered_with_what_was_counted(model):
    model.layers[1].ffn.register_forward_pre_hook(asks_for_too_much)
    error = out_of_memory(model, steps(model), limit=2 * PEAK)
    first, second = str(error).splitlines()[:2]
    assert first.startswith(
        f"out of memory, forward of layers.1.ffn: {CPU_TEXT}{2**52} by"
    )
    assert "lived then (counted): " in second
    assert error.report.timeline[-1].by_part["activations"] > 0
    assert CPU_TEXT in str(error.__cause__) and error.is_undone


def test_a_guard_leaves_the_limit_of_an_outer_one_to_that(model):
    step = steps(model)

    def guarded_step() -> None:
        with memory_guard(model, TRAIN):
            step()

    error = out_of_memory(model, guarded_step, limit=2 * MIB)
    assert "passed the limit of 2 MiB" in str(error)


def test_a_guard_with_a_limit_leaves_the_lower_one_of_an_outer_guard_to_that(model):
    step = steps(model)

    def guarded_step() -> None:
        with memory_guard(model, TRAIN, limit=2**40):
            step()

    error = out_of_memory(model, guarded_step, limit=2 * MIB)
    assert "passed the limit of 2 MiB" in str(error)
    assert "would fit" not in str(error) and "(too much)" in str(error)


def test_a_limit_that_an_optimizer_passes_while_it_changes_weights_waits(model):
    optimizer = adamw(model, fused=False, foreach=True)
    train = replace(TRAIN, micro_batch=1, global_batch=1, seq_len=8)
    step = steps(model, train, optimizer)
    for _ in range(2):
        step()  # moments are there, and the update needs room for its own
    before = model.norm.weight.detach().clone()
    start = measure(step, model, optimizer)
    assert start.peak_instant.name == "optimizer"
    update = max(x.total for x in start.timeline if x.name == "optimizer")
    error = out_of_memory(model, step, train, optimizer, limit=update - 1)
    assert not error.is_undone
    assert str(error).endswith("were being changed already, so the step was done")
    assert not torch.equal(model.norm.weight, before)
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}


@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES)
def test_a_model_tells_the_policies_that_it_is_under(model, policy):
    apply_recompute(model, policy)
    names = recompute_policies(model)
    classes = [type(module) for module in model.modules()]
    apply_recompute(apply_recompute(model, "none"), names)
    assert [type(module) for module in model.modules()] == classes


def applied(remedy, generator) -> tuple[Transformer, TrainConfig]:
    model = Transformer(TINY, generator=generator)
    apply_recompute(model, remedy.arguments.get("recompute", "none"))
    return model, remedy.arguments.get("train", TRAIN)


def test_every_remedy_that_is_promised_holds(model):
    optimizer = adamw(model)
    step = steps(model, optimizer=optimizer)
    step()
    promised = set()
    for limit in (int(share * PEAK) for share in (0.9, 0.6, 0.4)):
        error = out_of_memory(model, step, optimizer=optimizer, limit=limit)
        for remedy in error.remedies:
            if not remedy.fits:
                continue
            promised |= {name for name in ALONE if name in remedy.change}
            changed, train = applied(remedy, torch.Generator().manual_seed(0))
            its_own = adamw(changed)
            its_step = steps(changed, train, its_own)
            its_step()
            with memory_guard(changed, train, its_own, limit=limit):
                its_step()
    assert promised == set(ALONE)


def test_the_text_is_short_and_says_all(model):
    optimizer = adamw(model)
    step = steps(model, optimizer=optimizer)
    step()
    text = str(out_of_memory(model, step, optimizer=optimizer, limit=2 * MIB))
    lines = text.splitlines()
    size = r"[\d.]+ [KM]iB"
    patterns = [
        r"out of memory, (forward|backward)( of \S+)?: \w+ passed the limit of 2 MiB",
        rf"{size} lived then \(counted\): \w+ {size}(, \w+ {size})+",
        rf"of the activations: \S+ {size}, \S+ {size}, \S+ {size}",
        rf"such a step needs {size}, as predicted",
        r"what fits: micro_batch=\d with seq_len=64; seq_len=\d+ with micro_batch=4",
        r"remedies, the cheapest first, each with its predicted peak and time:",
        rf"  1\. {size} with micro_batch=\d, .*; the same global_batch from \d .*",
        rf"  2\. {size} .*",
        rf"  3\. {size} .*",
        r"no weight was changed, and the gradients are dropped",
    ]
    assert len(lines) == len(patterns) <= 15
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), line


def test_the_answer_can_be_sent_to_another_process(model):
    error = out_of_memory(model, steps(model), limit=2 * MIB)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) and copy.remedies == error.remedies
    assert (copy.report, copy.fit) == (error.report, error.fit)


def test_a_limit_below_the_weights_says_that_nothing_fits(model):
    text = str(out_of_memory(model, steps(model), limit=10_000))
    assert "what fits: no micro_batch with seq_len=64; no seq_len with" in text
    assert "nothing that was tried fits; nearest come, with their predicted" in text
    assert "(too much)" in text


def test_what_fits_is_told_of_what_may_be_changed_alone(model):
    step = steps(model)
    text = str(out_of_memory(model, step, limit=2 * MIB, kinds=("recompute",)))
    assert "what fits" not in text
    text = str(out_of_memory(model, step, limit=2 * MIB, kinds=("seq_len",)))
    assert re.search(r"what fits: seq_len=\d+ with micro_batch=4\n", text)


def test_a_limit_of_no_byte_is_refused(model):
    rule = "limit must be a whole number of at least 1"
    with pytest.raises(ValueError, match=rule), memory_guard(model, TRAIN, limit=0):
        pass


@pytest.mark.parametrize(
    ("options", "kind", "rule"),
    [
        ({"model": torch.nn.Linear(2, 2)}, ValueError, "model must be a Transformer"),
        ({"train": None}, ValueError, "train must be of type TrainConfig; got None"),
        ({"kinds": "recompute"}, ValueError, "kinds must be a sequence of names, whic"),
        ({"kinds": ("time",)}, ValueError, "kinds must be one of .*; got 'time'"),
        ({"steps": 3}, TypeError, r"predict\(\) has no keyword argument 'steps'"),
    ],
)
def test_what_no_answer_can_be_made_of_is_refused_before_the_step(
    model, options, kind, rule
):
    with (
        pytest.raises(kind, match=rule),
        memory_guard(**({"model": model, "train": TRAIN} | options)),
    ):
        pytest.fail("the step began")


def test_a_model_in_bf16_is_answered_with_what_it_needs():
    model = Transformer(TINY, dtype=torch.bfloat16)
    text = str(out_of_memory(model, steps(model), limit=MIB))
    half = States(weights="bfloat16", gradients="bfloat16", moments="bfloat16")
    needed = predict(TINY, TRAIN, states=half).peak
    assert f"such a step needs {memory(needed)}, as predicted" in text
