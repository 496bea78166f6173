"""The fallback: transformers' own loop decodes the whole call, with a warning that says why."""

import logging
from typing import Any, Literal

from lookahead._per_model import PerModel
from lookahead.generation.call import Call
from lookahead.generation.output import output_of
from lookahead.stats import DecodingStats

_log = logging.getLogger("lookahead")
_reasons: PerModel[list[str]] = PerModel(list)  # why a model fell back, if it has been told


def run(call: Call, stats: Literal["none", "summary", "detailed"], reason: str | None) -> Any:
    """Decode with ``_sample`` as transformers has it; say ``reason`` once a model, and in the statistics."""
    told = _reasons.of(call.model)
    if reason is not None and not told:
        told.append(reason)
        _log.warning("use_lookahead has no effect, plain decoding goes on: %s.", reason.rstrip("."))
    sample = getattr(type(call.model)._sample, "lookahead_original", type(call.model)._sample)
    kwargs = call.kwargs if call.cache is None else call.kwargs | {call.traits.cache_argument: call.cache}
    output = sample(
        call.model,
        call.input_ids,
        logits_processor=call.processors,
        stopping_criteria=call.criteria,
        generation_config=call.config,
        streamer=call.streamer,
        **kwargs,
    )
    if not call.config.return_dict_in_generate:
        return output
    counted = None if stats == "none" else DecodingStats(plain={reason or "": 1}, bits={"plain": 1})
    return output_of(call, dict(output), counted)
