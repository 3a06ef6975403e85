"""`python -m labkit train`: train a preset on text, alone or under torchrun.

python -m labkit train --preset tiny --steps 100
torchrun --nproc-per-node 2 -m labkit train --preset small --corpus ~/notes
python -m labkit train --resume runs/small
"""

import argparse
import math
import os
import secrets
import textwrap
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import psutil
import torch

from labkit.commands.progress import line_printer, print_decisions
from labkit.config import PRESETS, ModelConfig, TrainConfig
from labkit.hardware import measure
from labkit.hardware.units import from_memory
from labkit.memory import RECOMPUTE_POLICIES
from labkit.memory.out_of_memory import OutOfMemory
from labkit.model import Transformer, generate
from labkit.monitor import Monitor
from labkit.parallel.group import process_group
from labkit.precision import POLICIES
from labkit.precision.scheduler import PrecisionScheduler
from labkit.training import RECIPES, Corpus, Trainer, corpus, faster_precision
from labkit.training.ranks import Ranks
from labkit.training.recipes import require_fit
from labkit.training.run_folder import METRICS_NAME, require_new
from labkit.training.snapshots import N_SNAPSHOTS
from labkit.training.windows import Windows

BYTES_PER_PARAMETER = 16
"""FP32 weights, gradients and two moments."""

SNAPSHOT_BYTES = 12 * N_SNAPSHOTS
"""The same for each parameter of what a precision scheduler may go back to."""

MOST_THREADS = 1024
"""Far beyond it, starting the threads exhausts the process and ends it."""

LEAST = {"save_every": 1, "log_every": 1, "sample": 0}
"""Smallest values of options that no config checks."""

RECIPE_OPTIONS = (
    *("n_steps", "global_batch", "micro_batch", "seq_len", "lr", "seed"),
    *("fp8_policy", "moments"),
)
NEW_RUN_OPTIONS = (
    *("preset", "corpus", "out", "precision", "precision_scheduler"),
    *RECIPE_OPTIONS,
)

FP8_OPTIONS = {
    "fp8_policy": "says what --precision fp8 has in FP8",
    "precision_scheduler": "decides what --precision fp8 has in FP8",
}
"""What an option does, that is nothing without FP8."""

PROMPT = "def "
"""What the sample at the end goes on from."""

