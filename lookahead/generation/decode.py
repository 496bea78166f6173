"""One call of ``generate`` with a strategy: the whole method on one screen, in :func:`decode`."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from jacobi import Drafter, LookaheadError, PlainDrafter, Step, Wants, solve
from lookahead.draft.context import Drafts
from lookahead.draft.latency import StepTimes
from lookahead.draft.memory import borrowed
from lookahead.draft.strategy import DraftStrategy as Strategy
from lookahead.generation import transformers_loop
from lookahead.generation.call import Call
from lookahead.generation.curves import step_times
from lookahead.generation.drafting import WhileWriting, draft_context
from lookahead.generation.memories import recall
from lookahead.generation.observers import Observers
from lookahead.generation.output import LookaheadOutput, LookaheadSeq2SeqOutput, decoded
from lookahead.generation.watch import records
from lookahead.models.traits import boundary
from lookahead.parallel.split import Replicas, refusal
from lookahead.parallel.tensor import TensorParallel
from lookahead.runtime.attention import grouped_attention, switched_attention
from lookahead.runtime.experts import expert_kernels
from lookahead.runtime.forward import Prompt
from lookahead.runtime.linear import LinearModel
from lookahead.runtime.open import open_tree
from lookahead.runtime.packed_layers import Packed
from lookahead.runtime.packing import packed_weights
from lookahead.runtime.tracing.replay import TracedExecutor, Traces
from lookahead.runtime.tracing.schedule import traces_for
from lookahead.runtime.tree import TreeModel
from lookahead.support import route as support
from lookahead.support.call import check_mode
from lookahead.verify.sequences import Sequences
from lookahead.verify.typical import check_paths
from lookahead.verify.verifier import Verifier

Output = LookaheadOutput | LookaheadSeq2SeqOutput | Tensor


def decode(strategy: Strategy, call: Call) -> Output:
    """Check, plan, and then for every pass: draft, one forward, verify, keep."""
    sequences = Sequences(call.input_ids, call.criteria, call.config, keep_up=call.keeps_up)
    support.check(call.model, call.traits, call.input_ids, call.kwargs)
    plan = support.plan(call.model, call.traits, call.input_ids, call.kwargs, call.cache, sequences.most_new)
    if plan.route == "plain":
        return transformers_loop.run(call, strategy.stats, plan.reason)
    wants, rule = wanted(strategy, call, plan, sequences.most_new)
    traces, packed, stream = None, None, call.stream(sequences)
    ranks = _ranks(strategy, call, sequences, plan, wants)
    if plan.route == "tree":
        reason = support.self_test(call.model, call.traits)
        if reason is not None:
            return transformers_loop.run(call, strategy.stats, reason)
        traces, packed = _made_earlier(strategy, call, wants, sequences.most_new)
    with (
        borrowed(call.model, call.traits.vocab_size, strategy.remembers) as memory,
        closing(_opened(call, plan, sequences, wants, strategy.static, traces, packed)) as model,
        ExitStack() as ends,
    ):
        recall(memory, call.model, strategy)
        passes = model if ranks is None else ranks.around(model)
        rules = sequences, call.processors, call.criteria, call.config, passes
        verifier = Verifier(
            *rules,
            verification=strategy.verification,
            in_lockstep=plan.route == "chain",
            rule=rule,
            everywhere=wants.choices,
            stream=stream if ranks is None else None,  # ranks that stream must choose as those that do not
        )

        def curve() -> StepTimes:
            batch, traces, packed = _ways(model, call)
            how = (strategy.static, traces, call.traits, plan.route == "chain", packed)
            times = memory.times if ranks is None else ranks.times(memory.times)
            return step_times(call.model, batch, times, None, *how)

        known = call, sequences, memory, model, curve, strategy, verifier.noise, ends.callback
        own = ranks is None or ranks.leads  # drafts: other ranks are told their trees
        drafts = strategy.drafts(draft_context(*known)) if own else Drafts([PlainDrafter() for _ in range(call.batch)])
        shared = sequences, [0] * call.batch, call.traits.vocab_size  # depths of trees, in the middle
        drafters: list[Drafter] = [WhileWriting(each, row, *shared) for row, each in enumerate(drafts.drafters)]
        how = strategy.stats, packs(strategy, call), records(drafts.drafters), stream, verifier.noise
        observers = Observers(call, sequences, model, drafts, *how)

        def aside() -> None:
            observers.catch_up()
            drafts.catch_up()

        if ranks is not None:
            ranks.asks(verifier)
            drafters = ends.enter_context(ranks.call(drafters, _call_of(strategy, call), call.traits.device))
        with closing(_passes(passes, drafters, verifier, aside)) as steps:
            for step in steps:
                observers.see(step)
        aside()
        observers.close()
        if call.exports_cache:
            passes.store(call.cache)
        return decoded(call, sequences, verifier, drafts.drafters, observers.stats)


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
    synced_gpus: bool = False,
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
        if synced_gpus:
            raise LookaheadError("synced_gpus=True is not supported with lookahead: expected one process. Drop it.")
        check_mode(generation_config)
        strategy = assisted(strategy, generation_config, model_kwargs)
        given = (logits_processor, stopping_criteria, generation_config, streamer, model_kwargs)
        return decode(strategy, Call.of(model, input_ids, *given))


def assisted(strategy: Strategy, config: GenerationConfig, given: Mapping[str, Any]) -> Strategy:
    """The strategy, with what a call asks to draft with: its ``assistant_model``, as many of the model's own layers as
    ``assistant_early_exit`` says, or with ``use_mtp`` the model's MTP layers."""
    mtp, early_exit, draft = getattr(config, "use_mtp", None), config.assistant_early_exit, given.get("assistant_model")
    if mtp is not None and not isinstance(mtp, bool):
        raise LookaheadError(f"use_mtp must be True or False: got {mtp!r} of type {type(mtp).__name__}.")
    if mtp and (early_exit is not None or draft is not None):
        raise LookaheadError("use_mtp and an assistant both say what drafts: drop one of them.")
    if early_exit is not None and draft is not None:
        raise LookaheadError("assistant_early_exit and assistant_model both say what drafts: drop one of them.")
    if mtp:
        return strategy.predicting()
    if early_exit is not None:
        return strategy.assisted(early_exit)
    if draft is None:
        return strategy
    other = given.get("assistant_tokenizer")
    return strategy.assisted(draft, None if other is None else (given.get("tokenizer"), other))


