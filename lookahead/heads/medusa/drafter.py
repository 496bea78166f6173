"""The fixed tree of Medusa's heads alone, as published."""

from collections.abc import Sequence

from jacobi import Path, Successors, TokenTree
from lookahead.heads.medusa.choices import ChoiceTree
from lookahead.heads.medusa.source import HeadCandidates, best_of_head
from lookahead.sources.perturbed import Draw


class MedusaDrafter:
    """Medusa decoding (Cai et al., arXiv 2401.10774, section 2.1.2): one sequence's tree of fixed shape. It is filled
    with the heads' best candidates: rank i at depth k + 1 is head k's candidate i, under the noise of ``draw`` where
    tokens are drawn."""

    def __init__(
        self, candidates: HeadCandidates, sequence: int, choices: ChoiceTree, draw: Draw | None = None
    ) -> None:
        self._candidates = candidates
        self._draw = draw
        self._index = 0  # of the next token
        self._sequence = sequence
        shape = choices.token_tree()
        self._nodes = list(zip(shape.parents[1:], shape.depths[1:], shape.tokens[1:], strict=True))
        self._root = 0

    def draft(self, room: int) -> TokenTree:
        tree = TokenTree(self._root)
        found = self._candidates.of(self._sequence) if room > 0 else None
        if found is None:
            return tree
        tokens, logs = found
        if self._draw is not None:
            lines = enumerate(zip(tokens, logs, strict=True))
            offers = [best_of_head(self._draw, *line, self._index + head) for head, line in lines]
            first = [[token for token, _ in offer] for offer in offers]
            tokens = [list(dict.fromkeys([*best, *line])) for best, line in zip(first, tokens, strict=True)]
        for parent, depth, rank in self._nodes:
            if depth > room:
                break
            tree.add(parent, tokens[depth - 1][rank])  # candidates of a head differ, so nodes keep their numbers
        return tree

    def told(self, tree: TokenTree) -> tuple[Sequence[str], Sequence[float]]:
        """Every node is the heads'. Nothing is estimated."""
        return ["", *["heads"] * (len(tree) - 1)], []

    def learn(self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None) -> None:
        self._root = path.tokens[-1]
        self._index += len(path.tokens)
        self._candidates.note(self._sequence, path.nodes[-1])
