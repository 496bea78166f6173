"""One call of ``generate`` with a strategy: checks, the loop, and its readers."""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

from jacobi import Drafter, JacobiDrafter, LookaheadError, Path, Step, Successors, TokenTree, solve
from lookahead import support
from lookahead.attention import grouped_attention, switched_attention
from lookahead.cache import empty_cache
from lookahead.cache_checks import check_caches, check_chain_cache
from lookahead.chain import ChainModel, cache_name, chain_cache
from lookahead.decoder import is_seq2seq, vocabulary
from lookahead.emission import Emission
from lookahead.lossy import LossyEmission
from lookahead.masks import mask_rules
from lookahead.memory import borrowed
from lookahead.model import FusedModel
from lookahead.outputs import LookaheadOutput, LookaheadSeq2SeqOutput, output_of
from lookahead.plain import PlainLoop
from lookahead.planner import Planner
from lookahead.postponed import PostponedTest, can_wait
from lookahead.snapshots import holds_text
from lookahead.static import fused_model
from lookahead.stats import DecodingStats
from lookahead.strategy import CallContext, RowContext, Strategy
from lookahead.tracing import CallTraces, traces_for

_TRUST = 0.7  # of estimates that were made on other texts


class _RowDrafter:
    """A row's drafter while it writes, and pad tokens as deep as the other rows' trees once it has ended."""

    def __init__(self, drafter: Drafter, row: int, emission: Emission, depths: list[int]) -> None:
        self.drafter = drafter
        self._row = row
        self._emission = emission
        self._depths = depths
        self._writes = True

    def draft(self, room: int) -> TokenTree:
        emission = self._emission
        self._writes = not emission.finished[self._row]
        if not self._writes:
            self._depths[self._row] = 0
            depth = room if all(emission.finished) else min(room, max(self._depths))
            return TokenTree.chain(emission.written[self._row][-1], [emission.pad] * depth)
        tree = self.drafter.draft(room)
        self._depths[self._row] = max(tree.depths)
        return tree

    def learn(self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None) -> None:
        if self._writes:  # or did when the tree was drafted
            self.drafter.learn(tree, greedy, path, successors)


class _Readers:
    """What looks at every pass: statistics, the planner of sizes, who makes traces, the streamer."""

    def __init__(
        self,
        emission: Emission,
        fused: FusedModel | ChainModel,
        stats: DecodingStats | None,
        planner: Planner | None,
        traced: CallTraces | None,
        streamer: BaseStreamer | None,
        *,
        detailed: bool,
    ) -> None:
        self._emission = emission
        self._fused = fused
        self._stats = stats
        self._planner = planner
        self._traced = traced
        self._streaming = None if streamer is None else _Streaming(streamer, emission)
        self._detailed = detailed
        self._first = True
        self._before = [0] * emission.batch

    def read(self, step: Step) -> None:
        """Take in one pass."""
        if self._stats is not None:
            after = self._emission.lengths()
            written = [now - then for now, then in zip(after, self._before, strict=True)]
            self._stats.count(step, written, first=self._first, detailed=self._detailed)
            self._before = after
        if self._planner is not None and not self._first:
            self._planner.observe(step)
        if self._streaming is not None:
            self._streaming.flush()
        if self._traced is not None and not all(self._emission.finished):
            self._traced.look(max(self._emission.lengths()))
        if self._planner is not None:
            self._planner.open(self._fused.context)
            self._fused.harvest = self._planner.harvest
        self._first = False


class _Streaming:
    """Reads steps and puts every index that all rows have written, one 1-D tensor each, as ``generate`` does."""

    def __init__(self, streamer: BaseStreamer, emission: Emission) -> None:
        self._streamer = streamer
        self._emission = emission
        self._put = 0

    def flush(self) -> None:
        """Put what has become complete."""
        emission = self._emission
        everything = all(emission.finished)
        lengths = [len(row) for row in emission.written]
        going = [n for n, done in zip(lengths, emission.finished, strict=True) if not done]
        complete = max(lengths) if everything else min(going)
        for index in range(self._put, complete):
            tokens = [row[index] if index < len(row) else emission.pad for row in emission.written]
            self._put = index + 1
            self._streamer.put(torch.tensor(tokens))


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
    """Decode as ``GenerationMixin._sample`` would, with fewer passes where :func:`lookahead.support.route` has any.

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
    with switched_attention(model, strategy.attention):
        return _decode(
            strategy,
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer,
            model_kwargs,
            synced_gpus,
        )


def _is_users(cache: Any) -> bool:
    """Whether a cache is the caller's, and not one that ``generate`` has just made."""
    return getattr(cache, "_is_user_defined", False) or (cache is not None and holds_text(cache))


