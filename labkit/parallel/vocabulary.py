"""The cross-entropy of logits that are cut by words over ranks, and stay cut.

Each rank has the logits of its own words. Of every position, ranks exchange three
numbers: the largest logit, the sum of exponentials, and the logit of the target.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate

from labkit.model.checks import IGNORED
from labkit.parallel.tensor_stream import Stream, moved


class _CutCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy that keeps the logits as they are, no FP32 copies."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, targets: Tensor, start: int, mesh: DeviceMesh
    ) -> Tensor:
        exact = logits.float()  # (n, v)
        largest = moved(exact.amax(dim=-1), mesh, Partial("max"), Replicate())
        is_own, word = _own_words(targets, start, logits.shape[-1])
        chosen = exact.gather(-1, word).squeeze(-1).mul_(is_own)
        total = (exact - largest.unsqueeze(-1)).exp_().sum(dim=-1)
        sums = torch.stack((total, chosen))
        total, target_logit = moved(sums, mesh, Partial(), Replicate())
        log_total = total.log().add_(largest)
        ctx.save_for_backward(logits.detach(), targets, log_total)
        ctx.start = start
        return (log_total - target_logit).mul_(targets != IGNORED).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, log_total = ctx.saved_tensors
        is_own, word = _own_words(targets, ctx.start, logits.shape[-1])
        slope = (logits.float() - log_total.unsqueeze(-1)).exp_()
        slope.scatter_add_(-1, word, -is_own.float().unsqueeze(-1))
        slope.mul_((grad * (targets != IGNORED)).unsqueeze(-1))
        return slope.type_as(logits), None, None, None


def _own_words(
    targets: Int[Tensor, "n"], start: int, n_words: int
) -> tuple[Tensor, Tensor]:
    """Return which targets are words of this rank, and which; (n,) and (n, 1)."""
    word = targets - start
    is_own = (word >= 0) & (word < n_words)
    return is_own, word.clamp(0, n_words - 1).unsqueeze(-1)


def cut_cross_entropy_sum(
    logits: Float[Tensor, "b s v"],
    targets: Int[Tensor, "b s"],
    stream: Stream,
    n_words: int,
) -> Float[Tensor, ""]:
    """Return the cross-entropy summed over targets, in nats and FP32, on every rank.

    Args:
        logits: of this rank's words, as `stream.cut(n_words)` says.
        targets: words of the whole vocabulary, or -100.
        stream: the ranks.
        n_words: the size of the vocabulary; ranks may have unequal parts.
    """
    start, _ = stream.cut(n_words)
    return _CutCrossEntropy.apply(
        logits.flatten(0, 1), targets.flatten(), start, stream.mesh
    )
