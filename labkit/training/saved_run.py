"""A saved run, opened: its configs, its text, and where it goes on writing."""

from dataclasses import dataclass
from pathlib import Path

import torch

from labkit.config import ModelConfig, TrainConfig
from labkit.model import Transformer
from labkit.training import corpus as corpora
from labkit.training.checkpoint import (
    CHECKPOINT_NAME,
    Checkpoint,
    checkpoint_path,
    read_checkpoint,
)
from labkit.training.checkpoint_check import read_configs
from labkit.training.corpus import Corpus


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun:
    """All that a run needs to go on, but for the machine."""

    checkpoint: Checkpoint
    cfg: ModelConfig
    train: TrainConfig
    corpus: Corpus

    run_dir: Path | None
    """Folder of the run; None: the checkpoint is a copy under another name."""

    def build(self, device: torch.device | str | None = None) -> Transformer:
        """Return a model of its config; None is PyTorch's default device."""
        device = torch.device(device or torch.get_default_device())
        return Transformer(self.cfg, device=device, generator=torch.Generator(device))


def open_run(path: str | Path, corpus: Corpus | None = None) -> SavedRun:
    """Return the run whose checkpoint, or folder, this is.

    Args:
        path: the checkpoint, or the folder of the run.
        corpus: the run's text; None finds it again where it was.

    Raises:
        ValueError: the checkpoint's values are not whole, or the text is another one.
    """
    path = checkpoint_path(path)
    checkpoint = read_checkpoint(path)
    cfg, train = read_configs(checkpoint.values)
    source = checkpoint.values["corpus"]
    if corpus is None:
        corpus = corpora.reopen(source)
    corpora.require_same_text(corpus, source["fingerprint"])
    return SavedRun(
        checkpoint=checkpoint,
        cfg=cfg,
        train=train,
        corpus=corpus,
        run_dir=path.parent if path.name == CHECKPOINT_NAME else None,
    )
