"""One tree forward: what the model is given for it, and the call of the model."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from jacobi import TokenTree
from lookahead.models.families.overrides import overriding
from lookahead.models.families.registry import overrides_for
from lookahead.models.families.scans import scans_of
from lookahead.models.hidden_states import HiddenStates, Outputs, watched
from lookahead.models.mask_rules import mask_rules, shortest_window
from lookahead.models.names import CACHE
from lookahead.models.traits import ModelTraits
from lookahead.runtime.attention import packing_pays, tree_forward
from lookahead.runtime.layout import Layout
from lookahead.runtime.masks import MaskBuffer, tree_masks
from lookahead.runtime.packed_layers import Invariance, Packed, packed_twin
from lookahead.runtime.packing import packing_of
from lookahead.runtime.scores import send
from lookahead.runtime.turns import Turns

# What belongs to the prompt's pass only; everything else the caller gave goes along with every pass.
_PROMPT_ONLY = (
    "attention_mask",
    "position_ids",
    CACHE,
    "logits_to_keep",
    "inputs_embeds",
    "token_type_ids",
    "mm_token_type_ids",
    *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model reads before the first tree, as ``generate`` prepared it."""

    input_ids: Tensor  # [batch, token], of an encoder-decoder model the decoder's
    config: GenerationConfig
    kwargs: dict[str, Any]  # beside tokens and cache
    cache: Cache | None  # what comes before the prompt, and where the KV cache may be left; None = nothing
    new_tokens: int  # that follow at most
    spread: int = 0  # tokens by which the longest exceeds the shortest, where they are padded on the right
    follows: bool = False  # the tokens are those behind the cache's alone


