"""Trees of EAGLE heads alone, as published: EAGLE-1's of fixed shape, and EAGLE-2's, which is ranked again."""

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

Made = tuple[float, Branch]  # a candidate: sum of log-probabilities, branch


def ranked_again(
    root: int, passes: Passes, room: int, chain: bool = False, *, top_k: int, depth: int, total_tokens: int
) -> TokenTree:
    """EAGLE-2's tree (section 4), at most ``room`` deep; a ``chain`` has one branch. ``depth`` times the ``top_k``
    nodes of a level with the best cumulative log-probabilities are expanded by ``top_k`` children each, and of all that
    were made the ``total_tokens - 1`` best are kept. With top_k = 2, depth = 2 and 6 tokens, log-probabilities and
    their sums::

        root -+- A -0.2 -+- C -0.5 (-0.7) -+- G -0.3 (-1.0)      kept: A, C, D, G, I
              |          |                 +- H -1.4 (-2.1)
              |          +- D -1.0 (-1.2) -+- I -0.2 (-1.4)
              |                            +- J -1.9 (-3.1)
              +- B -1.7 --- E -0.1 (-1.8), F -2.5 (-4.2)         C and D are expanded, E and F are not
    """
    width = 1 if chain else top_k
    made: list[Made] = []
    frontier: list[Made] = [(0.0, ())]
    for _ in range(min(depth + 1, room)):
        new: list[Made] = []
        for (score, branch), said in zip(frontier, passes.after([branch for _, branch in frontier]), strict=True):
            if said is not None:
                best = zip(said[0][:width].tolist(), said[1][:width].tolist(), strict=True)
                new += [(score + chance, (*branch, token)) for token, chance in best]
        made += new
        frontier = _best(new, width)
        if not frontier:
            break
    kept = {branch for _, branch in _best(made, total_tokens - 1)}
    return TokenTree.from_paths(root, [branch for _, branch in made if branch in kept])


def _best(made: list[Made], count: int) -> list[Made]:
    """Of equals those made first, so that no child comes before its parent."""
    return sorted(made, key=lambda each: -each[0])[:count]
