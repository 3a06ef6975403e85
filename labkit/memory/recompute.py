"""Trading time for memory: what a model keeps for the backward pass, and runs again.

A policy is a transform of a finished model. Modules change their class, and nothing
else: names, weights and results stay, gradients to the bit, and another policy takes
the place of the last. Passes without gradients run as before.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from labkit.config import ModelConfig
from labkit.config.checks import require_choice, require_whole
from labkit.memory.formats import is_converted
from labkit.memory.recompute_modules import (
    CheckpointedBlock,
    CheckpointedGQA,
    CheckpointedMLA,
    CheckpointedMoE,
    CheckpointedMTPModule,
    CheckpointedRouter,
    DiscardingBlock,
    DiscardingLinear,
    RebuiltNorm,
    Recomputing,
    SelectiveMLA,
    SelectiveMLP,
    SelectiveMTPModule,
)
from labkit.model import Transformer
from labkit.model.attention import MLA
from labkit.model.moe import MoE
from labkit.model.transformer import Block, MTPModule

RECOMPUTE_POLICIES = {
    "none": "Keep all that autograd saves.",
    "full": "Keep each block's input, and run the block again.",
    "every_k": "Run the first of every k blocks again, and keep the others.",
    "selective": "Run norms, MLA up-projections, routers and SwiGLU products again, "
    "but neither attention's core nor any other large product.",
    "attention": "Run attention and its norm again.",
    "moe": "Run experts, their router and their norm again.",
}
"""What each policy does, by its name; "selective" is DeepSeek-V3's, section 3.2.3."""

Variants = Mapping[type[nn.Module], type[nn.Module]]
"""The class that a module takes on, by its plain one."""

Changes = list[tuple[nn.Module, Variants]]


def _by_plain_class(*variants: type[nn.Module]) -> Variants:
    return {variant.__bases__[-1]: variant for variant in variants}


CHECKPOINTED = _by_plain_class(
    CheckpointedBlock,
    CheckpointedMTPModule,
    CheckpointedMLA,
    CheckpointedGQA,
    CheckpointedMoE,
    CheckpointedRouter,
)
REBUILT = _by_plain_class(RebuiltNorm)
DISCARDING = _by_plain_class(DiscardingBlock, DiscardingLinear)
SELECTIVE = _by_plain_class(SelectiveMLA, SelectiveMLP, SelectiveMTPModule)
_VARIANTS = {
    variant
    for variants in (CHECKPOINTED, REBUILT, DISCARDING, SELECTIVE)
    for variant in variants.values()
}


def _block_of(block: Block | MTPModule) -> Block:
    return block.block if isinstance(block, MTPModule) else block


def _nothing(block: Block | MTPModule) -> Changes:
    return []


def _full(block: Block | MTPModule) -> Changes:
    return [(block, CHECKPOINTED)]


def _attention(block: Block | MTPModule) -> Changes:
    block = _block_of(block)
    norm = (block.attn_norm, REBUILT)
    return [(block, DISCARDING), norm, (block.attn, CHECKPOINTED)]


def _moe(block: Block | MTPModule) -> Changes:
    block = _block_of(block)
    if not isinstance(block.ffn, MoE):
        return []
    norm = (block.ffn_norm, REBUILT)
    return [(block, DISCARDING), norm, (block.ffn, CHECKPOINTED)]


def _selective(block: Block | MTPModule) -> Changes:
    inner = _block_of(block)
    changes = [(inner, DISCARDING)]
    changes += [(inner.attn_norm, REBUILT), (inner.ffn_norm, REBUILT)]
    if isinstance(inner.attn, MLA):
        changes.append((inner.attn, SELECTIVE))
    mlp = inner.ffn
    if isinstance(inner.ffn, MoE):
        changes.append((inner.ffn.gate, CHECKPOINTED))
        mlp = inner.ffn.shared_experts
    if mlp is not None:
        changes.append((mlp, SELECTIVE))
    if isinstance(block, MTPModule):
        changes += [(block, SELECTIVE), (block.norm, REBUILT)]
    return changes


def _final_changes(model: Transformer) -> Changes:
    return [(model.norm, REBUILT), (model.head, DISCARDING)]


_CHANGES = {
    "none": _nothing,
    "full": _full,
    "selective": _selective,
    "attention": _attention,
    "moe": _moe,
}


