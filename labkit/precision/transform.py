"""FP8 as a transform of a finished model: modules change their class, nothing else."""

from types import MappingProxyType

from torch import nn

from labkit.model.experts import Experts
from labkit.model.linear import Linear
from labkit.model.mlp import MLP
from labkit.precision.linear import Fp8Linear, Fp8Recipe, InFp8
from labkit.precision.swiglu import Fp8Experts, Fp8MLP

IN_FP8 = MappingProxyType({Linear: Fp8Linear, MLP: Fp8MLP, Experts: Fp8Experts})
"""What modules become; a policy of recomputation may have changed them before."""


def to_fp8(module: nn.Module, recipe: Fp8Recipe | None = None) -> None:
    """Let a linear layer, routed experts, or an MLP and its layers multiply in FP8.

    Names and weights stay. Apply a policy of recomputation before, not after. Absorbed
    decoding reads `wkv_b` as it is, in high precision.

    Args:
        module: a `Linear`, an `MLP` or `Experts`.
        recipe: the default one, if None; takes the place of one given before.

    >>> mlp = MLP(256, 512)
    >>> to_fp8(mlp)
    >>> type(mlp).__name__, mlp.w1.backend.name
    ('Fp8MLP', 'emulate')

    Raises:
        ValueError: another module, or a device without a backend.
    """
    recipe = recipe or Fp8Recipe()
    parts = _parts(module)
    recipe.backend_on(next(module.parameters()).device)
    for part in parts:
        if not isinstance(part, InFp8):
            part.plain = type(part)
            part.__class__ = next(
                cls for plain, cls in IN_FP8.items() if isinstance(part, plain)
            )
        part.recipe = recipe


def to_high(module: nn.Module) -> None:
    """Take back what `to_fp8` did to a module, if it did."""
    for part in _parts(module):
        if isinstance(part, InFp8):
            part.__class__ = part.plain
            del part.plain, part.recipe


def _parts(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the module, and the layers of an MLP."""
    if isinstance(module, MLP):
        return module, module.w1, module.w2, module.w3
    if isinstance(module, tuple(IN_FP8)):
        return (module,)
    raise ValueError(
        "module must be a Linear, an MLP or Experts of labkit's model; got a "
        f"{type(module).__name__}. Pass the layers in it one by one."
    )
