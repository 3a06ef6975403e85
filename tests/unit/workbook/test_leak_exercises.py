"""The sick runs of notebook 04's exercises: other ways to mend them, and not to."""

import gc

import pytest
import torch

from labkit.workbook.exercises import find, grade, sick_runs, wrong_turns
from labkit.workbook.exercises.sick_runs import batch, new_run, what_grows


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stub_of(name):
    namespace = {"torch": torch, "F": torch.nn.functional}
    exec(find(name).stub, namespace)
    return list(namespace.values())[-1]


def then(step, after):
    """Return the step as it was, with something else done at its end."""

    def longer(run, given):
        loss = step(run, given)
        after(run)
        return loss

    return longer


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "holder"),
    [
        ("held_out_loss", "`history` of Run"),
        ("growing_hooks", "forward hooks of `norm`"),
        ("late_report", "`reports` of Run"),
    ],
)
def test_a_run_is_sick_as_it_is_given(name, holder):
    assert what_grows(stub_of(name)).startswith(f"{holder}, ")


@pytest.mark.usefixtures("unchecked")
def test_a_garbage_collector_is_told_that_the_list_holds_the_graph():
    step = then(
        stub_of("held_out_loss"), lambda run: len(run.history) % 10 or gc.collect()
    )

    assert (
        "a collector frees only what nobody holds"
        in grade(find("held_out_loss"), step).line
    )


def test_a_number_taken_without_no_grad_is_right_as_well():
    step = then(
        stub_of("held_out_loss"),
        lambda run: run.history.append(run.history.pop().item()),
    )

    assert grade(find("held_out_loss"), step).mark == "✓"


def test_another_number_than_the_one_that_was_noted_is_not_right():
    def step(run, given):
        loss = run.model.loss(given.tokens, given.targets).total
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.history.append(loss.item())
        return loss.item()

    for name, what in [("held_out_loss", "losses"), ("growing_hooks", "values")]:
        line = grade(find(name), step).line
        assert line.startswith(f"✗ for the difference from the {what} it noted before")


def test_an_answer_without_the_cache_is_told_that_it_is_not_used():
    line = grade(find("cache_that_is_not_reused"), wrong_turns.use_no_cache).line

    assert line.startswith("✗ for the cache: you gave 'not used', expected 'the same'")


def test_a_hook_that_is_registered_once_is_right_as_well():
    def step(run, given):
        if not run.model.norm._forward_hooks:
            run.model.norm.register_forward_hook(
                lambda module, args, out: run.history.append(out.abs().max().item())
            )
        loss = run.model.loss(given.tokens, given.targets).total
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss.item()

    assert grade(find("growing_hooks"), step).mark == "✓"


def test_four_micro_batches_in_one_graph_need_over_three_times_the_memory_of_one():
    assert sick_runs.peak_growth(stub_of("one_graph_at_a_time")) > 3


def test_the_server_is_wrong_from_its_second_answer_on():
    assert sick_runs.n_right_answers(stub_of("cache_that_is_not_reused")) < 5
    assert sick_runs.room_after(stub_of("cache_that_is_not_reused")) == 150


def test_a_run_is_the_same_each_time():
    weights = [new_run().model.embed.weight for _ in range(2)]

    assert torch.equal(*weights)
    assert torch.equal(batch(3).tokens, batch(3).tokens)
    assert not torch.equal(batch(3).tokens, batch(4).tokens)


def test_the_predicted_step_is_that_of_a_simulation():
    live, step = 34.0, 2
    while live + 20 <= 80:  # the next step fits
        live, step = live + 0.6, step + 1

    assert find("steps_left").solution == step + 1 == 47
