"""An encoder-decoder model as the solver sees it: the tree is the decoder's, the encoder has run before the first pass.
The cross-attention's keys and values are filled by the prompt's pass, and stay in the cache that ``generate`` prepared.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import MoEModelOutput

from jacobi import TokenTree
from lookahead.models.families.decoders import position_ids
from lookahead.models.families.registry import overrides_for
from lookahead.models.hidden_states import Outputs
from lookahead.models.names import CACHE
from lookahead.models.traits import ModelTraits
from lookahead.runtime.forward import Prompt, TreeForward
from lookahead.runtime.layout import Layout

_POSITIONS = "decoder_position_ids"


class EncoderDecoderForward(TreeForward):
    """Prefill and tree forwards of an encoder-decoder model; see :class:`TreeForward` for the arguments. The prompt is
    the decoder's; its ``kwargs`` hold ``encoder_outputs``, its cache may hold that of the cross-attention."""

    mask_name = "decoder_attention_mask"
    positions_name = _POSITIONS

    def __init__(
        self, model: PreTrainedModel, traits: ModelTraits, layout: Layout, prompt: Prompt, *others: Any
    ) -> None:
        super().__init__(model, traits, layout, prompt, *others)
        cross = getattr(prompt.cache, "cross_attention_cache", None)
        self._caches = EncoderDecoderCache(self.layout.cache, DynamicCache() if cross is None else cross)
        self.prompt_kwargs |= {CACHE: self._caches}
        self._overrides = overrides_for(self.model.get_decoder())
        self._takes_positions = True  # this class does, and knows whom to tell
        # Where token ids are turned into positions, that is where places go: some positions start at an offset.
        counts = any(override.stand_in is position_ids for override in self._overrides)
        self._tells_decoder = _takes_positions(self.model) and not counts

    def prefill(self) -> Tensor:
        """Run the decoder's prompt as plain decoding does; later passes are given what its second step is given."""
        given = {key: value for key, value in self.prompt_kwargs.items() if value is not None}
        first = self.model.prepare_inputs_for_generation(self.prompt.input_ids, **given)
        if _POSITIONS in first:  # some models count them from the mask here
            self.prompt_kwargs[_POSITIONS] = first[_POSITIONS]
        logits = super().prefill()
        given = {key: value for key, value in given.items() if key not in (self.mask_name, _POSITIONS)}
        later = self.model.prepare_inputs_for_generation(self.prompt.input_ids, next_sequence_length=1, **given)
        inputs = ("decoder_input_ids", self.mask_name, _POSITIONS, "logits_to_keep")
        self.kwargs = {key: value for key, value in later.items() if key not in inputs and value is not None}
        self.kwargs |= {CACHE: self._caches, "use_cache": True, "return_dict": True}
        return logits

    def widened(self, trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        """Two nodes at least where sequences have gaps: some decoders take one token for a pass that needs no mask."""
        if self.layout.visible is None or max(map(len, trees)) > 1:
            return trees
        wider = TokenTree.chain(trees[0].tokens[0], [0])
        wider.depths[1] = 0  # it lies where the root lies: there may be no place after it
        return [wider, *trees[1:]]

    def call(self, inputs: dict[str, Tensor], masks: Any, module: Callable[..., Any] | None = None) -> Outputs:
        given = {"decoder_input_ids": inputs["input_ids"]}
        if self._tells_decoder:
            given[_POSITIONS] = inputs["position_ids"]
        return super().call(given, masks, module)

    def plain_cache(self, cache: Cache) -> Cache:
        return EncoderDecoderCache(cache, self._caches.cross_attention_cache)

    def store(self, cache: Cache, *, move: bool) -> None:
        assert isinstance(cache, EncoderDecoderCache)  # checked before the first pass
        super().store(cache.self_attention_cache, move=move)
        cache.is_updated = dict(self._caches.is_updated)


@dataclass
class _StandIn(MoEModelOutput):
    """An encoder's output with all that the one or other decoder looks for."""

    attention_mask: Tensor | None = None


def stand_in_encoder(model: PreTrainedModel, batch: int) -> MoEModelOutput:
    """What an encoder might have said about ``batch`` equal texts of five tokens: drawn once and for all."""
    config, traits = model.config, ModelTraits.of(model)
    encoder = getattr(config, "encoder", None) or getattr(config, "encoder_config", None) or config
    sizes = (getattr(source, name, None) for source in (encoder, config) for name in ("hidden_size", "d_model"))
    size = next((size for size in sizes if isinstance(size, int)), None) or traits.config.hidden_size
    noise = torch.randn((1, 5, size), generator=torch.Generator().manual_seed(0))
    return _StandIn(last_hidden_state=noise.to(traits.device, traits.dtype).repeat(batch, 1, 1))


def _takes_positions(model: PreTrainedModel) -> bool:
    inside = getattr(model, "decoder", None)  # two models under one roof hand arguments of this prefix on to it
    given = inspect.signature(type(inside).forward).parameters if isinstance(inside, PreTrainedModel) else {}
    return _POSITIONS in inspect.signature(type(model).forward).parameters or "position_ids" in given
