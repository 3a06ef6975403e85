"""The training loop: one optimizer step at a time, measured, saved and resumable.

A run is a pure function of its model, `TrainConfig`, corpus and scheduler: killed at
any step and resumed from its checkpoint, it repeats the losses of a run that was not,
bit for bit, on the same machine and thread count.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from labkit.config import Layout, TrainConfig, model_to_dict
from labkit.config.checks import require_whole
from labkit.hardware.usage import used_memory
from labkit.memory import apply_recompute
from labkit.memory.out_of_memory import ALONE, OutOfMemory, memory_guard
from labkit.memory.predict import COMPUTE_DTYPES
from labkit.model import Transformer
from labkit.monitor import Monitor, StepMetrics
from labkit.precision.scheduler import Decision, PrecisionScheduler
from labkit.training.accumulation import (
    StepLoss,
    accumulate,
    busiest_by_mean,
    loss_scale,
)
from labkit.training.checkpoint import (
    CHECKPOINT_NAME,
    Checkpoint,
    gather_tensors,
    require_finite,
    scatter_tensors,
    write_checkpoint,
)
from labkit.training.checkpoint_check import Tensors
from labkit.training.corpus import Corpus
from labkit.training.decisions import Rollback
from labkit.training.evaluation import Evaluation, evaluate, sample_of
from labkit.training.fp8 import Fp8
from labkit.training.interrupt import held_interrupt
from labkit.training.optimizer import MOMENTS, build_optimizer
from labkit.training.ranks import Ranks
from labkit.training.recipes import require_fit, require_run
from labkit.training.run_folder import (
    folder_in_use,
    monitor_in,
    place_of,
    require_new,
)
from labkit.training.saved_run import open_run
from labkit.training.snapshots import N_SNAPSHOTS
from labkit.training.stopwatch import Stopwatch
from labkit.training.update import update_weights
from labkit.training.watch import PrecisionWatch, saved_scheduler
from labkit.training.windows import BatchCursor, Windows


class Trainer:
    """Trains a model on a corpus.

    Under a `torch.distributed` process group every rank makes a Trainer with the
    same arguments; each takes its share of every global batch, and the first writes
    records and checkpoints. That the result equals one process's is tested with gloo
    on CPU; CUDA and NCCL have not been run.

    Args:
        model: starts from its present weights, on its present device, in high
            precision; with `precision="fp8"` it is converted here.
        train: the recipe.
        corpus: the text.
        monitor: gets a record of every step; None writes `run_dir/metrics.jsonl`.
        run_dir: new folder for checkpoint and records; None keeps all in memory.
        memory_limit: bytes of tensors that may live at once, as for `memory_guard`,
            which makes steps slower; None is no limit.
        scheduler: decides step by step what of the recipe's `fp8_policy` is in FP8, and
            when to go back to an earlier step; for `precision="fp8"`. See
            `SnapshotRing` for the memory that it takes.
    """

    def __init__(  # noqa: PLR0913, each decides alone
        self,
        model: Transformer,
        train: TrainConfig,
        corpus: Corpus,
        *,
        monitor: Monitor | None = None,
        run_dir: str | Path | None = None,
        memory_limit: int | None = None,
        scheduler: PrecisionScheduler | None = None,
    ) -> None:
        require_fit(model.cfg, train)
        if memory_limit is not None:
            require_whole({"memory_limit": memory_limit})
        self.run_dir = None if run_dir is None else Path(run_dir)
        if self.run_dir is not None:
            require_new(self.run_dir)
        self.model, self.train, self.corpus = model, train, corpus
        self.device = next(model.parameters()).device
        self.ranks = Ranks.current()
        self.ranks.share(train.global_batch)
        self.ranks.share_weights(model)
        self.optimizer = build_optimizer(model, train)
        windows = Windows(
            corpus.train, train.seq_len, seed=train.seed, name="training text"
        )
        self.cursor = BatchCursor(windows, ranks=self.ranks)
        self.valid = Windows(corpus.valid, train.seq_len, name="validation text")
        self.fp8 = Fp8(model, train, scheduler)
        self.watch = PrecisionWatch(self.fp8, self.ranks)
        self.n_steps_done = 0
        self.n_tokens_seen = 0
        self.load: Int[Tensor, "l e"] | None = None
        """Tokens that the last step routed to each expert, over all ranks."""
        self.monitor = monitor or monitor_in(self.run_dir, self.ranks)
        self.memory_limit = memory_limit
        self._remedies = ALONE
        """What an answer to `OutOfMemory` may propose to change."""
        self._folder: Path | None = None
        """The folder that holds this run already."""
        self._n_steps_saved: int | None = None
        self._is_whole = True
        """Whether weights, moments and counts are all of the same step."""

    @classmethod
    def resume(
        cls,
        path: str | Path,
        *,
        corpus: Corpus | None = None,
        monitor: Monitor | None = None,
        device: torch.device | str | None = None,
        memory_limit: int | None = None,
    ) -> "Trainer":
        """Return a Trainer that goes on where a checkpoint was written.

        Args:
            path: the checkpoint, or the folder of the run, where it goes on writing.
            corpus: the run's text; None finds it again where it was.
            monitor: as for a new Trainer.
            device: where to train; None is PyTorch's default device.
            memory_limit: as for a new Trainer.

        Raises:
            ValueError: the checkpoint is not whole, or the text is another one. The
                global state of random numbers is as it was.
        """
        saved = open_run(path, corpus)
        run_dir, values = saved.run_dir, saved.checkpoint.values
        trainer = cls(
            saved.build(device),
            saved.train,
            saved.corpus,
            monitor=monitor or monitor_in(run_dir, Ranks.current()),
            memory_limit=memory_limit,
            scheduler=saved_scheduler(saved),
        )
        trainer.run_dir = run_dir
        trainer._go_to(values, trainer.watch.load(saved.checkpoint))
        trainer._folder = run_dir
        trainer._n_steps_saved = None if run_dir is None else trainer.n_steps_done
        trainer._remedies = ("recompute",)  # the recipe is fixed
        return trainer

    def save(self, path: str | Path | None = None) -> Path:
        """Write a checkpoint, on the first rank, and return where it is.

        Args:
            path: the file; None takes the run's folder.

        Raises:
            FloatingPointError: weights or moments are not finite: the run diverged.
                What was saved before is intact, as after any other failure.
        """
        is_elsewhere = path is not None
        path = place_of(path, self.run_dir)
        if self.ranks.is_first:
            self._write(path)
        self.ranks.barrier()
        if not is_elsewhere:
            self._folder, self._n_steps_saved = self.run_dir, self.n_steps_done
        return path

    def _write(self, path: Path) -> None:
        values = {
            "model": model_to_dict(self.model.cfg),
            "train": asdict(self.train),
            "corpus": self.corpus.source,
            **self._progress(),
            "scheduler": self.watch.to_values(),
        }
        tensors = gather_tensors(self.model, self.optimizer)
        require_finite(tensors, self.n_steps_done, path)
        tensors |= self.watch.to_tensors()
        write_checkpoint(path, Checkpoint(tensors, values))

    def _progress(self) -> dict[str, Any]:
        """Return how far the run has come, as plain values."""
        return {
            "cursor": self.cursor.state_dict(),
            "n_steps_done": self.n_steps_done,
            "n_tokens_seen": self.n_tokens_seen,
        }

    def _go_to(self, progress: Mapping[str, Any], tensors: Tensors) -> None:
        """Put back what `_progress` and `gather_tensors` returned."""
        self.cursor.load_state_dict(progress["cursor"])
        scatter_tensors(tensors, self.model, self.optimizer)
        self.n_steps_done = progress["n_steps_done"]
        self.n_tokens_seen = progress["n_tokens_seen"]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What the scheduler decided so far."""
        return self.watch.log.decisions

    @property
    def rollbacks(self) -> tuple[Rollback, ...]:
        """How often, and why, the run went back to an earlier step."""
        return self.watch.log.rollbacks

    def step(self) -> StepMetrics:
        """Do one optimizer step over the global batch and return its record.

        After a step that the scheduler takes back, fewer steps are done than before.

        Raises:
            OutOfMemory: it needs more than there is, or than `memory_limit`.
        """
        self.watch.keep(self._progress(), self.optimizer)
        guard = memory_guard(
            self.model,
            self.train,
            self.optimizer,
            limit=self.memory_limit,
            n_held=self.watch.held_on(self.device),
            kinds=self._remedies,
            layout=Layout(dp=self.ranks.world),
        )
        try:
            with guard:
                return self._step()
        except OutOfMemory as error:
            self._is_whole |= error.is_undone
            raise

    def _step(self) -> StepMetrics:
        stopwatch = Stopwatch(self.device)
        batch = self.cursor.peek(self.train.global_batch).to(self.device)
        n_tokens = self.ranks.count(batch.n_targets)
        mtp = self.model.cfg.mtp
        scale = loss_scale(self.train, mtp, self.n_steps_done, n_tokens=n_tokens)
        stopwatch.lap("data")
        self.optimizer.zero_grad(set_to_none=True)
        with self.watch.watching():
            loss = accumulate(
                self.model,
                batch.split(self.train.micro_batch),
                scale,
                dtype=COMPUTE_DTYPES[self.train.precision],
                stopwatch=stopwatch,
            )
        self.ranks.sum_gradients(self.model.parameters())
        loss = StepLoss(self.ranks.sum(loss.parts), self.ranks.sum(loss.load))
        stopwatch.lap("communication")
        self._is_whole = False
        grad_norm = update_weights(
            self.model, self.optimizer, self.train, self.n_steps_done, loss.load
        )
        stopwatch.lap("optimizer")
        self.cursor.advance(self.train.global_batch)
        self.n_steps_done += 1
        self.n_tokens_seen += self.train.tokens_per_step
        self._is_whole, self._folder = True, self.run_dir
        self.load = loss.load
        metrics = self._metrics(loss, grad_norm, stopwatch)
        self._obey(metrics)
        if self.ranks.is_first:
            self.monitor.record(metrics)
            self.watch.log.publish(self.run_dir)
        return metrics

    def _obey(self, metrics: StepMetrics) -> None:
        """Let the scheduler, if there is one, judge a step; go back if it says so."""
        snapshot = self.watch.judge(metrics)
        if snapshot is not None:
            self._is_whole = False
            self._go_to(snapshot.progress, snapshot.tensors)
            self._is_whole, self._n_steps_saved = True, None

    def _metrics(
        self, loss: StepLoss, grad_norm: float, stopwatch: Stopwatch
    ) -> StepMetrics:
        tokens_per_second = self.train.tokens_per_step / stopwatch.seconds.total()
        flops = self.model.cfg.flops_per_token(self.train.seq_len, training=True)
        return StepMetrics(
            step=self.n_steps_done,
            attempt=len(self.rollbacks),
            tokens=self.n_tokens_seen,
            **loss.named(),
            grad_norm=grad_norm,
            is_skipped=not math.isfinite(grad_norm),
            lr=self.optimizer.param_groups[0]["lr"],
            tokens_per_second=tokens_per_second,
            mfu=self.monitor.mfu(tokens_per_second * flops / self.ranks.world),
            memory_bytes=used_memory(self.device),
            expert_load=busiest_by_mean(loss.load),
            **{f"{lap}_seconds": taken for lap, taken in stopwatch.seconds.items()},
        )

    def recompute(self, policy: str | Sequence[str], *, k: int = 4) -> None:
        """Put the model under a policy, as `apply_recompute`, also if it is in FP8."""
        self.fp8.transform(lambda model: apply_recompute(model, policy, k=k))

    def run(
        self,
        n_steps: int | None = None,
        *,
        progress: bool = True,
        save_every: int | None = None,
    ) -> list[StepMetrics]:
        """Train and return the records of the steps done and not taken back.

        Ctrl-C (or the notebook's stop button) ends the run after the step it is in.
        With a `run_dir` the end of the run is saved, however it came: also when a
        listener fails, or a step before it changes a weight. Calling `run` again goes
        on. No other run can write to the folder meanwhile.

        Args:
            n_steps: steps to do; None goes on to the end of `train.n_steps`.
            progress: whether to show a progress bar.
            save_every: steps between checkpoints; None saves at the end only.
        """
        if n_steps is None:
            n_steps = max(self.train.n_steps - self.n_steps_done, 0)
        require_run(n_steps, save_every, self.run_dir)
        is_hidden = not (progress and self.ranks.is_first)
        records: list[StepMetrics] = []
        goal = self.n_steps_done + n_steps
        folder = self._folder_in_use()
        bar = tqdm(total=n_steps, unit="step", disable=is_hidden)
        with folder, bar, held_interrupt() as is_interrupted:
            while self.n_steps_done < goal and not self.ranks.any(is_interrupted()):
                n_before = self.n_steps_done
                with self._kept_if_broken_off():
                    records.append(self.step())
                bar.set_postfix(loss=f"{records[-1].loss_main:.3f}", refresh=False)
                bar.update(self.n_steps_done - n_before)
                while records and records[-1].step > self.n_steps_done:
                    records.pop()
                if save_every and self.n_steps_done % save_every == 0:
                    self.save()
            if self.run_dir is not None and self._n_steps_saved != self.n_steps_done:
                self.save()
        return records

    def _folder_in_use(self) -> AbstractContextManager[None]:
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        n_states = 1 if self.watch.scheduler is None else 1 + N_SNAPSHOTS
        return folder_in_use(
            self.run_dir if self.ranks.is_first else None,
            is_new=self.run_dir != self._folder,
            n_bytes=n_states * weights * (1 + len(MOMENTS)),
        )

    @contextmanager
    def _kept_if_broken_off(self) -> Iterator[None]:
        """Save the steps done, unless the weights were just being changed.

        The other ranks may be anywhere, so the first does not wait for them.
        """
        try:
            yield
        except BaseException:
            has_place = self.run_dir is not None and self.ranks.is_first
            is_unsaved = self.n_steps_done not in (0, self._n_steps_saved)
            if has_place and is_unsaved and self._is_whole:
                self._write(self.run_dir / CHECKPOINT_NAME)
            raise

    def evaluate(self, n_batches: int = 8) -> Evaluation:
        """Return the loss on a fixed sample of validation windows.

        The sample is the same at every call. Ranks share it.

        Args:
            n_batches: micro-batches per rank; fewer if the text has fewer windows.
        """
        size = self.train.micro_batch
        sample = sample_of(self.valid, size, n_batches, self.ranks)
        batches = (batch.to(self.device) for batch in sample)
        dtype = COMPUTE_DTYPES[self.train.precision]
        return evaluate(self.model, batches, dtype=dtype, ranks=self.ranks)
