"""Wrong turns of those who mend the sick runs of notebook 04, each really taken.

They stand in the order of the exercises: the held-out loss, the hook, the
micro-batches, the report that is put off, and the cache.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from labkit.model import LatentCache
from labkit.training.windows import Batch
from labkit.workbook.exercises.sick_runs import CFG, ROOM, Run


def _learn(run: Run, loss: Float[Tensor, ""]) -> float:
    """Change the weights by a loss, and return it."""
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss.item()


def _held_out(run: Run) -> Float[Tensor, ""]:
    return run.model.loss(run.held_out.tokens, run.held_out.targets).total


def delete_the_name(run: Run, batch: Batch) -> float:
    """Delete the name of what the list holds."""
    loss = _learn(run, run.model.loss(batch.tokens, batch.targets).total)
    held_out = _held_out(run)
    run.history.append(held_out)
    del held_out
    return loss


def keep_the_last_only(run: Run, batch: Batch) -> float:
    """Keep one measurement, of the last step."""
    loss = _learn(run, run.model.loss(batch.tokens, batch.targets).total)
    run.history[:] = [_held_out(run)]
    return loss


def note_the_training_loss(run: Run, batch: Batch) -> float:
    """Note the loss that is at hand."""
    loss = _learn(run, run.model.loss(batch.tokens, batch.targets).total)
    run.history.append(loss)
    return loss


def keep_tensors(run: Run, batch: Batch) -> float:
    """Keep a tensor without its graph for each step."""
    loss = _learn(run, run.model.loss(batch.tokens, batch.targets).total)
    run.history.append(_held_out(run).detach())
    return loss


def detach_before_backward(run: Run, batch: Batch) -> float:
    """Cut the training loss off before its backward."""
    loss = run.model.loss(batch.tokens, batch.targets).total
    run.history.append(_held_out(run).item())
    return _learn(run, loss.detach().requires_grad_())


def train_without_gradients(run: Run, batch: Batch) -> float:
    """Put all of the step under `no_grad`."""
    with torch.no_grad():
        loss = run.model.loss(batch.tokens, batch.targets).total
        run.history.append(_held_out(run).item())
        return _learn(run, loss)


def _add_hook(run: Run) -> None:
    run.model.norm.register_forward_hook(
        lambda module, args, out: run.history.append(out.abs().max().item())
    )


def delete_the_hook(run: Run, batch: Batch) -> float:
    """Delete the name of what the module holds."""

    def note(module: nn.Module, args: object, out: Float[Tensor, "b s d"]) -> None:
        run.history.append(out.abs().max().item())

    run.model.norm.register_forward_hook(note)
    loss = _learn(run, run.model.loss(batch.tokens, batch.targets).total)
    del note
    return loss


def no_hook(run: Run, batch: Batch) -> float:
    """Leave out the hook."""
    return _learn(run, run.model.loss(batch.tokens, batch.targets).total)


def shorten_the_list(run: Run, batch: Batch) -> float:
    """Delete what surplus hooks have noted."""
    n_before = len(run.history)
    _add_hook(run)
    loss = _learn(run, run.model.loss(batch.tokens, batch.targets).total)
    del run.history[n_before + 1 :]
    return loss


def delete_each_loss(run: Run, batches: list[Batch]) -> float:
    """Delete the name of each loss that the sum refers to."""
    total = torch.zeros(())
    n_tokens = sum(batch.n_targets for batch in batches)
    for batch in batches:
        loss = run.model.loss(batch.tokens, batch.targets, n_tokens=n_tokens).total
        total = total + loss
        del loss
    return _learn(run, total)


def learn_from_the_last(run: Run, batches: list[Batch]) -> float:
    """Run backward once, from the last micro-batch."""
    total, n_tokens = 0.0, sum(batch.n_targets for batch in batches)
    for batch in batches:
        loss = run.model.loss(batch.tokens, batch.targets, n_tokens=n_tokens).total
        total += loss.item()
    _learn(run, loss)
    return total


def learn_nothing(run: Run, batches: list[Batch]) -> float:
    """Add up detached losses, and run backward from them."""
    total, n_tokens = torch.zeros(()), sum(batch.n_targets for batch in batches)
    for batch in batches:
        loss = run.model.loss(batch.tokens, batch.targets, n_tokens=n_tokens).total
        total = total + loss.detach()
    return _learn(run, total.requires_grad_())


def four_small_steps(run: Run, batches: list[Batch]) -> float:
    """Let the optimizer step after each micro-batch."""
    total, n_tokens = 0.0, sum(batch.n_targets for batch in batches)
    for batch in batches:
        loss = run.model.loss(batch.tokens, batch.targets, n_tokens=n_tokens).total
        total += _learn(run, loss)
    return total


def _learn_and_show(run: Run, batch: Batch) -> tuple[float, Float[Tensor, "b s v"]]:
    logits = run.model(batch.tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    return _learn(run, loss), logits


def bind_by_default(run: Run, batch: Batch) -> float:
    """Hold the logits as a default argument."""
    loss, logits = _learn_and_show(run, batch)
    run.reports.append(
        lambda logits=logits: f"expects token {logits[0, -1].argmax().item()}"
    )
    return loss


def read_the_last(run: Run, batch: Batch) -> float:
    """Let all reports read one attribute."""
    loss, run.last = _learn_and_show(run, batch)
    run.reports.append(lambda: f"expects token {run.last[0, -1].argmax().item()}")
    return loss


def report_the_last_only(run: Run, batch: Batch) -> float:
    """Keep one report, of the last step."""
    loss, logits = _learn_and_show(run, batch)
    expected = logits[0, -1].argmax().item()
    run.reports[:] = [lambda: f"expects token {expected}"]
    return loss


@torch.inference_mode()
def _write_on(run: Run, tokens: Int[Tensor, "1 s"]) -> list[int]:
    answer = []
    for _ in range(4):
        tokens = run.model(tokens, run.cache)[:, -1:].argmax(-1)
        answer.append(tokens.item())
    return answer


def new_cache(run: Run, tokens: Int[Tensor, "1 s"]) -> list[int]:
    """Make a new cache for each prompt."""
    run.cache = LatentCache(CFG, 1, ROOM, dtype=torch.float32)
    return _write_on(run, tokens)


def write_zeros(run: Run, tokens: Int[Tensor, "1 s"]) -> list[int]:
    """Fill the cache with zeros, and write on behind them."""
    run.cache.entries = torch.zeros_like(run.cache.entries)
    return _write_on(run, tokens)


def forget_the_answer(run: Run, tokens: Int[Tensor, "1 s"]) -> list[int]:
    """Rewind to the end of the prompt."""
    (held,) = run.cache.lengths
    answer = _write_on(run, tokens)
    run.cache.rewind(held + tokens.shape[1])
    return answer


@torch.inference_mode()
def use_no_cache(run: Run, tokens: Int[Tensor, "1 s"]) -> list[int]:
    """Compute all tokens again for each that follows."""
    answer = []
    for _ in range(4):
        following = run.model(tokens)[:, -1:].argmax(-1)
        answer.append(following.item())
        tokens = torch.cat([tokens, following], dim=1)
    return answer


def empty_cuda_cache(run: Run, tokens: Int[Tensor, "1 s"]) -> list[int]:
    """Ask CUDA's allocator to give memory back."""
    answer = _write_on(run, tokens)
    torch.cuda.empty_cache()
    return answer
