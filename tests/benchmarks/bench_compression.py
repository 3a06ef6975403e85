"""What compressed sums of gradients cost in loss, and save in bytes.

A preset is trained on the standard library by two ranks, once for each compression, on
the same batches. Each runs as a hook of DDP. Shown are the bytes that a rank sends in a
step, as counted and as predicted, the memory that the hook keeps, and the loss on
held-out text beside that of plain sums; with error feedback it has to be within 1 %.
What a hook without feedback, or one that sums nothing, does is shown, not judged.

Run with `make bench`, or

    python tests/benchmarks/bench_compression.py --preset small --steps 300
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labkit.config import PRESETS
from labkit.hardware.units import memory
from labkit.model import Transformer
from labkit.monitor import Monitor
from labkit.parallel.communication.checksum import diverged
from labkit.parallel.communication.compress import (
    Coded,
    Compression,
    compress_replicas,
)
from labkit.parallel.communication.compress_codec import Int8, Narrow, TopK
from labkit.parallel.communication.compress_power import PowerSGD
from labkit.parallel.communication.count import count_communication
from labkit.parallel.launch import launch
from labkit.training import Trainer, corpus
from labkit.training.ranks import Ranks
from labkit.training.recipes import RECIPES

N_RANKS = 2
WITHIN = 0.01
"""Of the loss of plain sums."""

LAST = 0.2
"""Of the steps, over whose training loss the mean is taken."""

MAKERS: dict[str, Callable[[], Compression] | None] = {
    "plain sums": lambda: Coded(Narrow("fp32")),
    "bf16": lambda: Coded(Narrow("bf16")),
    "fp8": lambda: Coded(Narrow("fp8")),
    "fp8, no feedback": lambda: Coded(Narrow("fp8"), error_feedback=False),
    "int8": lambda: Coded(Int8()),
    "int8, no feedback": lambda: Coded(Int8(), error_feedback=False),
    "top 10%": lambda: Coded(TopK(0.1)),
    "top 10%, no feedback": lambda: Coded(TopK(0.1), error_feedback=False),
    "top 1%": lambda: Coded(TopK(0.01)),
    "top 1%, no feedback": lambda: Coded(TopK(0.01), error_feedback=False),
    "PowerSGD 16": lambda: PowerSGD(rank=16),
    "PowerSGD 16, no feedback": lambda: PowerSGD(rank=16, error_feedback=False),
    "PowerSGD 4": lambda: PowerSGD(rank=4),
    "PowerSGD 4, no feedback": lambda: PowerSGD(rank=4, error_feedback=False),
    "no sum at all": None,
}


class Row(NamedTuple):
    """How a run went."""

    train: float
    valid: float
    sent_bytes: float
    expected_bytes: float
    state_bytes: int
    diverged: tuple[str, ...]
    seconds: float


class Loss(nn.Module):
    """A model whose forward pass is its loss, as DDP wants it."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model, self.method = model, model.loss

    def forward(self, *args, **kwargs):
        return self.method(*args, **kwargs)


class SummedInBackward(Ranks):
    """Ranks whose gradients the hook has summed before they are asked to."""

    def sum_gradients(self, parameters) -> None:
        """Do nothing."""


def train(name: str, preset: str, n_steps: int) -> Row:
    """Train one model with one hook, as one of the ranks."""
    recipe = replace(RECIPES[preset], n_steps=n_steps)
    generator = torch.Generator().manual_seed(recipe.seed)
    model = Transformer(PRESETS[preset], generator=generator)
    trainer = Trainer(model, recipe, corpus.standard_library(), monitor=Monitor())
    ddp = DistributedDataParallel(
        Loss(model),
        process_group=unchecked_group(),
        forward_sync_buffers=False,  # router biases move alike on all ranks
    )
    sums = None
    if MAKERS[name] is None:
        ddp.register_comm_hook(None, silent)
    else:
        sums = compress_replicas(ddp, MAKERS[name]())
    model.loss = lambda *args, **kwargs: ddp(*args, **kwargs)
    trainer.ranks = SummedInBackward(dist.get_rank(), dist.get_world_size())
    start = time.perf_counter()
    records = trainer.run(n_steps - 1, progress=False)
    with count_communication({"hook": ddp.process_group}) as found:
        records += trainer.run(1, progress=False)
    seconds = time.perf_counter() - start
    del model.loss
    last = records[-max(1, round(LAST * n_steps)) :]
    return Row(
        train=sum(record.loss_main for record in last) / len(last),
        valid=trainer.evaluate().nats,
        sent_bytes=found.sum("sent_bytes", axis="hook"),
        expected_bytes=sums.expected().n_bytes if sums else 0,
        state_bytes=sums.compression.state_bytes if sums else 0,
        diverged=diverged(model),
        seconds=seconds,
    )


def unchecked_group() -> dist.ProcessGroup:
    """Return a group whose collectives are not checked: DDP cannot bear the checks."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)
    group = dist.new_group()
    dist.set_debug_level(level)
    return group


def silent(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum nothing: each rank goes on with its own gradients."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", default="small", choices=("tiny", "small"))
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--only", nargs="*", default=None, help="names of hooks")
    parser.add_argument("--timeout", type=float, default=3600)
    args = parser.parse_args()
    n_steps = args.steps or RECIPES[args.preset].n_steps
    print(f"{args.preset}, {n_steps} steps, {N_RANKS} ranks")
    print(
        f"{'hook':26}{'sent a step':>13}{'predicted':>13}{'less':>7}{'kept':>11}"
        f"{'valid':>9}{'':>8}{'train':>9}{'':>8}  same  seconds"
    )
    passed, plain = True, None
    names = [n for n in MAKERS if not args.only or n in args.only or n == "plain sums"]
    for name in names:
        work = (train, N_RANKS, name, args.preset, n_steps)
        row = launch(*work, timeout=args.timeout)[0]
        plain = plain or row
        valid, training = row.valid / plain.valid - 1, row.train / plain.train - 1
        less = plain.sent_bytes / row.sent_bytes if row.sent_bytes else float("inf")
        is_exact = row.sent_bytes == row.expected_bytes
        is_judged = "no " not in name
        is_same = not row.diverged
        is_near = not is_judged or valid <= WITHIN
        has_passed = is_exact and is_near and is_same == (name != "no sum at all")
        passed = passed and has_passed
        print(
            f"{name:26}{row.sent_bytes:13,.0f}{row.expected_bytes:13,.0f}{less:7.1f}"
            f"{memory(row.state_bytes):>11}{row.valid:9.4f}{valid:+8.2%}"
            f"{row.train:9.4f}{training:+8.2%}  {'yes' if is_same else 'NO':4}"
            f"{row.seconds:9.0f}{'' if has_passed else '  missed'}",
            flush=True,
        )
    print("every bar reached" if passed else "a bar was missed")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
