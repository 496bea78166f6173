"""Trees of EAGLE heads alone, as published: EAGLE-1's of fixed shape, and EAGLE-2's, which is ranked again."""

from dataclasses import dataclass

from jacobi import TokenTree
from lookahead.sources.draft_model import Branch, Passes

# EAGLE-1's 25 nodes by the ranks of their tokens among their siblings (mc_sim_7b_63).
FIXED = tuple(
    tuple(map(int, ranks))
    for ranks in (
        *("0", "1", "2", "3"),
        *("00", "01", "02", "10", "11", "20", "21", "30"),
        *("000", "001", "002", "010", "011", "020", "021", "100"),
        *("0000", "0001", "0002", "00000", "00001"),
    )
)

Made = tuple[float, int, Branch]  # a candidate: sum of log-probabilities, how many were made before it, branch


@dataclass(frozen=True)
class Expansion:
    """EAGLE-2's tree (section 4): ``depth`` times the ``top_k`` nodes of a level with the best cumulative
    log-probabilities are expanded by ``top_k`` children each, and of all that were made the ``total_tokens - 1`` best
    are kept. With top_k = 2, depth = 2 and 6 tokens, log-probabilities and their sums::

        root -+- A -0.2 -+- C -0.5 (-0.7) -+- G -0.3 (-1.0)      kept: A, C, D, G, I
              |          |                 +- H -1.4 (-2.1)
              |          +- D -1.0 (-1.2) -+- I -0.2 (-1.4)
              |                            +- J -1.9 (-3.1)
              +- B -1.7 --- E -0.1 (-1.8), F -2.5 (-4.2)         C and D are expanded, E and F are not
    """

    top_k: int = 10
    depth: int = 7
    total_tokens: int = 60

    def grow(self, root: int, passes: Passes, room: int, chain: bool = False) -> TokenTree:
        """The tree below ``root``, at most ``room`` deep; a ``chain`` has one branch."""
        width = 1 if chain else self.top_k
        made: list[Made] = []
        frontier: list[Made] = [(0.0, -1, ())]
        for _ in range(min(self.depth + 1, room)):
            said = passes.after([branch for _, _, branch in frontier])
            new: list[Made] = []
            for (score, _, branch), each in zip(frontier, said, strict=True):
                if each is not None:
                    for token, chance in zip(each[0][:width].tolist(), each[1][:width].tolist(), strict=True):
                        new.append((score + chance, len(made) + len(new), (*branch, token)))
            made += new
            frontier = sorted(new, key=_rank)[:width]
            if not frontier:
                break
        tree = TokenTree(root)
        nodes: dict[Branch, int] = {(): 0}
        kept = sorted(made, key=_rank)[: self.total_tokens - 1]
        for _, _, branch in sorted(kept, key=lambda entry: entry[1]):
            nodes[branch] = tree.add(nodes[branch[:-1]], branch[-1])
        return tree


def _rank(entry: Made) -> tuple[float, int]:
    return -entry[0], entry[1]  # of equals the one made first, so that no child comes before its parent
