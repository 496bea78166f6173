"""Tokens that are like one that has not been there yet: after "dogs" a model says much of what it says after "cats"."""

from collections.abc import Callable, Iterable, Sequence
from math import exp
from typing import Any

import numpy as np
import torch

from lookahead.models.output_layer import copyable_weight
from lookahead.sources.successor_table import SuccessorTable

_NEAREST = 6  # tokens that are heard
_SHARP, _EVEN = 7.0, 0.63  # a vote is exp(sharp * (cosine - even))
_MOST_NUMBERS = 1024  # of an embedding, that are compared
_MOST_TOKENS = 4096  # that are looked through: those that came last

Embed = Callable[[Sequence[int]], np.ndarray]  # from tokens to what they are like: float32 lines of length 1


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
    """Which scored tokens are nearest to others, in one text."""

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
