"""Token recycling where tokens are drawn by noise that is known."""

from collections.abc import Sequence
from functools import cache
from math import isfinite

import numpy as np

from jacobi import Path, Successors, TokenTree
from lookahead import _native
from lookahead.sources.perturbed import BINS, BOUNDS, LEAST_SHARE, MOST, Draw, Offer, offer
from lookahead.sources.recycling import RecyclingSource
from lookahead.sources.successor_table import PLACES, Context, SuccessorTable, place_of

# Next tokens kept of each scored node; with 32, S at 24 nodes is 3 to 5 % lower, with 128 1 % higher.
DRAWN_BEST = 64
_FADE = 0.97  # of what the text's usual tokens are, from token to token; 0.95 and 0.99 do as well
_USUAL = 512  # of them that are asked; with 128, S is 3 % lower
_REFRESH = 16  # tokens after which these are chosen again
_LARGEST = 1e20
# By bin, where the context of one, two or three tokens is known, only the two before the last, or none: the chances of
# lone candidates that explain best which of a node's candidates were right (bundled model, code and prose at
# temperatures of 0.6 to 1.0; the two lowest bins, which are not proposed, hold shares that were right).
_PRIORS = (
    (0.01, 0.023, 0.053, 0.108, 0.253, 0.462, 0.646, 0.750, 0.761, 0.817, 0.824, 0.920),
    (0.018, 0.042, 0.073, 0.184, 0.410, 0.601, 0.741, 0.823, 0.916, 0.947, 0.950, 0.950),
    (0.025, 0.058, 0.138, 0.248, 0.463, 0.693, 0.845, 0.902, 0.950, 0.976, 0.992, 0.994),
    (0.007, 0.013, 0.032, 0.053, 0.095, 0.145, 0.200, 0.240, 0.400, 0.600, 0.650, 0.700),
    (0.007, 0.013, 0.027, 0.046, 0.065, 0.109, 0.133, 0.178, 0.25, 0.3, 0.585, 0.644),
)
_NEW = PLACES * BINS  # the first kind of a candidate in a new context

_LIMITS = np.array(BOUNDS).data
_ROWS = 2  # of each context
_HEARD = 0.7  # of the votes that are left, the longest context has, then the next one
_OLDER = 0.7  # of a row's votes, the row before it has

State = tuple[Context, int]  # and the index of the next token


@cache
def votes_of(orders: tuple[int, ...]) -> tuple[np.ndarray, float]:
    """The votes of rows of contexts of such lengths, longest and newest first, and what is left for the text's usual
    tokens; they sum to 1."""
    votes, left = list[float](), 1.0
    for order in dict.fromkeys(orders):
        fading = [_OLDER**age for age in range(orders.count(order))]
        votes += [left * _HEARD * each / sum(fading) for each in fading]
        left *= 1.0 - _HEARD
    return np.array(votes, np.float32)[:, None], left


class UsualTokens:
    """What the model has said on average in a text, with more weight on the newest: a guess of what it says next where
    the context is new. Under noise even that is often right, because the noise decides much of what is drawn.

    Attributes:
        views: the tokens and their chances, as functions in C read them.
    """

    def __init__(self, vocab_size: int) -> None:
        self._sums = np.zeros(vocab_size, np.float32)
        self._known = [np.zeros(0, np.int64)]  # tokens whose sums are not 0
        self._weight = 1.0  # of the distribution that is taken in next
        self._age = _REFRESH  # tokens since the usual ones were chosen
        self._keep(self._known[0], np.zeros(0, np.float32))

    def _keep(self, tokens: np.ndarray, chances: np.ndarray) -> None:
        self._tokens, self._chances = tokens, chances
        self.views = tokens.data, chances.data

    def add(self, tokens: np.ndarray, chances: np.ndarray) -> None:
        """Take in what the model said at one token: the best next tokens, and their chances up to a factor."""
        whole = float(chances.sum())
        if not isfinite(whole):
            return
        before = self._sums[tokens]
        self._sums[tokens] = before + chances * (self._weight / whole)
        if not before.all():
            self._known.append(tokens[(before == 0.0) & (chances > 0.0)])
        self._weight /= _FADE
        self._age += 1
        if self._weight > _LARGEST:
            self._sums /= self._weight
            self._weight = 1.0
            self._known = [np.flatnonzero(self._sums)]

    def refresh(self) -> None:
        """Choose them anew, if it is time to."""
        if self._age >= _REFRESH:
            self._choose()

    def shares(self, draw: Draw, line: np.ndarray | None) -> dict[int, float]:
        """The shares of the usual tokens where one is drawn with this noise."""
        self.refresh()
        return draw.shares(self._tokens[None], self._chances[None], line) if len(self._tokens) else {}

    def _choose(self) -> None:
        self._age = 0
        tokens = np.concatenate(self._known)  # few of a large vocabulary
        self._known = [tokens]
        sums = self._sums[tokens]
        if len(tokens) > _USUAL:
            most = np.argpartition(sums, -_USUAL)[-_USUAL:]
            tokens, sums = tokens[most], sums[most]
        self._keep(tokens, sums / self._weight)


