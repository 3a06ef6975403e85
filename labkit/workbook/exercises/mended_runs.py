"""The sick runs of notebook 04, mended: what answers to its exercises must equal."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from labkit.training.windows import Batch
from labkit.workbook.exercises.sick_runs import Run


def step_with_held_out_loss(run: Run, batch: Batch) -> float:
    """Learn from a batch, and note the loss on held-out text as a number."""
    loss = run.model.loss(batch.tokens, batch.targets).total
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    with torch.no_grad():
        held_out = run.model.loss(run.held_out.tokens, run.held_out.targets).total
    run.history.append(held_out.item())
    return loss.item()


def step_with_hook(run: Run, batch: Batch) -> float:
    """Learn from a batch, with a hook for as long as the forward pass."""

    def note(
        module: torch.nn.Module, args: object, out: Float[Tensor, "b s d"]
    ) -> None:
        run.history.append(out.abs().max().item())

    handle = run.model.norm.register_forward_hook(note)
    loss = run.model.loss(batch.tokens, batch.targets).total
    handle.remove()
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss.item()


def step_of_micro_batches(run: Run, batches: list[Batch]) -> float:
    """Learn from several micro-batches, each with its own backward."""
    n_tokens = sum(batch.n_targets for batch in batches)
    total = 0.0
    for batch in batches:
        loss = run.model.loss(batch.tokens, batch.targets, n_tokens=n_tokens).total
        loss.backward()
        total += loss.item()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return total


def step_with_report(run: Run, batch: Batch) -> float:
    """Learn from a batch; the report that is put off captures a number."""
    logits = run.model(batch.tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    expected = logits[0, -1].argmax().item()
    run.reports.append(lambda: f"expects token {expected}")
    return loss.item()


def answer(run: Run, tokens: Int[Tensor, "1 s"]) -> list[int]:
    """Read a prompt and write four tokens, with a cache that starts anew at 0."""
    run.cache.rewind(0)
    answer = []
    for _ in range(4):
        with torch.inference_mode():
            tokens = run.model(tokens, run.cache)[:, -1:].argmax(-1)
        answer.append(tokens.item())
    return answer
