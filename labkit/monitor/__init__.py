"""Records of a training run: what each step did, written where it survives."""

from labkit.monitor.metrics import Monitor, StepMetrics, read_jsonl

__all__ = ["Monitor", "StepMetrics", "read_jsonl"]
