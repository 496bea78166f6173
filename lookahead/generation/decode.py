"""One call of ``generate`` with a strategy: the whole method on one screen, in :func:`decode`."""

from contextlib import ExitStack
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from jacobi import LookaheadError, solve
from lookahead.draft.strategy import DraftStrategy as Strategy
from lookahead.generation import transformers_loop
from lookahead.generation.call import Call
from lookahead.generation.output import LookaheadOutput, LookaheadSeq2SeqOutput
from lookahead.generation.plan import assisted, plan_of
from lookahead.generation.session import Session
from lookahead.runtime.attention import switched_attention
from lookahead.runtime.session import kernels
from lookahead.support.call import check_mode

Output = LookaheadOutput | LookaheadSeq2SeqOutput | Tensor


def decode(strategy: Strategy, call: Call) -> Output:
    """Plan, open, and then for every pass: draft, one forward, verify, keep."""
    plan = plan_of(strategy, call)
    if plan.route == "plain":
        return transformers_loop.run(call, strategy.stats, plan.reason)
    with ExitStack() as ends:
        session = Session(plan, ends)
        with kernels(session.model.hidden):
            for step in solve(session.model, session.drafters, session.group.verifier, session.group.catch_up):
                session.see(step)
        return session.output()


def generate(
    strategy: Strategy,
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> Output:
    """Decode as ``GenerationMixin._sample`` would, in fewer passes; the arguments are ``_sample``'s, as it gets them.

    A model that can be given neither trees nor linear drafts falls back to ``_sample`` itself, with a warning.

    Returns:
        Token ids ``[batch, token]``, or with ``return_dict_in_generate`` a :class:`LookaheadOutput`, which
        for an encoder-decoder model is a :class:`LookaheadSeq2SeqOutput`.

    Raises:
        LookaheadError: the call cannot be decoded with lookahead, raised before any pass of the text; or, in the
            middle, the logits are NaN or the processed scores give no probabilities.
    """
    with switched_attention(model, strategy.attention):
        kwargs = dict(model_kwargs)
        if kwargs.pop("synced_gpus", False):
            raise LookaheadError("synced_gpus=True is not supported with lookahead: expected one process. Drop it.")
        check_mode(generation_config)
        strategy = assisted(strategy, generation_config, kwargs)
        call = Call.of(model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, kwargs)
        return decode(strategy, call)
