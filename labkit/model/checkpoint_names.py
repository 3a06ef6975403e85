"""The names that published checkpoints give to a model's weights.

A published file holds one matrix per expert and projection, where labkit stacks
them; transformers stacks them in memory too, and either spelling is understood. An
MTP module is stored as one more layer, with copies of the embedding and the head.
"""

from collections.abc import Container
from typing import NamedTuple

from jaxtyping import Shaped
from torch import Tensor

from labkit.config import ModelConfig
from labkit.model.transformer import Transformer

WORDS = {
    "attn": "self_attn",
    "attn_norm": "input_layernorm",
    "ffn": "mlp",
    "ffn_norm": "post_attention_layernorm",
    "wq": "q_proj",
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
    "w13": "gate_up_proj",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "bias": "e_score_correction_bias",
    "embed": "embed_tokens",
}
"""labkit's word for a part, and the published one; others are the same in both."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Place(NamedTuple):
    """Where a stored tensor belongs: a parameter, or some rows of one expert's."""

    parameter: str
    expert: int | None = None
    rows: slice = slice(None)

    def within(self, weights: dict[str, Tensor]) -> Shaped[Tensor, "..."]:
        """Return the view of this place in the model's weights."""
        whole = weights[self.parameter]
        return whole if self.expert is None else whole[self.expert, self.rows]


def places(model: Transformer, stored: Container[str] = ()) -> dict[str, Place]:
    """Return the place of each published tensor, by its name.

    Args:
        model: the model; its weights may be on the meta device.
        stored: names in a checkpoint; where they have the experts of a layer stacked,
            so has the result.
    """
    found = {}
    for name, weight in model.state_dict().items():
        published = published_name(name, model.cfg)
        if ".experts." not in published or published in stored:
            found[published] = Place(name)
        else:
            found |= _expert_places(published, name, len(weight), weight.shape[1])
    return found


def published_name(name: str, cfg: ModelConfig) -> str:
    """Return the published name of a weight; of stacked experts, transformers'.

    >>> from labkit.config import PRESETS
    >>> published_name("layers.3.attn.wq_a.weight", PRESETS["v3-671b"])
    'model.layers.3.self_attn.q_a_proj.weight'
    >>> published_name("mtp.0.block.ffn.gate.bias", PRESETS["v3-671b"])
    'model.layers.61.mlp.gate.e_score_correction_bias'
    """
    if name == "head.weight":
        return HEAD
    if name.startswith("mtp."):
        _, depth, rest = name.split(".", 2)
        rest = rest.removeprefix("block.")
        if rest == "norm.weight":
            rest = "shared_head.norm.weight"
        name = f"layers.{cfg.n_layers + int(depth)}.{rest}"
    return "model." + ".".join(WORDS.get(word, word) for word in name.split("."))


def _expert_places(
    published: str, name: str, n_experts: int, n_rows: int
) -> dict[str, Place]:
    prefix, _, stack = published.rpartition(".")
    if stack == "down_proj":
        projections = {stack: slice(None)}
    else:
        half = n_rows // 2
        projections = {"gate_proj": slice(half), "up_proj": slice(half, n_rows)}
    return {
        f"{prefix}.{expert}.{projection}.weight": Place(name, expert, rows)
        for expert in range(n_experts)
        for projection, rows in projections.items()
    }


def shared_copies(cfg: ModelConfig) -> dict[str, str]:
    """Return the copies that MTP layers store of shared weights: {copy: original}."""
    copies = {}
    for layer in range(cfg.n_layers, cfg.n_layers + cfg.n_mtp):
        copies[f"model.layers.{layer}.embed_tokens.weight"] = EMBEDDING
        copies[f"model.layers.{layer}.shared_head.head.weight"] = HEAD
    return copies


def is_beyond(name: str, n_layers: int) -> bool:
    """Return whether a stored tensor belongs to a layer after the main ones.

    >>> is_beyond("model.layers.61.eh_proj.weight", 61), is_beyond("lm_head.weight", 61)
    (True, False)
    """
    prefix, _, rest = name.partition("model.layers.")
    number = rest.partition(".")[0]
    return not prefix and number.isdecimal() and int(number) >= n_layers
