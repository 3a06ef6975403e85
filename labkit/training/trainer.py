"""The training loop: one optimizer step at a time, measured, saved and resumable.

A run is a pure function of its model, `TrainConfig` and corpus: killed at any step
and resumed from its checkpoint, it repeats the losses of a run that was not, bit for
bit, on the same machine and thread count.
"""

import math
from dataclasses import asdict
from pathlib import Path

import psutil
import torch
from jaxtyping import Int
from torch import Tensor, nn
from tqdm.auto import tqdm

from labkit.config import ModelConfig, TrainConfig, model_to_dict
from labkit.config.presets import BYTE_VOCAB
from labkit.model import Transformer
from labkit.monitor import Monitor, StepMetrics
from labkit.training import corpus as corpora
from labkit.training import schedules
from labkit.training.accumulation import (
    COMPUTE_DTYPES,
    LossScale,
    StepLoss,
    accumulate,
)
from labkit.training.checkpoint import (
    CHECKPOINT_NAME,
    Checkpoint,
    checkpoint_path,
    gather_tensors,
    read_checkpoint,
    scatter_tensors,
    write_checkpoint,
)
from labkit.training.checkpoint_check import read_configs
from labkit.training.corpus import Corpus
from labkit.training.evaluation import Evaluation, evaluate
from labkit.training.interrupt import held_interrupt
from labkit.training.optimizer import build_optimizer
from labkit.training.ranks import Ranks
from labkit.training.run_folder import METRICS_NAME, folder_in_use, require_new
from labkit.training.stopwatch import Stopwatch
from labkit.training.windows import BatchCursor, Windows


