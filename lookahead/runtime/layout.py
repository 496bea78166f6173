"""Where the tokens of every sequence lie: slots of the KV cache, and logical positions.

A batch's sequences accept different numbers of tokens, so they end at different slots, while a pass writes its nodes
at the same slots of all of them. Two sequences, the first padded on the left, after a pass that kept 1 and 3 nodes::

    slot             0  1  2  3  4  5  6        base = 6: the next pass writes its nodes here
    sequence 0       .  .  a  b  x  -  |        length 5, padding 2
    sequence 1       c  d  e  x  y  z  |        length 6, padding 0

    . = padding, - = never attended to; a node at depth d of sequence 0 has the logical position 5 - 2 + d = 3 + d
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from jacobi import TokenTree
from lookahead.models.families.overrides import PassPositions
from lookahead.runtime.attention_trials import PACKED, SINGLY
from lookahead.runtime.cache.tree import TreeCache, drop, join, repeat
from lookahead.runtime.scores import fetch, send
from lookahead.runtime.turns import Turns, steps_of


def below(trees: Sequence[TokenTree], roots: Sequence[int] | np.ndarray) -> np.ndarray:
    """Where nodes lie, ``[batch, node]``, whose roots lie at ``roots``; those that pad a tree, where its root does."""
    places = np.zeros((len(trees), max(map(len, trees))), np.int64)
    for line, tree in zip(places, trees, strict=True):
        line[: len(tree)] = tree.depths
    places += np.asarray(roots)[:, None]
    return places


class Layout:
    """One call's book of slots and positions.

    Args:
        depth_limit: the first position that does not exist; None = all do.
        idle: whether a sequence is only fed along with the others.
        find_boundary: from the prompt's slots and each sequence's last position, the first slot whose token needs the
            model's own pass, and why; None = there is none to look for.
    """

    def __init__(
        self,
        cache: TreeCache,
        device: torch.device,
        depth_limit: int | None,
        idle: Callable[[int], bool],
        find_boundary: Callable[[int, Sequence[int]], tuple[int, str] | None] | None = None,
    ) -> None:
        self.cache, self.device = cache, device
        self.count = 0  # sequences that the call numbers
        self.rows: list[int] = []  # those of them that are here
        self.padding: list[int] = []  # slots before each one's first token
        self.positions: list[int] = []  # of each one's last kept token, as position_ids count
        self.visible: np.ndarray | None = None  # bool [batch, slot], below the base, that hold tokens; None = all do
        self.padded: list[int] = []  # 1 = a prompt had padding, so that plain decoding gives each pass a mask
        self.apart = False  # each sequence is the only one of its call
        self.mask_dtype = torch.long
        self.boundary: tuple[int, str] | None = None  # what was found; None = all tokens are for tree forwards
        self._find_boundary, self._depth_limit, self._idle = find_boundary, depth_limit, idle
        self._axes: Tensor | None = None  # [axis, batch, 1], how far each axis is ahead of the positions counted here

    def start(self, past: int, batch: int, mask: Tensor | None, position_ids: Tensor | None) -> None:
        """Read where the prompt of ``past`` slots ends. ``mask`` ``[batch, slot]`` is 0 for padding on the left;
        ``position_ids`` are ``[batch, token]`` or ``[axis, batch, token]``, None = slots are positions."""
        if position_ids is None:
            last = highest = [past - 1] * batch
        else:
            ends = position_ids[..., -1].expand(*position_ids.shape[:-2], batch)
            last = (ends if ends.ndim == 1 else ends[0]).tolist()
            highest = last
            if ends.ndim > 1:  # several axes: all of them count on from the prompt's last token
                self._axes = (ends - ends[:1])[..., None].to(self.device)
                highest = ends.amax(0).tolist()
        # keep() counts the last prompt token like any accepted node, so the state starts one token earlier.
        self.positions = [position - 1 for position in last]
        self._number()
        self.padding = [0] * batch if mask is None else mask.long().argmax(-1).tolist()
        if mask is not None:
            self.visible = fetch(mask.bool()).copy()
            self.mask_dtype = mask.dtype
        elif batch > 1:
            self.visible = np.ones((batch, past), bool)
        self.padded = [int(self.visible is not None and not self.visible.all())] * batch
        if self._find_boundary is not None:
            self.boundary = self._find_boundary(past, highest)

    def _number(self) -> None:
        """Number sequences as they come in a pass."""
        self.count = len(self.positions)
        self.rows = list(range(self.count))

    def keep_prompts(self, behind: Sequence[int]) -> None:
        """Keep prompts whole that were read in one pass::

            slot             0  1  2  3  4
            sequence 0       a  b  c  -  -      2 behind
            sequence 1       d  e  f  g  h      0 behind

        Each has so many slots of padding ``behind``.
        """
        self.positions = [last + 1 - padding for last, padding in zip(self.positions, behind, strict=True)]
        self.cache.keep_prompts(behind)
        if self.visible is not None:
            self.visible &= np.arange(self.visible.shape[1]) < np.array(self.cache.lengths)[:, None]

    def holds(self, row: int) -> bool:
        """Whether a sequence has reached the boundary, where it waits until all have come as far."""
        return self.boundary is not None and self.cache.lengths[row] >= self.boundary[0]

    def at_boundary(self, batch: int) -> bool:
        """Whether all sequences that still write have reached the boundary."""
        return self.boundary is not None and all(self.holds(row) or self._idle(row) for row in range(batch))

    def roots(self) -> list[int]:
        """The position of each sequence's next root; 0 where any will do, because its scores are thrown away."""
        return self._fed([0 if self.holds(row) else position + 1 for row, position in enumerate(self.positions)])

    def _fed(self, roots: list[int]) -> list[int]:
        """The same roots, but 0 past the depth limit for sequences that are only fed along."""
        limit, pairs = self._depth_limit, zip(self.rows, roots, strict=True)
        return roots if limit is None else [0 if at >= limit and self._idle(row) else at for row, at in pairs]

    def over_axes(self, positions: Tensor) -> Tensor:
        """``positions`` ``[batch, node]`` as the model takes them: on every axis, where it has several."""
        return positions if self._axes is None else self._axes + positions

    def coordinates(self, trees: Sequence[TokenTree]) -> tuple[Tensor, Tensor]:
        """Logical positions of nodes ``[batch, node]`` and slots ``[batch, slot]``, as transformers' mask rules count.
        Windows and chunks are measured in slots from a sequence's first token, whatever the position ids say."""
        padding = np.array(self.padding)[:, None]
        nodes = below(trees, self.cache.lengths) - padding
        slots = np.concatenate([np.arange(self.cache.base) - padding, nodes], axis=1)
        return send(nodes, self.device), send(slots, self.device)

    def sequences(self, trees: Sequence[TokenTree], how: int, window: int) -> Tensor:
        """What :func:`.ordered_attention.attend` is told of each sequence: int32 ``[batch, 7 + node]``."""
        hows = [how | SINGLY if how & PACKED and padded else how for padded in self.padded]
        base, windows, counts = ([each] * len(trees) for each in (self.cache.base, window, self.count))
        numbers = ([0] * len(trees), [1] * len(trees)) if self.apart else (self.rows, counts)
        told = self.padding, self.cache.lengths, base, hows, windows, *numbers
        return torch.from_numpy(np.column_stack([*told, below(trees, [0] * len(trees))]).astype(np.int32))

    def turns(self, trees: Sequence[TokenTree], until: int) -> list[Turns]:
        """The turns of those nodes that lie before position ``until`` of their sequence."""
        base, width = self.cache.base, max(map(len, trees))
        found = []
        for row, (tree, start, length) in enumerate(zip(trees, self.padding, self.cache.lengths, strict=True)):
            shown = None
            if self.padded[row] and self.visible is not None:
                seen = np.ones(length + width, bool)
                seen[:length] = self.visible[row, :length]
                shown = torch.from_numpy(seen)[None, None, None]
            steps = steps_of(tree, until - 1 - (length - start), length == base)
            found.append(Turns(length, base + width, shown, steps, len(steps) == len(tree)))
        return found

    def pass_positions(self, trees: Sequence[TokenTree], tokens: Tensor, roots: list[int]) -> PassPositions:
        """What models that number the ``tokens`` ``[batch, node]`` of a pass themselves are told, by ``roots``."""
        places, visible = below(trees, self._fed(roots)), self._seen()
        low, high = int(places.min()), int(places.max())
        past = np.broadcast_to(np.arange(self.cache.base), (len(trees), self.cache.base))
        text = np.maximum(visible.cumsum(1) - 1, 0)
        slots, counted = (
            send(np.minimum(np.concatenate(parts, axis=1), high), self.device)  # nobody sees what lies past all nodes
            for parts in ((past, places), (text, below(trees, visible.sum(1))))
        )
        nodes = slots[:, self.cache.base :]
        return PassPositions(tokens, nodes, slots, low, high, counted, self.mask_dtype)

    def keep(self, counts: Sequence[int], starts: Sequence[int]) -> None:
        """Count each sequence's visited nodes, which the cache keeps from slot ``starts`` on."""
        self.positions = [at + count for at, count in zip(self.positions, counts, strict=True)]
        if self.visible is None:
            return
        if (missing := self.cache.base - self.visible.shape[1]) > 0:
            self.visible = np.pad(self.visible, ((0, 0), (0, max(256, missing))))
        for row, (count, start) in enumerate(zip(counts, starts, strict=True)):
            self.visible[row, start : start + count] = True

    def join(self, other: "Layout", most: int) -> None:
        """Take in another layout's sequences, behind those that are here; there are ``most`` at most."""
        if not self.positions:
            self.cache, self.visible = other.cache, other.visible
        else:
            shown = [self._seen(), other._seen()]
            columns = max(each.shape[1] for each in shown)
            wide = [np.pad(each, ((0, 0), (0, columns - each.shape[1]))) for each in shown]
            self.visible = np.concatenate(wide)
            join(self.cache, other.cache, most)
        self.apart = True
        self.padding += other.padding
        self.padded += other.padded
        self.positions += other.positions
        self._number()

    def repeat(self, count: int) -> None:
        """Hold the only sequence that is here ``count`` times."""
        self.visible = self._seen().repeat(count, axis=0)
        self.padding, self.positions = self.padding * count, self.positions * count
        self.padded *= count
        self._number()
        repeat(self.cache, count)

    def _seen(self) -> np.ndarray:
        """Which slots below the cache's base hold tokens, bool ``[batch, slot]``; one row for all that hold all."""
        return np.ones((1, self.cache.base), bool) if self.visible is None else self.visible[:, : self.cache.base]

    def let_go(self, leaves: Callable[[int], bool]) -> bool:
        """Leave sequences out once half of those that are here need not be fed any more; tells if any has gone."""
        ended = [at for at, row in enumerate(self.rows) if leaves(row)]
        if not len(self.rows) / 2 <= len(ended) < len(self.rows):
            return False
        for at in reversed(ended):
            self.drop(at)
        return True

    def drop(self, row: int, *, renumber: bool = False) -> None:
        """Leave a sequence out; the last one takes its place, and with ``renumber`` its number."""
        for held in (self.rows, self.padding, self.padded, self.positions):
            held[row] = held[-1]
            del held[-1]
        if self._axes is not None:
            self._axes[:, row] = self._axes[:, -1]
            self._axes = self._axes[:, :-1]
        if self.visible is not None:
            self.visible[row] = self.visible[-1]
            self.visible = self.visible[:-1]
        if self.positions:
            drop(self.cache, row)
            if len(self.positions) == 1 and self.visible is not None and self.visible[0, : self.cache.base].all():
                self.visible = None
        if renumber:
            self._number()

    def room(self) -> list[int] | None:
        """How deep each tree may be before it passes the depth limit or the boundary; None = there is neither."""
        limits = []
        if self._depth_limit is not None:
            limits.append([max(0, self._depth_limit - position - 2) for position in self.positions])
        if self.boundary is not None:
            limits.append([max(0, self.boundary[0] - 1 - length) for length in self.cache.lengths])
        return [min(pair) for pair in zip(*limits, strict=True)] if limits else None
