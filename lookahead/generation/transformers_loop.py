"""transformers' own loop, for what is decoded without lookahead: a whole call, told by name."""

import logging
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from lookahead.generation.output import output_of
from lookahead.generation.strategy import Strategy
from lookahead.runtime.linear import cache_name
from lookahead.stats import DecodingStats

_log = logging.getLogger("lookahead")
_warned: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()  # models whose hand-over has been told
_warned_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class PlainLoop:
    """transformers' own loop, for this call."""

    model: PreTrainedModel
    input_ids: Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    streamer: BaseStreamer | None

    def sample(self, model_kwargs: dict[str, Any], given_cache: Any) -> Any:
        """Decode with ``_sample`` as transformers has it."""
        sample = getattr(type(self.model)._sample, "lookahead_original", type(self.model)._sample)
        kwargs = model_kwargs if given_cache is None else model_kwargs | {cache_name(self.model): given_cache}
        return sample(
            self.model,
            self.input_ids,
            logits_processor=self.logits_processor,
            stopping_criteria=self.stopping_criteria,
            generation_config=self.generation_config,
            streamer=self.streamer,
            **kwargs,
        )

    def told(self, reason: str) -> str:
        """Say once a model why it is decoded plainly."""
        with _warned_lock:
            known = self.model in _warned
            _warned.add(self.model)
        if not known:
            _log.warning("use_lookahead has no effect, plain decoding goes on: %s.", reason.rstrip("."))
        return reason

    def hand_over(self, model_kwargs: dict[str, Any], given_cache: Any, reason: str, strategy: Strategy) -> Any:
        """Decode with ``_sample`` because there is nothing else: say so once a model, and in the statistics."""
        self.told(reason)
        output = self.sample(model_kwargs, given_cache)
        if not self.generation_config.return_dict_in_generate:
            return output
        stats = None if strategy.stats == "none" else DecodingStats(plain={reason: 1})
        return output_of(self.model, dict(output), stats, None)
