"""The buffers in which a call's keys and values lie, each with some layers' of one shape, from the prompt's pass on.

A model's entries (one layer's keys, or its values) are spread over a few buffers. So keeping a path is a few copies for
the whole model, and while the buffers grow, one after the other, only a part of the states is there twice.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lookahead.models.families.scans import Scans
from lookahead.models.mask_rules import SLIDING
from lookahead.runtime.scores import on_host

Allocate = Callable[[tuple[int, ...], Tensor], Tensor]  # (shape, a tensor of the dtype and device) -> buffer
Entry = tuple["LayerBuffer", int]
Slots = Tensor | np.ndarray  # ids of rows or slots, on a device or on the host
_TREE = 64  # slots for the nodes of a pass
# Buffers for a model whose states have one shape: each costs every pass some calls of torch, so small ones are few.
_SPREAD = 4
_LEAST_BYTES = 1 << 20
_ROOM = 8  # buffers have an eighth of their slots free when the prompt has been read, and grow by an eighth


@dataclass(frozen=True, slots=True)
class Extent:
    """Number of slots of a call's buffers, in multiples of ``granule``: little more than the text has, and never
    more than the prompt, ``new_tokens`` and one tree, but for a pass with a larger tree. Layers that see a sliding
    ``window`` hold little more than that; None = they hold all slots, as the others do."""

    prompt: int
    new_tokens: int
    granule: int = 16
    window: int | None = None

    @property
    def most(self) -> int:
        return self.rounded(self.prompt + self.new_tokens + _TREE)

    @property
    def first(self) -> int:
        """Slots while the prompt is read."""
        room = (self.prompt + self.prompt // _ROOM) // self.granule * self.granule
        return min(self.most, max(room, self.rounded(self.prompt + _TREE)))

    def after(self, capacity: int, stop: int) -> int:
        """Slots of buffers that take the place of those of ``capacity`` slots and must have ``stop``."""
        room = (capacity + max(_TREE, capacity // _ROOM)) // self.granule * self.granule
        return max(self.rounded(stop), min(room, self.most))

    def rounded(self, slots: int) -> int:
        return -(-slots // self.granule) * self.granule


class LayerBuffer:
    """``buffer`` ``[entry, batch, head, slot, channel]``, which grows; ``used`` of its entries hold states.

    With a ``window`` it drops slots that no later token sees. It begins at slot ``first`` of the text, and once it is
    full, slides on to ``oldest``, the first that the shortest sequence's next token sees, if that frees an eighth::

        slot of the text    5  6  7  8  9              8  9 10 11 12
        window = 3          a  b  c  d  e     slide    d  e  -  -  -        first = 5 -> 8

    Attributes:
        kind: shape, dtype, device and window of its entries.
        rows: sequences whose states it holds, the first ones of its rows; the others are free.
        span: first and last-plus-one slot of the pass that the views below are for.
        fresh: for each entry, the slots of the pass; unused with static shapes.
        history: for each entry, all slots up to the pass's last; with static shapes, up to the span's last.
        slots: the buffer as ``[batch, slot, entry, head, channel]``.
    """

    def __init__(self, kind: Hashable, buffer: Tensor, extent: Extent, window: int | None = None) -> None:
        self.kind, self.window, self.extent = kind, window, extent
        self.first = self.oldest = self.used = 0
        self.rows = buffer.shape[1]
        self.span = (0, 0)
        self.fresh: tuple[Tensor, ...] = ()
        self.history: tuple[Tensor, ...] = ()
        self._items: np.ndarray | None = None
        self._use(buffer)

    def write(self, entry: int, start: int, states: Tensor) -> Tensor:
        """Put states ``[batch, head, token, channel]`` of the prompt at ``start``; all that the entry holds then."""
        stop = start + states.shape[-2]
        if self.window is not None and start == 0:  # whatever sees more of the prompt is given its states
            self.first = max(0, stop - self.window)
            self.reach(stop)
            self.buffer[entry, :, :, : stop - self.first] = states[:, :, self.first :]
            return states
        self.reach(stop)
        self.buffer[entry, :, :, start - self.first : stop - self.first] = states
        return self.buffer[entry, :, :, : stop - self.first]

    def open(self, start: int, stop: int) -> None:
        """Make the views for a pass over slots ``start`` to ``stop``: once for all layers, growing where needed."""
        if self.span == (start, stop):
            return
        self.reach(stop)
        self.span = (start, stop)
        held = self.buffer.narrow(1, 0, self.rows)
        self.fresh = held.narrow(3, start - self.first, stop - start).unbind(0)
        self.history = held.narrow(3, 0, stop - self.first).unbind(0)

    def add_rows(self, count: int, most: int) -> None:
        """Hold so many sequences more; there will never be more than ``most``."""
        self._close()
        rows = self.rows + count
        if rows > self.buffer.shape[1]:
            self._move(self.entries, self.buffer.shape[3], max(rows, min(most, 2 * self.rows)))
        self.rows = rows

    def drop_row(self, row: int) -> None:
        """Hold a sequence no more; the last one takes its place."""
        self._close()
        self.rows -= 1
        if row < self.rows:
            self.buffer[:, row].copy_(self.buffer[:, self.rows])

    def move(self, rows: Slots, sources: Slots, targets: Slots) -> None:
        """Copy slots of all entries, ``[move]`` from and to ``[move]`` of these rows: tensors, on the host arrays."""
        if self.first:
            sources, targets = sources - self.first, targets - self.first
        if not self.on_host or not self.buffer.numel():
            self.slots[rows, targets] = self.slots[rows, sources]
            return
        if self._items is None:  # for NumPy, whose copies cost a fraction; not before: a compiled model may ask here
            channels: np.ndarray = self.slots.view(torch.uint8).numpy()
            self._items = channels.view(np.dtype((np.void, channels.shape[-1])))[..., 0]  # a head's channels in one
        self._items[rows, targets] = self._items[rows, sources]

    def reach(self, stop: int) -> None:
        """Have the text's slots up to ``stop``."""
        capacity, gone = self.buffer.shape[3], self.oldest - self.first
        if self.window is not None and stop - self.first > capacity and gone >= self.window // _ROOM:
            self.slide()
        stop -= self.first
        if stop <= capacity:
            return
        try:
            self.grow(self.extent.after(capacity, stop))
        except torch.OutOfMemoryError:
            self.grow(self.extent.rounded(stop))

    def slide(self) -> None:
        """Begin at ``oldest``."""
        gone = self.oldest - self.first
        if gone:
            self.buffer[..., : self.buffer.shape[3] - gone, :] = self.buffer[..., gone:, :].clone()
            self.first = self.oldest
            self._close()

    def grow(self, capacity: int) -> None:
        """Go on with ``capacity`` slots, unless there are as many; those past the old ones are zero."""
        if capacity > self.buffer.shape[3]:
            self._move(self.entries, capacity)

    def trim(self) -> None:
        """Free entries that nothing was put into."""
        if self.used < self.entries:
            self._move(self.used, self.buffer.shape[3])

    def _move(self, entries: int, capacity: int, rows: int = 0) -> None:
        old, slots = self.buffer, self.buffer.shape[3]
        rows = max(rows, old.shape[1])
        with torch.inference_mode(old.is_inference()):  # a pass in inference mode may be what asks for it
            shape = (entries, rows, old.shape[2], capacity, old.shape[4])
            buffer = old.new_zeros(shape, pin_memory=old.is_pinned())
            buffer[:, : self.rows, :, :slots] = old[:entries, : self.rows]
        self._use(buffer)

    def _use(self, buffer: Tensor) -> None:
        self.buffer, self.slots, self._items = buffer, buffer.permute(1, 3, 0, 2, 4), None
        self.entries, self.on_host = len(buffer), on_host(buffer.device)
        self._close()

    def _close(self) -> None:
        """Forget the views."""
        self.span, self.fresh, self.history = (0, 0), (), ()


