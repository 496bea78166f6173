"""Typical and nucleus acceptance: which candidates a lossy decode keeps. Neither keeps the model's distribution.

Both rules look at the distribution at a candidate's parent, as logits processors leave it, and say which tokens may
follow there (Cai et al., arXiv 2401.10774, section 2.3.1). Under both the most likely token may always follow, so as
the temperature goes to 0 they become greedy decoding.
"""

import torch
from torch import Tensor


def typical(scores: Tensor, posterior_threshold: float, posterior_alpha: float) -> Tensor:
    """Tokens with ``p > min(epsilon, delta * exp(-H))``: the more certain the model is, the fewer.

    Args:
        scores: processed scores ``[..., vocab]``, from which ``p = softmax(scores)``, with entropy H in nats.
        posterior_threshold: epsilon, the most that is ever asked for.
        posterior_alpha: delta; the authors take the square root of epsilon.

    Returns:
        bool ``[..., vocab]``.
    """
    probabilities = scores.softmax(-1)
    entropy = torch.special.entr(probabilities).sum(-1, keepdim=True)
    return probabilities > (posterior_alpha * (-entropy).exp()).clamp(max=posterior_threshold)


def nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Tokens of the smallest set of most likely ones that together have at least the probability ``top_p``.

    Of equally likely tokens the lower id counts as the likelier one.

    Args:
        scores: processed scores ``[..., vocab]``.
        top_p: from above 0 to 1, which is all that have any probability.

    Returns:
        bool ``[..., vocab]``.
    """
    ordered, ids = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered  # what the likelier tokens have together
    inside = (before < top_p) & (ordered > 0)
    return torch.zeros_like(inside).scatter(-1, ids, inside)
