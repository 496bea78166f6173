"""Token recycling: what the model last said after a token is drafted again (Luo et al., arXiv 2408.08696)."""

from collections.abc import Sequence
from math import isfinite, sqrt

import numpy as np

from jacobi import Path, Successors, TokenTree
from lookahead import _native
from lookahead.sources.neighbours import Embed, Neighbours
from lookahead.sources.perturbed import BINS, BOUNDS, LEAST_SHARE, Draw, Offer, offer
from lookahead.sources.successor_table import BEGIN, PLACES, Context, SuccessorTable, place_of

BEST, DRAWN_BEST = 16, 64  # next tokens kept of each scored node, and where they are drawn
_FADE = 0.97  # of what the text's usual tokens are, from token to token; 0.95 and 0.99 do as well
_USUAL = 512  # of them that are asked; with 128, S is 3 % lower
_REFRESH = 16  # tokens after which these are chosen again
_LARGEST = 1e20  # weight from which sums are scaled down: far below what float32 holds
# By bin, where the context of one, two or three tokens is known, only the two before the last or neighbours, or none:
# the chances of lone candidates that explain best which were right (SmolLM2-135M, chat, greedy, 2026-11-27), and large
# shares raised by hand towards those that were right under noise.
_PRIORS = (
    (0.02, 0.04, 0.077, 0.15, 0.265, 0.41, 0.55, 0.65, 0.70, 0.74, 0.77, 0.80),
    (0.035, 0.07, 0.13, 0.25, 0.41, 0.58, 0.70, 0.78, 0.82, 0.85, 0.87, 0.88),
    (0.04, 0.08, 0.15, 0.27, 0.44, 0.61, 0.73, 0.80, 0.85, 0.88, 0.90, 0.91),
    (0.015, 0.03, 0.06, 0.11, 0.19, 0.28, 0.37, 0.44, 0.50, 0.54, 0.57, 0.60),
    (0.01, 0.02, 0.033, 0.053, 0.085, 0.125, 0.165, 0.20, 0.23, 0.26, 0.30, 0.33),
    # The first three again, where only other texts have had the context.
    (0.015, 0.03, 0.05, 0.09, 0.15, 0.20, 0.25, 0.28, 0.30, 0.35, 0.40, 0.45),
    (0.015, 0.03, 0.05, 0.10, 0.18, 0.26, 0.34, 0.40, 0.45, 0.50, 0.55, 0.60),
    (0.015, 0.03, 0.07, 0.14, 0.25, 0.36, 0.46, 0.52, 0.57, 0.62, 0.67, 0.70),
)
_NEW = PLACES * BINS  # the first kind of a candidate in a new context
_OTHERS = _NEW + BINS  # in a context that only other texts have had

_LIMITS = np.array(BOUNDS).data
_ROWS = 2  # of each context
_MOST = 10  # candidates below one node
# Votes of rows whose context has no, one, two and three tokens; what the row before has of a row's votes; the age, in
# rows, at which a row has lost a third of them; and votes of the usual tokens: what explains best what came next.
_VOTES = (0.5, 2.0, 2.7, 3.3, 0.4, 50.0, 0.4)

ContextState = tuple[Context, int]  # and the index of the next token


def votes_of(orders: Sequence[int], ages: Sequence[int]) -> list[float]:
    """The votes of rows: more of longer contexts and newer rows, longest and newest first; ``ages`` in rows."""
    votes, fading = list[float](), 1.0
    for place, (order, age) in enumerate(zip(orders, ages, strict=True)):
        fading = fading * _VOTES[4] if place and order == orders[place - 1] else 1.0
        votes.append(_VOTES[order] * fading / sqrt(1.0 + age / _VOTES[5]))
    return votes