class TreeForward:
    """Prefill and tree forwards of one causal model in one call; nothing is held on the model itself.

    Args:
        layout: where tokens lie.
        prompt: its cache is only read, when the prompt is.
        hidden: notes hidden states of every pass; None = nobody wants any.
        prompt_logits: at how many of the prompt's last tokens logits are wanted, where the model can leave others out.
    """

    mask_name = "attention_mask"
    positions_name = "position_ids"

    def __init__(
        self,
        model: PreTrainedModel,
        traits: ModelTraits,
        layout: Layout,
        prompt: Prompt,
        hidden: HiddenStates | None = None,
        prompt_logits: int = 1,
    ) -> None:
        self.model, self.traits, self.layout, self.hidden = model, traits, layout, hidden
        self.packed: Packed | None = None
        self.limits: Invariance | None = None  # for a node's numbers to depend on its text alone; None = they need not
        self.is_packed = False  # tree forwards run over packed weights
        self.sequences: Tensor | None = None  # of the next pass, as attend takes them; None = attention is torch's
        self.turns: list[Turns] | None = None  # of its nodes that are attended to one by one; None = of none
        self.unpacked_ms: float | None = None  # of a pass over one node without packed weights, if there are any
        self.holds: int | None = None  # slots that sliding-window layers may hold; None = all layers hold all
        self.rules = mask_rules(model, traits)
        kwargs = prompt.kwargs
        self.token_types: Tensor | None = kwargs.get("token_type_ids")  # [batch, token]; the last is carried on
        self.prompt_kwargs = kwargs | {CACHE: layout.cache, "use_cache": True}
        if prompt_logits > 1 and "logits_to_keep" in self.prompt_kwargs:
            self.prompt_kwargs["logits_to_keep"] = prompt_logits
        self.kwargs = {k: v for k, v in kwargs.items() if k not in _PROMPT_ONLY and v is not None}
        self.kwargs |= {CACHE: layout.cache, "use_cache": True, "return_dict": True}
        self.prompt, self.batch = prompt, len(prompt.input_ids)
        self._takes_positions = traits.takes_positions
        self._run_on(model)
        self._heads: int | None = getattr(traits.config, "num_attention_heads", None)
        self._window = shortest_window(traits, self.rules)
        self._masks = MaskBuffer(self.batch, traits.dtype, layout.device)

    def use(self, packed: Packed) -> None:
        """Run the linear layers of tree forwards so; the prompt's pass stays plain decoding's."""
        self.packed, self.limits, self.is_packed = packed, packed.limits, bool(packed.parts)
        if self.is_packed:
            self.unpacked_ms = packing_of(self.model).single_ms
        if packed.parts or (packed.limits is not None and packed.limits.rows):
            self._run_on(packed_twin(self.model, packed))

    def _run_on(self, module: Any) -> None:
        """Run tree forwards on these modules: the model's own, or a twin's, which are overridden instead."""
        scans = scans_of(module) if self.layout.cache.states else []
        self.module, self._overrides = module, overrides_for(module) if self.traits.counts_slots else scans

    def follow(self, batch: int) -> None:
        """Sequences have joined or left the layout, which now has so many."""
        self.batch, self._masks = batch, MaskBuffer(batch, self.traits.dtype, self.layout.device)

    @property
    def is_plain(self) -> bool:
        """Whether tree forwards are given nothing but tokens, positions, masks and the cache."""
        own = {CACHE, "use_cache", "return_dict"}
        return self.token_types is None and set(self.kwargs) == own

    def prompt_slots(self) -> int:
        """How many slots the prompt will fill, what comes before it included, as far as can be told."""
        past = 0 if self.prompt.cache is None else int(self.prompt.cache.get_seq_length())
        mask, embeds = self.prompt_kwargs.get(self.mask_name), self.prompt_kwargs.get("inputs_embeds")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            return max(past, mask.shape[1])
        count = (self.prompt.input_ids if embeds is None or self.traits.is_encoder_decoder else embeds).shape[1]
        return count if count > past and not self.prompt.follows else past + count

    def load(self) -> None:
        """Take over what comes before the prompt."""
        if self.prompt.cache is not None:
            self.layout.cache.load(self.prompt.cache)

    def prefill(self) -> Tensor:
        """Run the prompt exactly as plain decoding does; logits ``[batch, token, vocab]`` of its last tokens."""
        run = partial(self.model._prefill, self.prompt.input_ids, self.prompt.config, self.prompt_kwargs)
        outputs = watched(self.hidden, run, last=None)
        cache, held = self.layout.cache, outputs.get(CACHE)
        if held is not None and held is not self.prompt_kwargs[CACHE]:  # Phi-3, of a prompt past its first range
            cache.load(held, take=True)
        mask, positions = self.prompt_kwargs.get(self.mask_name), self.prompt_kwargs.get(self.positions_name)
        self.layout.start(cache.get_seq_length(), self.batch, mask, positions)
        return outputs.logits

    def widened(self, trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        """The trees that are fed for ``trees``."""
        return trees

    def inputs(self, trees: Sequence[TokenTree]) -> tuple[dict[str, Tensor], Any]:
        """What a pass over ``trees`` is given, and its masks; None where it needs none."""
        width, tokens, positions = max(map(len, trees)), array("q"), array("q")
        for tree, root in zip(trees, self.layout.roots(), strict=True):
            spare = width - len(tree)
            tokens.extend(tree.tokens + tree.tokens[:1] * spare)
            positions.extend([root + depth for depth in tree.depths] + [root] * spare)
        input_ids, position_ids = send(tokens + positions, self.layout.device).view(2, -1, width).unbind(0)
        inputs = {"input_ids": input_ids}
        if self._takes_positions:
            inputs["position_ids"] = self.layout.over_axes(position_ids)
        if self.token_types is not None:
            inputs["token_type_ids"] = self.token_types[:, -1:].expand(-1, width)
        if (limits := self.limits) is not None:
            self.sequences = self.layout.sequences(trees, limits.singly, self.holds or 0)
            self.turns = self.layout.turns(trees, limits.turns) if limits.turns else None
        # Some models leave their windows to the cache (Moshi), and ours keeps all tokens.
        seen = self._window is None or self.layout.cache.base < self._window
        return inputs, None if width == 1 and self.layout.visible is None and seen else self.masks(trees)

    def masks(self, trees: Sequence[TokenTree]) -> Any:
        """The masks of a pass, one for each kind of layer; those of the pass before are gone."""
        cache, buffer = self.layout.cache, self._masks
        buffer.first = cache.make_room(max(map(len, trees)))
        visible = None if self.layout.visible is None else self.layout.visible[:, : cache.base]
        settled, coordinates = min(cache.lengths), self.layout.coordinates
        return tree_masks(self.rules, trees, cache.base, visible, coordinates, buffer, settled, self._window)

    @contextmanager
    def running(self, trees: Sequence[TokenTree], inputs: dict[str, Tensor]) -> Iterator[None]:
        """Inside, attention and the model's own counting of slots follow the trees."""
        tokens, layout = inputs["input_ids"], self.layout
        roots = layout.roots() if self.traits.is_encoder_decoder else layout.cache.lengths  # some count in the mask
        places = partial(layout.pass_positions, trees, tokens, roots)
        overridden = overriding(self._overrides, partial(layout.cache.scan, trees) if layout.cache.states else places)
        told = {"sequences": self.sequences, "turns": self.turns, "width": tokens.shape[1]}
        with tree_forward(**told), overridden:
            yield

    def call(self, inputs: dict[str, Tensor], masks: Any, module: Callable[..., Any] | None = None) -> Outputs:
        """Run the model, or another module with its cache, over a pass's inputs and masks; None = it needs none."""
        if self.hidden is not None:
            self.hidden.expect()
        given = {} if masks is None else {self.mask_name: masks}
        logits: Tensor = (module or self.module)(**inputs, **given, **self.kwargs).logits
        return Outputs(logits, () if self.hidden is None else self.hidden.take(logits))

    def packs(self, nodes: int) -> bool:
        """Whether attention over the KV cache so far packs query heads, in passes over so many nodes."""
        if self.traits.attention != "sdpa" or self.limits is not None:
            return False
        cache, batch = self.layout.cache, len(self.layout.cache.lengths)
        _, _, key_heads, _, channels = cache.buffers[0].shape
        query = batch, self._heads or key_heads, nodes, channels
        return packing_pays(query, (batch, key_heads, cache.base + nodes, channels), self.traits.dtype)

    def plain_cache(self, cache: Cache) -> Cache:
        """The cache that transformers' own passes are given, around the decoder's own keys and values."""
        return cache

    def store(self, cache: Cache, *, move: bool) -> None:
        """Leave the KV cache in ``cache`` as plain decoding would have; with ``move`` nothing stays here."""
        self.layout.cache.store(cache, move=move)
