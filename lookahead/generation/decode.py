"""One call of ``generate`` with a strategy: checks, the loop, and its readers."""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from jacobi import Drafter, JacobiDrafter, LookaheadError, Path, Successors, TokenTree, solve
from lookahead.draft.context import CallContext, Drafts, RowContext, Wants
from lookahead.draft.latency import StepTimes
from lookahead.draft.memory import Memory, borrowed
from lookahead.generation.curves import step_times
from lookahead.generation.observers import Readers
from lookahead.generation.output import LookaheadOutput, LookaheadSeq2SeqOutput, output_of
from lookahead.generation.strategy import Strategy
from lookahead.generation.transformers_loop import PlainLoop
from lookahead.models.compat import is_users_cache, kernels_for_decoding
from lookahead.models.hidden_states import HiddenStates
from lookahead.models.mask_rules import mask_rules
from lookahead.models.output_layer import output_layer
from lookahead.models.traits import ModelTraits, is_seq2seq, vocabulary
from lookahead.runtime.attention import grouped_attention, switched_attention
from lookahead.runtime.cache.snapshots import holds_text
from lookahead.runtime.cache.tree import empty_cache
from lookahead.runtime.cuda_graphs.executor import fused_model
from lookahead.runtime.linear import ChainModel, cache_name, chain_cache
from lookahead.runtime.tracing.record import CallTraces, traces_for
from lookahead.runtime.tree import FusedModel
from lookahead.stats import DecodingStats
from lookahead.support import route as support
from lookahead.support.caches import check_cache_of_linear, check_cache_of_trees
from lookahead.support.call import call_obstacle, check_mode
from lookahead.verify.opening import check_lossy, open_verifier
from lookahead.verify.sequences import Sequences
from lookahead.verify.verifier import Verifier

_TRUST = 0.7  # of estimates that were made on other texts
_NOT_THE_MODELS = ("tokenizer", "assistant_tokenizer", "assistant_model")


class _RowDrafter:
    """A row's drafter while it writes, and pad tokens as deep as the other rows' trees once it has ended."""

    def __init__(self, drafter: Drafter, row: int, sequences: Sequences, depths: list[int]) -> None:
        self.drafter = drafter
        self._row = row
        self._sequences = sequences
        self._depths = depths
        self._writes = True

    def draft(self, room: int) -> TokenTree:
        sequences = self._sequences
        self._writes = not sequences.finished[self._row]
        if not self._writes:
            self._depths[self._row] = 0
            depth = room if all(sequences.finished) else min(room, max(self._depths))
            return TokenTree.chain(sequences.written[self._row][-1], [sequences.pad] * depth)
        tree = self.drafter.draft(room)
        self._depths[self._row] = max(tree.depths)
        return tree

    def learn(self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None) -> None:
        if self._writes:  # or did when the tree was drafted
            self.drafter.learn(tree, greedy, path, successors)


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
) -> LookaheadOutput | LookaheadSeq2SeqOutput | Tensor:
    """Decode as ``GenerationMixin._sample`` would, with fewer passes where the route allows it.

    A model for which there is neither a tree nor a chain is handed to ``_sample`` itself, with a warning.

    Args:
        strategy: how drafts are grown.
        model: a causal model, or an encoder-decoder model.
        input_ids: ``[batch, token]``, padded on the left; of an encoder-decoder model the decoder's.
        logits_processor: as ``generate`` prepared them.
        stopping_criteria: as ``generate`` prepared them.
        generation_config: as ``generate`` prepared it.
        streamer: receives every token; the prompt has been put already.
        model_kwargs: the remaining inputs, as ``generate`` prepared them.
        synced_gpus: not supported.

    Returns:
        Token ids ``[batch, token]``, or with ``return_dict_in_generate`` a :class:`LookaheadOutput`, which
        for an encoder-decoder model is a :class:`LookaheadSeq2SeqOutput`.

    Raises:
        LookaheadError: the call cannot be decoded with lookahead, raised before any pass of the text; or, in the
            middle, the logits are NaN or the processed scores give no probabilities.
    """
    cache = cache_name(model)
    call = _Call(
        strategy,
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        streamer,
        {name: given for name, given in model_kwargs.items() if name not in (*_NOT_THE_MODELS, cache)},
        model_kwargs.get(cache),
    )
    with switched_attention(model, strategy.attention):
        if synced_gpus:
            raise LookaheadError("synced_gpus=True is not supported with lookahead: expected one process. Drop it.")
        check_mode(generation_config, model_kwargs.get("assistant_model"))
        return _decode(call)


