"""Medusa decoding as published: a tree of fixed shape (Cai et al., arXiv 2401.10774, section 2.1.2)."""

from collections.abc import Sequence

from jacobi import Path, Successors, TokenTree
from lookahead.sources.medusa.choices import ChoiceTree
from lookahead.sources.medusa.source import HeadCandidates


class MedusaDrafter:
    """Fills a sequence's tree with the heads' best candidates: rank i at depth k + 1 is head k's candidate i."""

    def __init__(self, candidates: HeadCandidates, sequence: int, choices: ChoiceTree) -> None:
        self._candidates = candidates
        self._sequence = sequence
        shape = choices.token_tree()
        self._nodes = list(zip(shape.parents[1:], shape.depths[1:], shape.tokens[1:], strict=True))
        self._root = 0

    def draft(self, room: int) -> TokenTree:
        """The tree, down to depth ``room``; the root alone while the heads have no hidden state."""
        tree = TokenTree(self._root)
        found = self._candidates.of(self._sequence) if room > 0 else None
        if found is None:
            return tree
        tokens, _ = found
        for parent, depth, rank in self._nodes:
            if depth > room:
                break
            tree.add(parent, tokens[depth - 1][rank])  # candidates of a head differ, so nodes keep their numbers
        return tree

    def learn(self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None) -> None:
        """Remember the last decided token, and where the heads have to run."""
        self._root = path.tokens[-1]
        self._candidates.note(self._sequence, path.nodes[-1])
