"""What a Trainer does for a precision scheduler; the scheduler here has a script."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit.config import ModelConfig, TrainConfig
from labkit.hardware.units import memory
from labkit.memory import OutOfMemory, measure
from labkit.monitor import read_jsonl
from labkit.precision import PrecisionPolicy
from labkit.precision.levels import modules_in_fp8
from labkit.precision.limits import Limits
from labkit.precision.linear import InFp8
from labkit.precision.policies import policy_of
from labkit.precision.scheduler import Decision, PrecisionScheduler, Verdict
from labkit.precision.signals import GemmSignal, StepSignals
from labkit.training import Trainer, read_checkpoint, snapshots, watch
from labkit.training.checkpoint import CHECKPOINT_NAME, gather_tensors, write_checkpoint
from labkit.training.decisions import Rollback, read_decisions
from labkit.training.ranks import Ranks

MODULE, OTHER = "layers.0.attn.wkv_a", "layers.0.ffn.w2"


def change(step: int, module: str, before: str, after: str) -> Decision:
    return Decision(
        step=step, module=module, signal="loss", value=7.5, before=before, after=after
    )


TROUBLE = Verdict(
    decisions=(change(5, MODULE, "fp8", "high"), change(5, OTHER, "high", "fp8")),
    roll_back=True,
    since=5,
    cause="loss",
)


class Scripted(PrecisionScheduler):
    """Says at each step, the first time, what its script has for it."""

    def __init__(
        self,
        cfg: ModelConfig,
        script: Mapping[int, Verdict] | None = None,
        aim: str | PrecisionPolicy = "deepseek-v3",
        **_: object,
    ) -> None:
        self.aim, self.hardware, self.limits = policy_of(aim), "cpu", Limits()
        self.script = dict(script or {})
        self.now = dict.fromkeys(modules_in_fp8(cfg, self.aim), "high")
        self.now[MODULE] = "fp8"
        self.n_seen = 0
        self.seen: list[StepSignals] = []

    @property
    def levels(self) -> dict[str, str]:
        return dict(self.now)

    @property
    def statistics(self) -> dict[str, Any]:
        return {"n_seen": self.n_seen}

    def observe(self, signals: StepSignals) -> Verdict:
        self.seen.append(signals)
        self.n_seen += 1
        verdict = self.script.pop(signals.step, Verdict())
        self.now |= {each.module: each.after for each in verdict.decisions}
        return verdict

    def rewind(self, statistics: Mapping[str, Any]) -> None:
        self.n_seen = statistics["n_seen"]

    def state_dict(self) -> dict[str, Any]:
        left = sorted(self.script)
        return {"levels": self.levels, "n_seen": self.n_seen, "left": left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.now, self.n_seen = dict(state["levels"]), state["n_seen"]
        self.script = {step: self.script[step] for step in state["left"]}


Make = Callable[..., Trainer]


@pytest.fixture(autouse=True)
def often(monkeypatch) -> None:
    """Take a snapshot every three steps."""
    monkeypatch.setattr(snapshots, "SNAPSHOT_EVERY", 3)


@pytest.fixture
def in_fp8(train_config) -> TrainConfig:
    return replace(train_config, precision="fp8", global_batch=2)


@pytest.fixture
def make(make_model, in_fp8, corpus) -> Make:
    """Return a function that makes a Trainer with a scheduler of this script."""

    def make(script: Mapping[int, Verdict] | None = None, **options: Any) -> Trainer:
        model = make_model()
        scheduler = Scripted(model.cfg, script)
        return Trainer(model, in_fp8, corpus, scheduler=scheduler, **options)

    return make


def in_fp8_now(trainer: Trainer) -> list[str]:
    modules = trainer.model.named_modules()
    return [name for name, module in modules if isinstance(module, InFp8)]


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    tensors = gather_tensors(trainer.model, trainer.optimizer)
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        one[name].cpu().numpy().tobytes() == two[name].cpu().numpy().tobytes()
        for name in one
    )


def losses(records: list) -> list[float]:
    return [record.loss for record in records]


def test_the_scheduler_sees_each_step_and_its_levels_hold_from_the_next(make):
    trainer = make({1: Verdict(decisions=(change(1, OTHER, "high", "fp8"),))})
    assert in_fp8_now(trainer) == [MODULE]
    records = [trainer.step()]
    assert in_fp8_now(trainer) == [MODULE, "layers.0.ffn", OTHER]
    records.append(trainer.step())

    first, second = trainer.watch.scheduler.seen
    assert [x.step for x in (first, second)] == [1, 2]
    assert losses(records) == losses([first, second])
    assert first.grad_norm == records[0].grad_norm
    assert {m: tuple(gemms) for m, gemms in first.gemms.items()} == {
        MODULE: ("fprop", "dgrad", "wgrad")
    }
    assert second.gemms.keys() == {MODULE, OTHER}
    assert trainer.decisions == (change(1, OTHER, "high", "fp8"),)


def test_a_rollback_puts_everything_back_but_levels(make):
    def draw(*_: object) -> None:
        torch.rand(1)

    before, trainer = make(), make({5: TROUBLE})
    for each in (before, trainer):
        each.model.norm.register_forward_hook(draw)
    before.run(3, progress=False)
    steps = [trainer.step().step for _ in range(5)]
    assert steps == [1, 2, 3, 4, 5]
    assert same(everything(trainer), everything(before))
    assert (trainer.n_steps_done, trainer.n_tokens_seen) == (3, 3 * 2 * 16)
    assert trainer.cursor.state_dict() == before.cursor.state_dict()
    assert trainer.watch.scheduler.n_seen == 3
    assert in_fp8_now(trainer) == ["layers.0.ffn", OTHER]
    assert trainer.rollbacks == (Rollback(step=5, since=5, back_to=3, cause="loss"),)


def test_a_run_goes_back_to_before_the_trouble_began(make):
    trainer = make({5: replace(TROUBLE, since=3)})
    for _ in range(5):
        trainer.step()
    assert trainer.n_steps_done == 0  # the state after step 3 is not from before it


def test_steps_that_are_taken_back_are_done_again_with_the_same_text(make):
    again = replace(TROUBLE, decisions=())
    expected = losses(make().run(7, progress=False))
    trainer = make({5: again})
    records = trainer.run(7, progress=False)
    assert trainer.rollbacks and losses(records) == expected
    assert [record.attempt for record in records] == [0, 0, 0, 1, 1, 1, 1]


def test_records_tell_attempts_apart_and_the_last_of_each_step_stands(make, tmp_path):
    trainer = make({5: TROUBLE}, run_dir=tmp_path)
    records = trainer.run(6, progress=False)
    assert read_jsonl(tmp_path / "metrics.jsonl") == records
    done = read_jsonl(tmp_path / "metrics.jsonl", all_attempts=True)
    assert [(record.attempt, record.step) for record in done] == [
        *((0, step) for step in range(1, 6)),
        *((1, step) for step in range(4, 7)),
    ]
    assert done[3].loss != done[5].loss  # in another precision


def test_every_decision_is_a_line_of_the_run(make, tmp_path):
    heard = []
    trainer = make({5: TROUBLE}, run_dir=tmp_path)
    trainer.watch.log.listeners.append(heard.append)
    trainer.run(6, progress=False)
    rollback = Rollback(step=5, since=5, back_to=3, cause="loss")
    path = tmp_path / "decisions.jsonl"
    assert read_decisions(path) == [*TROUBLE.decisions, rollback]
    assert heard == [(*TROUBLE.decisions, rollback)]
    assert json.loads(path.read_text().splitlines()[0]) == {
        "step": 5,
        "module": MODULE,
        "signal": "loss",
        "value": 7.5,
        "before": "fp8",
        "after": "high",
    }


@pytest.mark.parametrize(("n_more", "is_saved_later"), [(1, False), (2, True)])
def test_a_killed_run_repeats_the_whole_one_wherever_it_was_killed(
    make, corpus, tmp_path, monkeypatch, n_more, is_saved_later
):
    whole = make({5: TROUBLE}, run_dir=tmp_path / "whole")
    expected = losses(whole.run(7, progress=False))

    killed = make({5: TROUBLE}, run_dir=tmp_path / "killed")
    killed.run(4, progress=False)
    for _ in range(n_more):
        killed.step()
    assert len(killed.rollbacks) == 1
    if is_saved_later:
        killed.save()
    del killed

    script = {5: TROUBLE}
    monkeypatch.setattr(
        watch, "PrecisionScheduler", lambda cfg, **o: Scripted(cfg, script, **o)
    )
    resumed = Trainer.resume(tmp_path / "killed", corpus=corpus)
    resumed.run(7 - resumed.n_steps_done, progress=False)
    assert losses(read_jsonl(tmp_path / "killed" / "metrics.jsonl")) == expected
    assert same(everything(resumed), everything(whole))
    assert resumed.watch.to_values() == whole.watch.to_values()
    assert same(resumed.watch.to_tensors(), whole.watch.to_tensors())
    files = [tmp_path / name / "decisions.jsonl" for name in ("killed", "whole")]
    assert files[0].read_text() == files[1].read_text()


def test_a_real_scheduler_repeats_itself_from_the_start_and_from_a_checkpoint(
    make_model, in_fp8, corpus, tmp_path
):
    hasty = Limits(n_warm_up=1, n_healthy=1, patience=1, span=2, most_z=1.0)

    def make(run_dir: Path | None = None) -> Trainer:
        scheduler = PrecisionScheduler(make_model().cfg, limits=hasty)
        return Trainer(
            make_model(), in_fp8, corpus, run_dir=run_dir, scheduler=scheduler
        )

    whole, again = make(), make(tmp_path)
    expected = losses(whole.run(6, progress=False))
    again.run(4, progress=False)
    resumed = Trainer.resume(tmp_path, corpus=corpus)
    resumed.run(2, progress=False)
    assert losses(read_jsonl(tmp_path / "metrics.jsonl")) == expected
    assert resumed.rollbacks
    assert any(each.signal == "healthy" for each in whole.decisions)
    assert resumed.watch.to_values() == whole.watch.to_values()
    assert in_fp8_now(resumed) == in_fp8_now(whole)


def test_decisions_that_a_checkpoint_does_not_know_are_no_longer_told(
    make, corpus, tmp_path, monkeypatch
):
    trainer = make({2: Verdict(decisions=TROUBLE.decisions)}, run_dir=tmp_path)
    trainer.run(1, progress=False)
    trainer.step()
    assert (tmp_path / "decisions.jsonl").is_file()
    monkeypatch.setattr(watch, "PrecisionScheduler", _Unscripted)
    Trainer.resume(tmp_path, corpus=corpus).step()
    assert not (tmp_path / "decisions.jsonl").exists()


class _Unscripted(Scripted):
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(dict(state) | {"left": []})


def test_snapshots_take_twelve_bytes_a_parameter_and_are_two_at_most(make):
    trainer = make()
    n_bytes = []
    for _ in range(7):
        trainer.step()
        n_bytes.append(trainer.watch.ring.n_bytes)
    parameters = list(trainer.model.parameters())
    n_params = sum(parameter.numel() for parameter in parameters)
    n_biases = sum(buffer.numel() for buffer in trainer.model.buffers())
    most = 12 * n_params + 4 * (n_biases + len(parameters))
    most += torch.get_rng_state().nbytes
    assert n_bytes == [most] * 3 + [2 * most] * 4


@pytest.mark.usefixtures("unchecked")
def test_snapshots_count_against_the_limit_from_the_first_step_and_are_told(make):
    plain = make()
    plain.step()
    report = measure(plain.step, plain.model, plain.optimizer)
    held = 2 * plain.watch.ring.n_bytes

    enough = make(memory_limit=report.peak + held)
    enough.run(2, progress=False)
    trainer = make(memory_limit=held + report.by_part["weights"])
    with pytest.raises(OutOfMemory) as caught:
        trainer.step()
    assert f"and {memory(held)} are held beside the step" in str(caught.value)
    assert f"passed the limit of {memory(trainer.memory_limit)}" in str(caught.value)
    assert trainer.n_steps_done == 0


def test_a_checkpoint_without_a_snapshots_tensor_is_refused(
    make, corpus, tmp_path, monkeypatch
):
    make(run_dir=tmp_path).run(1, progress=False)
    saved = read_checkpoint(tmp_path)
    del saved.tensors["snapshot.0.model.norm.weight"]
    write_checkpoint(tmp_path / CHECKPOINT_NAME, saved)
    monkeypatch.setattr(watch, "PrecisionScheduler", Scripted)
    with pytest.raises(ValueError, match=r"missing: snapshot\.0\.model\.norm\.weight"):
        Trainer.resume(tmp_path, corpus=corpus)


def test_a_checkpoint_whose_scheduler_is_not_whole_is_refused(make, corpus, tmp_path):
    make(run_dir=tmp_path).run(1, progress=False)
    saved = read_checkpoint(tmp_path)
    del saved.values["scheduler"]["state"]
    saved.values["scheduler"]["snapshots"][0].pop("progress")
    write_checkpoint(tmp_path / CHECKPOINT_NAME, saved)
    with pytest.raises(ValueError) as error:
        Trainer.resume(tmp_path, corpus=corpus)
    assert "scheduler.state is missing, scheduler.snapshots is [" in str(error.value)


def test_a_scheduler_needs_a_recipe_in_fp8_with_its_own_aim(make_model, in_fp8, corpus):
    def message(train: TrainConfig) -> str:
        model = make_model()
        with pytest.raises(ValueError) as error:
            Trainer(model, train, corpus, scheduler=Scripted(model.cfg))
        return str(error.value)

    assert message(replace(in_fp8, precision="bf16")) == (
        "a precision scheduler decides what is in FP8, so precision must be 'fp8'; got "
        "'bf16'. Set precision='fp8', or scheduler=None."
    )
    assert message(replace(in_fp8, fp8_policy="aggressive")) == (
        "the scheduler's aim must be the recipe's fp8_policy, which checkpoints "
        "record; got 'deepseek-v3' and 'aggressive'. Give the scheduler "
        "aim='aggressive', or set fp8_policy='deepseek-v3'."
    )


def test_recompute_leaves_the_levels_as_they_are(make):
    trainer = make()
    trainer.recompute("full")
    assert in_fp8_now(trainer) == [MODULE]


class _Two(Ranks):
    """The other rank saw signals of its own."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def max(self, values: torch.Tensor) -> torch.Tensor:
        inf = float("inf")
        return torch.maximum(values, torch.tensor([[0.5, -25.0]] + [[-inf, -inf]] * 5))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values + torch.tensor([[1, 2]] + [[0, 0]] * 5)


@pytest.mark.usefixtures("unchecked")
def test_ranks_see_the_worst_of_each_product_and_all_that_is_not_finite():
    ours = {
        "a": {"fprop": GemmSignal(0.25, 20.0, 1), "wgrad": GemmSignal(0.1, 31.5, 0)}
    }
    assert watch.worst_of(ours, ("a", "b"), _Two()) == {
        "a": {"fprop": GemmSignal(0.5, 20.0, 3), "wgrad": GemmSignal(0.1, 31.5, 0)}
    }
    assert watch.worst_of(ours, ("a", "b"), Ranks()) is ours
