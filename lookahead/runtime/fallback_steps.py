"""transformers' own decoding steps, for a text whose passes change (:func:`~lookahead.models.traits.boundary`)."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import ModelOutput


class PlainPasses:
    """transformers' own decoding passes, from some token of the text on.

    Args:
        model: the model.
        cache: the text so far but for its last token, all sequences equally long.
        model_kwargs: as ``generate`` prepared them for the prompt.
        written: new tokens so far.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, model_kwargs: dict[str, Any], written: int) -> None:
        self._model = model
        kwargs = {"use_cache": True} | model_kwargs | {"past_key_values": cache}
        self._seq2seq = bool(model.config.is_encoder_decoder)
        self._kwargs = model._update_model_kwargs_for_generation(
            ModelOutput(), kwargs, is_encoder_decoder=self._seq2seq, num_new_tokens=written
        )

    @property
    def cache(self) -> Cache:
        """The KV cache; another one than in the beginning where the model has recomputed the text."""
        return self._kwargs["past_key_values"]

    def forward(self, input_ids: Tensor) -> ModelOutput:
        """The pass of the last token of ``[batch, token]``; its ``logits`` are ``[batch, token, vocab]``."""
        inputs = self._model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **self._kwargs)
        outputs: ModelOutput = self._model(**inputs, return_dict=True)
        self._kwargs = self._model._update_model_kwargs_for_generation(
            outputs, self._kwargs, is_encoder_decoder=self._seq2seq
        )
        return outputs
