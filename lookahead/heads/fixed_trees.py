"""Trees of fixed shape, filled with what a head alone says: EAGLE-1's and Medusa's."""

from collections.abc import Iterable

from jacobi import TokenTree
from lookahead.draft.drawn_trees import Urn
from lookahead.sources.draft_model import Branch, Passes
from lookahead.sources.perturbed import Draw


def fixed_tree(
    shape: Iterable[Branch], root: int, passes: Passes, room: int, chain: bool = False, *, draw: Draw | None = None
) -> TokenTree:
    """The tree below ``root`` of a ``shape``, paths of ranks behind their prefixes: a node holds the token of its rank
    among those that ``passes`` give for its parent. It is at most ``room`` deep; a ``chain`` has first ranks only. With
    ``draw`` a rank is not that of a token's logit, but says when it was drawn among its siblings."""
    tree = TokenTree(root)
    nodes: dict[Branch, tuple[Branch, int]] = {(): ((), 0)}  # by ranks: the branch, and its node
    fitting = [ranks for ranks in shape if len(ranks) <= room and not (chain and any(ranks))]
    for depth in sorted({len(ranks) for ranks in fitting}):
        level = [ranks for ranks in fitting if len(ranks) == depth]
        parents = sorted({ranks[:-1] for ranks in level} & nodes.keys())
        said = passes.after([nodes[ranks][0] for ranks in parents]) if parents else []
        best: dict[Branch, list[int]] = {}
        for above, each in zip(parents, said, strict=True):
            if draw is None:
                best[above] = [] if each is None else each[0].tolist()
                continue
            urn = Urn(each, draw)
            taken = [urn.take() for ranks in level if ranks[:-1] == above]
            best[above] = [drawn[0] for drawn in taken if drawn is not None]
            tree.drawn_from = (tree.drawn_from or {}) | {nodes[above][1]: urn.chances}
        for ranks in level:
            tokens = best.get(ranks[:-1], [])
            if ranks[-1] < len(tokens):
                branch, parent = nodes[ranks[:-1]]
                token = tokens[ranks[-1]]
                nodes[ranks] = (*branch, token), tree.add(parent, token)
    return tree
