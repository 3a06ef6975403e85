"""What the model tour counts and compares: pieces, shapes, bytes, logits."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from labkit.config import ModelConfig
from labkit.model import Transformer
from labkit.model.checkpoint_fp8 import is_quantized, scale_shape
from labkit.model.checkpoint_names import places, shared_copies
from labkit.workbook.table import Row


def size(module: nn.Module) -> int:
    """Return the parameters of a module, its routers' balancing biases included."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.numel() for tensor in tensors)


def stored_parts(cfg: ModelConfig) -> dict[str, int]:
    """Return the parameters of the main model, by part.

    >>> from labkit.config import PRESETS
    >>> stored_parts(PRESETS["v3-671b"])["router"]
    106445312
    """
    counts = cfg.parameter_counts()
    return {
        "routed experts": counts.routed_experts,
        "shared experts": counts.shared_experts,
        "attention": counts.attention,
        "dense networks": counts.dense_ffn,
        "embedding": counts.embedding,
        "head": counts.head,
        "router": counts.router,
        "norms": counts.norms,
    }


def active_parts(cfg: ModelConfig) -> dict[str, int]:
    """Return the parameters that work on one token, by part.

    The embedding is looked up, not multiplied, so it counts 0 here.

    >>> from labkit.config import PRESETS
    >>> active_parts(PRESETS["v3-671b"])["routed experts"]  # 8 of 256
    20434649088
    """
    active = stored_parts(cfg) | {"embedding": 0}
    if cfg.moe is not None:
        n_routed, n_active = cfg.moe.n_routed_experts, cfg.moe.n_activated_experts
        active["routed experts"] = active["routed experts"] // n_routed * n_active
    return active


def trace(module: nn.Module, *inputs: object) -> list[Row]:
    """Run a module on one token; return a row for each linear and norm it passes.

    `reads` and `writes` are the values of the token before and after.
    """
    rows: list[Row] = []

    def note(part: nn.Module, args: tuple[Any, ...], out: Any) -> None:  # noqa: ANN401
        rows.append(
            {
                "step": names[part],
                "reads": args[0].shape[-1],
                "writes": out.shape[-1],
                "parameters": size(part),
            }
        )

    names = {
        part: name for name, part in module.named_modules() if not [*part.children()]
    }
    hooks = [part.register_forward_hook(note) for part in names]
    try:
        module(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return rows


def file_parts(model: Transformer) -> dict[str, int]:
    """Return the bytes of the tensors in an FP8 checkpoint, by how they are stored.

    The rule of the published files: matrices in FP8 with an FP32 scale per block,
    except embedding, head, routers and the MTP projection, which stay in BF16 like
    the norms. An MTP module brings its own copies of embedding and head.

    Args:
        model: may be on the meta device.
    """
    weights, exact = model.state_dict(), dict(model.named_buffers())
    targets = places(model)
    stored = [(name, name) for name in targets] + [*shared_copies(model.cfg).items()]
    sizes = dict.fromkeys(("FP8 values", "FP32 scales", "BF16", "FP32 biases"), 0)
    for name, original in stored:
        place = targets[original]
        tensor = place.within(weights)
        if is_quantized(name, tuple(tensor.shape)):
            rows, columns = scale_shape(tuple(tensor.shape))
            sizes["FP8 values"] += tensor.numel()
            sizes["FP32 scales"] += 4 * rows * columns
        elif place.parameter in exact:
            sizes["FP32 biases"] += 4 * tensor.numel()
        else:
            sizes["BF16"] += 2 * tensor.numel()
    return sizes


@torch.no_grad()
def randomise(model: nn.Module, *, seed: int) -> None:
    """Draw weights, norm gains and router biases so that every part counts.

    Fresh models have gains of 1 and biases of 0, which would hide a part that is left
    out.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            buffer.uniform_(-0.5, 0.5, generator=generator)


UNJUDGED = "not judged: transformers is missing; pip install -e '.[test]' brings it"


@torch.no_grad()
def judge(
    model: Transformer | None,
    tokens: Int[Tensor, "b s"],
    logits: Float[Tensor, "b s v"] | None,
    faults: Mapping[str, Callable[[Transformer], object]],
) -> list[Row]:
    """Return how far a model, as it is and with each fault, is from given logits.

    Args:
        model: ours; it is not changed.
        tokens: what both models read.
        logits: of the other program; None, like the model, where it is not installed.
        faults: changes in place to a copy of the model, by their name.
    """
    if model is None or logits is None:
        return [{"our model": UNJUDGED}]
    rows = []
    for name, change in faults.items():
        copy = deepcopy(model)
        change(copy)
        ours = copy(tokens)
        largest = float((ours - logits).abs().max())
        same = int((ours.argmax(-1) == logits.argmax(-1)).sum())
        rows.append(
            {
                "our model": name,
                "largest difference of a logit": "below 1e-4"
                if largest < 1e-4
                else f"{largest:.2g}",
                "same next token": f"{same} of {tokens.numel()}",
            }
        )
    return rows
