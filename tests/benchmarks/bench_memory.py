"""Predicted memory beside measured and published: bytes, and errors with their sign.

Four tables. Steps of a real Trainer, drawn with a fixed seed: each kind of attention
under each recompute policy and a mixture of them, in both precisions, the rest at
random. A pipeline stage of DeepSeek-V3 in its full size, measured on fake tensors.
Its layers in FP8 beside BF16 (`fp8_layers`). Figures that others published. An error
is positive where the prediction is above.

Run with `make bench`, or `python tests/benchmarks/bench_memory.py [steps] [stage]
[fp8] [published]` for some of the four. One thread for steps, and one for the stage.
"""

import random
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context

import torch
from fp8_layers import fp8

from labkit.config import (
    PRESETS,
    GQAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    MTPConfig,
    TrainConfig,
)
from labkit.memory import RECOMPUTE_POLICIES, apply_recompute, measure, predict
from labkit.memory.comparison import Measured, against_measured, published_rows
from labkit.memory.full_size import local_experts, measure_stage, predict_stage
from labkit.memory.report import MemoryReport
from labkit.model import Transformer
from labkit.training import Corpus, Trainer, corpus

ACTIVATIONS, PEAK = 0.02, 0.05
"""Largest errors of a step; lasting parts must be equal."""

STAGE_ACTIVATIONS = 0.03
STAGE_GIB, STAGE_SECONDS = 1.0, 90.0
"""Most real memory and time that the full-size stage may take."""

MIB, GIB = 2**20, 2**30

MLA = MLAConfig(
    n_heads=4,
    q_lora_rank=40,
    kv_lora_rank=32,
    qk_nope_head_dim=24,
    qk_rope_head_dim=8,
    v_head_dim=24,
)
ATTENTION = {
    "MLA": MLA,
    "MLA, direct queries": replace(MLA, q_lora_rank=None),
    "GQA": GQAConfig(n_heads=8, n_kv_heads=2, head_dim=16),
    "MHA": GQAConfig(n_heads=4, n_kv_heads=4, head_dim=24),
}

OF_A_BLOCK = ("none", "full", "selective", "attention")
"""Policies that any block can have, of which a mixture gives each its own."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One drawn training step."""

    attention: str
    policy: str
    """Its name, or "mixed"."""

    recompute: str | tuple[str, ...]
    cfg: ModelConfig
    train: TrainConfig

    def __str__(self) -> str:
        cfg, train = self.cfg, self.train
        parts = "dense" if cfg.moe is None else "MoE"
        if cfg.mtp is not None:
            parts += f" + {cfg.n_mtp} MTP"
        shape = f"{train.micro_batch} x {train.seq_len}"
        if train.n_micro_batches > 1:
            shape += f", {train.n_micro_batches} times"
        return (
            f"{self.attention:19}  {self.policy:9}  {train.precision}  {parts:13}  "
            f"{shape:18}"
        )


def drawn(seed: int = 0) -> Iterator[Case]:
    """Yield a case for each attention, policy and precision, the rest at random."""
    rng = random.Random(seed)
    for attention, policy, precision in product(
        ATTENTION, (*RECOMPUTE_POLICIES, "mixed"), ("fp32", "bf16")
    ):
        is_sparse = policy == "moe" or rng.random() < 0.6
        micro_batch = rng.randint(1, 4)
        cfg = _drawn_model(rng, attention, is_sparse=is_sparse)
        n_blocks = cfg.n_layers + cfg.n_mtp
        mixed = tuple(rng.choice(OF_A_BLOCK) for _ in range(n_blocks))
        yield Case(
            attention=attention,
            policy=policy,
            recompute=mixed if policy == "mixed" else policy,
            cfg=cfg,
            train=TrainConfig(
                micro_batch=micro_batch,
                global_batch=micro_batch * rng.choice((1, 1, 2, 3)),
                seq_len=rng.choice((64, 128, 200, 320, 512)),
                precision=precision,
            ),
        )


def _drawn_model(rng: random.Random, attention: str, *, is_sparse: bool) -> ModelConfig:
    moe = MoEConfig(
        n_routed_experts=rng.choice((4, 8, 16)),
        n_activated_experts=rng.randint(2, 4),
        moe_inter_dim=rng.choice((48, 96)),
        n_shared_experts=rng.randint(0, 2),
        score_func=rng.choice(("sigmoid", "softmax")),
    )
    n_layers = rng.randint(2, 5)
    return replace(
        PRESETS["tiny"],
        dim=rng.choice((64, 96, 144)),
        inter_dim=rng.choice((160, 320)),
        n_layers=n_layers,
        n_dense_layers=rng.randint(0, 1) if is_sparse else n_layers,
        attention=ATTENTION[attention],
        moe=moe if is_sparse else None,
        mtp=rng.choice((None, MTPConfig(), MTPConfig(depth=2))),
        max_seq_len=512,
    )


def measured_step(case: Case, text: Corpus) -> tuple[MemoryReport, list[list[int]]]:
    """Return the report of a Trainer's second step, and its last micro-batch's load."""
    model = Transformer(case.cfg, generator=torch.Generator().manual_seed(0))
    apply_recompute(model, case.recompute)
    trainer = Trainer(model, case.train, text)
    trainer.step()
    loads, plain_loss = [], model.loss

    def loss(*args: object, **kwargs: object) -> object:
        parts = plain_loss(*args, **kwargs)
        loads.append(parts.load.tolist())
        return parts

    model.loss = loss
    return measure(trainer.step, model), loads[-1]


