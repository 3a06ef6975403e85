"""Where to cut a model into pipeline stages, by the work of each layer.

A step takes as long as its fullest stage, again and again, so the largest is made as
small as it can be. The head and the modules of multi-token prediction, each with the
head once more, are work of the last stage; the embedding is a lookup and costs nothing
here. Backward passes take twice their forward pass everywhere, so that only the
latter is counted.
"""

from collections.abc import Callable, Sequence

from labkit.config import ModelConfig
from labkit.config.checks import require_whole
from labkit.config.counts import (
    attention_flops_per_token,
    attention_params,
    ffn_params,
)
from labkit.parallel.pipeline.orders import V_SHAPED, chunks_per_rank

Measure = Callable[[float, float], float]
"""Joins the work of a stage with the measure of the stages behind it."""


def layer_flops(cfg: ModelConfig, seq_len: int | None = None) -> tuple[int, ...]:
    """Return forward FLOPs per token of each main layer.

    Matrix products and attention's scores; every token visits as many experts as it
    chooses, and the shared ones.

    Args:
        cfg: the model.
        seq_len: tokens of a sequence; None takes the longest without YaRN.

    >>> from labkit.config import PRESETS
    >>> flops = layer_flops(PRESETS["v3-671b"])
    >>> [round(each / 1e9, 2) for each in (flops[0], flops[-1])]
    [1.33, 1.34]

    Raises:
        ValueError: `seq_len` is not a whole number of at least 1.
    """
    return tuple(
        _block_flops(cfg, seq_len, is_dense=index < cfg.n_layers - cfg.n_moe_layers)
        for index in range(cfg.n_layers)
    )


def output_flops(cfg: ModelConfig, seq_len: int | None = None) -> int:
    """Return forward FLOPs per token of what follows the layers: head and MTP.

    >>> from labkit.config import PRESETS
    >>> v3 = PRESETS["v3-671b"]
    >>> round(output_flops(v3) / layer_flops(v3)[-1], 2)
    3.92
    """
    head = 2 * cfg.vocab_size * cfg.dim
    if not cfg.n_mtp:
        return head
    block = _block_flops(cfg, seq_len, is_dense=cfg.moe is None)
    return head + cfg.n_mtp * (4 * cfg.dim * cfg.dim + block + head)


def _block_flops(cfg: ModelConfig, seq_len: int | None, *, is_dense: bool) -> int:
    if seq_len is None:
        seq_len = min(cfg.max_seq_len, cfg.rope.original_seq_len)
    params = attention_params(cfg.attention, cfg.dim)
    if is_dense or cfg.moe is None:
        params += ffn_params(cfg.dim, cfg.inter_dim)
    else:
        n_visited = cfg.moe.n_activated_experts + cfg.moe.n_shared_experts
        params += cfg.moe.n_routed_experts * cfg.dim
        params += n_visited * ffn_params(cfg.dim, cfg.moe.moe_inter_dim)
    return 2 * params + attention_flops_per_token(cfg, seq_len) // cfg.n_layers


def cut_layers(
    cfg: ModelConfig, n_stages: int, *, seq_len: int | None = None
) -> tuple[int, ...]:
    """Return how many main layers each stage takes, at least one each.

    The fullest stage has as little work as possible, and among such cuts the work is
    as even as possible.

    Args:
        cfg: the model.
        n_stages: virtual stages, `pp * vpp`.
        seq_len: tokens of a sequence; None takes the longest without YaRN.

    >>> from labkit.config import PRESETS
    >>> cut_layers(PRESETS["v3-671b"], 16)
    (4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 1)

    Raises:
        ValueError: there are fewer layers than stages.
    """
    require_whole({"n_stages": n_stages})
    if n_stages > cfg.n_layers:
        raise ValueError(
            "a pipeline needs a layer for each of its pp * vpp stages; got "
            f"{cfg.n_layers} layers for {n_stages} stages. Lower pp or vpp, or name "
            "layers_per_stage, where 0 is allowed."
        )
    costs = layer_flops(cfg, seq_len)
    extra = output_flops(cfg, seq_len)
    fullest = _best(costs, extra, n_stages, lambda work, rest: max(work, rest))
    limit = fullest[0]

    def unevenness(work: float, rest: float) -> float:
        return work**2 + rest if work <= limit else float("inf")

    return _best(costs, extra, n_stages, unevenness)[1]


def layers_of_stages(
    cfg: ModelConfig, n_stages: int, layers_per_stage: Sequence[int] | None = None
) -> tuple[range, ...]:
    """Return the main layers of each stage: cut by their work, or as they are named.

    Args:
        cfg: the model.
        n_stages: virtual stages, `pp * vpp`.
        layers_per_stage: how many each takes, 0 too; None cuts by work.

    Raises:
        ValueError: the numbers do not fit the model and the stages.
    """
    if layers_per_stage is None:
        layers_per_stage = cut_layers(cfg, n_stages)
    _require_split(cfg, n_stages, layers_per_stage)
    stops = [sum(layers_per_stage[: index + 1]) for index in range(n_stages)]
    starts = [0, *stops[:-1]]
    return tuple(map(range, starts, stops))


def stages_of_rank(
    schedule: str, pp: int, rank: int, *, vpp: int | None = None
) -> tuple[int, ...]:
    """Return which stages lie on a pipeline rank, in the order of the model.

    >>> stages_of_rank("1f1b", 4, 1, vpp=2), stages_of_rank("dualpipev", 4, 1)
    ((1, 5), (1, 6))

    Raises:
        ValueError: no such schedule, or it has another number of stages on a rank.
    """
    vpp = chunks_per_rank(schedule, vpp)
    require_whole({"pp": pp})
    require_whole({"rank": rank}, at_least=0)
    if schedule in V_SHAPED:
        return rank, 2 * pp - 1 - rank
    return tuple(range(rank, pp * vpp, pp))


def _require_split(
    cfg: ModelConfig, n_stages: int, layers_per_stage: Sequence[int]
) -> None:
    each = {f"layers_per_stage[{index}]": n for index, n in enumerate(layers_per_stage)}
    require_whole(each, at_least=0)
    if len(layers_per_stage) != n_stages or sum(layers_per_stage) != cfg.n_layers:
        raise ValueError(
            "layers_per_stage must name the layers of each stage, which are pp * vpp = "
            f"{n_stages}, and sum to n_layers={cfg.n_layers}; got "
            f"{list(layers_per_stage)}, {len(layers_per_stage)} numbers that sum to "
            f"{sum(layers_per_stage)}. Correct it, or leave it out for a cut by work."
        )


def _best(
    costs: Sequence[int], extra: int, n_stages: int, measure: Measure
) -> tuple[float, tuple[int, ...]]:
    """Return the least measure of all cuts, and the layers of each stage of that cut.

    From the last stage backwards: `best[start]` is of the layers from `start` on, cut
    into as many stages as were gone through.
    """
    n_layers = len(costs)
    before = [sum(costs[:index]) for index in range(n_layers + 1)]
    best = {
        start: (measure(before[-1] - before[start] + extra, 0), (n_layers - start,))
        for start in range(n_layers)
    }
    for _ in range(n_stages - 1):
        longer = {}
        for start in range(min(best), max(best)):
            stops = range(start + 1, max(best) + 1)
            work = [before[stop] - before[start] for stop in stops]
            least, stop = min(
                (measure(each, best[stop][0]), stop)
                for each, stop in zip(work, stops, strict=True)
            )
            longer[start] = least, (stop - start, *best[stop][1])
        best = longer
    return best[0]