def block_policies(
    policy: str | Sequence[str], n_blocks: int, *, k: int = 4, name: str = "policy"
) -> tuple[str, ...]:
    """Return the policy of each block, MTP modules included.

    Errors call the policy by `name`, as whoever gave it does.

    >>> block_policies("every_k", 6, k=4)
    ('full', 'none', 'none', 'none', 'full', 'none')
    >>> block_policies("moe", 2)
    ('moe', 'moe')
    """
    if isinstance(policy, str) or not isinstance(policy, Sequence):
        require_choice({name: policy}, tuple(RECOMPUTE_POLICIES))
        if policy != "every_k":
            return (policy,) * n_blocks
        require_whole({"k": k})
        return tuple("none" if i % k else "full" for i in range(n_blocks))
    if len(policy) != n_blocks:
        raise ValueError(
            f"{name} must be one name, or one for each of {n_blocks} blocks (layers, "
            f"then MTP modules); got {len(policy)} names. Pass {n_blocks}."
        )
    each = {f"{name}[{index}]": own for index, own in enumerate(policy)}
    require_choice(each, tuple(_CHANGES))
    return tuple(policy)


def require_experts(policies: Sequence[str], *, has_experts: bool) -> None:
    """Raise ValueError if a block is to run experts again that the model lacks."""
    if "moe" in policies and not has_experts:
        raise ValueError(
            "policy 'moe' runs experts again, so the model must have some; got a dense "
            "model. Choose 'selective', 'attention' or 'full'."
        )


def apply_recompute(
    model: Transformer, policy: str | Sequence[str], *, k: int = 4
) -> Transformer:
    """Put the model under a policy, in place of the one it was under; return it.

    Forward hooks of what runs again are called again. A `Trainer` that resumes builds
    a plain model: apply the policy to that again. A single sequence is generated
    fastest under "none", which leaves the model its absorbed form.

    Args:
        model: its blocks as `Transformer` made them, or under a policy.
        policy: a name in `RECOMPUTE_POLICIES`, or one for each block: layers, then
            MTP modules.
        k: of "every_k" only.

    Raises:
        ValueError: another model than a `Transformer`, an unknown policy, not one for
            each block, "moe" without experts, or modules that another transform has
            changed, as `labkit.precision.convert` does. The model is as before.

    >>> from labkit.config import PRESETS
    >>> model = apply_recompute(Transformer(PRESETS["tiny"], device="meta"), "full")
    >>> type(model.layers[0]).__name__
    'CheckpointedBlock'
    >>> type(apply_recompute(model, "none").layers[0]).__name__
    'Block'
    """
    require_transformer(model)
    blocks = [*model.layers, *model.mtp]
    names = block_policies(policy, len(blocks), k=k)
    require_experts(names, has_experts=bool(model.routers()))
    changes = _final_changes(model) if "selective" in names else []
    for block, name in zip(blocks, names, strict=True):
        changes += _CHANGES[name](block)
    _change_classes(model, changes)
    return model


def require_transformer(model: object) -> None:
    """Raise ValueError unless it is a `Transformer`, perhaps a compiled one."""
    if not isinstance(getattr(model, "cfg", None), ModelConfig):
        raise ValueError(
            "model must be a Transformer of labkit.model, whose blocks are known; got "
            f"a {type(model).__name__}. Build it as Transformer(cfg)."
        )


def recompute_policies(model: Transformer) -> tuple[str, ...]:
    """Return the policy of each block of a model, as `apply_recompute` takes them.

    >>> from labkit.config import PRESETS
    >>> model = apply_recompute(Transformer(PRESETS["tiny"], device="meta"), "every_k")
    >>> recompute_policies(model)
    ('full', 'none', 'none', 'none', 'full')
    """
    return tuple(_policy_of(block) for block in (*model.layers, *model.mtp))


def _policy_of(block: Block | MTPModule) -> str:
    """Return the first policy that leaves each module the class that it has."""
    plain = {module: _plain_class(module) for module in block.modules()}
    for name, changes in _CHANGES.items():
        classes = {m: new.get(plain[m], plain[m]) for m, new in changes(block)}
        if all(type(m) is classes.get(m, cls) for m, cls in plain.items()):
            return name
    raise AssertionError("a block is under a policy that is not in _CHANGES")


def _change_classes(model: nn.Module, changes: Changes) -> None:
    """Give modules their new classes, and all others their plain ones."""
    names = {module: name for name, module in model.named_modules()}
    classes = {module: _plain_class(module) for module in names}
    for module, plain in classes.items():
        if issubclass(plain, Recomputing) or is_converted(module):
            _raise_changed(names[module], plain)
    for module, variants in changes:
        if classes[module] not in variants:
            _raise_changed(names[module], classes[module])
        classes[module] = variants[classes[module]]
    for module, cls in classes.items():
        module.__class__ = cls


def _raise_changed(name: str, cls: type[nn.Module]) -> None:
    raise ValueError(
        "a recompute policy must come before other transforms, because it changes the "
        f"classes of modules; {name} is a {cls.__name__}. Call apply_recompute first."
    )


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that the module had before any policy."""
    is_ours = type(module) in _VARIANTS
    return type(module).__bases__[-1] if is_ours else type(module)
