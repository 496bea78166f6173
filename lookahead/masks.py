"""Attention masks for a fused pass, in the form each model asks for.

What a node may see has two parts. The tree part (history, ancestors, itself) is the same for every model and comes from
:func:`jacobi.tree.additive_mask`. The other part belongs to the model's layers: causal, sliding, chunked. transformers
states it as a function of two indices, made from the config; we take that function as it is and ask it about
*logical* places (the row's length plus depth) instead of physical slots.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, create_masks_for_generate

from jacobi import TokenTree, additive_mask

_RECORDER = "lookahead_mask_rule"  # in transformers' registry only while rules are being read
_recording = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Rule:
    """One kind of layer's visibility as ``function(batch, head, query place, key place)``; None = all causal."""

    function: Callable[..., Any] | None


def _record(*args: Any, mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any) -> _Rule:
    return _Rule(None if mask_function is causal_mask_function else mask_function)


def mask_rules(model: PreTrainedModel) -> Any:
    """The visibility rules of a model's layers, in the form its ``forward`` takes masks: one, or a dict by layer type.

    They come from transformers' own ``create_masks_for_generate`` (or the model's override of it), run with a mask
    function that returns the rule in place of a mask.
    """
    config = copy.copy(model.config.get_text_config())
    config._attn_implementation_internal = _RECORDER
    create = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    with _recording:
        AttentionMaskInterface.register(_RECORDER, _record)
        try:
            rules = create(
                config=config,
                inputs_embeds=torch.empty((1, 1, 0), device=model.device, dtype=model.dtype),
                attention_mask=None,
                past_key_values=None,
                position_ids=None,
            )
        finally:
            AttentionMaskInterface._global_mapping.pop(_RECORDER, None)
    return _Rule(None) if rules is None else rules


def map_rules(rules: Any, build: Callable[[_Rule], Tensor]) -> Any:
    """Build one mask for each rule, keeping the form; equal layer types share a mask."""
    if not isinstance(rules, dict):
        return build(rules)
    plain: Tensor | None = None
    masks = {}
    for kind, rule in rules.items():
        if rule.function is None:
            plain = build(rule) if plain is None else plain
            masks[kind] = plain
        else:
            masks[kind] = build(rule)
    return masks


def fused_masks(
    rules: Any,
    trees: Sequence[TokenTree],
    base: int,
    history: Tensor | None,
    coordinates: Callable[[Sequence[TokenTree]], tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """The additive masks ``[batch, 1, node, slot]`` of a pass, one for each kind of layer.

    Args:
        rules: from :func:`mask_rules`.
        trees: one a row; shorter ones are padded at the end with nodes that see only themselves.
        base: slot of node 0.
        history: bool ``[batch, base]``, the slots below ``base`` that hold a row's history; None = all of them.
        coordinates: gives the logical places of nodes ``[batch, node]`` and of slots ``[batch, base + node]``; only
            called if a rule asks for more than causality.
        dtype: of the model's hidden states.
        device: of the model's inputs.
    """
    batch, width = len(trees), max(map(len, trees))
    lowest = torch.finfo(dtype).min
    mask = torch.zeros((batch, 1, width, base + width), dtype=dtype, device=device)
    if history is not None:
        mask[:, 0, :, :base].masked_fill_(~history[:, None, :], lowest)
    for row, tree in enumerate(trees):
        count = len(tree)
        mask[row, 0, :count, base : base + count] = additive_mask(tree.parents, dtype, device)
        if count < width:
            mask[row, 0, :count, base + count :] = lowest
            mask[row, 0, count:] = lowest
            mask[row, 0, count:, base + count :].fill_diagonal_(0.0)

    def build(rule: _Rule) -> Tensor:
        if rule.function is None:
            return mask
        # Logical places know the padding already, so every row asks the rule as an unpadded row 0 would.
        first = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=device)
        queries, keys = coordinates(trees)
        seen = rule.function(first, first, queries[:, None, :, None], keys[:, None, None, :])
        return mask.masked_fill(~seen, lowest)

    return map_rules(rules, build)
