"""What a scheduler is asked, prepared as ``generate`` prepares it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from jacobi import LookaheadError
from lookahead.draft.strategy import DraftStrategy as Strategy
from lookahead.generation.call import Call
from lookahead.generation.plan import Plan
from lookahead.generation.watch import Watcher
from lookahead.models.compat import handing_on
from lookahead.models.names import CACHES
from lookahead.models.traits import boundary


@dataclass(eq=False, repr=False)
class Ticket:
    """A request of a :class:`lookahead.scheduling.Scheduler`, and what becomes of it.

    Attributes:
        inputs: ``generate``'s own arguments.
        strategy: how it drafts; None = plain decoding.
        seed: of what it draws; None = it does not draw.
        watcher: is told of every pass in which it wrote.
        salt: only requests of the same one share kept beginnings with it.
        cached: tokens of the prompt that were known when it was read; None = it has not been.
    """

    inputs: dict[str, Any]
    strategy: Strategy | None
    seed: int | None
    watcher: Watcher | None
    salt: str | None = None
    cached: int | None = None
    cancelled: bool = False
    done: bool = False
    _output: Any = None
    _error: BaseException | None = None

    def cancel(self) -> None:
        """End it before its next pass, or leave it out where it has not begun; :meth:`result` then is an error."""
        self.cancelled = True

    def result(self) -> Any:
        """What ``generate`` would have returned, or the exception that it would have raised.

        Raises:
            LookaheadError: it is not done yet, or was cancelled.
        """
        if not self.done:
            raise LookaheadError("This request is not done yet: run the scheduler until it is.")
        if self._error is not None:
            raise self._error
        return self._output

    def end(self, output: Any = None, error: BaseException | None = None) -> None:
        """It is done, with what ``generate`` would have returned or raised."""
        self.done, self._output, self._error = True, output, error
        self.inputs = {}


def prepared(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Call:
    """A call as ``generate`` prepares it, which reads nothing yet; ``generate``'s own errors where it refuses it. A
    streamer is given the prompt."""

    def taken(
        twin: PreTrainedModel,
        input_ids: Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Call:
        # generate puts a caller's processors behind its own; some have to see the model's own logits.
        logits_processor.sort(key=lambda each: not getattr(each, "lookahead_first", False))
        # transformers gives the prompt to a streamer, and then tells nobody of it.
        streamer = inputs.get("streamer")
        return Call.of(model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, kwargs)

    tokenizer = inputs.get("tokenizer")
    prepares = model if tokenizer is None else handing_on(model, tokenizer)
    return prepares.generate(**inputs, custom_generate=taken)


def why_alone(plan: Plan) -> str | None:
    """Why a call that trees can decode shares no passes with others; None = it does."""
    call, strategy, traits, count = plan.call, plan.strategy, plan.call.traits, plan.call.input_ids.shape[1]
    past = 0 if call.cache is None else int(call.cache.get_seq_length())
    slots = max(count, past + 1)
    change = boundary(traits, slots, [slots - 1])
    is_growing = isinstance(call.cache, DynamicCache) and not getattr(call.cache, "offloading", False)
    own_passes = otherwise = False
    if strategy is not None:
        own_passes = strategy.static is True or strategy.attention is not None
        otherwise = bool(call.config.do_sample) and (strategy.verification != "exact" or strategy.rule is not None)
    given = {name for name, value in call.kwargs.items() if value is not None}
    usual = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position"}
    positions = call.kwargs.get("position_ids")
    has_axes = isinstance(positions, Tensor) and positions.ndim > 2
    reasons: list[tuple[str, bool]] = [
        ("it has several sequences", call.batch > 1),
        ("the model is an encoder-decoder or sharded", traits.is_encoder_decoder or traits.is_sharded),
        ("its drafts read hidden states", bool(plan.wants.taps)),
        ("its strategy has passes of its own", own_passes),
        ("its strategy draws in another way", otherwise),
        ("the model is another one further on", change is not None and change[0] < slots + plan.new_tokens),
        ("its cache is not a growing one on the device", call.cache is not None and not is_growing),
        ("it gives the model more than tokens", bool(given - usual - CACHES) or has_axes),
    ]
    return next((reason for reason, holds in reasons if holds), None)
