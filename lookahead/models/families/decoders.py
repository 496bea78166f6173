"""Decoders that number tokens themselves, from the cache's length on, where a tree has siblings.

What turns their count into something is known by its interface. For a pass each is asked for one stretch of text that
covers all nodes, of which each reads the line of its own position: offsets, tables and buckets stay the model's.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lookahead.models.families.overrides import PassPositions, in_passes
from lookahead.models.names import CACHE_LENGTH

# Whose inputs of a step are the last tokens and their positions, and nothing else that depends on the text.
_PREPARES = ("GenerationMixin", *(f"{kind}ForConditionalGeneration" for kind in ("Canary", "CohereAsr", "Whisper")))
# Decoders whose steps do not heed padding in the decoder's prompt as the prompt's own pass does.
_FORGETFUL = ("led", "nllb-moe")


class _HeadLines:
    """Lines ``[batch, node, channel]`` for RoFormer, which takes them for ``[node, channel]`` of all heads."""

    def __init__(self, lines: Tensor) -> None:
        self._lines = lines

    def __getitem__(self, _: Any) -> Tensor:
        return self._lines[:, None]


@in_passes
def position_embeddings(module: Any, original: Any, positions: PassPositions, *args: Any, **kwargs: Any) -> Any:
    """For ``embed_positions(x, cache_length)`` (BART, Marian, M2M100, Whisper and their kin)."""
    signature = inspect.signature(type(module).forward)
    first = list(signature.parameters)[1]
    padding = None if isinstance(module, nn.Embedding) else getattr(module, "padding_idx", None)
    given = dict(signature.bind(module, *args, **kwargs).arguments)
    given.pop("self")
    shape = given[first]
    if "position_ids" in given:
        given["position_ids"] = None

    def table(count: int, token: int) -> Tensor:
        """Lines ``[count, channel]`` for ``count`` equal tokens, the first at position ``low``."""
        asked: Any = (1, count)
        if isinstance(shape, Tensor) and not first.endswith("shape"):
            asked = shape.new_full((1, count, *shape.shape[2:]), token if shape.ndim == 2 else 0)
        lines: Tensor = original(**given | {first: asked, CACHE_LENGTH: positions.low})
        return lines.reshape(-1, lines.shape[-1])[-count:]

    # A token that is no padding, over and over.
    lines = table(positions.high - positions.low + 1, int(padding == 0))[positions.nodes - positions.low]
    if padding is None:
        return _HeadLines(lines) if type(module).__name__.startswith("RoFormer") else lines
    # These tell pad tokens, in the text itself too, by a line of their own.
    return torch.where((positions.tokens == padding)[..., None], table(1, padding), lines)


@in_passes
def position_ids(_: Any, original: Any, positions: PassPositions, ids: Tensor, padding: int, *start: int) -> Tensor:
    """For RoBERTa's way of counting (and its kin's as a decoder), in which padding has a position of its own."""
    words = ids.new_full((1, positions.high - positions.low + 1), int(padding == 0))
    lines = original(words, padding, positions.low)[0][positions.nodes - positions.low]
    alone = original(ids.new_full((1, 1), padding), padding, positions.low)[0]
    return torch.where(positions.tokens == padding, alone, lines)


@in_passes
def relative_biases(_: Any, original: Any, positions: PassPositions, *lengths: int, **others: Any) -> Any:
    """For biases by the distance between query and key (T5 and its kin)."""
    count = positions.high - positions.low + 1
    table = original(count, positions.high + 1, **others | {"past_seen_tokens": positions.low})[0]
    return table[:, (positions.nodes - positions.low)[:, :, None], positions.slots[:, None, :]].transpose(0, 1)


@in_passes
def expert_router(module: Any, _: Any, positions: PassPositions, *args: Any, **kwargs: Any) -> Any:
    """For routers whose experts take no more tokens of a pass than their capacity, which one token never exceeds."""
    roomy = copy.copy(module)
    roomy.expert_capacity = 1 << 30
    given = inspect.signature(type(module).forward).bind(roomy, *args, **kwargs)
    if "padding_mask" in given.arguments:  # made of the mask's end, where a tree has branches
        given.arguments["padding_mask"] = None
    return type(module).forward(*given.args, **given.kwargs)


def own_steps(model: PreTrainedModel) -> str | None:
    """Why an encoder-decoder model makes more of a step than its tokens: of the text, or of other sequences."""
    name = type(model).__name__
    home = type(model).prepare_inputs_for_generation.__qualname__.partition(".")[0]
    if home not in _PREPARES:
        return (
            f"{name} prepares the inputs of each step in its own way ({home}.prepare_inputs_for_generation), which a "
            "pass over several tokens would skip"
        )
    fraction = getattr(model.config, "moe_eval_capacity_token_fraction", 1.0)
    policy = getattr(model.config, "second_expert_policy", "all")
    if fraction < 1.0 or policy != "all":
        return (
            f"{name} chooses experts by chance or by what else is in a pass: expected moe_eval_capacity_token_fraction "
            f"of 1.0 and second_expert_policy 'all' in its config, got {fraction} and {policy!r}"
        )
    return None


def forgets_padding(model: PreTrainedModel) -> bool:
    """True if plain decoding's steps see what ``decoder_attention_mask`` hides from the prompt's pass."""
    return model.config.model_type in _FORGETFUL
