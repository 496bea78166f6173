"""Settings and criteria of calls of ``generate``."""

from typing import Any

import torch
from helpers.models import VOCAB
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from lookahead import Jacobi, Lookahead


def allowed_tokens(row: int, ids: Tensor) -> list[int]:
    """Another third of the vocabulary after every token, and another one in every row."""
    return [token for token in range(VOCAB) if (token + int(ids[-1]) + row) % 3]


class Recorder(LogitsProcessor):
    """A processor with a memory: bans what has been written as often as it has been called; remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = input_ids.tolist()
        if self.calls:
            assert [row[:-1] for row in ids] == self.calls[-1], "every call sees one token more of the same text"
        self.calls.append(ids)
        assert input_ids.is_contiguous()
        assert scores.shape == (len(ids), VOCAB)
        assert scores.dtype is torch.float32
        for row, text in enumerate(ids):
            scores[row, (text[-1] * 3 + len(self.calls)) % VOCAB] += 2.0
        return scores


class Drawing(LogitsProcessor):
    """A processor of the user's own that draws random numbers."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.rand_like(scores)


class LengthIs(StoppingCriteria):
    """Stops every row at a length; remembers which texts it was shown."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.shown: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.shown.append(input_ids.tolist())
        return torch.full((input_ids.shape[0],), input_ids.shape[1] == self.length)


STRATEGIES = [
    None,
    Lookahead(window_size=5, ngram_size=5, pool_from_output=False, always_forward_one=False, seed=802),
    Lookahead(window_size=2, ngram_size=8, verification_set_size=1, seed=667),
]


def ids_of(sequences: Tensor, index: int) -> list[int]:
    """The token that each row writes at ``index`` (prompts are 12 long)."""
    return sequences[:, 12 + index].tolist()


BLOCKS = [
    Jacobi(mode="jacobi", block_size=6, blocks=2, spawn_ratio=0.5, tails=4, seed=1),
    Jacobi(mode="hybrid", block_size=4, blocks=3, spawn_ratio=0.25, tails=2, initial_guess="pad"),
    Jacobi(tails=4, seed=1),
]
