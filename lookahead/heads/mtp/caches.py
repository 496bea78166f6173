"""What MTP layers keep of one sequence's pairs, in caches of transformers' own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from lookahead.runtime.cache.snapshots import Snapshot

Decode = Callable[[DynamicCache, Tensor, Tensor, Any], Tensor]  # of states [pair, hidden], positions [pair], masks

_INDEXED = "indexed_attention"


class TreeCache:
    """Keys and values of a layer of attention, one entry a pair, and the pairs' positions."""

    def __init__(self, config: Any) -> None:
        # Without a config nothing is dropped that a window does not see any more; indexers need one.
        self.states = (
            DynamicCache(config=config) if _INDEXED in (getattr(config, "layer_types", None) or ()) else DynamicCache()
        )
        self.positions = torch.empty(0, dtype=torch.long)

    @property
    def length(self) -> int:
        return len(self.positions)

    def crop(self, length: int) -> None:
        """Forget all pairs behind the first ``length``."""
        if length < self.length:
            self.states.crop(length - self.length)
            self.positions = self.positions[:length]


class LinearCache:
    """The cache of a layer that also has convolution or recurrent states, which follow one branch at a time. They are
    copied where the text ends. A node on another branch than the last one is reached from there::

        text   a b c | copied      fed d, e: the states are at c-d-e
        node f below c-d           back to c; d is fed again, then f
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._text = 0  # pairs of it
        self._nodes: list[tuple[Tensor, Tensor]] = []  # state and position of every pair behind the text
        self._branch: list[int] = []  # the nodes that the states have seen
        self._states = DynamicCache(config=config)
        self._snapshot = Snapshot(self._states)  # of the end of the text

    @property
    def length(self) -> int:
        return self._text + len(self._nodes)

    def _back(self) -> None:
        """To the end of the text."""
        if self._text:
            self._snapshot.restore()
        else:
            self._states = DynamicCache(config=self._config)
            self._snapshot = Snapshot(self._states)
        self._branch = []

    def crop(self, length: int) -> None:
        """Forget all pairs behind the first ``length``: those of the text, or all that are held, which then are it."""
        if self._nodes and length == self.length and self._branch == list(range(len(self._nodes))):
            self._text, self._branch = length, []
            self._snapshot.take()
        elif self._branch:
            self._back()
        self._nodes = []

    def run(self, decode: Decode, states: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """What comes out for pairs ``[pair, hidden]``, each of which sees the text, and what bool ``mask`` ``[pair,
        pairs]`` shows of the nodes."""
        first = len(self._nodes)
        self._nodes += zip(states.split(1), positions.split(1), strict=True)
        seen = mask[:, self._text :]
        if self._branch == list(range(first)) and bool((seen == torch.ones_like(seen).tril(first)).all()):
            self._branch = list(range(len(self._nodes)))  # the text, or one branch, goes on
            return decode(self._states, states, positions, None)
        return torch.cat([self._reached(decode, line.nonzero()[:, 0].tolist()) for line in seen])

    def _reached(self, decode: Decode, branch: list[int]) -> Tensor:
        """What comes out at the last node of a branch."""
        if self._branch != branch[:-1]:
            self._back()
        new = [self._nodes[node] for node in branch[len(self._branch) :]]
        self._branch = branch
        states, positions = (torch.cat(each) for each in zip(*new, strict=True))
        return decode(self._states, states, positions, None)[-1:]
