import json
import logging
import math
from dataclasses import replace

import pytest

from labkit.monitor import Monitor, StepMetrics, metrics, read_jsonl

RECORD = StepMetrics(
    step=1,
    tokens=64,
    loss=2.5,
    loss_main=2.0,
    loss_mtp=0.4,
    loss_balance=0.1,
    grad_norm=0.75,
    lr=1e-3,
    tokens_per_second=32.0,
    memory_bytes=1000,
    expert_load=(1.5, 1.25),
    data_seconds=0.1,
    forward_seconds=0.5,
    backward_seconds=1.0,
    communication_seconds=0.1,
    optimizer_seconds=0.3,
)


def at(step: int, loss: float = 2.5) -> StepMetrics:
    return replace(RECORD, step=step, loss=loss)


def write(monitor: Monitor, *steps: int, loss: float = 2.5) -> None:
    for step in steps:
        monitor.record(at(step, loss))


def test_records_come_back_equal(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    write(Monitor(path), 1, 2)
    assert read_jsonl(path) == [at(1), at(2)]


def test_nothing_is_made_before_the_first_record(tmp_path):
    monitor = Monitor(tmp_path / "new" / "metrics.jsonl", tensorboard=True, interval=2)
    write(monitor, 1)
    assert list(tmp_path.iterdir()) == []


def test_each_line_is_a_json_object_with_the_fields_names(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(Monitor(path), 1)
    values = json.loads(path.read_text())
    assert values["loss_main"] == 2.0 and values["expert_load"] == [1.5, 1.25]
    assert values["mfu"] is None


def test_a_loss_that_is_not_a_number_comes_back_as_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(Monitor(path), 1, loss=math.nan)
    assert math.isnan(read_jsonl(path)[0].loss)


def test_a_torn_last_line_is_left_out_and_the_next_record_starts_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(Monitor(path), 1, 2)
    path.write_bytes(path.read_bytes()[:-20])
    assert read_jsonl(path) == [at(1)]
    write(Monitor(path), 2, 3)
    assert read_jsonl(path) == [at(1), at(2), at(3)]


def test_steps_that_a_resumed_run_repeats_replace_the_earlier_ones(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(Monitor(path), 1, 2, 3, 4)
    write(Monitor(path), 3, loss=9.0)
    assert read_jsonl(path) == [at(1), at(2), at(3, loss=9.0)]


def test_all_attempts_are_there_on_demand_but_not_what_a_killed_run_did_twice(tmp_path):
    path, monitor = tmp_path / "metrics.jsonl", Monitor(tmp_path / "metrics.jsonl")
    write(monitor, 1, 2, 3)
    for step in (2, 3):  # after a rollback
        monitor.record(replace(at(step), attempt=1))
    write(monitor, 3, 4)  # a run that goes on from its second step, as first saved
    monitor.record(replace(at(3), attempt=1))
    assert read_jsonl(path) == [at(1), at(2), replace(at(3), attempt=1)]
    assert read_jsonl(path, all_attempts=True) == [
        *(at(step) for step in (1, 2, 3, 4)),
        replace(at(3), attempt=1),
    ]


def test_a_record_from_before_there_were_attempts_is_of_the_first(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(Monitor(path), 1)
    values = json.loads(path.read_text())
    assert values.pop("attempt") == 0
    path.write_text(json.dumps(values) + "\n")
    assert read_jsonl(path) == [at(1)]


def test_a_line_that_is_no_record_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(ValueError) as error:
        read_jsonl(path)
    assert str(error.value) == (
        f"{path}:1 is not a record of StepMetrics ('expert_load'). "
        "Remove the line, or read a file that Monitor wrote."
    )


def test_listeners_get_the_records_that_are_due():
    heard = []
    monitor = Monitor(interval=2, on_step=[heard.append])
    write(monitor, 1, 2, 3, 4)
    assert heard == [at(2), at(4)]


def test_an_interval_below_one_is_refused():
    with pytest.raises(ValueError) as error:
        Monitor(interval=0)
    assert str(error.value) == (
        "interval must be at least 1 step; got 0. Set interval=1."
    )


def test_a_missing_tensorboard_is_said_once_with_its_remedy(monkeypatch, caplog):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        monitor = Monitor(tensorboard=True)
        write(monitor, 1, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "TensorBoard is not installed, so no events are written; install it with: "
        'pip install "labkit[tensorboard]"'
    ]


def test_tensorboard_gets_every_number_of_a_record(monkeypatch):
    class Writer:
        def __init__(self) -> None:
            self.scalars = {}

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars[name, step] = value

        def flush(self) -> None:
            self.is_flushed = True

    writer = Writer()
    monkeypatch.setattr(metrics, "_tensorboard_writer", lambda path: writer)
    write(Monitor(tensorboard=True), 7)
    assert writer.is_flushed
    assert writer.scalars["loss", 7] == 2.5
    assert writer.scalars["expert_load/1", 7] == 1.25
    assert ("mfu", 7) not in writer.scalars


def test_the_time_of_a_step_is_the_sum_of_its_phases():
    assert RECORD.seconds == pytest.approx(2.0)
    assert list(RECORD.time_split) == [
        "data",
        "forward",
        "backward",
        "communication",
        "optimizer",
    ]


def test_a_record_reads_as_one_line():
    assert str(replace(RECORD, mfu=0.314)) == (
        "step     1  loss 2.5000  main 2.0000  grad norm 0.75  lr 1.00e-03  "
        "32 tokens/s  MFU 31.4%"
    )
    assert str(replace(RECORD, is_skipped=True)).endswith(
        "32 tokens/s  skipped: gradients not finite"
    )
