"""Token recycling: what the model last said after a token is drafted again (Luo et al., arXiv 2408.08696)."""

from collections.abc import Sequence

from jacobi import Path, Successors, TokenTree
from lookahead.sources.successor_table import LEVELS, Context, SuccessorTable

_BEFORE = -1  # stands for the tokens before the text's first

# Shares that were right on the bundled model (greedy, penalised and sampled text mixed), rounded: by length of context,
# and then after a new token, for the best candidate by its level.
_BEST_PRIORS = (
    (0.14, 0.15, 0.20, 0.20, 0.30, 0.35, 0.45, 0.65),
    (0.18, 0.20, 0.20, 0.30, 0.40, 0.50, 0.60, 0.85),
    (0.27, 0.33, 0.43, 0.47, 0.72, 0.85, 0.87, 0.94),
    (0.08, 0.09, 0.11, 0.13, 0.13, 0.12, 0.10, 0.10),
)
_LATER_PRIORS = (
    (0.09, 0.05, 0.04, 0.03, 0.03),
    (0.12, 0.08, 0.06, 0.05, 0.04),
    (0.22, 0.13, 0.08, 0.06, 0.05),
    (0.04, 0.03, 0.02, 0.02, 0.015),
)
_USUAL_PRIORS = (0.03, 0.03, 0.03, 0.02, 0.015, 0.015)


class RecyclingSource:
    """Candidates from what the model said at scored nodes, in this text and before: also off the path that was kept. A
    candidate's kind is the length of its context, its rank, and its distance in logits from its rivals. Sequences and
    calls on the same model may share the table. With ``guess`` there are candidates after new tokens, too."""

    name = "recycling"
    priors = (
        tuple(
            prior
            for best, later in zip(_BEST_PRIORS, _LATER_PRIORS, strict=True)
            for prior in (*best, *(share for share in later for _ in range(LEVELS)))
        )
        + _USUAL_PRIORS
    )

    def __init__(self, table: SuccessorTable, guess: bool = True) -> None:
        self._table = table
        self._guess = guess
        self._root = (_BEFORE, _BEFORE, _BEFORE)

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        text = [_BEFORE, _BEFORE, _BEFORE, *prompt]
        if successors is not None and prompt:
            count = min(len(successors.tokens), len(prompt))  # earlier ones stand for padding
            first, second, *tokens = text[len(text) - count - 2 :]
            said = Successors(successors.tokens[-count:], successors.logits[-count:])
            self._table.put((first, second, tokens[0]), list(range(-1, count - 1)), tokens, said)
        self._root = (text[-3], text[-2], text[-1])

    def root(self) -> Context:
        return self._root

    def step(self, state: Context, token: int) -> Context:
        return (state[1], state[2], token)

    def propose(self, state: Context) -> Sequence[tuple[int, int]]:
        return self._table.ranked(state, self._guess)

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        if successors is not None:
            self._table.put(self._root, tree.parents, tree.tokens, successors)
        for token in path.tokens:
            self._root = self.step(self._root, token)
