"""Which of transformers' logits processors and stopping rules may be run row by row, or on scores alone."""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors_module
from transformers.generation import stopping_criteria as rules


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
    """Names of the processors and stopping rules that may look at the whole batch."""
    others = {type(processor) for processor in processors} - ROW_PROCESSORS
    return sorted(kind.__name__ for kind in others | ({type(rule) for rule in criteria} - ROW_RULES))


def warp_of(processors: LogitsProcessorList) -> dict[str, Any]:
    """What the usual warpers do to scores: temperature, top_k, top_p and min_p, those that are there."""
    names = ("temperature", "top_k", "top_p", "min_p")
    warpers = [each for each in processors if type(each) in PREFIX_FREE]
    given = {name: getattr(each, name) for each in warpers for name in names if hasattr(each, name)}
    return {name: value for name, value in given.items() if isinstance(value, int | float)}


def for_row(processors: LogitsProcessorList, row: int, batch: int) -> Processing:
    """The processors as they treat one row: what they hold for every row of the batch is cut down to it."""
    mine = LogitsProcessorList()
    for processor in processors:
        ignored = getattr(processor, "prompt_ignore_length", None)
        if batch > 1 and isinstance(ignored, Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = ignored[row : row + 1]
        mine.append(processor)
    return direct(mine)


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
