"""The leak explorer: what a fault keeps at full size, and how many steps that leaves.

    widgets.explore(draw, describe, caption="…", plan=…)

All of it is arithmetic on configs. Nothing here is watched: `clinic` does that.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType

from ipywidgets import ValueWidget
from matplotlib.figure import Figure

from labkit.config import PRESETS, Layout, ModelConfig, TrainConfig
from labkit.memory import STATES, predict
from labkit.training import RECIPES
from labkit.workbook.figures.charts import Part
from labkit.workbook.figures.leaks import runway, spell_size
from labkit.workbook.spelling import spell
from labkit.workbook.widgets.controls import choice, slider, steps

V3, LITE = PRESETS["v3-671b"], PRESETS["v2-lite-16b"]

MODELS = MappingProxyType(
    {
        "DeepSeek-V3, the last 4 of its layers": (
            replace(V3, n_layers=4, n_dense_layers=0),
            Layout(dp=64, ep=64),
        ),
        "DeepSeek-V2-Lite, all 27 layers": (LITE, Layout(dp=8, ep=8)),
    }
)
"""What one GPU of a run holds, and how many GPUs share its experts."""

GRAPH, LOGITS, CACHE, METRICS = FAULTS = (
    "loss with its graph",
    "logits in a closure",
    "cache not rewound",
    "metrics as tensors",
)

MEANINGS = dict(
    zip(FAULTS, ("activations", "activations", "cache", "ink"), strict=True)
)

KEPT = ("activations", "logits", "dispatch")
"""Parts of a prediction that autograd keeps for the backward."""

N_STEPS = RECIPES["v3-671b"].n_steps

GPU_BLOCK = 512
"""Bytes to which CUDA's allocator rounds the smallest tensor up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeakPlan:
    """What the explorer's controls stand at, and what each fault keeps in a step."""

    model: str
    fault: str
    micro_batch: int
    seq_len: int
    free_gigabytes: int

    @property
    def config(self) -> ModelConfig:
        """Return the layers of one GPU."""
        return MODELS[self.model][0]

    def bytes_per_step(self) -> dict[str, int]:
        """Return what each fault leaves behind at every step, in bytes."""
        cfg, layout = MODELS[self.model]
        n_tokens = self.micro_batch * self.seq_len
        train = TrainConfig(
            micro_batch=self.micro_batch,
            global_batch=self.micro_batch * layout.dp,
            seq_len=self.seq_len,
            precision="bf16",
        )
        report = predict(cfg, train, layout, "gpu", states=STATES["deepseek-v3"])
        end = next(i for i in report.timeline if i.name == "end of forward")
        load = 8 * cfg.moe.n_routed_experts * (cfg.n_layers - cfg.n_dense_layers)
        return {
            GRAPH: sum(end.by_part.get(part, 0) for part in KEPT),
            LOGITS: 2 * n_tokens * cfg.vocab_size,
            CACHE: n_tokens * cfg.kv_bytes_per_token("bfloat16"),
            METRICS: 3 * GPU_BLOCK + -(-load // GPU_BLOCK) * GPU_BLOCK,
        }

    def steps_left(self) -> dict[str, int]:
        """Return how many steps fit into the free memory with each fault."""
        free = int(self.free_gigabytes * 1e9)
        return {name: free // size for name, size in self.bytes_per_step().items()}


def controls() -> dict[str, ValueWidget]:
    """Return the controls, by the names of `LeakPlan`'s fields."""
    return {
        "model": choice("on one GPU", list(MODELS)),
        "fault": choice("kept in each step", FAULTS),
        "micro_batch": slider("micro-batch", (1, 16), value=1, unit="sequences"),
        "seq_len": steps(
            "sequence", [1024, 2048, 4096, 8192, 16_384], value=4096, unit="tokens"
        ),
        "free_gigabytes": slider("free at the peak", (1, 80), value=40, unit="GB"),
    }


def draw(**plan: str | int) -> Figure:
    """Return the steps that memory lasts with each fault."""
    chosen = LeakPlan(**plan)
    left = chosen.steps_left()
    parts = [
        Part(name=name, amount=n, meaning=MEANINGS[name]) for name, n in left.items()
    ]
    title = (
        f"{chosen.free_gigabytes} GB last {_count(left[GRAPH])} with kept graphs, "
        f"{left[METRICS]:,} with metrics"
    )
    return runway(parts, title=title, n_steps=N_STEPS, chosen=chosen.fault)


def describe(**plan: str | int) -> str:
    """Return how long the free memory lasts with the chosen fault, in numbers."""
    chosen = LeakPlan(**plan)
    size = chosen.bytes_per_step()[chosen.fault]
    left = chosen.steps_left()[chosen.fault]
    start = (
        f"{chosen.model}, {chosen.fault}: {spell_size(size)} stay behind in each step. "
        f"{chosen.free_gigabytes} GB free at the peak "
    )
    if left == 0:
        return f"{start}are used up within the first one."
    last = f"{start}last {_count(left)}"
    if left < N_STEPS:
        return f"{last}. DeepSeek-V3 trained for {N_STEPS:,} steps."
    return (
        f"{last}, {spell(left / N_STEPS)} times the {N_STEPS:,} of DeepSeek-V3: memory "
        "grows, and no run of that length notices."
    )


def _count(n_steps: int) -> str:
    return f"{n_steps:,} {'step' if n_steps == 1 else 'steps'}"
