"""The process group: joined before the work of a rank, left in order after it.

`labkit.parallel.launch` starts the processes of one machine and joins them. On a
cluster torchrun starts them, and `run` in the script joins the same function:

    if __name__ == "__main__":
        run(work, 3)                     # torchrun --nproc-per-node 4 script.py

It is tested with gloo on CPUs; on GPUs and with NCCL it has not been run.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

Result = TypeVar("Result")

PATIENCE = timedelta(minutes=5)
"""How long a rank waits for the others before it gives up."""

STEP_LINE = "step {}\n"
"""What `at_step` writes."""


@contextmanager
def process_group() -> Iterator[None]:
    """Join the group that torchrun started, if it did, and leave it in order.

    gloo's threads abort the interpreter at exit if they still hold tensors. So the
    caller must have dropped its model when the context ends; then everyone collects
    garbage and waits for the others before the group is destroyed. A process that is
    in a group already, as those of `launch` are, stays in it.
    """
    is_launched = dist.is_available() and dist.is_torchelastic_launched()
    if not is_launched or dist.is_initialized():
        yield
        return
    join()
    try:
        yield
        leave()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def join(
    store: dist.Store | None = None,
    *,
    rank: int = -1,
    world: int = -1,
    patience: timedelta = PATIENCE,
    backend: str = "gloo",
) -> None:
    """Join the group; without a store, the one that torchrun names.

    Args:
        store: where the ranks find each other.
        rank: this process, if there is a store.
        world: how many there are, if there is a store.
        patience: how long a rank waits for the others.
        backend: of PyTorch, for tensors on the CPU.
    """
    if torch.cuda.is_available():
        backend = f"cpu:{backend},cuda:nccl"  # flags and counts travel from the CPU
        torch.cuda.set_device(dist.get_node_local_rank() % torch.cuda.device_count())
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=patience
    )


def leave() -> None:
    """Wait for the other ranks, with nothing left to send, and leave the group."""
    if dist.is_initialized():
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


def run(fn: Callable[..., Result], *args: object) -> Result:
    """Return `fn(*args)`, called in the group of torchrun; alone without torchrun.

    A rank that raises leaves its traceback where torchrun looks for it.
    """
    torch.set_num_threads(1)

    @record
    def in_group() -> Result:
        with process_group():
            return fn(*args)

    return in_group()


def node_of(rank: int) -> int:
    """Return the node of a rank, as torchrun and `launch` number them.

    Nodes have as many ranks each, and the first node the first of them.
    """
    return rank // int(os.environ.get("LOCAL_WORLD_SIZE", rank + 1))


def at_step(step: int) -> None:
    """Say on stderr which step begins; if the rank fails, `launch` names the step."""
    sys.stderr.write(STEP_LINE.format(step))
    sys.stderr.flush()