class DrawnRecycling:
    """:class:`.RecyclingSource` for tokens that are drawn: its rows are longer, and what the model said is divided by
    the noise. After a new token the row of another one in its place votes, and the text's :class:`UsualTokens`. A
    candidate's kind is the length of its context, and the bin of its share.

    Attributes:
        by_noise: accepted tokens that the model had not called the likeliest there before.
    """

    name = "recycling"
    priors = tuple(prior for group in _PRIORS for prior in group)

    def __init__(self, table: SuccessorTable, draw: Draw, vocab_size: int) -> None:
        self._table = table
        self._recycling = RecyclingSource(table)
        self._draw = draw
        self._index = 0  # of the next token
        self.by_noise = 0
        self._settings = draw.warp, (_ROWS, _HEARD, _OLDER), _LIMITS, MOST
        self._usual = UsualTokens(vocab_size)
        self._lines: dict[int, np.ndarray | None] = {}  # of noise, read in this pass, by index
        self._usuals: dict[int, dict[int, float]] = {}  # the usual tokens under them

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        self._recycling.start(prompt, successors)
        if successors is not None:
            count = len(successors.tokens)
            self._take_in(successors, range(max(0, count - len(prompt)), count))

    def _take_in(self, said: Successors, nodes: Sequence[int]) -> None:
        for node, chances in zip(nodes, self._draw.chances(said.logits.take(nodes, 0)), strict=True):
            self._usual.add(said.tokens[node], chances)

    def root(self) -> State:
        self._usual.refresh()
        return self._recycling.root(), self._index

    def step(self, state: State, token: int) -> State:
        context, index = state
        return self._recycling.step(context, token), index + 1

    def propose(self, state: State) -> Offer:
        context, index = state
        if index not in self._lines:
            self._lines[index] = self._draw.line(index)
        if _native.speedups is not None:
            table, line = self._table, self._lines[index]
            return _native.speedups.heard(self._settings, table.rows, table.written, context, line, self._usual.views)
        return self._heard(context, index)

    def _heard(self, context: Context, index: int) -> Offer:
        orders, rows = self._table.last(context, _ROWS)
        if not rows:
            return offer(self._usual_at(index), _NEW)
        votes, left = votes_of(tuple(orders))
        said, line = self._table.said(rows), self._lines[index]
        shares = self._draw.shares(said.tokens, self._draw.chances(said.logits), line, votes)
        if orders[0] <= 1:
            for token, share in self._usual_at(index).items():
                if token in shares or left * share >= LEAST_SHARE:
                    shares[token] = shares.get(token, 0.0) + left * share
        return offer(shares, place_of(orders[0]) * BINS)

    def _usual_at(self, index: int) -> dict[int, float]:
        if index not in self._usuals:
            self._usuals[index] = self._usual.shares(self._draw, self._lines[index])
        return self._usuals[index]

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        context = self._recycling.root()
        for token in path.tokens[:-1]:
            self.by_noise += self._table.likeliest(context) != token
            context = self._recycling.step(context, token)
        self._index += len(path.tokens)
        self._lines.clear()
        self._usuals.clear()
        if successors is not None:
            self._take_in(successors, path.nodes)
        self._recycling.learn(tree, path, successors)
