"""The losses of Medusa's heads, made in parts so that all logits never exist at once. Cai et al., arXiv 2401.10774,
section 2.2. With heads counted from 0, head k at token t is to predict token t + k + 2; the model itself predicts token
t + 1."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, log_softmax

from lookahead.heads.medusa.heads import MedusaHeads
from lookahead.heads.medusa.network import Output
from lookahead.training.data import IGNORE, places_at_once


def heads_loss(
    heads: MedusaHeads, output: Output, hidden: Tensor, labels: Tensor, decay: float = 0.8
) -> tuple[Tensor, Tensor]:
    """The heads' loss L1: the sum over the heads of ``decay ** (k + 1)`` times head k's cross-entropy. A head's
    cross-entropy is the mean over its labelled tokens, in nats; 0 where it has none. The model's ``output`` layer reads
    ``hidden`` ``[batch, token, hidden]``; ``labels`` ``[batch, token]`` are token ids or ``IGNORE``. Returned are L1,
    and each head's cross-entropy ``[head]`` without a gradient, both float32."""
    assert heads.vocab_size is not None  # fresh heads know it
    size = places_at_once(hidden.device, 2 * heads.vocab_size)  # scores, and their slopes
    losses = []
    for head in range(heads.num_heads):
        target = labels[:, head + 2 :]
        kept = target != IGNORE
        states, target = hidden[:, : target.shape[1]][kept], target[kept]
        layers: list[Any] = [heads.blocks[head], heads.outputs[head] if heads.own_output else output]
        parameters = [weight for layer in layers for weight in layer.parameters() if weight.requires_grad]
        total = _SummedLoss.apply(partial(_logits, heads, head, output), size, states, target, *parameters)
        losses.append(total / max(1, len(target)))
    each = torch.stack(losses)
    weights = each.new_tensor([decay ** (head + 1) for head in range(len(losses))])
    return (weights * each).sum(), each.detach()


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """L_LM, the model's own mean cross-entropy: of ``logits`` ``[batch, token, vocab]``, with ``labels`` as above."""
    target = labels[:, 1:]
    kept = target != IGNORE
    return cross_entropy(logits[:, :-1][kept].float(), target[kept], reduction="sum") / max(1, int(kept.sum()))


def distillation_loss(logits: Tensor, original: Tensor, labels: Tensor) -> Tensor:
    """KL(original || adapted) of logits ``[batch, token, vocab]``: a mean over labelled next tokens (section 2.3.2)."""
    kept = labels[:, 1:] != IGNORE
    adapted = log_softmax(logits[:, :-1][kept].float(), dim=-1)
    target = log_softmax(original[:, :-1][kept].float(), dim=-1)
    return (target.exp() * (target - adapted)).sum() / max(1, int(kept.sum()))


def _logits(heads: MedusaHeads, head: int, output: Output, hidden: Tensor) -> Tensor:
    """One head's logits ``[token, vocab]``, on the device of ``hidden``."""
    state = heads.state(head, hidden)
    if heads.own_output:
        return heads.over_vocabulary(heads.outputs[head](state)).to(hidden.device)
    return output(state.to(hidden.device, hidden.dtype))


class _SummedLoss(torch.autograd.Function):
    """Summed cross-entropy in parts; forward makes the gradients too. Those of a mean may be too small for float16."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], size: int, states: Tensor, target: Tensor, *weights: Tensor
    ) -> Tensor:
        """In nats; ``run``, with ``weights`` to train, turns ``states`` ``[token, hidden]`` into logits by ``size``."""
        ctx.deep = ctx.needs_input_grad[2]
        total = torch.zeros((), device=states.device, dtype=torch.promote_types(states.dtype, torch.float32))
        slopes = [torch.zeros_like(weight) for weight in weights]
        reached: list[Tensor] = []
        for part, wanted in zip(states.split(size), target.split(size), strict=True):
            with torch.enable_grad():
                leaf = part.detach().requires_grad_(ctx.deep)
                logits = run(leaf)
            scores = logits.detach().to(total.dtype)
            norm = scores.logsumexp(-1, keepdim=True)
            total += (norm - scores.gather(-1, wanted[:, None])).sum()
            slope = (scores - norm).exp_()
            slope[torch.arange(len(wanted), device=slope.device), wanted] -= 1.0
            inputs = [*weights, leaf] if ctx.deep else list(weights)
            grads = torch.autograd.grad(logits, inputs, slope.to(logits.dtype)) if inputs else ()
            for sum_, grad in zip(slopes, grads, strict=False):
                sum_ += grad
            reached += grads[len(weights) :]
        ctx.save_for_backward(*slopes, *([torch.cat(reached)] if ctx.deep else []))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        slopes = [(part.to(torch.promote_types(part.dtype, scale.dtype)) * scale).to(part.dtype) for part in kept]
        states = slopes.pop() if ctx.deep else None
        return None, None, states, None, *slopes
