"""Trees of candidates that are drawn by chance, for verification that compares them with what they were drawn from.

A candidate may only be drawn for a place that was chosen before its token was known, and stays where it is: leaving out
what turned out to be unlikely would bias the text. So these trees are not ranked again, and none is cut.
"""

from bisect import bisect_right
from heapq import heappop, heappush
from itertools import count

import numpy as np
import torch

from jacobi import Path, TokenTree
from lookahead.sources.draft_model import Branch, Passes, Said
from lookahead.sources.perturbed import Draw

# Shares that were accepted with the bundled model and a disturbed copy, by the place among siblings, and how many
# trials they count for.
_PRIORS, _BELIEF = (0.8, 0.4, 0.25, 0.2), 4.0
_CHANCES = (0.1, 0.4, 0.8)  # at which the next bin of chances begins


class Urn:
    """The candidates of one node, drawn one after the other and never put back, by torch's own generator; ``chances``
    are those of tokens before anything was drawn, as the processors of ``draw`` leave them."""

    def __init__(self, said: Said | None, draw: Draw) -> None:
        tokens, logits = (np.empty(0, np.int64), np.empty(0)) if said is None or not len(said[0]) else said
        left = draw.chances(logits).astype(np.float64) if len(tokens) else logits
        self._tokens, self._left = tokens, left / left.sum() if len(left) else left
        kept = zip(tokens.tolist(), self._left.tolist(), strict=True)
        self.chances = {token: chance for token, chance in kept if chance > 0.0}

    def take(self) -> tuple[int, float] | None:
        """A token, and the chance that it had; None when all are taken."""
        whole = float(self._left.sum())
        if not whole > 0.0:
            return None
        place = int(torch.multinomial(torch.from_numpy(self._left), 1))
        chance = float(self._left[place]) / whole
        self._left[place] = 0.0
        return int(self._tokens[place]), chance


class Rates:
    """How often drawn candidates were accepted: by their place among siblings, and by the chance that they had there.

    A drawn token is accepted with min(1, p / q), so it is how well a head knows the model that counts, and not, as for
    chosen tokens, how likely it is.
    """

    def __init__(self) -> None:
        self._tried = np.full((len(_PRIORS), len(_CHANCES) + 1), _BELIEF)
        self._right = self._tried * np.array(_PRIORS)[:, None]

    def rate(self, place: int, chance: float | None = None) -> float:
        """Of the candidates at a place, with any chance, or about this one."""
        cells = slice(None) if chance is None else bisect_right(_CHANCES, chance)
        at = min(place, len(_PRIORS) - 1), cells
        return float(self._right[at].sum() / self._tried[at].sum())

    def learn(self, tree: TokenTree, path: Path) -> None:
        """Take in what became of a tree."""
        for node, written in zip(path.nodes, path.tokens, strict=True):
            left = 1.0
            for place, token in enumerate(tree.children[node]):
                drawn = (tree.drawn_from or {})[node][token]
                cell = min(place, len(_PRIORS) - 1), bisect_right(_CHANCES, drawn / max(left, drawn))
                self._tried[cell] += 1.0
                self._right[cell] += token == written
                if token == written:
                    break
                left -= drawn


class DrawnTree:
    """Trees of ``nodes`` drawn tokens where most are expected to be accepted, by the rates of their places (as in
    Sequoia, Chen et al., arXiv 2402.12374, but one by one, as the tree is drawn). An open place is worth
    its *reach*, the chance that the walk gets to it, times its rate. With the rates 0.7 for first and 0.4 for second
    children::

        root, reach 1.0     draws cat     open: cat's first child 0.7 x 0.7, the root's second child 0.3 x 0.4
        cat,  reach 0.7     draws sat     open: sat's first child 0.49 x 0.7, cat's second child 0.21 x 0.4, ...

    """

    def __init__(self, draw: Draw, nodes: int) -> None:
        self.rates = Rates()
        self._draw, self._nodes = draw, nodes

    def grow(self, root: int, passes: Passes, room: int, chain: bool = False) -> TokenTree:
        """The tree below ``root``, at most ``room`` deep; a ``chain`` has one branch."""
        tree, rates = TokenTree(root), self.rates
        branches: dict[int, Branch] = {0: ()}
        urns: dict[int, Urn] = {}
        order = count()  # of equals the one made first
        heap: list[tuple[float, int, int, float]] = []

        def open_place(node: int, reach: float) -> None:
            worth = reach * rates.rate(len(tree.children[node]))
            heappush(heap, (-worth, next(order), node, reach))

        if room > 0:
            open_place(0, 1.0)
        while heap and len(tree) <= self._nodes:
            _, _, node, reach = heappop(heap)
            if node not in urns:
                level = [node, *(other for _, _, other, _ in heap if tree.depths[other] == tree.depths[node])]
                asked = [each for each in level if each not in urns]
                said = passes.after([branches[each] for each in asked])
                urns |= {each: Urn(told, self._draw) for each, told in zip(asked, said, strict=True)}
            drawn = urns[node].take()
            if drawn is None:
                continue
            accepted = rates.rate(len(tree.children[node]), drawn[1])
            child = tree.add(node, drawn[0])
            branches[child] = (*branches[node], drawn[0])
            if not chain:
                open_place(node, reach * (1.0 - accepted))
            if tree.depths[child] < room:
                open_place(child, reach * accepted)
        tree.drawn_from = {node: urn.chances for node, urn in urns.items() if tree.children[node]}
        return tree
