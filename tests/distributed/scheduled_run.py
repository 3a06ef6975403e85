"""A run under torchrun whose scheduler must decide alike on all ranks.

    torchrun --nproc-per-node 2 scheduled_run.py FOLDER N_STEPS

The activations of the last rank become infinite in its fourth forward pass. Each rank
writes what it did to FOLDER/RANK.json; FOLDER/run is the folder of the run, which goes
on if there is one.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from labkit.config import MLAConfig, ModelConfig, MoEConfig, TrainConfig
from labkit.model import Transformer
from labkit.parallel.group import process_group
from labkit.precision.faults import Fault, inject
from labkit.precision.scheduler import PrecisionScheduler
from labkit.training import Corpus, Trainer
from labkit.training.ranks import Ranks

CFG = ModelConfig(
    vocab_size=256,
    dim=16,
    n_layers=2,
    inter_dim=24,
    attention=MLAConfig(
        n_heads=2,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    ),
    moe=MoEConfig(n_routed_experts=4, n_activated_experts=2, moe_inter_dim=8),
    max_seq_len=64,
)

TRAIN = TrainConfig(
    n_steps=20, global_batch=2, micro_batch=1, seq_len=16, precision="fp8"
)

FAULT = Fault(kind="inf", module="layers.1.attn.wo", first=3, last=3)


def make_trainer(folder: Path) -> Trainer:
    text = np.random.default_rng(0).integers(97, 123, 700, dtype=np.uint8)
    corpus = Corpus("noise", text[:600], text[600:], fingerprint="noise")
    if folder.exists():
        return Trainer.resume(folder, corpus=corpus)
    model = Transformer(CFG, generator=torch.Generator().manual_seed(0))
    scheduler = PrecisionScheduler(CFG, start="deepseek-v3")
    return Trainer(model, TRAIN, corpus, run_dir=folder, scheduler=scheduler)


def train(folder: Path, n_steps: int, ranks: Ranks) -> None:
    trainer = make_trainer(folder / "run")
    is_struck = ranks.rank == ranks.world - 1 and not trainer.n_steps_done
    with inject(trainer.model, *([FAULT] if is_struck else [])):
        records = trainer.run(n_steps, progress=False)
    done = {
        "losses": [record.loss for record in records],
        "log": trainer.watch.log.to_values(),
        "scheduler": trainer.watch.scheduler.state_dict(),
        "weights": [parameter.sum().item() for parameter in trainer.model.parameters()],
        "limits": asdict(trainer.watch.scheduler.limits),
    }
    (folder / f"{ranks.rank}.json").write_text(json.dumps(done))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group():
        train(Path(sys.argv[1]), int(sys.argv[2]), Ranks.current())
