"""Token recycling: what the model last said after a token is drafted again (Luo et al., arXiv 2408.08696); after one
that has not been there yet, what it said after tokens that are like it."""

from collections.abc import Callable, Iterable, Sequence
from math import exp, sqrt
from typing import Any

import numpy as np
import torch

from jacobi import Path, Successors, TokenTree
from lookahead import _native
from lookahead.models.output_layer import copyable_weight
from lookahead.sources.perturbed import BINS, BOUNDS, Draw, Offer, offer
from lookahead.sources.successor_table import BEGIN, PLACES, Context, SuccessorTable, place_of

BEST, DRAWN_BEST = 16, 64  # next tokens kept of each scored node, and where they are drawn
# By bin, where the context of one, two or three tokens is known, or only the two before the last or neighbours: the
# chances of lone candidates that explain best which were right (SmolLM2-135M, chat, greedy, 2026-11-27), and large
# shares raised by hand towards those that were right under noise.
_PRIORS = (
    (0.02, 0.04, 0.077, 0.15, 0.265, 0.41, 0.55, 0.65, 0.70, 0.74, 0.77, 0.80),
    (0.035, 0.07, 0.13, 0.25, 0.41, 0.58, 0.70, 0.78, 0.82, 0.85, 0.87, 0.88),
    (0.04, 0.08, 0.15, 0.27, 0.44, 0.61, 0.73, 0.80, 0.85, 0.88, 0.90, 0.91),
    (0.015, 0.03, 0.06, 0.11, 0.19, 0.28, 0.37, 0.44, 0.50, 0.54, 0.57, 0.60),
    # The first three again, where only other texts have had the context.
    (0.015, 0.03, 0.05, 0.09, 0.15, 0.20, 0.25, 0.28, 0.30, 0.35, 0.40, 0.45),
    (0.015, 0.03, 0.05, 0.10, 0.18, 0.26, 0.34, 0.40, 0.45, 0.50, 0.55, 0.60),
    (0.015, 0.03, 0.07, 0.14, 0.25, 0.36, 0.46, 0.52, 0.57, 0.62, 0.67, 0.70),
)
_OTHERS = PLACES * BINS  # the first kind of a candidate in a context that only other texts have had

_LIMITS = np.array(BOUNDS).data
_ROWS = 2  # of each context
_MOST = 10  # candidates below one node
# Votes of rows whose context has no, one, two and three tokens; what the row before has of a row's votes; and the age,
# in rows, at which a row has lost a third of them: what explains best what came next.
_VOTES = (0.5, 2.0, 2.7, 3.3, 0.4, 50.0)

_NEAREST = 6  # tokens that are heard
_SHARP, _EVEN = 7.0, 0.63  # a vote is exp(sharp * (cosine - even))
_MOST_NUMBERS = 1024  # of an embedding, that are compared
_MOST_TOKENS = 4096  # that are looked through: those that came last

Embed = Callable[[Sequence[int]], np.ndarray]  # from tokens to what they are like: float32 lines of length 1

ContextState = tuple[Context, int]  # and the index of the next token


