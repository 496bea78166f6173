"""A transformers model as the solver sees it: prompt pass, fused pass, keep."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import utils as generation_utils

from jacobi import Path, Scores, TokenTree
from lookahead.attention import fused_pass
from lookahead.cache import TreeCache
from lookahead.hidden import HiddenStates
from lookahead.masks import MaskBuffer, fused_masks
from lookahead.scoring import score

# What belongs to the prompt's pass only; everything else the caller gave goes along with every pass.
_PROMPT_ONLY = (
    "attention_mask",
    "position_ids",
    "past_key_values",
    "logits_to_keep",
    "inputs_embeds",
    "token_type_ids",
    *getattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()),
)

_WIDEST_BUFFERED = 256  # nodes; masks of wider passes are too large to be kept


def prompt_scores(logits: Tensor, harvest: int) -> Scores:
    """Scores for the prompt's last token, with the best next tokens at all of ``logits`` ``[batch, token, vocab]``."""
    scores = score(logits[:, -1:], harvest)
    if scores.successors is not None and logits.shape[1] > 1:  # what the rest of the prompt said
        earlier = score(logits[:, :-1], harvest).successors or []
        for row, before in zip(scores.successors, earlier, strict=True):
            row.tokens[:0], row.levels[:0] = before.tokens, before.levels
    return scores


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
        idle: whether a row is only fed along with the others; its scores are thrown away.
        harvest: how many of the model's best next tokens to gather at every node; 0 gathers none.
        prompt_harvest: for how many of the prompt's last tokens.
        hidden: is given what the output layer reads in every pass; None = nobody wants it.

    Attributes:
        route: how passes are run: ``"dynamic"``, or as :mod:`lookahead.static` says ``"static"`` or ``"cuda graphs"``.
        route_reason: why it is not a faster one.
        again: nodes that the next pass feeds once more, and ``fed_again``, how many there have been: none, here.
    """

    again = 0
    fed_again = 0

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
        idle: Callable[[int], bool],
        harvest: int = 0,
        prompt_harvest: int = 1,
        hidden: HiddenStates | None = None,
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
        self._idle = idle
        self._hidden = hidden
        self.harvest = harvest
        if harvest and "logits_to_keep" in self._prompt_kwargs:
            self._prompt_kwargs["logits_to_keep"] = prompt_harvest
        self._device = model.device
        self._dtype = model.dtype
        self._token_types: Tensor | None = model_kwargs.get("token_type_ids")
        self._positions: list[int] = []  # of each row's last kept token
        self._padding: list[int] = []  # slots before each row's first token
        self._visible: Tensor | None = None  # bool [batch, slot]; None = every slot below base, in every row
        self._masks: MaskBuffer | None = None
        self.route = "dynamic"
        self.route_reason: str | None = None

    @property
    def context(self) -> int:
        """Tokens of history of the longest row."""
        return self._cache.base

    def prefill(self) -> Scores:
        """Run the prompt exactly as plain decoding does; scores for its last token."""
        if self._hidden is not None:
            self._hidden.expect()
        outputs = self._model._prefill(self._input_ids, self._generation_config, self._prompt_kwargs)
        if self._hidden is not None:
            self._hidden.put(self._hidden.take(outputs.logits)[:, -1:])
        past = self._cache.get_seq_length()
        batch = self._input_ids.shape[0]
        self._consolidate(past + min(self._new_tokens, max(1024, past)) + 64)
        mask = self._prompt_kwargs.get("attention_mask")
        position_ids = self._prompt_kwargs.get("position_ids")
        last = [past - 1] * batch if position_ids is None else position_ids[:, -1].expand(batch).tolist()
        # keep() counts the last prompt token like any accepted node, so the state starts one token earlier.
        self._positions = [position - 1 for position in last]
        self._padding = [0] * batch if mask is None else mask.long().argmax(-1).tolist()
        if mask is not None:
            self._visible = mask.to(self._device, torch.bool)
        elif batch > 1:
            self._visible = torch.ones((batch, past), dtype=torch.bool, device=self._device)
        return prompt_scores(outputs.logits, self.harvest)

    def _consolidate(self, slots: int) -> None:
        """Move the prompt's keys and values into buffers with about ``slots`` slots."""
        self._cache.consolidate(slots)

    def _roots(self) -> list[int]:
        """The position of each row's next root."""
        roots = [position + 1 for position in self._positions]
        if self._depth_limit is None:
            return roots
        # Past the table, where a row is only fed along, any position will do.
        return [0 if at >= self._depth_limit and self._idle(row) else at for row, at in enumerate(roots)]

    def forward(self, trees: Sequence[TokenTree]) -> Scores:
        """Score every node of every tree in one pass."""
        width = max(map(len, trees))
        tokens, positions = [], []
        for tree, root in zip(trees, self._roots(), strict=True):
            spare = width - len(tree)
            tokens.append(tree.tokens + tree.tokens[:1] * spare)
            positions.append([root + depth for depth in tree.depths] + [root] * spare)
        # By way of NumPy, which reads nested lists several times faster.
        input_ids, position_ids = torch.from_numpy(np.array([tokens, positions])).to(self._device)
        inputs = {"input_ids": input_ids, "position_ids": position_ids}
        if self._token_types is not None:
            inputs["token_type_ids"] = self._token_types[:, -1:].expand(-1, width)
        if width == 1 and self._visible is None:
            return self._scored(self._call(**inputs))
        base = self._cache.base
        history = None if self._visible is None else self._visible[:, :base]
        buffer = None
        if width <= _WIDEST_BUFFERED:
            if self._masks is None:
                self._masks = MaskBuffer(len(trees), self._dtype, self._device)
            buffer = self._masks
        masks = fused_masks(
            self._rules,
            trees,
            base,
            history,
            self._coordinates,
            self._dtype,
            self._device,
            buffer,
            min(self._cache.lengths),
        )
        with fused_pass():
            outputs = self._call(**inputs, attention_mask=masks)
        return self._scored(outputs)

    def _call(self, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Run the model: logits ``[batch, node, vocab]``, and what the output layer read if somebody wants it."""
        if self._hidden is None:
            return self._model(**inputs, **self._pass_kwargs).logits, None
        self._hidden.expect()
        logits: Tensor = self._model(**inputs, **self._pass_kwargs).logits
        return logits, self._hidden.take(logits)

    def _scored(self, outputs: tuple[Tensor, Tensor | None]) -> Scores:
        logits, hidden = outputs
        if self._hidden is not None and hidden is not None:
            self._hidden.put(hidden)
        return score(logits, self.harvest)

    def _coordinates(self, trees: Sequence[TokenTree]) -> tuple[Tensor, Tensor]:
        """The places of nodes ``[batch, node]`` and slots ``[batch, slot]`` in their rows, as transformers counts them.

        Windows and chunks are measured in slots from a row's first token, whatever the position ids say.
        """
        width, base = max(map(len, trees)), self._cache.base
        nodes = [
            [length - padding + depth for depth in tree.depths] + [0] * (width - len(tree))
            for tree, length, padding in zip(trees, self._cache.lengths, self._padding, strict=True)
        ]
        queries = torch.tensor(nodes, device=self._device)
        padding = torch.tensor(self._padding, device=self._device)[:, None]
        return queries, torch.cat([torch.arange(base, device=self._device) - padding, queries], dim=1)

    def keep(self, paths: Sequence[Path]) -> None:
        """Move each row's visited nodes to the end of its history."""
        starts = list(self._cache.lengths)
        self._cache.keep([path.nodes for path in paths])
        self._positions = [at + len(path.nodes) for at, path in zip(self._positions, paths, strict=True)]
        if self._visible is None:
            return
        missing = self._cache.base - self._visible.shape[1]
        if missing > 0:
            self._visible = torch.nn.functional.pad(self._visible, (0, max(256, missing)))
        for row, (path, start) in enumerate(zip(paths, starts, strict=True)):
            self._visible[row, start : start + len(path.nodes)] = True

    def store(self, cache: Cache) -> None:
        """Leave the history in ``cache`` as plain decoding would have."""
        self._cache.store(cache)

    def bucket(self, nodes: int) -> int:
        """The number of nodes that a pass over ``nodes`` nodes computes."""
        return nodes

    def close(self) -> None:
        """The call is over: give back what the model's next call can use."""

    def room(self) -> list[int] | None:
        """How deep each row's tree may be before it passes the depth limit; None = no limit."""
        if self._depth_limit is None:
            return None
        return [max(0, self._depth_limit - position - 2) for position in self._positions]
