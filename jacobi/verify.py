"""Which part of a scored tree the model itself would have written.

The walk starts at the root and asks at every node for the one token that plain decoding would write there: the argmax,
or one draw from the model's distribution. If a child holds that token the walk goes on, otherwise the token is the
*carried* one and the walk ends. Drafts never influence what is chosen, only how far one pass gets, so the text is
plain decoding's (a deterministic draft makes the draw-and-compare rule of Leviathan et al., arXiv 2211.17192,
accept with exactly the probability the model gives the drafted token).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jacobi.tree import TokenTree


@dataclass(slots=True)
class Path:
    """What one row keeps of a pass.

    Attributes:
        nodes: visited nodes, the root first; their keys and values become history.
        tokens: the token decided at each visited node, in order; the last one is the carried token.
    """

    nodes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def walk(tree: TokenTree, choose: Callable[[int], int], stop: Callable[[int], bool]) -> Path:
    """Follow the model down ``tree``.

    Args:
        tree: the scored tree.
        choose: gives the token decided at a node; called once for each visited node, in order.
        stop: told each decided token in order, says whether the walk ends with it.

    Returns:
        The path: as many tokens as nodes, never empty.
    """
    path = Path()
    node: int | None = 0
    while node is not None:
        token = choose(node)
        path.nodes.append(node)
        path.tokens.append(token)
        if stop(token):
            break
        node = tree.children[node].get(token)
    return path


def reject(probabilities: Tensor, candidates: Sequence[int], generator: torch.Generator | None = None) -> int:
    """Choose a token by the papers' rejection scheme (arXiv 2402.02057, algorithm 4).

    Candidates are tried in order: t is accepted with probability p(t), otherwise p(t) is set to zero and the rest is
    renormalised; when all are rejected the token is drawn from what is left. The token is distributed as
    ``probabilities`` whatever the candidates are, but the generator is not consumed as plain sampling consumes it.

    Args:
        probabilities: ``[vocab]``, summing to 1.
        candidates: distinct token ids that the tree offers at this node.
        generator: source of randomness; None is torch's default generator.
    """
    left = probabilities.clone()
    for token in candidates:
        if torch.rand((), generator=generator, device=left.device) < left[token] / left.sum():
            return token
        left[token] = 0.0
    if left.sum() <= 0:  # rounding only: every candidate with mass was rejected
        return int(probabilities.argmax())
    return int(torch.multinomial(left, 1, generator=generator))