def embed_of(model: Any) -> Embed | None:
    """What a model's tokens are like, by its input embeddings; None where there are none at hand."""
    weight = copyable_weight(model.get_input_embeddings())
    if weight is None:
        return None
    some = weight[:, :: -(-weight.shape[1] // _MOST_NUMBERS)]

    def embed(tokens: Sequence[int]) -> np.ndarray:
        lines: np.ndarray = some[torch.tensor(tokens, device=some.device)].float().cpu().numpy()
        return lines / np.maximum(np.linalg.norm(lines, axis=1, keepdims=True), 1e-9)

    return embed


class Neighbours:
    """Which scored tokens are nearest to others, in one text: a model says much the same after "dogs" and "cats"."""

    def __init__(self, table: SuccessorTable, embed: Embed | None) -> None:
        self._table, self._embed = table, embed
        self._tokens: dict[int, None] = {}
        self._unread: list[int] = []
        self._lines = np.zeros((0, 0), np.float32)
        self._near: dict[int, list[tuple[int, float]]] = {}  # since tokens were noted last

    def note(self, tokens: Iterable[int]) -> None:
        """The table has rows behind these."""
        self._near.clear()
        new = dict.fromkeys(token for token in tokens if token not in self._tokens)
        self._tokens.update(new)
        self._unread.extend(new)

    def rows(self, token: int) -> list[tuple[int, float]]:
        """The last rows behind the tokens that are nearest to one that has none, and their votes."""
        if self._embed is None or token in self._tokens:
            return []
        if token not in self._near:
            known = self._table.row_of(token) is not None  # from another text
            self._near[token] = [] if known or not self._tokens else self._found(token, self._embed)
        return self._near[token]

    def _found(self, token: int, embed: Embed) -> list[tuple[int, float]]:
        if self._unread:
            new = embed(self._unread)
            self._lines = np.concatenate([self._lines, new])[-_MOST_TOKENS:] if len(self._lines) else new
            self._unread.clear()
            for oldest in list(self._tokens)[: -len(self._lines)]:
                del self._tokens[oldest]
        likes = self._lines @ embed([token])[0]
        nearest = np.argsort(-likes, kind="stable")[:_NEAREST].tolist()
        tokens = list(self._tokens)
        rows = [(self._table.row_of(tokens[each]), float(likes[each])) for each in nearest]
        return [(row, exp(_SHARP * (like - _EVEN))) for row, like in rows if row is not None]


def votes_of(orders: Sequence[int], ages: Sequence[int]) -> list[float]:
    """The votes of rows: more of longer contexts and newer rows, longest and newest first; ``ages`` in rows."""
    votes, fading = list[float](), 1.0
    for place, (order, age) in enumerate(zip(orders, ages, strict=True)):
        fading = fading * _VOTES[4] if place and order == orders[place - 1] else 1.0
        votes.append(_VOTES[order] * fading / sqrt(1.0 + age / _VOTES[5]))
    return votes


class RecyclingSource:
    """Candidates from what the model said at scored nodes, in this text and before: also off the kept path. All rows
    of a node's contexts vote; where tokens are drawn, what they say is divided by the noise. After a new token the
    row of another one in its place votes, and those of tokens that are like it (``embed`` tells), or without
    ``guess`` nothing. A candidate's kind is the length of its context, and the bin of
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
        self._lines: dict[int, np.ndarray | None] = {}  # of noise, read in this pass, by index

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        text = [*BEGIN, *prompt]
        if successors is not None and prompt:
            count = min(len(successors.tokens), len(prompt))  # earlier ones stand for padding
            first, second, *tokens = text[len(text) - count - 2 :]
            said = Successors(successors.tokens[-count:], successors.logits[-count:])
            self._table.put((first, second, tokens[0]), list(range(-1, count - 1)), tokens, said)
            self._near.note(tokens)
        self._root = (text[-3], text[-2], text[-1])

    def root(self) -> ContextState:
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
            return _native.speedups.heard(self._settings, *at, context, line, near)
        return self._heard(context, index, near)

    def _heard(self, context: Context, index: int, near: Sequence[tuple[int, float]]) -> Offer:
        orders, rows = self._table.last(context, _ROWS)
        votes = votes_of(orders, self._table.ages(rows))
        if not orders or not orders[0]:
            orders, rows = [*orders, *(0 for _ in near)], [*rows, *(row for row, _ in near)]
            votes += [vote for _, vote in near]
        if not rows:
            return []
        whole = 0.0
        for vote in votes:
            whole += vote
        said, line = self._table.said(rows), self._lines[index]
        parts = np.array([vote / whole for vote in votes], np.float32)[:, None]
        shares = self._draw.shares(said.tokens, self._draw.chances(said.logits), line, parts)
        own = not orders[0] or self._table.ages(rows[:1])[0] < self._table.since(self._begun)
        return offer(shares, place_of(orders[0]) * BINS + (0 if own else _OTHERS), _MOST)

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        root, begin = self._root, len(path.tokens) - 1
        for place, token in enumerate(path.tokens):
            if place < begin:
                self.by_noise += self._drawn and self._table.likeliest(self._root) != token
            self._root = (self._root[1], self._root[2], token)
        self._index += len(path.tokens)
        self._lines.clear()
        if successors is not None:
            self._near.note(tree.tokens)
            self._table.put(root, tree.parents, tree.tokens, successors)
