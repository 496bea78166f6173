"""KV caches of texts that may go on: the next request of a conversation is prefilled from where the last one ended."""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from itertools import count, takewhile
from typing import Any

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

_LEAST_COMMON = 16  # tokens in common that are worth a cache
_MOST_LOST = 64  # tokens of a kept text that a request may cut off; what goes on further is copied


class Conversations:
    """A bounded store of KV caches by their texts; the one unused for longest goes first. For one thread.

    A request takes the cache of the text with which it has most in common, cut to that prefix; its own text is put in
    place of the old one. A text that goes on well past that prefix stays as it is, and the prefix is copied::

        kept      You are kind. | Hi! | Hello, how are you?
        request   You are kind. | Hi! | Hello, how are you? | Fine.
                  `---- cached, 11 tokens ----------------'

    Only caches that can be cut exactly are kept: key and value tensors of full attention. Others are made anew.

    Args:
        most: caches kept; 0 = none.
        most_bytes: of all of them together.
    """

    def __init__(self, model: PreTrainedModel, most: int = 4, most_bytes: int = 1 << 30) -> None:
        self._model, self._most, self._most_bytes = model, most, most_bytes
        self._kept: OrderedDict[int, tuple[list[int], Any, str | None]] = OrderedDict()
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Of all tensors kept."""
        return sum(_bytes(cache) for _, cache, _ in self._kept.values())

    def take(self, ids: Sequence[int], salt: str | None = None) -> tuple[Any, int]:
        """A cache for a text, and how many of its first tokens it holds: less than all, as one must be fed. The cache
        is the caller's until it is put back; None where none can be kept. Only texts of the same ``salt`` count."""
        best, common = None, _LEAST_COMMON - 1
        for number, (known, _, _) in ((number, kept) for number, kept in self._kept.items() if kept[2] == salt):
            pairs = zip(known, ids[:-1], strict=False)  # one token must be fed
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if shared > common:
                best, common = number, shared
        if best is None:
            return self._new(), 0
        known, cache, _ = self._kept[best]
        if len(known) - common > _MOST_LOST:  # another conversation, which may go on
            cache = copy.deepcopy(cache)
        else:
            del self._kept[best]
        if (length := int(cache.get_seq_length())) > common:
            cache.crop(common - length)  # a negative number is how many tokens go
        return cache, common

    def put(self, ids: Sequence[int], cache: Any, salt: str | None = None) -> None:
        """Keep a cache that holds the first tokens of a finished text."""
        if cache is None or not self._most:
            return
        length = int(cache.get_seq_length())
        self._kept[next(self._numbers)] = (list(ids[:length]), cache, salt)
        while len(self._kept) > self._most or self.bytes > self._most_bytes:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        self._kept.clear()

    def _new(self) -> Any:
        if not self._most or self._model.config.is_encoder_decoder:
            return None
        cache = DynamicCache(config=self._model.config)
        return cache if cache.layers and all(type(layer) is DynamicLayer for layer in cache.layers) else None


def _bytes(cache: Any) -> int:
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
