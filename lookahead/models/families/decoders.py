"""Logical positions for decoders that count their positions themselves.

The decoders of encoder-decoder models mostly take no ``position_ids``: they number the nodes of a pass from the cache's
length on, which is right for a chain in a batch whose rows have equal lengths, and for nothing else. The modules
that turn such numbers into something are known by their interface, and can be asked about other places:

* position embeddings, ``embed_positions(x, past_key_values_length)`` (BART, Marian, M2M100, Whisper and their kin);
* position ids, ``create_position_ids_from_input_ids(input_ids, padding_idx, past_key_values_length)`` (RoBERTa and its
  kin as a decoder);
* relative biases, ``compute_bias(query_length, key_length, device, past_seen_tokens)`` (T5 and its kin).

For the duration of a pass each is asked for a contiguous stretch that covers all nodes, and every node and slot
then reads the line of its own place. So nothing is assumed about the numbers themselves: offsets, tables and buckets
stay the model's.

Mixtures of experts that turn tokens away when too many of a pass choose the same expert are given room as well: plain
decoding's passes hold one token of a row, and turn nothing away.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lookahead.models.families.overrides import Builder, current_places

_BIAS = {"query_length", "key_length", "past_seen_tokens"}
COUNT = "create_position_ids_from_input_ids"


@dataclass(frozen=True, slots=True)
class DecoderPlaces:
    """Where the nodes and slots of a pass lie in their rows' texts.

    Attributes:
        tokens: ``[batch, node]`` token ids.
        nodes: ``[batch, node]`` positions.
        slots: ``[batch, slot]`` positions of all slots that the pass reads, the nodes' own last.
        low: the smallest position of a node.
        high: the largest.
    """

    tokens: Tensor
    nodes: Tensor
    slots: Tensor
    low: int
    high: int


def decoder_builders(decoder: nn.Module) -> list[Builder]:
    """What in a decoder would treat the nodes of a pass otherwise than single tokens."""
    found: list[Builder] = []
    for name, module in decoder.named_modules():
        kind = type(module)
        if name.endswith("embed_positions") and "past_key_values_length" in _parameters(kind.forward):
            found.append(Builder(module, "forward", _embedding))
        elif getattr(module, "has_relative_attention_bias", False) and _parameters(kind.compute_bias) >= _BIAS:
            found.append(Builder(module, "compute_bias", _bias))
        elif hasattr(kind, COUNT):
            found.append(Builder(module, COUNT, _count))
        elif isinstance(getattr(module, "expert_capacity", None), int):
            found.append(Builder(module, "forward", _router))
    return found


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


class _HeadLines:
    """Lines ``[batch, node, channel]`` for RoFormer, which takes them for ``[node, channel]`` of all rows and heads."""

    def __init__(self, lines: Tensor) -> None:
        self._lines = lines

    def __getitem__(self, _: Any) -> Tensor:
        return self._lines[:, None]


def _embedding(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(type(module).forward)
    first = list(signature.parameters)[1]
    padding = None if isinstance(module, nn.Embedding) else getattr(module, "padding_idx", None)

    def forward(*args: Any, **kwargs: Any) -> Any:
        places: DecoderPlaces | None = current_places()
        if places is None:
            return original(*args, **kwargs)
        given = dict(signature.bind(module, *args, **kwargs).arguments)
        given.pop("self")
        shape = given[first]
        if "position_ids" in given:
            given["position_ids"] = None

        def table(count: int, token: int) -> Tensor:
            """Lines ``[count, channel]`` for one row of ``count`` equal tokens, the first at position ``low``."""
            asked: Any = (1, count)
            if isinstance(shape, Tensor) and not first.endswith("shape"):
                asked = shape.new_full((1, count, *shape.shape[2:]), token if shape.ndim == 2 else 0)
            lines: Tensor = original(**given | {first: asked, "past_key_values_length": places.low})
            return lines.reshape(-1, lines.shape[-1])[-count:]

        lines = table(places.high - places.low + 1, _word(padding))[places.nodes - places.low]
        if padding is None:
            return _HeadLines(lines) if type(module).__name__.startswith("RoFormer") else lines
        # These tell pad tokens, in the text itself too, by a line of their own.
        return torch.where((places.tokens == padding)[..., None], table(1, padding), lines)

    return forward


def _word(padding: int | None) -> int:
    """A token that is no padding."""
    return 0 if padding != 0 else 1


def _count(_: Any, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def create_position_ids_from_input_ids(
        input_ids: Tensor, padding_idx: int, past_key_values_length: int = 0
    ) -> Tensor:
        places: DecoderPlaces | None = current_places()
        if places is None:
            return original(input_ids, padding_idx, past_key_values_length)
        words = input_ids.new_full((1, places.high - places.low + 1), _word(padding_idx))
        ids = original(words, padding_idx, places.low)[0][places.nodes - places.low]
        alone = original(input_ids.new_full((1, 1), padding_idx), padding_idx, places.low)[0]
        return torch.where(places.tokens == padding_idx, alone, ids)

    return create_position_ids_from_input_ids


def _bias(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_bias(query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0) -> Any:
        places: DecoderPlaces | None = current_places()
        if places is None:
            return original(query_length, key_length, device=device, past_seen_tokens=past_seen_tokens)
        count = places.high - places.low + 1
        table = original(count, places.high + 1, device=device, past_seen_tokens=places.low)[0]
        # What lies past the last place is masked out: unused slots of shorter rows.
        slots = places.slots.clamp(max=places.high)
        return table[:, (places.nodes - places.low)[:, :, None], slots[:, None, :]].transpose(0, 1)

    return compute_bias


def _router(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(type(module).forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if current_places() is None:
            return original(*args, **kwargs)
        # Experts turn away tokens past their capacity, which a single token never exceeds, and tokens that the end of a
        # mask calls padding, where a tree has branches.
        roomy = copy.copy(module)
        roomy.expert_capacity = 1 << 30
        given = signature.bind(roomy, *args, **kwargs)
        if "padding_mask" in given.arguments:
            given.arguments["padding_mask"] = None
        return type(module).forward(*given.args, **given.kwargs)

    return forward