class UsualTokens:
    """What the model has said on average in a text, with more weight on the newest: a guess of what it says next where
    the context is new. Under noise even that is often right, because the noise decides much of what is drawn.

    Attributes:
        views: the tokens and their chances, as functions in C read them.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(0, np.float32)
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
        if (most := int(tokens.max())) >= len(self._sums):
            self._sums = np.concatenate([self._sums, np.zeros(most + 1, np.float32)])
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
        if self._age < _REFRESH:
            return
        self._age = 0
        tokens = np.concatenate(self._known)  # few of a large vocabulary
        self._known = [tokens]
        sums = self._sums[tokens]
        if len(tokens) > _USUAL:
            most = np.argpartition(sums, -_USUAL)[-_USUAL:]
            tokens, sums = tokens[most], sums[most]
        self._keep(tokens, sums / self._weight)

    def shares(self, draw: Draw, line: np.ndarray | None) -> dict[int, float]:
        """The shares of the usual tokens where one is drawn with this noise."""
        self.refresh()
        return draw.shares(self._tokens[None], self._chances[None], line) if len(self._tokens) else {}


class RecyclingSource:
    """Candidates from what the model said at scored nodes, in this text and before: also off the kept path. All rows
    of a node's contexts vote; where tokens are drawn, what they say is divided by the noise. After a new token the
    row of another one in its place votes, those of tokens that are like it (``embed`` tells), and the text's
    :class:`UsualTokens`, or without ``guess`` nothing. A candidate's kind is the length of its context, and the bin of
    its share. Sequences and calls on the same model may share the table.

    Attributes:
        by_noise: accepted tokens that the model had not called the likeliest there before.
    """

    name = "recycling"
    priors = tuple(prior for group in _PRIORS for prior in group)

    def __init__(
        self, table: SuccessorTable, draw: Draw | None = None, embed: Embed | None = None, *, guess: bool = True
    ) -> None:
        self._table, self._guess = table, guess
        self._root = BEGIN
        self._near = Neighbours(table, embed)
        self._drawn, draw = draw is not None, draw or Draw(lambda index: None)
        self._draw = draw
        self._index = 0  # of the next token
        self.by_noise = 0
        self._begun = table.written  # when this text began
        self._settings = draw.warp, _ROWS, _VOTES, _LIMITS, _MOST, self._begun
        self._usual = UsualTokens()
        self._lines: dict[int, np.ndarray | None] = {}  # of noise, read in this pass, by index
        self._usuals: dict[int, dict[int, float]] = {}  # the usual tokens under them

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        text = [*BEGIN, *prompt]
        if successors is not None and prompt:
            count = min(len(successors.tokens), len(prompt))  # earlier ones stand for padding
            first, second, *tokens = text[len(text) - count - 2 :]
            said = Successors(successors.tokens[-count:], successors.logits[-count:])
            self._table.put((first, second, tokens[0]), list(range(-1, count - 1)), tokens, said)
            self._take_in(said, range(count))
            self._near.note(tokens)
        self._root = (text[-3], text[-2], text[-1])

    def _take_in(self, said: Successors, nodes: Sequence[int]) -> None:
        for node, chances in zip(nodes, self._draw.chances(said.logits.take(nodes, 0)), strict=True):
            self._usual.add(said.tokens[node], chances)

    def root(self) -> ContextState:
        self._usual.refresh()
        return self._root, self._index

    def step(self, state: ContextState, token: int) -> ContextState:
        (_, first, second), index = state
        return (first, second, token), index + 1

    def propose(self, state: ContextState) -> Offer:
        context, index = state
        if not self._guess and (self._table.get(context) or (0,))[0] == 0:
            return []
        if index not in self._lines:
            self._lines[index] = self._draw.line(index)
        near = self._near.rows(context[2])
        if _native.speedups is not None:
            at, line = (self._table.rows, self._table.written), self._lines[index]
            return _native.speedups.heard(self._settings, *at, context, line, self._usual.views, near)
        return self._heard(context, index, near)

    def _heard(self, context: Context, index: int, near: Sequence[tuple[int, float]]) -> Offer:
        orders, rows = self._table.last(context, _ROWS)
        votes = votes_of(orders, self._table.ages(rows))
        if not orders or not orders[0]:
            orders, rows = [*orders, *(0 for _ in near)], [*rows, *(row for row, _ in near)]
            votes += [vote for _, vote in near]
        if not rows:
            return offer(self._usual_at(index), _NEW, _MOST)
        usual = _VOTES[6] if orders[0] <= 1 else 0.0
        whole = usual
        for vote in votes:
            whole += vote
        said, line = self._table.said(rows), self._lines[index]
        parts = np.array([vote / whole for vote in votes], np.float32)[:, None]
        shares = self._draw.shares(said.tokens, self._draw.chances(said.logits), line, parts)
        if usual:
            for token, share in self._usual_at(index).items():
                if token in shares or usual / whole * share >= LEAST_SHARE:
                    shares[token] = shares.get(token, 0.0) + usual / whole * share
        own = not orders[0] or self._table.ages(rows[:1])[0] < self._table.since(self._begun)
        return offer(shares, place_of(orders[0]) * BINS + (0 if own else _OTHERS), _MOST)

    def _usual_at(self, index: int) -> dict[int, float]:
        if index not in self._usuals:
            self._usuals[index] = self._usual.shares(self._draw, self._lines[index])
        return self._usuals[index]

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        if successors is not None:
            self._take_in(successors, path.nodes)
            self._near.note(tree.tokens)
        root, begin = self._root, len(path.tokens) - 1
        for place, token in enumerate(path.tokens):
            if place < begin:
                self.by_noise += self._drawn and self._table.likeliest(self._root) != token
            self._root = (self._root[1], self._root[2], token)
        self._index += len(path.tokens)
        self._lines.clear()
        self._usuals.clear()
        if successors is not None:
            self._table.put(root, tree.parents, tree.tokens, successors)
