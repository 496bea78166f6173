"""Which part of a scored tree the model itself would have written.

The walk asks at every node, from the root down, for the token that plain decoding would write there: the argmax, or
one draw from the model's distribution. It goes on to the child that holds this token; without one the token is the
*bonus* token, and the walk ends. Drafts only influence how far a pass gets, so the text is plain decoding's. (Drafts
made without chance are accepted with the model's probability, as by the rule of Leviathan et al., arXiv 2211.17192.)
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jacobi.tree import TokenTree


@dataclass(slots=True)
class Path:
    """What one sequence keeps of a pass.

    The keys and values of the visited ``nodes``, the root first, enter the KV cache. ``tokens`` were decided at them,
    the last is the bonus token.
    """

    nodes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def walk(tree: TokenTree, choose: Callable[[int], int], stop: Callable[[int], bool]) -> Path:
    """Follow the model down ``tree``.

    Where the model writes *the*, then *dog*, then *barks*::

        <s> - the - cat - sat        nodes    0    1    4      <s>  the  dog
               |                     tokens  the  dog  barks
               + - dog

    Two drafted tokens are accepted, and *barks* is the bonus token: one pass wrote three tokens.

    Args:
        choose: gives the token decided at a node; called once for each visited node, in order.
        stop: told each decided token in order; True ends the walk with it.
    """
    path = Path()
    node: int | None = 0
    while node is not None:
        token = choose(node)
        path.nodes.append(node)
        path.tokens.append(token)
        node = None if stop(token) else tree.children[node].get(token)
    return path


def longest(
    trees: Mapping[int, TokenTree],
    judge: Callable[[Sequence[tuple[int, int]]], Sequence[Mapping[int, float]]],
    end_tokens: Container[int] = (),
) -> dict[int, list[int]]:
    """The longest path of accepted candidates in each tree, for the lossy rules of Medusa (arXiv 2401.10774).

    Where *the*, *cat* and *dog* are accepted and *sat* is not, two paths are equally long, and the likelier one wins::

        <s> - the - cat - sat        the -0.1  cat -0.5    sum -0.6
               |                     the -0.1  dog -0.3    sum -0.4  -> nodes 0 1 4
               + - dog

    All trees are searched together, depth by depth, and each node is judged once. Gives each row's nodes, the root
    first; of equally long paths the one with the largest sum of log-probabilities.

    Args:
        trees: scored trees, by row.
        judge: takes places (row, node) of one depth; gives each one's accepted children: log-probabilities by token.
        end_tokens: nothing follows these.
    """
    ends, sums = dict.fromkeys(trees, 0), dict.fromkeys(((row, 0) for row in trees), 0.0)
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
        inner = [(row, node) for row, node in reached if trees[row].children[node]]
        places = [(row, node) for row, node in inner if trees[row].tokens[node] not in end_tokens]
    return {row: tree.path(ends[row]) for row, tree in trees.items()}


def reject(
    probabilities: Tensor,
    candidates: Sequence[int],
    generator: torch.Generator | None = None,
    drawn_from: Tensor | None = None,
) -> int:
    """Choose a token that is distributed as ``probabilities`` p, whatever the candidates are.

    Candidates are tried in order; if all are rejected the token is drawn from what is left of p.

    * Without ``drawn_from``, t is accepted with probability p(t); else p(t) becomes 0 and p is renormalised (Fu et
      al., arXiv 2402.02057, algorithm 4).
    * Drawn from ``drawn_from`` q, t is accepted with probability min(1, p(t) / q(t)); else p becomes
      norm(max(p - q, 0)), t leaves q and q is renormalised (Leviathan et al., arXiv 2211.17192, algorithm 1; for
      several candidates Jeon et al., arXiv 2402.14160, recursive rejection sampling).

    For example, with p and the candidates *cat* and *dog*::

                     p: cat  dog  fox                     p: cat  dog  fox    q: cat  dog
                        0.5  0.3  0.2  cat with 1/2          0.5  0.3  0.2       0.8  0.2   cat with 5/8
        cat rejected    0    0.6  0.4  dog with 3/5          0    1/3  2/3       0    1     dog with 1/3
        dog rejected    0    0    1    fox                   0    0    1                    fox

    Both rules are exact; knowing q accepts more. The generator is not consumed as plain sampling consumes it.

    Args:
        probabilities: ``[vocab]``, summing to 1.
        candidates: distinct token ids that the tree offers at this node.
        drawn_from: ``[vocab]``, summing to 1, if the candidates were drawn from it by chance, in this order and
            without replacement (the siblings of a tree are distinct); None = they were not drawn by chance.
    """
    left = probabilities.clone()
    drafts = None if drawn_from is None else drawn_from.to(left, copy=True)
    for token in candidates:
        total = left.sum()
        chance = left[token] / total
        if drafts is not None:
            chance = chance / drafts[token]
        if torch.rand((), generator=generator, device=left.device) < chance:
            return token
        if drafts is not None:
            left = (left - total * drafts).clamp_(min=0)
            drafts[token] = 0.0
            drafts /= drafts.sum().clamp(min=torch.finfo(drafts.dtype).tiny)
        left[token] = 0.0
    if left.sum() <= 0:  # rounding only: every candidate with mass was rejected
        return int(probabilities.argmax())
    return int(torch.multinomial(left, 1, generator=generator))


def chances_of(tree: TokenTree, node: int, like: Tensor) -> Tensor | None:
    """From what the children of a node were drawn, ``[vocab]`` as ``like`` is; None = they were not drawn by chance."""
    drawn = (tree.drawn_from or {}).get(node)
    if drawn is None:
        return None
    chances = torch.zeros_like(like)
    chances[torch.tensor([*drawn], device=like.device)] = torch.tensor([*drawn.values()], dtype=torch.float64).to(like)
    return chances
