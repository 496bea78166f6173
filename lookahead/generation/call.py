"""One call of ``generate`` as transformers prepared it."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from lookahead.models.compat import is_users_cache
from lookahead.models.traits import ModelTraits
from lookahead.runtime.cache.snapshots import holds_text
from lookahead.verify.sequences import Sequences

_TRUST = 0.7  # of estimates that were made on other texts
_NOT_THE_MODELS = ("tokenizer", "assistant_tokenizer", "assistant_model")


@dataclass(frozen=True, slots=True)
class Call:
    """What ``generate`` prepared."""

    model: PreTrainedModel
    traits: ModelTraits
    input_ids: Tensor  # the prompt [batch, token], padded on the left; of an encoder-decoder model the decoder's
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: BaseStreamer | None
    kwargs: dict[str, Any]  # what the model is given beside tokens and cache
    cache: Any  # as it was prepared or given; None = there is none

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
        model_kwargs: dict[str, Any],
    ) -> "Call":
        """Read the model's class and config, and part its cache from its other inputs."""
        traits = ModelTraits.of(model)
        others = (*_NOT_THE_MODELS, traits.cache_argument)
        kwargs = {name: given for name, given in model_kwargs.items() if name not in others}
        cache = model_kwargs.get(traits.cache_argument)
        return cls(model, traits, input_ids, processors, criteria, config, streamer, kwargs, cache)

    @property
    def batch(self) -> int:
        return len(self.input_ids)

    def sequences(self) -> Sequences:
        """The text, of which nothing is written yet. Where scores or a cache are returned, finished sequences go on to
        the longest one's length, as plain decoding leaves them."""
        config = self.config
        scored = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        return Sequences(self.input_ids, self.criteria, config, keep_up=self.exports_cache or bool(scored))

    @property
    def exports_cache(self) -> bool:
        """Whether anybody sees the KV cache when all is written."""
        if self.cache is None or not self.kwargs.get("use_cache", True):
            return False
        return bool(self.config.return_dict_in_generate) or is_users_cache(self.cache) or holds_text(self.cache)

    @property
    def choice(self) -> Hashable:
        """Stands for how tokens are chosen: what is accepted under one choice says little about another."""
        warpers = ("temperature", "top_k", "top_p", "min_p") if self.config.do_sample else ()
        values = [getattr(self.config, name, None) for name in (*warpers, "repetition_penalty")]
        return (bool(self.config.do_sample), *values, *(type(processor).__name__ for processor in self.processors))

    def trust(self, sees_noise: bool) -> float:
        """How far estimates can be believed at first. Where drafts do not see the noise that tokens are drawn with: the
        hotter the sampling, the less. With it they are as good at every temperature."""
        if sees_noise or not self.config.do_sample:
            return _TRUST
        temperature = 1.0 if self.config.temperature is None else float(self.config.temperature)
        return _TRUST / (1.0 + temperature**2)

    def prompts(self) -> list[list[int]]:
        """The prompts' tokens, padding left out."""
        mask = self.kwargs.get("decoder_attention_mask" if self.traits.is_encoder_decoder else "attention_mask")
        if mask is None or mask.shape != self.input_ids.shape:
            mask = torch.ones_like(self.input_ids)
        return [row[real].tolist() for row, real in zip(self.input_ids.cpu(), mask.cpu().bool(), strict=True)]