@dataclass(frozen=True, slots=True)
class _Call:
    """What ``generate`` prepared; ``kwargs`` are what the model is given beside the tokens and the cache."""

    strategy: Strategy
    model: PreTrainedModel
    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: BaseStreamer | None
    kwargs: dict[str, Any]
    cache: Any

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.input_ids)

    @property
    def rule(self) -> Callable[[Tensor], Tensor] | None:
        """What a lossy decode may keep; None = it is exact."""
        return self.strategy.rule if self.config.do_sample else None

    @property
    def has_users_cache(self) -> bool:
        """Whether the cache is the caller's, and not one that ``generate`` has just made."""
        return is_users_cache(self.cache) or (self.cache is not None and holds_text(self.cache))


def _decode(call: _Call) -> LookaheadOutput | LookaheadSeq2SeqOutput | Tensor:
    """Decode with drafts, or hand over to transformers' own loop."""
    model = call.model
    traits = ModelTraits.of(model)
    support.check(model, traits, call.input_ids, call.kwargs)
    plain = PlainLoop(model, call.input_ids, call.processors, call.criteria, call.config, call.streamer)
    route, reason = support.route(model, traits)
    if route == "plain":
        assert reason is not None  # as route says
        return plain.hand_over(call.kwargs, call.cache, reason, call.strategy)
    if route == "chain" and call.strategy.static is True:
        raise LookaheadError(f"static=True cannot be used: {reason}. Leave static unset, or set it to False.")
    decoding = _Decoding(call, route, reason, plain)
    new_tokens = decoding.sequences.most_new
    obstacle = call_obstacle(route, model, traits, call.input_ids, call.kwargs, call.cache, new_tokens)
    if obstacle is not None:
        reason = obstacle if reason is None else f"{reason}; {obstacle}"
        return plain.hand_over(call.kwargs, call.cache, reason, call.strategy)
    if route == "chain":
        check_cache_of_linear(traits, call.cache, call.batch)
    else:
        check_cache_of_trees(traits, call.cache, call.batch, call.input_ids.shape[1] + new_tokens - 1)
    with borrowed(model, vocabulary(model), call.strategy.remembers) as memory:
        decoding.prepare(memory)
        decoding.run()
    return decoding.output()


