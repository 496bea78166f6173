"""What MTP layers keep of one sequence's pairs, in caches of transformers' own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from lookahead.runtime.cache.snapshots import Snapshot

Decode = Callable[[Tensor, Tensor, Any], Tensor]  # states [pair, hidden], positions [pair], masks: what comes out


class TreeCache:
    """Keys and values of a layer of attention, one entry a pair, and the pairs' positions."""

    def __init__(self) -> None:
        self.states = DynamicCache()  # without a config: nothing is dropped that a window does not see any more
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
        self.states = DynamicCache(config=config)
        self._config = config
        self._snapshot = Snapshot(self.states)
        self._text = 0  # pairs of it
        self._nodes: list[tuple[Tensor, Tensor]] = []  # state and position of every pair behind the text
        self._branch: list[int] = []  # the nodes that the states have seen
        self._at_text = False  # the text's pairs have been read up to its end

    @property
    def length(self) -> int:
        return self._text + len(self._nodes)

    def crop(self, length: int) -> None:
        """Forget all pairs behind the first ``length``, which are the text's; its next pairs follow."""
        if length < self._text:
            self.__init__(self._config)  # type: ignore[misc]  # what was fed first was no text
        elif self._branch:
            self._snapshot.restore()
        self._nodes, self._branch, self._at_text = [], [], False

    def run(self, decode: Decode, states: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """What comes out for pairs ``[pair, hidden]``: those of the text that follow a crop, all at once, then nodes,
        which see what bool ``mask`` ``[pair, pairs]`` shows."""
        if not self._at_text:
            out = decode(states, positions, None)
            self._text += len(states)
            self._snapshot.take()
            self._at_text = True
            return out
        first = len(self._nodes)
        self._nodes += zip(states.split(1), positions.split(1), strict=True)
        seen = mask[:, self._text :]
        return torch.cat(
            [self._reached(decode, line.nonzero()[:, 0].tolist()) for line in seen[:, : first + len(states)]]
        )

    def _reached(self, decode: Decode, branch: list[int]) -> Tensor:
        """What comes out at the last node of a branch."""
        if self._branch != branch[:-1]:
            self._snapshot.restore()
            self._branch = []
        new = [self._nodes[node] for node in branch[len(self._branch) :]]
        self._branch = branch
        return decode(torch.cat([state for state, _ in new]), torch.cat([place for _, place in new]), None)[-1:]
