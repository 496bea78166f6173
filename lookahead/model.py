"""A transformers model as the solver sees it: prompt pass, fused pass, keep."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from jacobi import Path, Scores, TokenTree
from lookahead.attention import fused_pass
from lookahead.cache import TreeCache
from lookahead.masks import fused_masks

# What belongs to the prompt's pass only; everything else the caller gave goes along with every pass.
_PROMPT_ONLY = (
    "attention_mask",
    "position_ids",
    "past_key_values",
    "logits_to_keep",
    "inputs_embeds",
    "token_type_ids",
)


class FusedModel:
    """One call's view of a model (implements :class:`jacobi.Model`); holds nothing on the model itself.

    Args:
        model: a causal model that passed the checks of :mod:`lookahead.support`.
        rules: its mask rules.
        cache: where the history lives; may already hold an earlier call's.
        input_ids: ``[batch, prompt]``.
        generation_config: as ``generate`` prepared it.
        model_kwargs: as ``generate`` prepared them, without a streamer or tokenizer.
        new_tokens: most tokens this call can write, for the first size of the buffers.
        depth_limit: positions at or past this one are never drafted; None = no limit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rules: Any,
        cache: TreeCache,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        new_tokens: int,
        depth_limit: int | None,
    ) -> None:
        self._model = model
        self._rules = rules
        self._cache = cache
        self._input_ids = input_ids
        self._generation_config = generation_config
        self._prompt_kwargs = model_kwargs | {"past_key_values": cache, "use_cache": True}
        self._pass_kwargs = {k: v for k, v in model_kwargs.items() if k not in _PROMPT_ONLY and v is not None}
        self._pass_kwargs |= {"past_key_values": cache, "use_cache": True, "return_dict": True}
        self._new_tokens = new_tokens
        self._depth_limit = depth_limit
        self._device = model.device
        self._dtype = model.dtype
        self._positions: list[int] = []  # of each row's last kept token
        self._visible: Tensor | None = None  # bool [batch, slot]; None = every slot below base, in every row
        self._slots: Tensor | None = None  # logical position of each slot [batch, slot]; only if a rule asks for it
        self._node_positions: Tensor | None = None

    def prefill(self) -> Scores:
        """Run the prompt exactly as plain decoding does; scores for its last token."""
        outputs = self._model._prefill(self._input_ids, self._generation_config, self._prompt_kwargs)
        past = self._cache.get_seq_length()
        batch = self._input_ids.shape[0]
        self._cache.consolidate(past + min(self._new_tokens, max(1024, past)) + 64)
        mask = self._prompt_kwargs.get("attention_mask")
        position_ids = self._prompt_kwargs.get("position_ids")
        last = [past - 1] * batch if position_ids is None else position_ids[:, -1].expand(batch).tolist()
        # keep() counts the last prompt token like any accepted node, so the state starts one token earlier.
        self._positions = [position - 1 for position in last]
        if mask is not None:
            self._visible = mask.to(self._device, torch.bool)
        if not self._only_causal():
            mask = torch.ones((batch, past), dtype=torch.long) if mask is None else mask
            self._slots = (mask.to(self._device).cumsum(-1) - 1).clamp_(min=0)
        if batch > 1 and self._visible is None:
            self._visible = torch.ones((batch, past), dtype=torch.bool, device=self._device)
        if self._slots is not None:
            self._node_positions = self._slots[:, -1:]
        return self._scores(outputs.logits[:, -1:])

    def forward(self, trees: Sequence[TokenTree]) -> Scores:
        """Score every node of every tree in one pass."""
        width = max(map(len, trees))
        fed = [
            [tree.tokens + [tree.tokens[0]] * (width - len(tree)) for tree in trees],
            [
                [position + 1 + depth for depth in tree.depths] + [position + 1] * (width - len(tree))
                for tree, position in zip(trees, self._positions, strict=True)
            ],
        ]
        input_ids, position_ids = torch.tensor(fed, device=self._device)
        base = self._cache.base
        masks = None
        if width > 1 or self._visible is not None:
            keys = position_ids
            if self._slots is not None:
                keys = torch.cat([self._slots[:, :base], position_ids], dim=1)
                self._node_positions = position_ids
            history = None if self._visible is None else self._visible[:, :base]
            masks = fused_masks(self._rules, trees, base, history, position_ids, keys, self._dtype)
        elif self._slots is not None:
            self._node_positions = position_ids
        with fused_pass() if masks is not None else nullcontext():
            outputs = self._model(
                input_ids=input_ids, position_ids=position_ids, attention_mask=masks, **self._pass_kwargs
            )
        return self._scores(outputs.logits)

    def keep(self, paths: Sequence[Path]) -> None:
        """Move each row's visited nodes to the end of its history."""
        starts = list(self._cache.lengths)
        self._cache.keep([path.nodes for path in paths])
        if self._visible is not None:
            self._visible = _at_least(self._visible, self._cache.base)
        if self._slots is not None:
            self._slots = _at_least(self._slots, self._cache.base)
        for row, (path, start) in enumerate(zip(paths, starts, strict=True)):
            stop = start + len(path.nodes)
            self._positions[row] += len(path.nodes)
            if self._visible is not None:
                self._visible[row, start:stop] = True
            if self._slots is not None and path.nodes:
                assert self._node_positions is not None
                self._slots[row, start:stop] = self._node_positions[row, path.nodes]

    def store(self, cache: Cache) -> None:
        """Leave the history in ``cache`` as plain decoding would have."""
        self._cache.store(cache)

    def room(self) -> list[int] | None:
        """How deep each row's tree may be before it passes the depth limit; None = no limit."""
        if self._depth_limit is None:
            return None
        return [max(0, self._depth_limit - position - 2) for position in self._positions]

    def _only_causal(self) -> bool:
        rules = self._rules.values() if isinstance(self._rules, dict) else [self._rules]
        return all(rule.function is None for rule in rules)

    def _scores(self, logits: Tensor) -> Scores:
        """Argmax of every node, NaN marked, in one transfer."""
        vocab = logits.shape[-1]
        best = logits.argmax(-1)
        nan = logits.gather(-1, best[..., None])[..., 0].isnan()  # argmax treats NaN as the largest number
        greedy = (best + nan * vocab).tolist()
        broken = set()
        for row, ids in enumerate(greedy):
            if max(ids) >= vocab:
                broken |= {(row, node) for node, token in enumerate(ids) if token >= vocab}
                greedy[row] = [token % vocab for token in ids]
        return Scores(logits, greedy, frozenset(broken))


def _at_least(state: Tensor, slots: int) -> Tensor:
    """``state`` ``[batch, slot]``, padded with zeros in generous steps to at least ``slots`` slots."""
    missing = slots - state.shape[1]
    return state if missing <= 0 else torch.nn.functional.pad(state, (0, max(256, missing)))
