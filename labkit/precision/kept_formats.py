"""What a policy lets layers in FP8 keep for the backward pass, by arithmetic."""

from labkit.config import ModelConfig
from labkit.precision.plan import PlanRow, plan
from labkit.precision.policies import PrecisionPolicy


def kept_formats(
    cfg: ModelConfig,
    policy: str | PrecisionPolicy = "deepseek-v3",
    hardware: str = "cpu",
) -> dict[str, str]:
    """Return the format in which each layer in FP8 keeps what it reads, by its name.

    SwiGLU is among them where what it reads is cached. `labkit.memory.predict` takes
    this as `cached`, and knows by itself what recomputation and routers change of it.

    Args:
        cfg: the model.
        policy: a name of `POLICIES`, or a policy.
        hardware: as in `plan`.

    >>> from labkit.config import PRESETS
    >>> kept = kept_formats(PRESETS["v3-671b"])
    >>> kept["layers.9.attn.wo"], kept["layers.9.ffn.experts.swiglu"], "head" in kept
    ('e5m6', 'e4m3', False)

    Raises:
        ValueError: no policy or no device has this name.
    """
    rows = plan(cfg, policy, hardware).rows
    in_fp8 = {row.operator.name for row in rows if _is_fp8(row)}
    kept = {}
    for row in rows:
        name, part = row.operator.name, row.operator.part
        if name in in_fp8:
            kept[name] = "bf16" if row.kept == "fp32" else row.kept
        elif part == "swiglu" and _is_cached(row, in_fp8):
            kept[name] = "e4m3"
    return kept


def _is_fp8(row: PlanRow) -> bool:
    return row.weight == "e4m3" and not row.operator.is_shared


def _is_cached(row: PlanRow, in_fp8: set[str]) -> bool:
    """Return whether SwiGLU's inputs are in FP8; experts in FP8 always cache theirs."""
    owner = row.operator.name.removesuffix(".swiglu")
    return owner in in_fp8 or (row.kept == "e4m3" and f"{owner}.w2" in in_fp8)
