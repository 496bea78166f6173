"""Beam search with ReDrafter's head alone, as published."""

import numpy as np

from jacobi import TokenTree
from lookahead.sources.draft_model import Branch, Passes

CANDIDATES = 50  # next tokens of a beam; others have no chance


def beam_search(root: int, passes: Passes, room: int, chain: bool = False, *, width: int, length: int) -> TokenTree:
    """ReDrafter's beams (arXiv 2403.09919, section 3), at most ``room`` deep; of a ``chain`` the best one only. They
    are the ``width`` likeliest continuations of ``length`` tokens, the root counted. In a tree, what several beams
    begin with is scored once::

        root a b c          root - a - b -+- c
        root a b d                 |      +- d
        root a e f                 +- e - f        9 drafted tokens in 6 nodes
    """
    beams: list[tuple[float, Branch]] = [(0.0, ())]
    for _ in range(min(length - 1, room)):
        longer: list[tuple[float, Branch]] = []
        for (score, branch), said in zip(beams, passes.after([branch for _, branch in beams]), strict=True):
            if said is not None and len(said[0]):
                tokens, logits = (each[:CANDIDATES] for each in said)
                lower = logits.astype(np.float64) - logits[0]  # log-probabilities as if there were no others
                sums = (score + (lower - np.log(np.exp(lower).sum()))).tolist()
                longer += [(total, (*branch, token)) for token, total in zip(tokens.tolist(), sums, strict=True)]
        if not longer:
            break
        beams = sorted(longer, key=lambda beam: -beam[0])[: 1 if chain else width]
    return TokenTree.from_paths(root, [branch for _, branch in beams])