def wanted(
    strategy: Strategy, call: Call, plan: support.Plan, new_tokens: int
) -> tuple[Wants, Callable[[Tensor], Tensor] | None]:
    """What the strategy's drafts are told of passes, and its rule for what is accepted; None = the text is exact."""
    if plan.route == "chain" and strategy.static is True:
        raise LookaheadError(f"static=True cannot be used: {plan.reason}. Leave static unset, or set it to False.")
    rule = strategy.rule if call.config.do_sample else None
    if rule is not None:
        check_paths(call.batch, call.processors, call.criteria, in_lockstep=plan.route == "chain")
    drawn = bool(call.config.do_sample) and strategy.verification == "exact" and rule is None
    wants = strategy.wants(batch=call.batch, vocab_size=call.traits.vocab_size, new_tokens=new_tokens, drawn=drawn)
    strategy.check(call.model)
    return replace(wants, taps=strategy.taps(call.model)), rule


def _made_earlier(strategy: Strategy, call: Call, wants: Wants, new: int) -> tuple[Traces | None, Packed | None]:
    """What makes passes on a CPU faster, as far as earlier calls have paid for it: traces, and packed weights. A single
    ``new`` token comes from the prompt's pass, which is the model's own."""
    if strategy.static or call.traits.is_sharded or new < 2:
        return None, None
    packed = packed_weights(call.model) if packs(strategy, call) else None
    if not strategy.traces:
        return None, packed
    return traces_for(call.model, wants.taps, call.traits, packed), packed


