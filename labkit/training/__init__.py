"""Training on real text: corpus, schedules, optimizer, loop, checkpoints."""

from labkit.training.checkpoint import read_checkpoint
from labkit.training.corpus import Corpus
from labkit.training.evaluation import Evaluation, evaluate
from labkit.training.trainer import Trainer

__all__ = ["Corpus", "Evaluation", "Trainer", "evaluate", "read_checkpoint"]
