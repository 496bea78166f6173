"""One call of ``generate`` with a strategy: checks, the loop, and its readers."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from jacobi import Drafter, JacobiDrafter, LookaheadError, Path, Step, Successors, TokenTree, solve
from lookahead import support
from lookahead.attention import grouped_attention
from lookahead.emission import Emission
from lookahead.masks import mask_rules
from lookahead.model import FusedModel
from lookahead.stats import DecodingStats
from lookahead.strategies import RowContext, Strategy


@dataclass
class LookaheadOutput(GenerateDecoderOnlyOutput):
    """What ``generate(..., return_dict_in_generate=True)`` returns.

    Attributes:
        stats: what the decode did; None with ``stats="none"``.
        trajectories: with ``Jacobi(return_trajectory=True)``, every iterate fed to the model, ``[row][pass]``.
    """

    stats: DecodingStats | None = None
    trajectories: list[list[list[int]]] | None = None


class _RowDrafter:
    """A row's drafter while it writes, and pad tokens as deep as the other rows' trees once it has ended."""

    def __init__(self, drafter: Drafter, row: int, emission: Emission, depths: list[int]) -> None:
        self.drafter = drafter
        self._row = row
        self._emission = emission
        self._depths = depths

    def draft(self, room: int) -> TokenTree:
        emission = self._emission
        if emission.finished[self._row]:
            self._depths[self._row] = 0
            depth = room if all(emission.finished) else min(room, max(self._depths))
            return TokenTree.chain(emission.written[self._row][-1], [emission.pad] * depth)
        tree = self.drafter.draft(room)
        self._depths[self._row] = max(tree.depths)
        return tree

    def learn(
        self, tree: TokenTree, greedy: Sequence[int], path: Path, successors: Successors | None = None
    ) -> None:
        if not self._emission.finished[self._row]:
            self.drafter.learn(tree, greedy, path, successors)


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
) -> LookaheadOutput | Tensor:
    """Decode as ``GenerationMixin._sample`` would, with fewer passes.

    Args:
        strategy: how drafts are grown.
        model: a causal model.
        input_ids: ``[batch, token]``, padded on the left.
        logits_processor: as ``generate`` prepared them.
        stopping_criteria: as ``generate`` prepared them.
        generation_config: as ``generate`` prepared it.
        streamer: receives every token; the prompt has been put already.
        model_kwargs: the remaining inputs, as ``generate`` prepared them.
        synced_gpus: not supported.

    Returns:
        Token ids ``[batch, token]``, or a :class:`LookaheadOutput` with ``return_dict_in_generate``.

    Raises:
        LookaheadError: the call cannot be decoded with lookahead, raised before any pass of the text; or, in the
            middle, the logits are NaN or the processed scores give no probabilities.
    """
    model_kwargs = {k: v for k, v in model_kwargs.items() if k not in ("tokenizer", "assistant_tokenizer")}
    given_cache = model_kwargs.pop("past_key_values", None)
    batch = input_ids.shape[0]
    if synced_gpus:
        raise LookaheadError("synced_gpus=True is not supported with lookahead: expected one process. Drop it.")
    support.check_mode(generation_config, model_kwargs.pop("assistant_model", None))
    support.check_model(model)
    support.check_prompt(model, input_ids, model_kwargs)

    wants_cache = bool(model_kwargs.get("use_cache", True))
    users_cache = getattr(given_cache, "_is_user_defined", False) or (
        given_cache is not None and int(given_cache.get_seq_length()) > 0
    )
    returned = generation_config.return_dict_in_generate
    export = given_cache is not None and wants_cache and (returned or users_cache)
    scored = returned and (generation_config.output_scores or generation_config.output_logits)

    fused: FusedModel
    emission = Emission(
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        verification=strategy.verification,
        keep_up=bool(export or scored),
        model_room=lambda: fused.room(),
    )
    new_tokens = emission.most_new
    support.check_caches(model, given_cache, batch, input_ids.shape[1] + new_tokens - 1)
    past = model_kwargs.get("position_ids")
    last_position = (int(past[:, -1].max()) if past is not None else input_ids.shape[1] - 1) + new_tokens
    limit = support.depth_limit(model, last_position, batch)
    support.self_test(model)
    drafters = _drafters(strategy, model, input_ids, model_kwargs, generation_config, emission)

    fused = FusedModel(
        model,
        mask_rules(model),
        support.empty_cache(model, given_cache),
        input_ids,
        generation_config,
        model_kwargs,
        new_tokens,
        limit,
        emission.idle,
    )
    stats = None if strategy.stats == "none" else DecodingStats()
    streaming = None if streamer is None else _Streaming(streamer, emission)
    before = [0] * batch

    def read(step: Step) -> None:
        nonlocal before
        if stats is not None:
            after = emission.lengths()
            written = [now - then for now, then in zip(after, before, strict=True)]
            stats.count(step, written, first=stats.steps == 0, detailed=strategy.stats == "detailed")
            before = after
        if streaming is not None:
            streaming.flush()

    steps = solve(fused, drafters, emission)
    with grouped_attention():
        read(next(steps))  # the prompt's pass, for which transformers keeps its own choice of kernels
        with _optimized(model):
            for step in steps:
                read(step)
    if streamer is not None:
        streamer.end()
    if export:
        fused.store(given_cache)
    if not returned:
        return emission.sequences()
    trajectories = [d.drafter.trajectory for d in drafters if isinstance(d.drafter, JacobiDrafter)]
    return LookaheadOutput(
        sequences=emission.sequences(),
        scores=emission.recorded("scores"),
        logits=emission.recorded("logits"),
        past_key_values=given_cache if export else None,
        stats=stats,
        trajectories=[t for t in trajectories if t is not None] or None,
    )


def _drafters(
    strategy: Strategy,
    model: PreTrainedModel,
    input_ids: Tensor,
    model_kwargs: dict[str, Any],
    generation_config: GenerationConfig,
    emission: Emission,
) -> list[_RowDrafter]:
    mask = model_kwargs.get("attention_mask")
    rows = input_ids.tolist()
    if mask is not None and mask.shape == input_ids.shape:
        rows = [
            [t for t, real in zip(row, flags, strict=True) if real]
            for row, flags in zip(rows, mask.tolist(), strict=True)
        ]
    vocab = model.get_input_embeddings().weight.shape[0]
    pad = emission.pad if 0 <= emission.pad < vocab else 0  # a draft must be tokens that the model can be fed
    depths = [0] * len(rows)
    drafters = []
    for index, prompt in enumerate(rows):
        seed = None if strategy.seed is None else strategy.seed + index
        context = RowContext(prompt, vocab, pad, emission.end_tokens, random.Random(seed))
        drafters.append(_RowDrafter(strategy.drafter(context), index, emission, depths))
    return drafters


@contextmanager
def _optimized(model: PreTrainedModel) -> Iterator[None]:
    """transformers' own switch of expert kernels for decoding, where this version has it."""
    optimize = getattr(model, "_optimize_model_for_decode", None)
    if optimize is None:
        yield
        return
    with optimize():
        yield
