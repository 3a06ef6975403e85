"""Exercises of notebook 04: read a slope, and mend five sick runs.

A check makes a small run with the answer as its step, and looks at it with `LeakWatch`:
nothing may grow, and it must learn and note what it did before.
"""

from labkit.workbook.exercises import wrong_turns
from labkit.workbook.exercises.mended_runs import (
    answer,
    step_of_micro_batches,
    step_with_held_out_loss,
    step_with_hook,
    step_with_report,
)
from labkit.workbook.exercises.sick_runs import (
    drift,
    growth,
    is_reused,
    micro_batches,
    n_hooks,
    n_noted,
    n_right_answers,
    n_true_reports,
    noted_drift,
    peak_growth,
    room_after,
)
from labkit.workbook.exercises.spec import Case, Exercise, Misconception

EXERCISES = (
    Exercise(
        name="steps_left",
        kind="predict",
        title="How long will it run?",
        difficulty=1,
        minutes=4,
        task="At the end of steps 1 to 5 a run holds 10.0, 34.0, 34.6, 35.2 and 35.8 "
        "GB, on a card of 80 GB. Within each step, 20 GB more come and go. In which "
        "step will it run out of memory? One step more or less counts as right.",
        stub="last_step = None",
        cases=(Case(given="", expected=47.0, tolerance=0.022),),
        misconceptions=(
            Misconception(
                79, "that is when the end of a step is full: 20 GB come within it"
            ),
            Misconception(
                9, "the jump from 10 to 34 GB was optimizer state, made once"
            ),
            Misconception(
                12, "one jump of 24 GB is no slope, and 20 GB come within a step"
            ),
        ),
        hints=(
            "From which step on is the growth the same at every step?",
            "0.6 GB a step from 34.0 GB on, and 20 of the 80 GB are needed within.",
            "60 - 34.0 GB at 0.6 GB a step are 43.3 steps after step 2.",
        ),
        solution=47,
        because="step 46 reaches 79.8 GB, step 47 would need 80.4.",
    ),
    Exercise(
        name="held_out_loss",
        kind="fix",
        title="The sick run that looks at held-out text",
        difficulty=1,
        minutes=6,
        task="Memory grows by a whole forward pass in each step. Find out why, and "
        "mend `step`. It must train as before, and `run.history` must still get one "
        "number in each step.",
        stub='''def step(run, batch):
    """Learn from a batch, and note the loss on held-out text."""
    loss = run.model.loss(batch.tokens, batch.targets).total
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    held_out = run.model.loss(run.held_out.tokens, run.held_out.targets).total
    run.history.append(held_out)
    return loss.item()''',
        cases=(
            Case(given="bytes kept in each step", measure=growth, expected=0),
            Case(given="numbers noted in 10 steps", measure=n_noted, expected=10),
            Case(
                given="the difference from how it trained before",
                measure=lambda step: drift(step, step_with_held_out_loss),
                at_most=1e-6,
            ),
            Case(
                given="the difference from the losses it noted before",
                measure=lambda step: noted_drift(step, step_with_held_out_loss),
                at_most=1e-6,
            ),
        ),
        misconceptions=(
            Misconception(
                wrong_turns.delete_the_name,
                "the list holds the tensor, and the tensor its graph: `del` only "
                "removes a name, and a collector frees only what nobody holds",
            ),
            Misconception(
                wrong_turns.keep_tensors,
                "the graph is gone, and a tensor is left for each step: `.item()` "
                "keeps a number",
            ),
            Misconception(
                wrong_turns.note_the_training_loss,
                "that is the loss on the batch; the one on held-out text was noted",
            ),
            Misconception(
                wrong_turns.keep_the_last_only,
                "the growth is gone, and the measurements with it",
            ),
            Misconception(
                wrong_turns.detach_before_backward,
                "the training loss was cut off before its backward: no weight gets a "
                "gradient, and nothing is learnt",
            ),
            Misconception(
                wrong_turns.train_without_gradients,
                "`no_grad` may stand around the held-out loss only",
            ),
        ),
        hints=(
            "What hangs on `held_out` that nobody ever runs backward through?",
            "Its whole graph. `loss` gave its own back in `backward`.",
            "`run.history.append(held_out.item())`, and `torch.no_grad()` around the "
            "forward pass saves the graph altogether.",
        ),
        solution=step_with_held_out_loss,
        seconds=30.0,
        because="a number holds nothing else.",
    ),
    Exercise(
        name="growing_hooks",
        kind="fix",
        title="The sick run that gets slower",
        difficulty=2,
        minutes=6,
        task="No tensor is left behind, and yet each step takes a little longer than "
        "the one before. Mend `step`; `run.history` gets one number in each step.",
        stub='''def step(run, batch):
    """Learn from a batch, and note the largest value before the head."""
    run.model.norm.register_forward_hook(
        lambda module, args, out: run.history.append(out.abs().max().item())
    )
    loss = run.model.loss(batch.tokens, batch.targets).total
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss.item()''',
        cases=(
            Case(given="hooks after 10 steps", measure=n_hooks, at_most=1),
            Case(given="numbers noted in 10 steps", measure=n_noted, expected=10),
            Case(
                given="the difference from how it trained before",
                measure=lambda step: drift(step, step_with_hook),
                at_most=1e-6,
            ),
            Case(
                given="the difference from the values it noted before",
                measure=lambda step: noted_drift(step, step_with_hook),
                at_most=1e-6,
            ),
        ),
        misconceptions=(
            Misconception(
                wrong_turns.shorten_the_list,
                "the list is as long as it should be, and still every old hook runs",
            ),
            Misconception(
                wrong_turns.delete_the_hook,
                "the module holds every hook: `del` removes your name for it, and a "
                "collector frees only what nobody holds",
            ),
            Misconception(wrong_turns.no_hook, "with the hook the measurement is gone"),
        ),
        hints=(
            "How many hooks run in the tenth step?",
            "`register_forward_hook` returns a handle.",
            "Call `handle.remove()` after the forward pass.",
        ),
        solution=step_with_hook,
        seconds=30.0,
        because="what is added in a step must go in the same step.",
    ),
    Exercise(
        name="one_graph_at_a_time",
        kind="fix",
        title="The sick run whose peak follows accumulation",
        difficulty=2,
        minutes=8,
        task="Four micro-batches were to need the memory of one, and need nearly four "
        "times as much. Mend `step`, which must train as before.",
        stub='''def step(run, batches):
    """Learn from several micro-batches as from one large batch."""
    n_tokens = sum(batch.n_targets for batch in batches)
    total = 0
    for batch in batches:
        loss = run.model.loss(batch.tokens, batch.targets, n_tokens=n_tokens).total
        total = total + loss
    total.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return total.item()''',
        cases=(
            Case(
                given="the peak of 4 micro-batches by that of 1",
                measure=peak_growth,
                at_most=2,
                tolerance=0.01,
            ),
            Case(
                given="the difference from how it trained before",
                measure=lambda step: drift(step, step_of_micro_batches, micro_batches),
                at_most=1e-4,
            ),
        ),
        misconceptions=(
            Misconception(
                wrong_turns.delete_each_loss,
                "`total` refers to the graph of every micro-batch until its backward",
            ),
            Misconception(
                wrong_turns.learn_nothing,
                "detached before the backward, the sum reaches no weight: nothing is "
                "learnt",
            ),
            Misconception(
                wrong_turns.learn_from_the_last,
                "only the last micro-batch ran backward: the others taught nothing",
            ),
            Misconception(
                wrong_turns.four_small_steps,
                "the optimizer moved after each micro-batch: that is four small steps",
            ),
        ),
        hints=(
            "How many graphs live when `total.backward()` begins?",
            "Gradients add up in `parameter.grad` by themselves.",
            "`loss.backward()` in the loop, and only numbers in `total`.",
        ),
        solution=step_of_micro_batches,
        because="gradients are what lasts from one micro-batch to the next.",
    ),
    Exercise(
        name="late_report",
        kind="fix",
        title="The sick run that reports at its end",
        difficulty=2,
        minutes=6,
        task="What a step expects is printed when the run is over. Until then memory "
        "grows. Mend `step`; each of `run.reports` is still called at the end.",
        stub='''def step(run, batch):
    """Learn from a batch, and put off the report on it."""
    logits = run.model(batch.tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.reports.append(lambda: f"expects token {logits[0, -1].argmax().item()}")
    return loss.item()''',
        cases=(
            Case(given="bytes kept in each step", measure=growth, expected=0),
            Case(
                given="true reports of 10 steps",
                measure=lambda step: n_true_reports(step, step_with_report),
                expected=10,
            ),
            Case(
                given="the difference from how it trained before",
                measure=lambda step: drift(step, step_with_report),
                at_most=1e-6,
            ),
        ),
        misconceptions=(
            Misconception(
                wrong_turns.bind_by_default,
                "the function still holds the logits, captured or as a default: give "
                "it the number",
            ),
            Misconception(
                wrong_turns.read_the_last,
                "when they are called, all of them read the logits of the last step",
            ),
            Misconception(
                wrong_turns.report_the_last_only,
                "the growth is gone, and nine reports with it",
            ),
        ),
        hints=(
            "What must live until the function is called?",
            "Whatever it captures: here all logits, for one number.",
            "Capture `expected = logits[0, -1].argmax().item()`.",
        ),
        solution=step_with_report,
        seconds=30.0,
        because="a function keeps alive what it captures, whole.",
    ),
    Exercise(
        name="cache_that_is_not_reused",
        kind="fix",
        title="The server that answers worse and worse",
        difficulty=2,
        minutes=6,
        task="`run.cache` has room for one conversation of 16 tokens, and makes room "
        "for more when it is told to write past that. Memory grows with each prompt, "
        "and answers are wrong from the second on. Mend `answer`. The cache must be "
        "reused.",
        stub='''def answer(run, tokens):
    """Read a prompt and write four tokens."""
    answer = []
    for _ in range(4):
        with torch.inference_mode():
            tokens = run.model(tokens, run.cache)[:, -1:].argmax(-1)
        answer.append(tokens.item())
    return answer''',
        cases=(
            Case(given="room after 10 prompts", measure=room_after, at_most=16),
            Case(given="right answers of 10", measure=n_right_answers, expected=10),
            Case(given="the cache", measure=is_reused, expected="the same"),
        ),
        misconceptions=(
            Misconception(
                wrong_turns.empty_cuda_cache,
                "the cache goes on where the last conversation ended; CUDA's "
                "`empty_cache` hands back only what nobody holds",
            ),
            Misconception(
                wrong_turns.write_zeros,
                "rows of zeros are rows: they take attention, and positions go on",
            ),
            Misconception(
                wrong_turns.forget_the_answer,
                "the answers are forgotten, and the prompts pile up",
            ),
            Misconception(
                wrong_turns.new_cache,
                "right answers, at the price of a new cache for every prompt",
            ),
            Misconception(
                wrong_turns.use_no_cache,
                "right answers, with every token computed again for each that follows",
            ),
        ),
        hints=(
            "At which position is the first token of the second prompt written?",
            "A conversation begins at position 0.",
            "`run.cache.rewind(0)`",
        ),
        solution=answer,
        seconds=30.0,
        because="a rewind costs nothing: what lies behind the length is hidden.",
    ),
)
