"""A transformers model as the solver sees it: prompt pass, fused pass, keep."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import utils as generation_utils

from jacobi import Path, Scores, TokenTree
from lookahead.models.families.decoders import DecoderPlaces
from lookahead.models.families.overrides import Places, placed
from lookahead.models.families.registry import place_builders, takes_positions
from lookahead.models.hidden_states import HiddenStates, Outputs, watched
from lookahead.models.limits import boundary
from lookahead.models.mask_rules import shortest_window
from lookahead.models.traits import ModelTraits, input_device
from lookahead.runtime.attention import fused_pass, packing_pays
from lookahead.runtime.cache.tree import TreeCache
from lookahead.runtime.fallback_steps import PlainPasses
from lookahead.runtime.inference_mode import InferenceMode
from lookahead.runtime.masks import MaskBuffer, fused_masks
from lookahead.runtime.scores import prompt_scores, score
from lookahead.runtime.tracing.replay import Traces, masks_given, weights_of

# What belongs to the prompt's pass only; everything else the caller gave goes along with every pass.
_PROMPT_ONLY = (
    "attention_mask",
    "position_ids",
    "past_key_values",
    "logits_to_keep",
    "inputs_embeds",
    "token_type_ids",
    "mm_token_type_ids",
    *getattr(generation_utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()),
)

_WIDEST_BUFFERED = 256  # nodes; masks of wider passes are too large to be kept


class FusedModel:
    """One call's view of a model (implements :class:`jacobi.Model`); holds nothing on the model itself.

    Args:
        model: a causal model that passed the checks of :mod:`lookahead.support.route`.
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
        text: prompt and text so far ``[batch, token]``, for handing over to plain passes; None = never hand over.

    Attributes:
        route: how passes are run: ``"dynamic"``, ``"traced"`` (see :mod:`lookahead.runtime.tracing.replay`), or as
            :mod:`lookahead.runtime.cuda_graphs.executor` says ``"static"`` or ``"cuda graphs"``.
        route_reason: why it is not a faster one.
        handed_over: why passes are transformers' own by now; None = they are not.
        again: nodes that the next pass feeds once more, and ``fed_again``, how many there have been: none, here.
        mask_name: the argument that says which of the prompt's tokens are padding.
        positions_name: the argument that gives the prompt's positions.
    """

    again = 0
    fed_again = 0
    mask_name = "attention_mask"
    positions_name = "position_ids"

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
        text: Callable[[], Tensor] | None = None,
    ) -> None:
        self._model = model
        self._model_kwargs = model_kwargs
        self._text = text
        self._boundary: tuple[int, str] | None = None  # the first slot that needs a plain pass
        self._plain: PlainPasses | None = None
        self._past = 0  # slots of the prompt
        self._axes: Tensor | None = None  # [axis, batch, 1], how far each axis is ahead of the positions counted here
        self._takes_positions = takes_positions(type(model).forward)
        self._builders = place_builders(model)
        self._rules = rules
        self._window = shortest_window(model, rules)
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
        self._inference = InferenceMode(model)
        self._traces: Traces | None = None
        self.harvest = harvest
        if harvest and "logits_to_keep" in self._prompt_kwargs:
            self._prompt_kwargs["logits_to_keep"] = prompt_harvest
        self._device = input_device(model)
        self._dtype = model.dtype
        self._token_types: Tensor | None = model_kwargs.get("token_type_ids")
        self._positions: list[int] = []  # of each row's last kept token
        self._padding: list[int] = []  # slots before each row's first token
        self._visible: Tensor | None = None  # bool [batch, slot]; None = every slot below base, in every row
        self._masks: MaskBuffer | None = None
        self.route = "dynamic"
        self.route_reason: str | None = None
        self.handed_over: str | None = None

    @property
    def plain_ms(self) -> float | None:
        """Milliseconds of the model's own pass over one node, where passes are traced; None = they are not."""
        return self._traces.untraced_ms if self._traces is not None and self.route == "traced" else None

    @property
    def context(self) -> int:
        """Tokens of history of the longest row."""
        return self._cache.base if self._plain is None else int(self._plain.cache.get_seq_length())

    def prefill(self) -> Scores:
        """Run the prompt exactly as plain decoding does; scores for its last token."""
        outputs = watched(
            self._hidden,
            lambda: self._model._prefill(self._input_ids, self._generation_config, self._prompt_kwargs),
            last=1,
        )
        held = outputs.get("past_key_values")
        if held is not None and held is not self._prompt_kwargs["past_key_values"]:
            self._cache.load(held)  # Phi-3 leaves the cache it is given alone where the prompt is past its first range
        past = self._cache.get_seq_length()
        batch = self._input_ids.shape[0]
        self._consolidate(past + min(self._new_tokens, max(1024, past)) + 64)
        mask = self._prompt_kwargs.get(self.mask_name)
        position_ids = self._prompt_kwargs.get(self.positions_name)
        if position_ids is None:
            last = highest = [past - 1] * batch
        else:
            ends = position_ids[..., -1].expand(*position_ids.shape[:-2], batch)
            last = (ends if ends.ndim == 1 else ends[0]).tolist()
            highest = last
            if ends.ndim > 1:  # several axes: all of them count on from the prompt's last token
                self._axes = (ends - ends[:1])[..., None].to(self._device)
                highest = ends.amax(0).tolist()
        self._past = past
        self._boundary = None if self._text is None else boundary(ModelTraits.of(self._model), past, highest)
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
        roots = [0 if self.holds(row) else at for row, at in enumerate(roots)]
        if self._depth_limit is None:
            return roots
        # Past the table, where a row is only fed along, any position will do.
        return [0 if at >= self._depth_limit and self._idle(row) else at for row, at in enumerate(roots)]

    def forward(self, trees: Sequence[TokenTree]) -> Scores:
        """Score every node of every tree in one pass."""
        if self._boundary is not None and all(self.holds(row) or self._idle(row) for row in range(len(trees))):
            self._hand_over()
        if self._plain is not None:
            return self._plain_pass()
        inputs, masks = self.inputs(trees)
        return self._scored(self._inference.run(lambda: self._pass(trees, inputs, masks)))

    def inputs(self, trees: Sequence[TokenTree]) -> tuple[dict[str, Tensor], Any]:
        """What a pass over ``trees`` is given, and its masks; None where it needs none."""
        width = max(map(len, trees))
        tokens, positions = [], []
        for tree, root in zip(trees, self._roots(), strict=True):
            spare = width - len(tree)
            tokens.append(tree.tokens + tree.tokens[:1] * spare)
            positions.append([root + depth for depth in tree.depths] + [root] * spare)
        # By way of NumPy, which reads nested lists several times faster.
        input_ids, position_ids = torch.from_numpy(np.array([tokens, positions])).to(self._device)
        inputs = {"input_ids": input_ids}
        if self._takes_positions:
            inputs["position_ids"] = position_ids if self._axes is None else self._axes + position_ids
        if self._token_types is not None:
            inputs["token_type_ids"] = self._token_types[:, -1:].expand(-1, width)
        return inputs, None if self._sees_everything(width) else self.masks(trees)

    def _sees_everything(self, width: int) -> bool:
        """Whether a pass needs no mask."""
        # Some models leave their windows to the cache (Moshi), and ours keeps all tokens.
        seen = self._window is None or self._cache.base < self._window
        return width == 1 and self._visible is None and seen

    def masks(self, trees: Sequence[TokenTree]) -> Any:
        """The masks of a pass, one for each kind of layer; those of the pass before are gone."""
        base = self._cache.base
        history = None if self._visible is None else self._visible[:, :base]
        buffer = None
        if max(map(len, trees)) <= _WIDEST_BUFFERED:
            if self._masks is None:
                self._masks = MaskBuffer(len(trees), self._dtype, self._device)
            buffer = self._masks
        settled = min(self._cache.lengths)
        places = self._coordinates
        return fused_masks(self._rules, trees, base, history, places, self._dtype, self._device, buffer, settled)

    def _pass(self, trees: Sequence[TokenTree], inputs: dict[str, Tensor], masks: Any) -> Outputs:
        with fused_pass(), placed(self._builders, lambda: self._places(trees, inputs["input_ids"])):
            if self._traces is not None:
                return self._traces.run(self, trees, inputs, masks)
            return self.call(**inputs, **masks_given(masks))

    def holds(self, row: int) -> bool:
        """Whether a row's next token needs a plain pass, for which it waits until all rows have come as far."""
        if self._boundary is None or self._plain is not None:
            return False
        return self._cache.lengths[row] >= self._boundary[0]

    def trust(self) -> None:
        """Take it for found that passes can be run in inference mode (:func:`lookahead.models.code_safety.is_safe`)."""
        self._inference.trust()

    def use(self, traces: Traces) -> bool:
        """Run passes by a model's traces where there are any.

        Returns:
            Whether nothing about the call stands against it.
        """
        own = {"past_key_values", "use_cache", "return_dict"}
        hears = self._hidden is not None
        if self._token_types is not None or set(self._pass_kwargs) != own or hears != traces.reads_hidden:
            return False
        if traces.made and self._traces is None:  # they are there for models that were found safe as this call began
            self.trust()
        self._traces = traces
        if traces.made:
            self.route, self.route_reason = "traced", None
        elif self.route == "traced":  # they were found wrong
            self.route, self.route_reason = "dynamic", traces.failure
        return True

    @cached_property
    def weights(self) -> list[Tensor]:
        """The model's, as traces are told them."""
        return list(weights_of(self._model).values())

    def open_views(self, nodes: int) -> list[Tensor]:
        """Of the history, see :meth:`lookahead.runtime.cache.tree.TreeCache.open_views`."""
        return self._cache.open_views(nodes)

    def given_views(self, views: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Of the history, see :meth:`lookahead.runtime.cache.tree.TreeCache.given_views`."""
        return self._cache.given_views(views)

    def packs(self, nodes: int) -> bool:
        """Whether attention over the history so far packs query heads, in passes over so many nodes."""
        config = self._model.config.get_text_config()
        _, batch, key_heads, _, channels = self._cache.buffers[0].shape
        heads = getattr(config, "num_attention_heads", key_heads)
        slots = self._cache.base + nodes
        sdpa = config._attn_implementation == "sdpa"
        return sdpa and packing_pays(batch, heads, key_heads, nodes, slots, channels, self._dtype)

    def call(self, module: Callable[..., Any] | None = None, /, **inputs: Any) -> Outputs:
        """Run the model, or another one with its history, over a pass's inputs and masks."""
        if self._hidden is not None:
            self._hidden.expect()
        logits: Tensor = (module or self._model)(**inputs, **self._pass_kwargs).logits
        return logits, None if self._hidden is None else self._hidden.take(logits)

    def _hand_over(self) -> None:
        """Go on with transformers' own passes: everything the history holds moves to a cache of theirs."""
        assert self._boundary is not None
        self._inference.leave()
        history = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        self._cache.store(history)
        cache = self._plain_cache(history)
        self._plain = PlainPasses(self._model, cache, self._model_kwargs, self._cache.base + 1 - self._past)
        self.handed_over = self._boundary[1]

    def _plain_cache(self, history: Cache) -> Cache:
        """The cache that transformers' own passes are given."""
        return history

    def _plain_pass(self) -> Scores:
        plain, text = self._plain, self._text
        assert plain is not None and text is not None
        outputs = watched(self._hidden, lambda: plain.forward(text()), last=1)
        return score(outputs.logits[:, -1:], self.harvest)

    def _scored(self, outputs: Outputs) -> Scores:
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

    def _places(self, trees: Sequence[TokenTree], tokens: Tensor) -> Places | DecoderPlaces:
        """The places of the pass's nodes and slots, for models that count them by themselves.

        Decoders that number tokens by the cache's length count padding as well.
        """
        if any(builder.name == "forward" for builder in self._builders):
            return self._numbered(trees, tokens)
        nodes, slots = self._coordinates(trees)
        base, width = self._cache.base, nodes.shape[1]
        counted = slots
        if self._visible is not None:
            visible = self._visible[:, :base].long()
            depths = [tree.depths + [0] * (width - len(tree)) for tree in trees]
            last = visible.sum(1, keepdim=True) + torch.tensor(depths, device=self._device)
            counted = torch.cat([(visible.cumsum(1) - 1).clamp(min=0), last], dim=1)
        mask = self._prompt_kwargs.get(self.mask_name)
        return Places(nodes, slots, counted, base + width, torch.long if mask is None else mask.dtype)

    def _numbered(self, trees: Sequence[TokenTree], tokens: Tensor) -> DecoderPlaces:
        lengths, width = self._cache.lengths, tokens.shape[1]
        places = [
            [length + depth for depth in tree.depths] + [length] * (width - len(tree))
            for tree, length in zip(trees, lengths, strict=True)
        ]
        if self._depth_limit is not None:  # a row that is only fed along may be past the table
            places = [[min(place, self._depth_limit - 1) for place in row] for row in places]
        nodes = torch.tensor(places, device=self._device)
        past = torch.arange(self._cache.base, device=self._device).expand(len(trees), -1)
        return DecoderPlaces(
            tokens, nodes, torch.cat([past, nodes], dim=1), min(map(min, places)), max(map(max, places))
        )

    def keep(self, paths: Sequence[Path]) -> None:
        """Move each row's visited nodes to the end of its history."""
        if self._plain is not None:
            return  # its passes keep what they are fed
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
        if self._plain is not None:
            self._cache = TreeCache(len(self._cache.layers))
            self._cache.load(self._plain.cache)
            self._cache.consolidate(0)
            self._cache.base += 1
        self._cache.store(cache)

    def bucket(self, nodes: int) -> int:
        """The number of nodes that a pass over ``nodes`` nodes computes."""
        return nodes

    def close(self) -> None:
        """The call is over: give back what the model's next call can use."""
        self._inference.leave()

    def room(self) -> list[int] | None:
        """How deep each row's tree may be before it passes the depth limit; None = no limit."""
        limits = []
        if self._depth_limit is not None:
            limits.append([max(0, self._depth_limit - position - 2) for position in self._positions])
        if self._boundary is not None:
            first, handed = self._boundary[0], self._plain is not None
            limits.append([0 if handed else max(0, first - 1 - length) for length in self._cache.lengths])
        return [min(pair) for pair in zip(*limits, strict=True)] if limits else None