def _is_usual(cache: Any) -> bool:
    """Whether there is nothing about a cache that would have to be checked."""
    return cache is None or (type(cache) is DynamicCache and not cache.offloading and not _is_users(cache))


def _decode(
    strategy: Strategy,
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
    synced_gpus: bool,
) -> LookaheadOutput | Tensor:
    """The call, with the attention that it uses."""
    model_kwargs = {k: v for k, v in model_kwargs.items() if k not in ("tokenizer", "assistant_tokenizer")}
    given_cache = model_kwargs.pop(cache_name(model), None)
    batch = input_ids.shape[0]
    if synced_gpus:
        raise LookaheadError("synced_gpus=True is not supported with lookahead: expected one process. Drop it.")
    support.check_mode(generation_config, model_kwargs.pop("assistant_model", None))
    support.check_model(model)
    support.check_prompt(model, input_ids, model_kwargs)
    plain = PlainLoop(model, input_ids, logits_processor, stopping_criteria, generation_config, streamer)
    returned = generation_config.return_dict_in_generate
    lossy = strategy.rule if generation_config.do_sample else None
    most = (generation_config.max_length or math.inf) - input_ids.shape[1]
    if strategy.automatic and most <= 1 and not returned and lossy is None and _is_usual(given_cache):
        # The prompt's pass writes all there is: whatever would be prepared here for drafts could only cost time.
        return plain.sample(model_kwargs, given_cache)
    route, reason = support.route(model)
    if route == "plain":
        assert reason is not None  # as route says
        return plain.hand_over(model_kwargs, given_cache, reason, strategy)
    if route == "chain" and strategy.static is True:
        raise LookaheadError(f"static=True cannot be used: {reason}. Leave static unset, or set it to False.")

    wants_cache = bool(model_kwargs.get("use_cache", True))
    users_cache = _is_users(given_cache)
    export = given_cache is not None and wants_cache and (returned or users_cache)
    scored = returned and (generation_config.output_scores or generation_config.output_logits)

    fused: FusedModel | ChainModel
    emission = (Emission if lossy is None else partial(LossyEmission, rule=lossy))(
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        verification=strategy.verification,
        keep_up=bool(export or scored),
        model_room=lambda: fused.room(),
        model_holds=lambda row: fused.holds(row),
        in_lockstep=route == "chain",
    )

    def no_trees(reason: str) -> None:
        assert isinstance(fused, FusedModel)  # chains are tested before they begin
        fused.hand_over(plain.told(reason))

    new_tokens = emission.most_new
    obstacle = support.call_obstacle(route, model, input_ids, model_kwargs, given_cache, new_tokens)
    if obstacle is not None:
        reason = obstacle if reason is None else f"{reason}; {obstacle}"
        return plain.hand_over(model_kwargs, given_cache, reason, strategy)
    if route == "chain":
        check_chain_cache(given_cache, model.config.get_text_config().num_hidden_layers, batch)
    else:
        check_caches(model, given_cache, batch, input_ids.shape[1] + new_tokens - 1)
    prefix = "decoder_" if is_seq2seq(model) else ""
    limit = support.depth_limit(model)
    mask = model_kwargs.get(f"{prefix}attention_mask")
    rows = _rows(strategy, input_ids, mask, vocabulary(model), emission, chain=route == "chain")
    stats = None if strategy.stats == "none" else DecodingStats()
    with borrowed(model, strategy.remembers) as memory:
        choice = _choice(generation_config, logits_processor)
        traces = traces_for(model, batch, strategy.reads_hidden) if route == "tree" and not strategy.static else None
        drafts = strategy.drafts(
            CallContext(model, rows, memory, choice, new_tokens, _trust(generation_config), traces)
        )
        if is_seq2seq(model) and drafts.hidden is not None:
            raise LookaheadError(
                f"{type(strategy).__name__} drafts with heads on a causal model, and {type(model).__name__} is an "
                "encoder-decoder model. Use Lookahead() or Jacobi()."
            )
        planner = drafts.planner
        if route == "tree":
            late = strategy.tests_late and batch == 1 and drafts.hidden is None
            if planner is not None and late and can_wait(model):
                planner.test = PostponedTest(model, new_tokens, no_trees)
            else:
                support.self_test(model)
        depths = [0] * batch
        drafters = [_RowDrafter(drafter, row, emission, depths) for row, drafter in enumerate(drafts.drafters)]
        if route == "chain":
            fused = ChainModel(
                model,
                chain_cache(model, given_cache),
                input_ids,
                generation_config,
                model_kwargs,
                depth_limit=limit,
                harvest=drafts.harvest,
                prompt_harvest=drafts.prompt_harvest,
                hidden=drafts.hidden,
                reason=reason,
            )
        else:
            fused = fused_model(
                strategy.static,
                model,
                mask_rules(model),
                empty_cache(model, given_cache),
                input_ids,
                generation_config,
                model_kwargs,
                new_tokens,
                limit,
                emission.idle,
                drafts.harvest,
                drafts.prompt_harvest,
                drafts.hidden,
                emission.sequences,
                cross=getattr(given_cache, "cross_attention_cache", None),
            )
        traced = None
        if traces is not None and type(fused) is FusedModel:
            traced = CallTraces(model, traces, fused, planner, batch, new_tokens)
        if planner is not None:
            planner.bucket = fused.bucket
            planner.again = lambda: fused.again
        readers = _Readers(emission, fused, stats, planner, traced, streamer, detailed=strategy.stats == "detailed")
        try:
            steps = solve(fused, drafters, emission)
            with grouped_attention(), drafts.hidden or nullcontext():
                readers.read(next(steps))  # the prompt's pass, for which transformers keeps its own choice of kernels
                with _optimized(model):
                    for step in steps:
                        readers.read(step)
            if streamer is not None:
                streamer.end()
            if planner is not None and planner.test is not None:
                planner.test.close(max(emission.lengths()))
            if export:
                fused.store(given_cache)
        finally:
            fused.close()
    if stats is not None:
        stats.fed_again = fused.fed_again
        if planner is not None:
            stats.add_plan(planner.credited, planner.single_ms, planner.timed_ms)
    if not returned:
        return emission.sequences()
    trajectories = [d.drafter.trajectory for d in drafters if isinstance(d.drafter, JacobiDrafter)]
    iterates = [t for t in trajectories if t is not None] or None
    output: dict[str, Any] = {
        "sequences": emission.sequences(),
        "scores": emission.recorded("scores"),
        "logits": emission.recorded("logits"),
        "past_key_values": given_cache if export else None,
    }
    return output_of(model, output, stats, iterates)


def _rows(
    strategy: Strategy,
    input_ids: Tensor,
    mask: Tensor | None,
    vocab: int,
    emission: Emission,
    *,
    chain: bool,
) -> list[RowContext]:
    prompts = input_ids.tolist()
    if mask is not None and mask.shape == input_ids.shape:
        prompts = [
            [t for t, real in zip(row, flags, strict=True) if real]
            for row, flags in zip(prompts, mask.tolist(), strict=True)
        ]
    pad = emission.pad if 0 <= emission.pad < vocab else 0  # a draft must be tokens that the model can be fed
    rows = []
    for index, prompt in enumerate(prompts):
        rng = random.Random(None if strategy.seed is None else strategy.seed + index)
        rows.append(RowContext(prompt, vocab, pad, emission.end_tokens, rng, index, chain))
    return rows


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


@contextmanager
def _optimized(model: PreTrainedModel) -> Iterator[None]:
    """transformers' own switch of expert kernels for decoding, where this version has it."""
    optimize = getattr(model, "_optimize_model_for_decode", None)
    if optimize is None:
        yield
        return
    with optimize():
        yield