class Trainer:
    """Trains a model on a corpus.

    Under a `torch.distributed` process group every rank makes a Trainer with the
    same arguments; each takes its share of every global batch, and the first writes
    records and checkpoints. That the result equals one process's is tested with gloo
    on CPU; CUDA and NCCL have not been run.

    Args:
        model: starts from its present weights, on its present device.
        train: the recipe.
        corpus: the text.
        monitor: gets a record of every step; None writes `run_dir/metrics.jsonl`.
        run_dir: new folder for checkpoint and records; None keeps all in memory.
    """

    def __init__(
        self,
        model: Transformer,
        train: TrainConfig,
        corpus: Corpus,
        *,
        monitor: Monitor | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        require_fit(model.cfg, train)
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
        self.n_steps_done = 0
        self.n_tokens_seen = 0
        self.load: Int[Tensor, "l e"] | None = None
        """Tokens that the last step routed to each expert, over all ranks."""
        self.monitor = monitor or _monitor_in(self.run_dir, self.ranks)

    @classmethod
    def resume(
        cls,
        path: str | Path,
        *,
        corpus: Corpus | None = None,
        monitor: Monitor | None = None,
        device: torch.device | str | None = None,
    ) -> "Trainer":
        """Return a Trainer that goes on where a checkpoint was written.

        Args:
            path: the checkpoint, or the folder of the run, where it goes on writing.
            corpus: the run's text; None finds it again where it was.
            monitor: as for a new Trainer.
            device: where to train; None is PyTorch's default device.

        Raises:
            ValueError: the checkpoint is not whole, or the text is another one. The
                global state of random numbers is as it was.
        """
        path = checkpoint_path(path)
        saved = read_checkpoint(path)
        values = saved.values
        cfg, train = read_configs(values)
        if corpus is None:
            corpus = corpora.reopen(values["corpus"])
        corpora.require_same_text(corpus, values["corpus"]["fingerprint"])
        run_dir = path.parent if path.name == CHECKPOINT_NAME else None
        device = torch.device(device or torch.get_default_device())
        model = Transformer(cfg, device=device, generator=torch.Generator(device))
        trainer = cls(
            model,
            train,
            corpus,
            monitor=monitor or _monitor_in(run_dir, Ranks.current()),
        )
        trainer.run_dir = run_dir
        trainer.cursor.load_state_dict(values["cursor"])
        scatter_tensors(saved.tensors, model, trainer.optimizer)
        trainer.n_steps_done = values["n_steps_done"]
        trainer.n_tokens_seen = values["n_tokens_seen"]
        return trainer

    def save(self, path: str | Path | None = None) -> Path:
        """Write a checkpoint, on the first rank, and return where it is.

        Args:
            path: the file; None takes the run's folder.
        """
        if path is None and self.run_dir is None:
            raise ValueError(
                "there is no place to save to: the Trainer has no run_dir. "
                "Give save a path, or the Trainer a run_dir."
            )
        path = self.run_dir / CHECKPOINT_NAME if path is None else Path(path)
        values = {
            "model": model_to_dict(self.model.cfg),
            "train": asdict(self.train),
            "corpus": self.corpus.source,
            "cursor": self.cursor.state_dict(),
            "n_steps_done": self.n_steps_done,
            "n_tokens_seen": self.n_tokens_seen,
        }
        if self.ranks.is_first:
            tensors = gather_tensors(self.model, self.optimizer)
            write_checkpoint(path, Checkpoint(tensors, values))
        self.ranks.barrier()
        return path

    def step(self) -> StepMetrics:
        """Do one optimizer step over the global batch and return its record."""
        stopwatch = Stopwatch(self.device)
        batch = self.cursor.peek(self.train.global_batch).to(self.device)
        scale = self._loss_scale(batch.n_targets)
        stopwatch.lap("data")
        self.optimizer.zero_grad(set_to_none=True)
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
        lr = schedules.learning_rate(self.train, self.n_steps_done)
        grad_norm = self._update_weights(loss.load, lr)
        stopwatch.lap("optimizer")
        self.cursor.advance(self.train.global_batch)
        self.n_steps_done += 1
        self.n_tokens_seen += self.train.tokens_per_step
        self.load = loss.load
        metrics = self._metrics(loss, lr, grad_norm, stopwatch)
        if self.ranks.is_first:
            self.monitor.record(metrics)
        return metrics

    def _loss_scale(self, n_targets: int) -> LossScale:
        n_tokens = self.ranks.sum(torch.tensor(n_targets, device=self.device))
        mtp = self.model.cfg.mtp
        return LossScale(
            n_tokens=max(int(n_tokens), 1),
            n_sequences=self.train.global_batch,
            mtp_weight=None
            if mtp is None
            else schedules.mtp_weight(self.train, mtp.loss_weight, self.n_steps_done),
        )

    def _update_weights(self, load: Int[Tensor, "l e"], lr: float) -> float:
        """Clip, step and move the router biases; return the norm before clipping.

        Gradients that are not finite would ruin weights and moments, so they change
        nothing.
        """
        parameters = self.model.parameters()
        norm = nn.utils.clip_grad_norm_(parameters, self.train.grad_clip).item()
        if not math.isfinite(norm):
            return norm
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        rate = schedules.bias_update_rate(self.train, self.n_steps_done)
        if rate > 0 and load.numel():
            self.model.update_router_bias(load, rate)
        return norm

    def _metrics(
        self, loss: StepLoss, lr: float, grad_norm: float, stopwatch: Stopwatch
    ) -> StepMetrics:
        total, main, mtp, balance = loss.parts.tolist()
        seconds = stopwatch.seconds
        tokens_per_second = self.train.tokens_per_step / seconds.total()
        return StepMetrics(
            step=self.n_steps_done,
            tokens=self.n_tokens_seen,
            loss=total,
            loss_main=main,
            loss_mtp=mtp,
            loss_balance=balance,
            grad_norm=grad_norm,
            is_skipped=not math.isfinite(grad_norm),
            lr=lr,
            tokens_per_second=tokens_per_second,
            mfu=self._mfu(tokens_per_second),
            memory_bytes=memory_bytes(self.device),
            expert_load=busiest_by_mean(loss.load),
            **{f"{phase}_seconds": seconds[phase] for phase in seconds},
        )

    def _mfu(self, tokens_per_second: float) -> float | None:
        if self.monitor.peak_flops is None:
            return None
        flops = self.model.cfg.flops_per_token(self.train.seq_len, training=True)
        return tokens_per_second * flops / (self.monitor.peak_flops * self.ranks.world)

    def run(
        self,
        n_steps: int | None = None,
        *,
        progress: bool = True,
        save_every: int | None = None,
    ) -> list[StepMetrics]:
        """Train and return the records of the steps done.

        Ctrl-C (or the notebook's stop button) ends the run after the step it is in.
        With a `run_dir` the end of the run is saved, however it came. Calling `run`
        again goes on.

        Args:
            n_steps: steps to do; None goes on to the end of `train.n_steps`.
            progress: whether to show a progress bar.
            save_every: steps between checkpoints; None saves at the end only.
        """
        if n_steps is None:
            n_steps = max(self.train.n_steps - self.n_steps_done, 0)
        self._check_run(n_steps, save_every)
        is_hidden = not (progress and self.ranks.is_first)
        records: list[StepMetrics] = []
        saved_at = None
        folder = folder_in_use(self.run_dir if self.ranks.is_first else None)
        bar = tqdm(total=n_steps, unit="step", disable=is_hidden)
        with folder, bar, held_interrupt() as is_interrupted:
            while len(records) < n_steps and not self.ranks.any(is_interrupted()):
                records.append(self.step())
                bar.set_postfix(loss=f"{records[-1].loss_main:.3f}", refresh=False)
                bar.update()
                if save_every and self.n_steps_done % save_every == 0:
                    self.save()
                    saved_at = self.n_steps_done
            if self.run_dir is not None and saved_at != self.n_steps_done:
                self.save()
        return records

    def _check_run(self, n_steps: int, save_every: int | None) -> None:
        if n_steps < 0:
            raise ValueError(
                f"n_steps must not be negative; got {n_steps}. "
                "Set n_steps=None to go on to the end of the recipe."
            )
        if save_every is not None and (save_every < 1 or self.run_dir is None):
            raise ValueError(
                "save_every needs a run_dir and at least 1 step; got "
                f"save_every={save_every} and run_dir={self.run_dir}. "
                "Give the Trainer a run_dir, or set save_every=None."
            )

    def evaluate(self, n_batches: int = 8) -> Evaluation:
        """Return the loss on a fixed sample of validation windows.

        The sample is the same at every call. Ranks share it.

        Args:
            n_batches: micro-batches per rank; fewer if the text has fewer windows.
        """
        if n_batches < 1:
            raise ValueError(
                f"n_batches must be at least 1; got {n_batches}. Set n_batches=8 or so."
            )
        size = self.train.micro_batch
        n_windows = min(self.ranks.world * n_batches * size, self.valid.per_epoch)
        first, last = (
            n_windows * rank // self.ranks.world
            for rank in (self.ranks.rank, self.ranks.rank + 1)
        )
        batches = (
            self.valid.take(start, min(size, last - start)).to(self.device)
            for start in range(first, last, size)
        )
        dtype = COMPUTE_DTYPES[self.train.precision]
        return evaluate(self.model, batches, dtype=dtype, ranks=self.ranks)


def memory_bytes(device: torch.device) -> int:
    """Return the process's resident set; on CUDA the peak of bytes allocated.

    On CUDA this has not been run.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def busiest_by_mean(load: Int[Tensor, "l e"]) -> tuple[float, ...]:
    """Return the load of each router's busiest expert, by the mean load.

    >>> busiest_by_mean(torch.tensor([[2, 2, 2, 2], [8, 0, 0, 0]]))
    (1.0, 4.0)
    """
    if not load.numel():
        return ()
    load = load.double()
    return tuple((load.amax(dim=-1) / load.mean(dim=-1)).tolist())


def require_fit(cfg: ModelConfig, train: TrainConfig) -> None:
    """Raise ValueError unless the model takes byte tokens in the recipe's lengths."""
    if train.seq_len > cfg.max_seq_len:
        raise ValueError(
            "seq_len must be at most the model's max_seq_len; got "
            f"{train.seq_len} and {cfg.max_seq_len}. Set seq_len={cfg.max_seq_len}, "
            "or build the model for longer sequences."
        )
    if train.seq_len <= cfg.n_mtp:
        raise ValueError(
            "seq_len must exceed the MTP depth, because module k predicts k tokens "
            f"further ahead; got {train.seq_len} and {cfg.n_mtp}. "
            f"Set seq_len={cfg.n_mtp + 1} or more, or build the model without MTP."
        )
    if cfg.vocab_size < BYTE_VOCAB:
        raise ValueError(
            f"vocab_size must be at least {BYTE_VOCAB}, because tokens are bytes; got "
            f"{cfg.vocab_size}. Set vocab_size={BYTE_VOCAB}."
        )


def _monitor_in(run_dir: Path | None, ranks: Ranks) -> Monitor:
    has_file = run_dir is not None and ranks.is_first
    return Monitor(run_dir / METRICS_NAME if has_file else None)