def packs(strategy: Strategy, call: Call) -> bool:
    """Whether passes may run on packed weights."""
    fits = call.traits.device.type == "cpu" and not call.traits.is_encoder_decoder
    return strategy.pack and fits and not strategy.static and not call.traits.is_sharded


def _ranks(
    strategy: Strategy, call: Call, sequences: Sequences, plan: support.Plan, wants: Wants
) -> TensorParallel | None:
    """The ranks over which the model is sharded, or trees are split; None = there are none."""
    if getattr(strategy, "parallel", None) is not None:
        return _replicas(strategy, call, sequences, plan, wants)
    if not call.traits.is_sharded:
        return None
    if strategy.verification != "exact" and call.config.do_sample:
        raise LookaheadError("verification= other than 'exact' cannot be used with tensor parallelism. Leave it out.")
    return TensorParallel(call.model, sequences)


def _replicas(strategy: Strategy, call: Call, sequences: Sequences, plan: support.Plan, wants: Wants) -> TensorParallel:
    """The ranks over which trees are split."""
    change = boundary(call.traits, call.input_ids.shape[1], [call.input_ids.shape[1] - 1])
    reasons = {
        "the model is sharded itself": call.traits.is_sharded,
        f"the model is given no trees ({plan.reason})": plan.route != "tree",
        "drafts read hidden states, of which each rank has a part": bool(wants.taps),
        "verification is not exact": bool(call.config.do_sample) and strategy.verification != "exact",
        "static=True has passes of its own": strategy.static is True,
        "the model is another one further on": change is not None and change[0] < sequences.max_length,
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    if why is not None:
        raise refusal(why)
    return Replicas(call.model, sequences)


def _call_of(strategy: Strategy, call: Call) -> dict[str, Any]:
    """What all ranks must have in common, by name; what only steers drafts may differ."""
    settings = call.config.to_diff_dict()
    drafts = ("use_lookahead", "lookahead_strategy")
    return {
        "prompts": call.input_ids,
        "attention masks": call.kwargs.get("attention_mask"),
        "generation settings": {name: value for name, value in settings.items() if name not in drafts},
        "strategy": [type(strategy).__name__, strategy.verification, strategy.draws_candidates],
        "processors": [type(each).__name__ for each in call.processors],
        "stopping rules": [type(each).__name__ for each in call.criteria],
    }


def _ways(model: TreeModel | LinearModel, call: Call) -> tuple[int, Traces | None, bool]:
    """How passes are run by now: over how many sequences, their traces, and whether weights are packed."""
    if not isinstance(model, TreeModel):
        return call.batch, None, False
    traces = model.executor.traces if isinstance(model.executor, TracedExecutor) else None
    return model.forward_pass.batch, traces, model.forward_pass.packed is not None


def _opened(
    call: Call,
    plan: support.Plan,
    sequences: Sequences,
    wants: Wants,
    static: bool | None,
    traces: Traces | None,
    packed: Packed | None,
) -> TreeModel | LinearModel:
    prompt = Prompt(call.input_ids, call.config, call.kwargs, call.cache, sequences.most_new)
    if plan.route == "chain":
        how: dict[str, Any] = {"depth_limit": call.traits.depth_limit, "reason": plan.reason, "test": plan.test}
        return LinearModel(call.model, call.traits, prompt, wants, **how)
    how = {"static": static, "traced": None if traces is None else partial(TracedExecutor, traces), "packed": packed}
    return open_tree(call.model, call.traits, prompt, sequences, wants, **how)


def _passes(
    model: Any, drafters: Sequence[Drafter], verifier: Verifier, aside: Callable[[], None]
) -> Generator[Step, None, None]:
    """The steps of the call, with attention and expert kernels that suit trees."""
    with grouped_attention(), expert_kernels(), model.hidden or nullcontext():
        yield from solve(model, drafters, verifier, aside)