class Store:
    """The buffers of one call, and what its layers know of the pass that runs; the arguments are :class:`.TreeCache`'s.

    Attributes:
        reading: the prompt is being read: each layer appends to what it holds.
        base: afterwards, first slot of the pass's nodes.
        slots: with static shapes, where the pass writes, ``[node]``; None = at ``base`` and the slots after it.
        places: of all states, in the order in which they turned up.
        extent, allocate: how large buffers are to be, and where they come from; None = they are made.
        scans: of recurrent layers in the last pass; None = there was none since the last was kept.
    """

    def __init__(self, types: Sequence[Hashable], on_host: bool) -> None:
        self.on_host = on_host
        self.reading = True
        self.base = 0
        self.slots: Tensor | None = None
        self.layers = 0
        self.groups: list[LayerBuffer] = []
        self.places: list[Entry] = []
        self._types = types
        self._expected: dict[tuple[Hashable, str], Hashable] = {}
        self.extent = Extent(0, 0)
        self.allocate: Allocate | None = None
        self.scans: Scans | None = None

    def place(self, layer: int, name: str, states: Tensor, alike: int) -> Entry:
        """A free entry for a layer's states of this ``name``; ``alike`` of them a layer have their shape."""
        batch, heads, tokens, channels = states.shape
        device = torch.device("cpu") if self.on_host else states.device
        slides = layer < len(self._types) and self._types[layer] in (SLIDING, None)
        window = self.extent.window if slides else None
        kind = (batch, heads, channels, states.dtype, device, window)
        group = next((group for group in self.groups if group.kind == kind and group.used < group.entries), None)
        if group is None:
            slots = max(self.extent.first, self.extent.rounded(tokens))
            if window is not None:
                slots = min(slots, self.extent.rounded(window + 1))
            most = batch * heads * channels * max(slots, 0 if window else self.extent.most) * states.dtype.itemsize
            shape = (self._entries(layer, name, kind, alike, most), batch, heads, slots, channels)
            if self.allocate is not None:
                buffer = self.allocate(shape, states)
            else:
                pinned = self.on_host and torch.cuda.is_available()
                buffer = torch.empty(shape, dtype=states.dtype, device=device, pin_memory=pinned)
            group = LayerBuffer(kind, buffer, self.extent, window)
            self.groups.append(group)
        self.places.append((group, group.used))
        group.used += 1
        return self.places[-1]

    def _entries(self, layer: int, name: str, kind: Hashable, alike: int, most: int) -> int:
        """Entries, of up to ``most`` bytes, of a kind's next buffer: as many as are expected, or few and then more."""
        own = self._types[layer] if layer < len(self._types) else None
        everything = 2 * len(self._types)
        spread = max(1, min(_SPREAD, everything * most // _LEAST_BYTES))
        missing = alike * sum(own == other for other in self._types[layer:]) - (alike == 2 and name == "value")
        entries = min(-(-everything // spread), missing)
        if entries <= 0 or self._expected.setdefault((own, name), kind) != kind:
            more = max((2 * group.entries for group in self.groups if group.kind == kind), default=alike)
            return min(max(entries, alike), more) if entries > 0 else more
        return entries

    def widen(self, extent: Extent) -> None:
        """Let all buffers become as large as this says, if it says more than what was said before."""
        if extent.most > self.extent.most:
            self.extent = extent
            for group in self.groups:
                group.extent = extent

    def clear(self) -> None:
        """Leave buffers to those layers that still use them."""
        self.groups.clear()
        self.places.clear()

    def settle(self) -> None:
        """The prompt has been read."""
        self.reading = False
        if self.allocate is None:
            for group in self.groups:
                group.trim()
