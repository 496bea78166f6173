"""States of recurrent layers beside a tree's keys and values: those behind the last kept token of each sequence.

A pass leaves them as they were: scans (`models.families.scans`) say what each node adds, and convolutions read each
node's last inputs along its path. They move when the pass's nodes are kept.
"""

from collections.abc import Hashable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from lookahead.runtime.cache.buffers import Store
from lookahead.runtime.cache.layers import EMPTY_LAYERS, TreeLayer
from lookahead.runtime.scores import send


class StateLayer(LinearAttentionLayer):
    """One layer's states; while the prompt is read, as transformers keeps them."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._inputs: Tensor | None = None  # [batch, channel, place], the convolution's last; None = still to be read
        self._given = torch.empty(0)  # these, and behind them the last pass's

    def update_conv_state(self, conv_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Take the inputs ``[batch, channel, node]`` of a pass; each node's own last ones, ``[..., node, place]``."""
        if self._inputs is None:
            return super().update_conv_state(conv_states, *args, **kwargs)
        assert self._store.scans is not None
        self._given, size = torch.cat([self._inputs, conv_states], dim=-1), self._inputs.shape[-1]
        windows = size + self._store.scans.inputs(size).to(self._given.device)  # [batch, node, place]
        rows = torch.arange(len(self._given), device=self._given.device)
        return self._given.transpose(1, 2)[rows[:, None, None], windows].permute(0, 3, 1, 2)

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Leave the state to what :meth:`keep` and the scans make of it."""
        if self._inputs is None:
            return super().update_recurrent_state(recurrent_states, *args, **kwargs)
        return recurrent_states

    def settle(self) -> None:
        """The prompt has been read."""
        self._inputs, self.conv_states[0] = self.conv_states[0], None
        self.record_past = True  # so that single tokens, too, come by update_conv_state

    def keep(self, last: Tensor) -> None:
        """Keep the inputs up to the node ``last`` ``[batch]`` of each sequence; -1 = those that are here."""
        assert self._inputs is not None
        assert self._store.scans is not None
        last, size = last.to(self._given.device), self._inputs.shape[-1]
        rows = torch.arange(len(last), device=last.device)
        windows = size + self._store.scans.inputs(size).to(last.device)[rows, last]  # [batch, place]
        moved = self._given.transpose(1, 2)[rows[:, None], windows].mT
        self._inputs = torch.where((last >= 0)[:, None, None], moved, self._inputs)

    def load(self, layer: LinearAttentionLayer) -> None:
        """Start from what one of transformers' own holds, which is only read."""
        if not layer.has_previous_state[0]:
            return
        _copy(layer.conv_states[0], layer.recurrent_states[0], self)

    def leave(self, layer: LinearAttentionLayer, rows: slice) -> None:
        """Put the states of some rows into one of transformers' own."""
        if self._inputs is not None:
            state = self.recurrent_states[0]
            _copy(self._inputs[rows], None if state is None else state[rows], layer)

    def drop_row(self, row: int) -> None:
        """Hold a sequence no more; the last one takes its place."""
        rows = list(range(len(self._held[0])))
        rows[row] = rows[-1]
        self.pick(rows[:-1])

    def join(self, other: "StateLayer") -> None:
        """Take another layer's sequences in behind those that are here."""
        self._held = [torch.cat(pair) for pair in zip(self._held, other._held, strict=True)]

    def pick(self, rows: list[int]) -> None:
        """Hold the states of these rows, in this order."""
        self._held = [states[rows] for states in self._held]

    @property
    def _held(self) -> list[Tensor]:
        """All that is held behind the prompt: inputs, and a state if there is one."""
        return [states for states in (self._inputs, self.recurrent_states[0]) if states is not None]

    @_held.setter
    def _held(self, states: list[Tensor]) -> None:
        self._inputs, self.recurrent_states[0] = states[0], states[1] if len(states) > 1 else None


class KeyedStateLayer(StateLayer, TreeLayer):
    """One layer's states, and its keys and values."""

    def __init__(self, store: Store) -> None:
        StateLayer.__init__(self, store)
        TreeLayer.__init__(self, store)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        (TreeLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)


def keep_states(store: Store, layers: Sequence[StateLayer], chosen: Sequence[Sequence[int]]) -> None:
    """Move the states of all layers behind each sequence's ``chosen`` nodes of the last pass, if it is not yet kept."""
    if store.scans is None:
        return
    last = send([nodes[-1] if nodes else -1 for nodes in chosen], layers[0].device)
    store.scans.keep(last)
    for layer in layers:
        layer.keep(last)
    store.scans = None


def types_with_keys(types: Sequence[Hashable], kinds: Sequence[type]) -> list[Hashable]:
    """The ``types`` of those layers that have keys, of which ``kinds`` are known; () = all have."""
    without = (LinearAttentionLayer, *EMPTY_LAYERS)
    return [each for each, kind in zip_longest(types, kinds) if kind not in without]


def tree_layer(kind: type, store: Store) -> Any:
    """What takes the place of a layer of transformers' own cache in a tree's."""
    if kind in EMPTY_LAYERS:
        return kind()
    ours = {LinearAttentionLayer: StateLayer, LinearAttentionAndFullAttentionLayer: KeyedStateLayer}
    return ours.get(kind, TreeLayer)(store)


def _copy(inputs: Tensor, state: Tensor | None, target: LinearAttentionLayer) -> None:
    """Leave copies of inputs and a state in one of transformers' layers."""
    target.lazy_initialization(conv_states=inputs, conv_kernel_size=inputs.shape[-1])
    target.conv_states[0].copy_(inputs)
    if state is not None:
        target.lazy_initialization(recurrent_states=state)
        target.recurrent_states[0].copy_(state)
    target.has_previous_state[0] = True
