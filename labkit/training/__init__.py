"""Training on real text: corpus, schedules, optimizer, loop, checkpoints."""

from labkit.training.checkpoint import read_checkpoint
from labkit.training.corpus import Corpus
from labkit.training.evaluation import Evaluation, evaluate
from labkit.training.recipes import RECIPES
from labkit.training.speed import faster_precision
from labkit.training.trainer import Trainer

__all__ = [
    "RECIPES",
    "Corpus",
    "Evaluation",
    "Trainer",
    "evaluate",
    "faster_precision",
    "read_checkpoint",
]