def steps() -> bool:
    """Print each case's errors, with its router load known and taken to be even."""
    text, true_load = corpus.standard_library(), []
    print(
        f"{'':70}{'lasting':>10}{'activations':>22}{'peak':>18}   with even routing\n"
        f"{'attention, recompute, precision, parts, micro-batch':70}"
        f"{'bytes off':>10}{'MiB':>12}{'error':>10}{'MiB':>9}{'error':>9}"
        f"{'activ.':>11}{'peak':>9}"
    )
    for case in drawn():
        report, load = measured_step(case, text)
        known, even = (
            against_measured(
                str(case),
                predict(case.cfg, case.train, recompute=case.recompute, load=given),
                report,
            )
            for given in (load, None)
        )
        true_load.append(known)
        print(
            f"{known.name:70}{known.persistent_difference:>10}"
            f"{known.activations / MIB:>12.2f}{known.activations_error:>+10.2%}"
            f"{known.peak / MIB:>9.1f}{known.peak_error:>+9.2%}"
            f"{even.activations_error:>+11.2%}{even.peak_error:>+9.2%}",
            flush=True,
        )
    return _judged(true_load)


def _judged(rows: list[Measured]) -> bool:
    lasting = max(row.persistent_difference for row in rows)
    kept = max(rows, key=lambda row: abs(row.activations_error))
    by_peak = sorted(rows, key=lambda row: row.peak_error)
    print(f"worst of {len(rows)}: lasting parts {lasting} bytes off")
    print(f"  activations {kept.activations_error:+.2%}: {_named(kept)}")
    for row in (by_peak[0], by_peak[-1]):
        print(f"  peak {row.peak_error:+.2%}: {_named(row)}")
    is_near = all(abs(row.peak_error) <= PEAK for row in rows)
    return lasting == 0 and abs(kept.activations_error) <= ACTIVATIONS and is_near


def _named(row: Measured) -> str:
    return " ".join(row.name.split())


STAGE = local_experts(PRESETS["v3-671b"], 8)
STAGE_TRAIN = TrainConfig(micro_batch=1, global_batch=1, seq_len=4096)
STAGE_LAYERS = 4


def resident_bytes() -> int:
    """Return the most memory that this process has had."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def stage_in_child() -> tuple[MemoryReport, float, int]:
    """Return the report of the stage, CPU seconds, and the growth of this process."""
    torch.set_num_threads(1)
    before, start = resident_bytes(), time.process_time()
    report = measure_stage(STAGE, STAGE_TRAIN, STAGE_LAYERS)
    return report, time.process_time() - start, resident_bytes() - before


def stage(measured: Future) -> bool:
    """Print the full-size stage."""
    report, seconds, n_bytes = measured.result()
    predicted = predict_stage(STAGE, STAGE_TRAIN, STAGE_LAYERS)
    ours, theirs = (_states_of(x, "end of forward") for x in (predicted, report))
    kept, measured_kept = (
        x["activations"] + x.get("dispatch", 0) for x in (ours, theirs)
    )
    error = kept / measured_kept - 1
    peak = predicted.peak - predicted.by_part["moments"]  # there is no optimizer here
    n_experts, n_params = STAGE.moe.n_routed_experts, theirs["weights"] // 2
    print(
        f"{STAGE_LAYERS} MoE layers of DeepSeek-V3 with {n_experts} of 256 routed "
        f"experts, {n_params / 1e9:.2f}e9 parameters in BF16, one sequence of "
        f"{STAGE_TRAIN.seq_len} tokens"
    )
    print(
        f"  activations {measured_kept / GIB:.2f} GiB measured, {kept / GIB:.2f} "
        f"predicted ({error:+.2%})"
    )
    print(
        f"  peak {report.peak / GIB:.2f} GiB measured, {peak / GIB:.2f} predicted "
        f"({peak / report.peak - 1:+.2%}), in the {report.peak_instant.name}"
    )
    print(
        f"  it took {n_bytes / GIB:.2f} GiB of real memory (at most {STAGE_GIB:.0f}) "
        f"and {seconds:.0f} CPU seconds of one thread (at most {STAGE_SECONDS:.0f})"
    )
    return (
        abs(error) <= STAGE_ACTIVATIONS
        and n_bytes <= STAGE_GIB * GIB
        and seconds <= STAGE_SECONDS
    )


def _states_of(report: MemoryReport, name: str) -> dict[str, int]:
    return dict(next(x.by_part for x in report.timeline if x.name == name))


def published() -> bool:
    """Print what others published beside what labkit computes."""
    rows, notes = published_rows(), {}
    for row in rows:
        mark = notes.setdefault(row.assumption, len(notes) + 1)
        digits = 12 if row.unit in ("B", "parameters") else 6
        said, ours = f"{row.published:,.12g}", f"{row.ours:,.{digits}g}"
        missed = "" if row.is_within else "  MISSED"
        print(
            f"{row.section:14} {row.item:66} {said:>15} {ours:>13} {row.unit:10} "
            f"{row.error:+7.2%}  {row.tolerance:8} [{mark}]{missed}"
        )
    for note, mark in notes.items():
        print(f"[{mark}] {note}")
    print("Tolerance 'none': shown, and nothing is claimed.")
    return all(row.is_within for row in rows)


NAMES = ("steps", "stage", "fp8", "published")


def main() -> None:
    torch.set_num_threads(1)
    chosen = [name for name in NAMES if name in sys.argv[1:]] or list(NAMES)
    reached = {}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        measured = pool.submit(stage_in_child) if "stage" in chosen else None
        for name in chosen:
            print(f"--- {name} ---", flush=True)
            if name == "steps":
                reached[name] = steps()
            elif name == "stage":
                reached[name] = stage(measured)
            elif name == "fp8":
                reached[name] = fp8()
            else:
                reached[name] = published()
    missed = ", ".join(name for name, is_reached in reached.items() if not is_reached)
    print(f"a bar was missed in: {missed}" if missed else "every bar reached")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
