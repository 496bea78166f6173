"""Prefix caching: keys and values of texts' beginnings, in blocks that texts with a common beginning share."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lookahead.models.traits import ModelTraits
from lookahead.runtime.cache.layers import TreeLayer
from lookahead.runtime.cache.tree import TreeCache

BLOCK = 16  # tokens; vLLM's blocks on a GPU have as many


class KeptBlock:
    """Keys and values of some tokens behind those of another block: ``states``, one tensor ``[layer's keys or values,
    head, token, channel]`` for each shape that they have."""

    def __init__(self, number: int, states: Sequence[Tensor]) -> None:
        self.number, self.states = number, states
        self.bytes = sum(each.nbytes for each in states)


class Prefixes:
    """A bounded store of keys and values. A text begins where its longest known beginning ends, in whole blocks; what
    was unused for longest goes first. For one thread::

        kept      You are kind.|Hi! How are you?|Fine.            3 blocks
        kept      You are kind.|What is the time?                 1 block more, beside a shared one
        text      You are kind.|Hi! How are you?|Splendid, you?   begins behind two of them

    Texts of another ``salt`` share nothing. Layers that keep keys and values of whole texts can be kept; windows can
    where their cache still holds all (a :class:`TreeCache` may), recurrent states cannot.

    Args:
        most_bytes: of all blocks together; 0 = nothing is kept.
    """

    def __init__(self, model: PreTrainedModel, most_bytes: int = 1 << 30) -> None:
        # Where positions' frequencies change with the length, a short text's keys are others than a long one's.
        self._model, self.most_bytes = model, 0 if ModelTraits.of(model).rope_limit else most_bytes
        self._kept: OrderedDict[tuple[Any, ...], KeptBlock] = OrderedDict()  # by what is before a block, and its tokens
        self._shapes: list[tuple[int, ...]] = []  # (heads, channels) of all keys and values, layer by layer
        self._numbers = count()
        self.bytes = 0

    @property
    def keeps(self) -> bool:
        """Whether anything can be kept, as far as is known."""
        return self.most_bytes > 0

    def find(self, ids: Sequence[int], salt: str | None = None) -> tuple[KeptBlock, ...]:
        """The known blocks that a text begins with, which end before its last token: that has to be read."""
        return tuple(self._kept[key] for key in self._keys(ids[: len(ids) - 1], salt))

    def _keys(self, ids: Sequence[int], salt: str | None) -> list[tuple[Any, ...]]:
        keys: list[tuple[Any, ...]] = []
        before: Any = salt
        for stop in range(BLOCK, len(ids) + 1, BLOCK):
            key = before, *ids[stop - BLOCK : stop]
            if key not in self._kept:
                break
            keys.append(key)
            before = self._kept[key].number
        return keys

    def cache(self, blocks: Sequence[KeptBlock], rows: int = 1) -> DynamicCache:
        """A cache of so many ``rows`` that hold the blocks' tokens, whatever windows the layers have."""
        cache, found = DynamicCache(), dict[tuple[int, ...], Any]()
        for states in zip(*(block.states for block in blocks), strict=True):
            joined = torch.cat(states, 2)
            found[joined.shape[1], joined.shape[3]] = iter(joined)
        for at in range(0, len(self._shapes), 2):
            keys, values = (next(found[shape])[None].expand(rows, -1, -1, -1) for shape in self._shapes[at : at + 2])
            cache.update(keys, values, at // 2)
        return cache

    def take(self, ids: Sequence[int], salt: str | None = None) -> tuple[Any, int]:
        """A cache for ``generate``, and how many of a text's first tokens it holds; None where none can be kept."""
        if not self.keeps or self._model.config.is_encoder_decoder:
            return None, 0
        cache = DynamicCache(config=self._model.config)
        if not cache.layers or any(type(layer) is not DynamicLayer for layer in cache.layers):
            return None, 0
        blocks = self.find(ids, salt)
        return self.cache(blocks) if blocks else cache, BLOCK * len(blocks)

    def keep(self, ids: Sequence[int], cache: Cache | None, salt: str | None = None, row: int = 0) -> None:
        """Keep what a ``row`` of a cache holds of a text, in whole blocks."""
        states = _states(cache, row) if self.keeps and cache is not None else []
        if states is None:
            self.most_bytes = 0
        if not states:
            return
        ids = ids[: min(each.shape[1] for each in states)]
        keys = self._keys(ids, salt)
        start, stop = BLOCK * len(keys), len(ids) // BLOCK * BLOCK
        if start < stop:
            self._shapes = [(each.shape[0], each.shape[2]) for each in states]
            stacks = [
                torch.stack([each[:, start:stop] for each in states if (each.shape[0], each.shape[2]) == shape])
                for shape in dict.fromkeys(self._shapes)
            ]
        for at in range(0, stop - start, BLOCK):
            block = KeptBlock(next(self._numbers), [stack[:, :, at : at + BLOCK].clone() for stack in stacks])
            before = self._kept[keys[-1]].number if keys else salt
            keys.append((before, *ids[start + at : start + at + BLOCK]))
            self._kept[keys[-1]] = block
            self.bytes += block.bytes
        for key in reversed(keys):  # a block is never older than what follows it
            self._kept.move_to_end(key)
        while self.bytes > self.most_bytes:
            self.bytes -= self._kept.popitem(last=False)[1].bytes

    def clear(self) -> None:
        self._kept.clear()
        self.bytes = 0


def _states(cache: Cache, row: int) -> list[Tensor] | None:
    """Keys and values ``[head, token, channel]`` of all layers that have some; None where there is more, or less."""
    length = cache.lengths[row] if isinstance(cache, TreeCache) else int(cache.get_seq_length())
    found, ended = list[Tensor](), False
    for layer in cache.layers:
        if not (type(layer) is DynamicLayer or (isinstance(layer, TreeLayer) and layer.holds_all)):
            return None
        keys, values = layer.keys, layer.values
        if keys is None or values is None:  # it reads another layer's
            ended = True
        elif ended:
            return None
        else:
            found += [keys[row, :, :length], values[row, :, :length]]
    return found
