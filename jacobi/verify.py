"""Which part of a scored tree the model itself would have written.

The walk starts at the root and asks at every node for the one token that plain decoding would write there: the argmax,
or one draw from the model's distribution. If a child holds that token the walk goes on, otherwise the token is the
*carried* one and the walk ends. Drafts never influence what is chosen, only how far one pass gets, so the text is
plain decoding's (a deterministic draft makes the draw-and-compare rule of Leviathan et al., arXiv 2211.17192,
accept with exactly the probability the model gives the drafted token).
"""

from collections.abc import Callable, Container, Mapping, Sequence
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
        distributions: the probabilities ``[vocab]`` from which each token was drawn; empty where none was.
    """

    nodes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)


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


def longest(
    trees: Mapping[int, TokenTree],
    judge: Callable[[Sequence[tuple[int, int]]], Sequence[Mapping[int, float]]],
    end_tokens: Container[int] = (),
) -> dict[int, list[int]]:
    """The longest path of accepted candidates in each tree, for the lossy rules of Medusa (arXiv 2401.10774).

    All trees are searched together, depth by depth, and each node is judged once, whatever number of paths it is on.
    So what is accepted at a node does not depend on which path asks.

    Args:
        trees: scored trees, by row.
        judge: is given places (row, node) of one depth, and says for each which of its children's tokens are accepted,
            with their log-probabilities.
        end_tokens: nothing follows these.

    Returns:
        For each row the nodes of its path, the root first; of equally long ones the path with the largest sum of
        log-probabilities.
    """
    ends = dict.fromkeys(trees, 0)
    sums = dict.fromkeys(((row, 0) for row in trees), 0.0)
    places = [(row, 0) for row, tree in trees.items() if tree.children[0]]
    while places:
        reached: list[tuple[int, int]] = []
        for (row, node), accepted in zip(places, judge(places), strict=True):
            for token, value in accepted.items():
                child = trees[row].children[node][token]
                sums[row, child] = sums[row, node] + value
                reached.append((row, child))
        for row, node in reached:
            deeper = trees[row].depths[node] > trees[row].depths[ends[row]]
            if deeper or sums[row, node] > sums[row, ends[row]]:
                ends[row] = node
        places = [
            (row, node)
            for row, node in reached
            if trees[row].children[node] and trees[row].tokens[node] not in end_tokens
        ]
    return {row: tree.path(ends[row]) for row, tree in trees.items()}


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
