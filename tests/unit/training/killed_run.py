"""A run that is killed with SIGKILL at chosen places until it is done.

    python killed_run.py FOLDER STEP:PLACE ...

FOLDER/model.json holds the config of the model.

Each STEP:PLACE is one process that starts or resumes the run in FOLDER/killed and
kills itself at that place of that step. A last process finishes the run, and another
one runs undisturbed in FOLDER/whole. The processes are forked from this one, which
only imports and builds, so that twelve of them cost little more than one.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from labkit.config import TrainConfig, model_from_dict
from labkit.model import Transformer
from labkit.training import Corpus, Trainer, checkpoint
from labkit.training.run_folder import METRICS_NAME

TRAIN = TrainConfig(
    n_steps=40, global_batch=2, micro_batch=1, seq_len=16, lr=1e-2, warmup_steps=5
)
SAVE_EVERY = 3


def make_corpus() -> Corpus:
    text = np.random.default_rng(0).integers(97, 123, 700, dtype=np.uint8)
    return Corpus("noise", text[:600], text[600:], fingerprint="noise")


def make_trainer(folder: Path) -> Trainer:
    if (folder / checkpoint.CHECKPOINT_NAME).exists():
        return Trainer.resume(folder, corpus=make_corpus())
    shutil.rmtree(folder, ignore_errors=True)  # records of a run that saved nothing
    cfg = model_from_dict(json.loads((folder.parent / "model.json").read_text()))
    model = Transformer(cfg, generator=torch.Generator().manual_seed(0))
    return Trainer(model, TRAIN, make_corpus(), run_dir=folder)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_forward(trainer: Trainer, step: int) -> None:
    def hook(*_: object) -> None:
        if trainer.n_steps_done == step - 1:
            kill()

    trainer.model.norm.register_forward_hook(hook)


def kill_after_update(trainer: Trainer, step: int) -> None:
    update = trainer.optimizer.step

    def update_and_die() -> None:
        update()
        if trainer.n_steps_done == step - 1:
            kill()

    trainer.optimizer.step = update_and_die


def kill_in_record(trainer: Trainer, step: int) -> None:
    record = trainer.monitor.record

    def half_a_line(metrics: object) -> None:
        if metrics.step == step:
            with (trainer.run_dir / METRICS_NAME).open("a") as file:
                file.write('{"step": ' + str(step))
                file.flush()
                kill()
        record(metrics)

    trainer.monitor.record = half_a_line


def kill_in_save(trainer: Trainer, step: int) -> None:
    save_file = checkpoint.save_file

    def half_a_file(tensors: dict, path: Path, **options: object) -> None:
        save_file(tensors, path, **options)
        if trainer.n_steps_done >= step:
            os.truncate(path, path.stat().st_size // 2)
            kill()

    checkpoint.save_file = half_a_file


def kill_around_move(trainer: Trainer, step: int, *, is_moved: bool) -> None:
    replace = os.replace

    def move_and_die(source: Path, target: Path) -> None:
        is_due = trainer.n_steps_done >= step
        if is_due and not is_moved:
            kill()
        replace(source, target)
        if is_due:
            kill()

    os.replace = move_and_die


PLACES: dict[str, Callable[[Trainer, int], None]] = {
    "forward": kill_in_forward,
    "update": kill_after_update,
    "record": kill_in_record,
    "save": kill_in_save,
    "before-move": lambda *args: kill_around_move(*args, is_moved=False),
    "after-move": lambda *args: kill_around_move(*args, is_moved=True),
}


def in_a_process(folder: Path, place: str | None = None, step: int = 0) -> int:
    """Run to the end or to the place; return the status as `waitpid` gives it."""
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1]
    trainer = make_trainer(folder)
    if place is not None:
        PLACES[place](trainer, step)
    trainer.run(progress=False, save_every=SAVE_EVERY)
    os._exit(0)


def main(folder: Path, kills: list[str]) -> None:
    torch.set_num_threads(1)  # a process with OpenMP threads must not fork
    make_trainer(folder / "unused")  # loads what PyTorch loads late
    for entry in kills:
        step, place = entry.split(":")
        status = in_a_process(folder / "killed", place, int(step))
        assert os.WTERMSIG(status) == signal.SIGKILL, f"{entry} gave status {status}"
    for name in ("killed", "whole"):
        assert in_a_process(folder / name) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
