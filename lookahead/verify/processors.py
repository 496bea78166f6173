"""Which of transformers' logits processors and stopping rules may be run row by row, or on scores alone."""

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors_module
from transformers.generation import stopping_criteria as rules

from lookahead.runtime.scores import send


def _processors(names: str) -> frozenset[type]:
    return frozenset(getattr(processors_module, name) for name in names.split() if hasattr(processors_module, name))


# Processors that look at nothing but the scores.
PREFIX_FREE = _processors("""
    EpsilonLogitsWarper EtaLogitsWarper LogitNormalization MinPLogitsWarper SuppressTokensLogitsProcessor
    TemperatureLogitsWarper TopHLogitsWarper TopKLogitsWarper TopPLogitsWarper TypicalLogitsWarper
""")
# Processors that look at which tokens a text has, but not where.
PLACE_FREE = PREFIX_FREE | _processors("InfNanRemoveLogitsProcessor RepetitionPenaltyLogitsProcessor")
# Processors and rules of transformers that treat each row on its own, whatever its number in the batch.
ROW_PROCESSORS = PREFIX_FREE | _processors("""
    ExponentialDecayLengthPenalty ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor
    InfNanRemoveLogitsProcessor MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor NoBadWordsLogitsProcessor
    NoRepeatNGramLogitsProcessor RepetitionPenaltyLogitsProcessor SequenceBiasLogitsProcessor
    SuppressTokensAtBeginLogitsProcessor
""")
SIMPLE_RULES = frozenset((rules.EosTokenCriteria, rules.MaxLengthCriteria))
ROW_RULES = SIMPLE_RULES | {rules.MaxTimeCriteria, rules.StopStringCriteria}
# Processors that keep something of the prefix they were given last.
STATEFUL = _processors("SynthIDTextWatermarkLogitsProcessor UnbatchedClassifierFreeGuidanceLogitsProcessor")

Processing = Callable[[Tensor, Tensor], Tensor]  # (texts [row, token], scores [row, vocab]) -> scores


def not_row_wise(processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> list[str]:
    """Names of the processors and stopping rules that may look at the whole batch. Ours say by a class attribute
    ``lookahead_row_wise`` that they treat each row on its own, and draw nothing."""
    others = {type(processor) for processor in processors} - ROW_PROCESSORS
    others |= {type(rule) for rule in criteria} - ROW_RULES
    return sorted(kind.__name__ for kind in others if not getattr(kind, "lookahead_row_wise", False))


def warp_of(processors: LogitsProcessorList) -> dict[str, Any]:
    """Settings of the usual warpers: temperature, top_k, top_p and min_p, those that are there."""
    names = ("temperature", "top_k", "top_p", "min_p")
    warpers = [each for each in processors if type(each) in PREFIX_FREE]
    given = {name: getattr(each, name) for each in warpers for name in names if hasattr(each, name)}
    return {name: value for name, value in given.items() if isinstance(value, int | float)}


class RowProcessors:
    """The processors for some rows of the batch, each maybe several times: what they hold by row is picked for them."""

    def __init__(self, processors: LogitsProcessorList, prompt_length: int) -> None:
        self._processors = processors
        self._direct = direct(processors)
        ignored = [tokens for tokens in map(_ignored, processors) if tokens is not None]
        self._by_row = any(isinstance(tokens, Tensor) for tokens in ignored)
        within = all(int(torch.as_tensor(tokens).max()) < prompt_length for tokens in ignored)
        # Texts may be padded with their own last token.
        self.pads = {type(processor) for processor in processors} <= PLACE_FREE and within

    def __call__(self, rows: Sequence[int], texts: Tensor, scores: Tensor) -> Tensor:
        """Processed ``scores`` ``[place, vocab]`` after ``texts`` ``[place, token]`` of these rows."""
        if not self._by_row:
            return self._direct(texts, scores)
        mine = LogitsProcessorList()
        for processor in self._processors:
            if isinstance(ignored := _ignored(processor), Tensor):
                processor = copy.copy(processor)
                processor.prompt_ignore_length = ignored[send(rows, ignored.device)]
            mine.append(processor)
        return direct(mine)(texts, scores)


def _ignored(processor: Any) -> int | Tensor | None:
    """Number of tokens at the beginning of a text, or of each row's, that a processor does not look at."""
    return getattr(processor, "prompt_ignore_length", None)


def direct(processors: LogitsProcessorList) -> Processing:
    """The same processors, called without looking up their parameters for every token, where those are known."""
    known = {type(processor) for processor in processors} <= ROW_PROCESSORS
    if type(processors) is not LogitsProcessorList or not known:
        return processors
    steps = tuple(processors)

    def process(texts: Tensor, scores: Tensor) -> Tensor:
        for step in steps:
            scores = step(texts, scores)
        return scores

    return process


def settings_of(processors: LogitsProcessorList) -> Hashable | None:
    """Stands for what a list of processors does; None where their settings cannot be compared."""
    known = tuple((type(each), tuple(sorted(vars(each).items()))) for each in processors)
    try:
        hash(known)
    except TypeError:
        return None
    return known if all(not isinstance(value, Tensor) for _, given in known for _, value in given) else None