class _Decoding:
    """One call under way: who drafts, the model that is asked, and who chooses what is written.

    Args:
        call: what ``generate`` prepared.
        route: ``"tree"`` or ``"chain"``, see :func:`lookahead.support.route.route`.
        reason: why it is no tree.
        plain: transformers' own loop, for a model that turns out not to be decoded with drafts.
    """

    _hidden: HiddenStates | None
    _drafts: Drafts
    _drafters: list[_RowDrafter]
    _fused: FusedModel | ChainModel
    _verifier: Verifier
    _traced: CallTraces | None

    def __init__(self, call: _Call, route: str, reason: str | None, plain: PlainLoop) -> None:
        self._call = call
        self._route = route
        self._reason = reason
        self._plain = plain
        self._stats = None if call.strategy.stats == "none" else DecodingStats()
        config = call.config
        returned = config.return_dict_in_generate
        wanted = call.cache is not None and bool(call.kwargs.get("use_cache", True))
        self._exports = wanted and (returned or call.has_users_cache)  # who sees the cache when all is written
        scored = returned and (config.output_scores or config.output_logits)
        if call.rule is not None:
            check_lossy(call.batch, call.processors, call.criteria, in_lockstep=route == "chain")
        keep_up = bool(self._exports or scored)
        self.sequences = Sequences(call.input_ids, call.criteria, config, keep_up=keep_up)

    def prepare(self, memory: Memory) -> None:
        """Make the view of the model, tested, and the drafters.

        Raises:
            LookaheadError: the strategy cannot draft for this model, or the model fails the test.
        """
        call, model, sequences = self._call, self._call.model, self.sequences
        strategy, new_tokens = call.strategy, sequences.most_new
        wants = strategy.wants(batch=call.batch, vocab_size=vocabulary(model), new_tokens=new_tokens)
        if is_seq2seq(model) and wants.taps:
            raise LookaheadError(
                f"{type(strategy).__name__} drafts with heads on a causal model, and {type(model).__name__} is an "
                "encoder-decoder model. Use Lookahead() or Jacobi()."
            )
        strategy.check(model)
        self._hidden = HiddenStates(output_layer(model)) if wants.taps else None
        traces = None
        if self._route == "tree":
            if not strategy.static:
                traces = traces_for(model, call.batch, bool(wants.taps))
            support.self_test(model)
        self._fused = self._view(wants)
        self._verifier = open_verifier(
            sequences,
            call.processors,
            call.criteria,
            call.config,
            self._fused,
            verification=strategy.verification,
            in_lockstep=self._route == "chain",
            rule=call.rule,
        )

        def curve() -> StepTimes:
            return step_times(model, call.batch, memory.times, None, strategy.static, traces)

        choice, trust = _choice(call.config, call.processors), _trust(call.config)
        try:
            self._drafts = strategy.drafts(
                CallContext(model, self._rows(), memory, choice, new_tokens, trust, self._fused, curve, self._hidden)
            )
        except BaseException:
            self._fused.close()
            raise
        planner = self._drafts.planner
        self._traced = None
        if traces is not None and type(self._fused) is FusedModel:
            renew = None if planner is None else planner.renew
            self._traced = CallTraces(model, traces, self._fused, renew, call.batch, new_tokens)

    def _rows(self) -> list[RowContext]:
        """What drafters may know of each row."""
        call, sequences = self._call, self.sequences
        prompts = call.input_ids.tolist()
        mask = call.kwargs.get("decoder_attention_mask" if is_seq2seq(call.model) else "attention_mask")
        if mask is not None and mask.shape == call.input_ids.shape:
            prompts = [
                [t for t, real in zip(row, flags, strict=True) if real]
                for row, flags in zip(prompts, mask.tolist(), strict=True)
            ]
        vocab, seed = vocabulary(call.model), call.strategy.seed
        pad = sequences.pad if 0 <= sequences.pad < vocab else 0  # a draft must be tokens that the model can be fed
        rows = []
        for index, prompt in enumerate(prompts):
            rng = random.Random(None if seed is None else seed + index)
            rows.append(RowContext(prompt, vocab, pad, sequences.end_tokens, rng, index, self._route == "chain"))
        return rows

    def _view(self, wants: Wants) -> FusedModel | ChainModel:
        """The model as the loop sees it."""
        call, limit = self._call, ModelTraits.of(self._call.model).depth_limit
        if self._route == "chain":
            return ChainModel(
                call.model,
                chain_cache(call.model, call.cache),
                call.input_ids,
                call.config,
                call.kwargs,
                depth_limit=limit,
                harvest=wants.top_k,
                prompt_harvest=wants.prompt_top_k,
                hidden=self._hidden,
                reason=self._reason,
            )
        return fused_model(
            call.strategy.static,
            call.model,
            mask_rules(call.model),
            empty_cache(call.model, call.cache),
            call.input_ids,
            call.config,
            call.kwargs,
            self.sequences.most_new,
            limit,
            self.sequences.idle,
            wants.top_k,
            wants.prompt_top_k,
            self._hidden,
            self.sequences.padded,
            cross=getattr(call.cache, "cross_attention_cache", None),
        )

    def run(self) -> None:
        """Write the text."""
        call, sequences, fused, drafts = self._call, self.sequences, self._fused, self._drafts
        depths = [0] * call.batch
        self._drafters = [_RowDrafter(drafter, row, sequences, depths) for row, drafter in enumerate(drafts.drafters)]
        detailed = call.strategy.stats == "detailed"
        readers = Readers(sequences, fused, self._stats, drafts.planner, self._traced, call.streamer, detailed=detailed)
        try:
            steps = solve(fused, self._drafters, self._verifier)
            with grouped_attention(), self._hidden or nullcontext():
                readers.read(next(steps))  # the prompt's pass, for which transformers keeps its own choice of kernels
                with kernels_for_decoding(call.model):
                    for step in steps:
                        readers.read(step)
            readers.close()
            if self._exports:
                fused.store(call.cache)
        finally:
            fused.close()

    def output(self) -> LookaheadOutput | LookaheadSeq2SeqOutput | Tensor:
        """What ``generate`` returns."""
        call, sequences, planner, stats = self._call, self.sequences, self._drafts.planner, self._stats
        if not call.config.return_dict_in_generate:
            return sequences.padded()
        if stats is not None:
            stats.fed_again = self._fused.fed_again
            if planner is not None:
                stats.add_plan(planner.credited, planner.single_ms, planner.timed_ms)
        told = [row.drafter.trajectory for row in self._drafters if isinstance(row.drafter, JacobiDrafter)]
        iterates = [trajectory for trajectory in told if trajectory is not None] or None
        output: dict[str, Any] = {
            "sequences": sequences.padded(),
            "scores": self._verifier.recorded("scores"),
            "logits": self._verifier.recorded("logits"),
            "past_key_values": call.cache if self._exports else None,
        }
        return output_of(call.model, output, stats, iterates)


def _choice(config: GenerationConfig, processors: LogitsProcessorList) -> tuple[Any, ...]:
    """Stands for how tokens are chosen: what is accepted under one choice says little about another."""
    warpers = ("temperature", "top_k", "top_p", "min_p") if config.do_sample else ()
    values = [getattr(config, name, None) for name in (*warpers, "repetition_penalty")]
    return (bool(config.do_sample), *values, *(type(processor).__name__ for processor in processors))


def _trust(config: GenerationConfig) -> float:
    """How far estimates made on greedy text can be believed at first: the hotter the sampling, the less."""
    if not config.do_sample:
        return _TRUST
    temperature = 1.0 if config.temperature is None else float(config.temperature)
    return _TRUST / (1.0 + temperature**2)
