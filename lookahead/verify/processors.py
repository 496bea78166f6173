"""Which of transformers' logits processors and stopping rules may be run row by row, or on scores alone."""

import copy
from collections.abc import Callable

from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processors_module
from transformers.generation import stopping_criteria as criteria_module

# Processors that look at nothing but the scores.
_PREFIX_FREE = (
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "LogitNormalization",
    "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
)
# Processors that are given the row's prefix as well.
_WITH_PREFIX = (
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
)


def _processors(names: tuple[str, ...]) -> frozenset[type]:
    return frozenset(getattr(processors_module, name) for name in names if hasattr(processors_module, name))


PREFIX_FREE = _processors(_PREFIX_FREE)
# Processors and rules of transformers that treat each row on its own, whatever its number in the batch.
ROW_PROCESSORS = PREFIX_FREE | _processors(_WITH_PREFIX)
# Processors that keep something of the prefix they were given last.
STATEFUL = _processors(("SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"))
ROW_RULES = frozenset(
    getattr(criteria_module, name)
    for name in ("EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria")
)
SIMPLE_RULES = frozenset((criteria_module.EosTokenCriteria, criteria_module.MaxLengthCriteria))


Processing = Callable[[Tensor, Tensor], Tensor]  # (texts [row, token], scores [row, vocab]) -> scores


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
    if (
        type(processors) is not LogitsProcessorList
        or not {type(processor) for processor in processors} <= ROW_PROCESSORS
    ):
        return processors
    steps = tuple(processors)

    def process(texts: Tensor, scores: Tensor) -> Tensor:
        for step in steps:
            scores = step(texts, scores)
        return scores

    return process