TERMS = {
    "n_steps": "--steps",
    "global_batch": "--global-batch",
    "micro_batch": "--micro-batch",
    "seq_len": "--seq-len",
    "lr": "--lr",
    "seed": "--seed",
    "precision='fp8'": "--precision fp8",
    "precision": "--precision",
    "fp8_policy": "--fp8-policy",
    r"moments=": "--moments=",
    r"recompute=\((.*?)\)": r"--recompute \1",
    "recompute": "--recompute",
    r"policy\[(\d+)\]": "each of several --recompute",
    "policy": "--recompute",
    "run_dir": "--out",
    "choose another folder": "choose another --out",
    "build the model": "choose a preset",
    r"corpus\.from_folder": "--corpus",
    r"Trainer\.save": "labkit train",
    r"Trainer\.resume\('(.*?)'\)": r"--resume \1",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `train`."""
    new = parser.add_argument_group("a new run (an option left out is the preset's)")
    new.add_argument("--preset", choices=PRESETS, help="model (default: tiny)")
    text = "folder of text (default: Python's standard library)"
    new.add_argument("--corpus", metavar="DIR", help=text)
    new.add_argument("--out", metavar="DIR", help="folder of the run, to be made")
    text = "optimizer steps of the whole run"
    new.add_argument("--steps", metavar="N", type=int, dest="n_steps", help=text)
    new.add_argument("--global-batch", metavar="N", type=int, help="sequences a step")
    new.add_argument("--micro-batch", metavar="N", type=int, help="sequences at once")
    new.add_argument("--seq-len", metavar="N", type=int, help="tokens a sequence")
    new.add_argument("--lr", metavar="X", type=float, help="peak learning rate")
    text = "of the weights and of the order of text"
    new.add_argument("--seed", metavar="N", type=int, help=text)
    text = "of matrix products; auto takes the faster of fp32 and bf16 here"
    choices = ("fp32", "bf16", "fp8", "auto")
    new.add_argument("--precision", choices=choices, help=text)
    text = "which layers --precision fp8 has in FP8 (default: deepseek-v3)"
    new.add_argument("--fp8-policy", metavar="NAME", choices=POLICIES, help=text)
    text = "let a scheduler decide what is in FP8 and when to go back: an idea of "
    text += "articles, not DeepSeek's"
    new.add_argument(
        "--precision-scheduler", action="store_true", default=None, help=text
    )
    text = "in what AdamW keeps its moments (default: fp32)"
    choices = ("fp32", "bf16", "bf16-stochastic")
    new.add_argument("--moments", choices=choices, help=text)
    parser.add_argument("--resume", metavar="DIR", help="go on with the run there")
    text = "steps between checkpoints (default: 100)"
    parser.add_argument("--save-every", metavar="N", type=int, default=100, help=text)
    text = "steps between lines (default: 10)"
    parser.add_argument("--log-every", metavar="N", type=int, default=10, help=text)
    text = "bytes of text to generate at the end (default: 200)"
    parser.add_argument("--sample", metavar="N", type=int, default=200, help=text)
    parser.add_argument("--threads", metavar="N", type=int, help="CPU threads")
    text = "what to run again in the backward, for all blocks or each (default: none)"
    parser.add_argument(
        "--recompute",
        nargs="+",
        type=lambda name: name.rstrip(","),
        choices=RECOMPUTE_POLICIES,
        help=text,
    )
    text = "most bytes of tensors at once, as in 2GiB; a step that needs more says why"
    parser.add_argument("--memory-limit", metavar="SIZE", help=text)
    text = "measure the peak of this machine first, and report MFU"
    parser.add_argument("--mfu", action="store_true", help=text)
    text = "write curves for TensorBoard too, if it is installed"
    parser.add_argument("--tensorboard", action="store_true", help=text)


def run(options: argparse.Namespace) -> int:
    """Train; on the first rank, print progress, validation loss and a sample."""
    _check(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with process_group():
        _train(options, Ranks.current())
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError for what is wrong with the options alone."""
    for name in ("corpus", "out", "resume"):
        if getattr(options, name) == "":
            raise ValueError(
                f"--{name} must name a folder; got an empty name (an unset variable?). "
                f"Give the folder, or leave --{name} out."
            )
    for name, least in LEAST.items():
        if getattr(options, name) < least:
            raise ValueError(
                f"{_flag(name)} must be at least {least}; got "
                f"{getattr(options, name)}. Set {_flag(name)} to {least} or more."
            )
    for name, purpose in FP8_OPTIONS.items():
        if getattr(options, name) is not None and options.precision != "fp8":
            raise ValueError(
                f"{_flag(name)} {purpose}; got --precision "
                f"{options.precision or 'fp32'}. Give --precision fp8, or leave "
                f"{_flag(name)} out."
            )
    if options.threads is not None and not 1 <= options.threads <= MOST_THREADS:
        raise ValueError(
            f"--threads must lie between 1 and {MOST_THREADS}; got {options.threads}. "
            f"This machine has {os.cpu_count()} processors."
        )


def _train(options: argparse.Namespace, ranks: Ranks) -> None:
    def say(text: str) -> None:
        if ranks.is_first:
            print(text, flush=True)

    trainer = _resumed(options) if options.resume else _new(options, ranks)
    if ranks.is_first:
        trainer.monitor = _monitor(options, trainer)
        trainer.watch.log.listeners.append(print_decisions)
    if options.recompute is not None:
        first, *others = options.recompute
        trainer.recompute(options.recompute if others else first)
    say(_describe(trainer))
    go_on = f"go on with: python -m labkit train --resume {trainer.run_dir}"
    try:
        records = trainer.run(progress=False, save_every=options.save_every)
    except OutOfMemory:
        if trainer.n_steps_done > 0:
            say(f"stopped after step {trainer.n_steps_done}; {go_on}")
        raise
    evaluation = trainer.evaluate()
    say(
        f"validation  {evaluation.nats:.4f} nats, "
        f"{evaluation.bits_per_byte:.4f} bits per byte"
    )
    if (records and records[-1].is_skipped) or not math.isfinite(evaluation.nats):
        raise FloatingPointError(
            f"the run diverged: at step {trainer.n_steps_done} its loss or gradients "
            "are not finite. Start a new run with a smaller lr."
        )
    if options.sample > 0 and ranks.is_first:
        say(_sample(trainer, options.sample))
    if trainer.n_steps_done < trainer.train.n_steps:
        say(f"stopped after step {trainer.n_steps_done}; {go_on}")
    say(f"saved in {trainer.run_dir}")


def _sample(trainer: Trainer, n_bytes: int) -> str:
    """Return a prompt and what the model writes after it, set off by a margin."""
    tokens = corpus.encode(PROMPT).unsqueeze(0).to(trainer.device)
    generator = torch.Generator(trainer.device).manual_seed(trainer.train.seed)
    n_bytes = min(n_bytes, trainer.model.cfg.max_seq_len - tokens.shape[1])
    new = generate(
        trainer.model,
        tokens,
        n_bytes,
        temperature=0.8,
        top_p=0.95,
        generator=generator,
    )
    text = PROMPT + corpus.decode(new.tokens[0])
    # Bytes of a young model would otherwise steer the terminal.
    text = "".join(c if c.isprintable() or c == "\n" else "·" for c in text)
    return "sample\n" + textwrap.indent(text, "    | ", predicate=lambda _: True)


def _resumed(options: argparse.Namespace) -> Trainer:
    given = [name for name in NEW_RUN_OPTIONS if getattr(options, name) is not None]
    if given:
        raise ValueError(
            "--resume goes on with the saved recipe and takes no options of a new run; "
            f"got {', '.join(_flag(name) for name in given)}. Leave them out."
        )
    limit = _memory_limit(options)
    trainer = Trainer.resume(options.resume, device=_device(), memory_limit=limit)
    if trainer.run_dir is None:  # a copy under another name: a run of its own
        trainer.run_dir = Path(options.resume).parent
        require_new(trainer.run_dir)
    return trainer


def _flag(name: str) -> str:
    return TERMS.get(name, f"--{name.replace('_', '-')}")


def _new(options: argparse.Namespace, ranks: Ranks) -> Trainer:
    preset = options.preset or "tiny"
    cfg, train = PRESETS[preset], _recipe(options, preset)
    limit = _memory_limit(options)
    run_dir = Path(options.out or f"runs/{_run_name(preset)}")
    # All that can be refused is, before the corpus writes its tokens.
    ranks.share(train.global_batch)
    require_fit(cfg, train)
    require_new(run_dir)
    is_kept = bool(options.precision_scheduler)
    _require_memory(preset, cfg, ranks, has_snapshots=is_kept)
    text = (
        corpus.standard_library(seq_len=train.seq_len)
        if options.corpus is None
        else corpus.from_folder(options.corpus, seq_len=train.seq_len)
    )
    generator = torch.Generator(_device()).manual_seed(train.seed)
    model = Transformer(cfg, device=_device(), generator=generator)
    if options.precision == "auto":
        train = replace(train, precision=_faster(model, train, text, ranks))
    scheduler = None
    if options.precision_scheduler:
        scheduler = PrecisionScheduler(cfg, aim=train.fp8_policy)
    return Trainer(
        *(model, train, text),
        run_dir=run_dir,
        memory_limit=limit,
        scheduler=scheduler,
    )


def _memory_limit(options: argparse.Namespace) -> int | None:
    if options.memory_limit is None:
        return None
    try:
        return from_memory(options.memory_limit)
    except ValueError as error:
        raise ValueError(f"--memory-limit: {error}") from error


def _run_name(preset: str) -> str:
    """Return a name that sorts by time; two starts in one second differ."""
    return f"{preset}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def _recipe(options: argparse.Namespace, preset: str) -> TrainConfig:
    """Return the preset's recipe with the options that were given."""
    train = RECIPES.get(preset, TrainConfig())
    names = [name for name in RECIPE_OPTIONS if getattr(options, name) is not None]
    changes = {name: getattr(options, name) for name in names}
    if "lr" in changes:
        changes["min_lr"] = changes["lr"] * train.min_lr / train.lr
    if "global_batch" in changes and "micro_batch" not in changes:
        changes["micro_batch"] = min(train.micro_batch, changes["global_batch"])
    if options.precision not in (None, "auto"):
        changes["precision"] = options.precision
    return replace(train, **changes)


def _require_memory(
    preset: str, cfg: ModelConfig, ranks: Ranks, *, has_snapshots: bool
) -> None:
    """Raise ValueError if the weights and their optimizer cannot fit here."""
    parts, size = "weights, gradients and moments", BYTES_PER_PARAMETER
    if has_snapshots:
        parts, size = "weights, gradients, moments and snapshots", size + SNAPSHOT_BYTES
    needed = size * cfg.n_params(include_mtp=True) * ranks.world
    present = psutil.virtual_memory().total
    if _device().type == "cpu" and needed > present:
        raise ValueError(
            f"{preset} does not fit: {parts} of "
            f"{ranks.world} rank(s) take {needed / 2**30:,.0f} GiB, and this machine "
            f"has {present / 2**30:,.0f} GiB. Choose a smaller preset, such as small."
        )


def _faster(model: Transformer, train: TrainConfig, text: Corpus, ranks: Ranks) -> str:
    """Return the faster precision; all ranks take the first rank's."""
    windows = Windows(text.train, train.seq_len, name="training text")
    count = min(train.micro_batch, ranks.share(train.global_batch))
    batch = windows.take(0, count).to(_device())
    is_bf16 = ranks.is_first and faster_precision(model, batch) == "bf16"
    return "bf16" if ranks.any(is_bf16) else "fp32"


def _device() -> torch.device:
    """Return where to train; on CUDA this has not been run."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _monitor(options: argparse.Namespace, trainer: Trainer) -> Monitor:
    return Monitor(
        trainer.run_dir / METRICS_NAME,
        tensorboard=options.tensorboard,
        on_step=[line_printer(options.log_every, trainer.train.n_steps)],
        peak_flops=_peak_flops(trainer) if options.mfu else None,
    )


def _peak_flops(trainer: Trainer) -> float:
    dtype = "float32" if trainer.train.precision == "fp32" else "bfloat16"
    dtypes = sorted({"float32", dtype})
    return measure(seconds=2.0, device=trainer.device, dtypes=dtypes).gemm_flops[dtype]


def _describe(trainer: Trainer) -> str:
    cfg, train, ranks = trainer.model.cfg, trainer.train, trainer.ranks
    total, active = cfg.n_params(include_mtp=True), cfg.n_active_params()
    is_fp8 = train.precision == "fp8"
    return "\n".join(
        (
            f"text        {trainer.corpus}",
            f"model       {total / 1e6:.2f}M parameters with MTP, "
            f"{active / 1e6:.2f}M active per token",
            f"recipe      {train.n_steps} steps ({trainer.n_steps_done} done) of "
            f"{train.global_batch} x {train.seq_len} tokens, {train.precision}, "
            f"{ranks.world} rank(s) on "
            f"{trainer.device}, {torch.get_num_threads()} thread(s) each",
            *([f"precision   {trainer.fp8}; the rest in BF16"] if is_fp8 else []),
        )
    )
