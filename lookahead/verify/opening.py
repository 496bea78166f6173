"""How the text of a call is verified, decided once a call.

==========  ===========================================================================================================
argmax      Each sequence follows the argmax down its own tree; nothing else is asked for.
own pace    Each sequence gets as far as its own tree goes; processors and stopping rules look at one at a time.
lockstep    All sequences write token t before any writes t+1, so that a processor or a rule of the caller's sees the
            batch as plain ``generate`` shows it. Sequences whose tree goes further wait.
lossy       Each sequence writes the longest path of candidates that a rule accepts; at their own pace.
==========  ===========================================================================================================
"""

from collections.abc import Callable
from typing import Literal

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from jacobi import LookaheadError
from lookahead.verify.processors import ROW_PROCESSORS, ROW_RULES, STATEFUL
from lookahead.verify.sampler import Sampler
from lookahead.verify.sequences import Sequences
from lookahead.verify.typical import LossyVerifier
from lookahead.verify.verifier import Limits, Verifier


def open_verifier(
    sequences: Sequences,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    limits: Limits,
    *,
    verification: Literal["exact", "rejection"],
    in_lockstep: bool = False,
    rule: Callable[[Tensor], Tensor] | None = None,
) -> Verifier:
    """The verifier of a call.

    Args:
        sequences: what is written into.
        processors, criteria, config: as ``generate`` prepared them.
        limits: how far the model lets sequences go.
        verification: ``"exact"``: plain decoding's own draws; ``"rejection"``: see :func:`jacobi.reject`.
        in_lockstep: the model can only advance all sequences together.
        rule: of a lossy decode (see :func:`check_lossy`): which tokens may be accepted where processed scores are
            ``[place, vocab]``; bool of the same shape. None = the text is exact.
    """
    sample = bool(config.do_sample) and rule is None
    others = _not_row_wise(processors, criteria)
    # Without an end token finished sequences write real tokens until the last one is done.
    end_together = sequences.pads or {type(each) for each in criteria} <= {MaxLengthCriteria}
    lockstep = rule is None and sequences.batch > 1 and (in_lockstep or bool(others) or not end_together)
    rejection = sample and verification == "rejection"
    sampler = Sampler(sequences, processors, config, sample=sample, rejection=rejection, lockstep=lockstep)
    if rule is None:
        return Verifier(sequences, criteria, limits, sampler)
    return LossyVerifier(sequences, criteria, limits, sampler, rule)


def check_lossy(
    batch: int, processors: LogitsProcessorList, criteria: StoppingCriteriaList, *, in_lockstep: bool
) -> None:
    """Refuse what a lossy decode cannot do, before any pass.

    Raises:
        LookaheadError: a processor keeps state from call to call; or, with several sequences, the model can only
            advance them together, or a processor or stopping rule may look at the whole batch.
    """
    if in_lockstep and batch > 1:
        raise LookaheadError(
            "Lossy acceptance writes each row of a batch at its own pace, and the rows of this model can only "
            f"advance together: got {batch} rows, expected one. Use acceptance='exact'."
        )
    for kind in {type(processor) for processor in processors} & STATEFUL:
        raise LookaheadError(
            f"Lossy acceptance asks processors along several candidate texts, and {kind.__name__} remembers the "
            "last one: expected processors without a state. Use acceptance='exact', or drop it."
        )
    others = _not_row_wise(processors, criteria)
    if batch > 1 and others:
        raise LookaheadError(
            f"Lossy acceptance writes each row of a batch at its own pace, and {others[0]} may look at "
            f"the whole batch: got {batch} rows, expected one, or transformers' own row-wise processors and "
            "stopping rules. Decode one row at a time, or use acceptance='exact'."
        )


def _not_row_wise(processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> list[str]:
    """Names of the processors and stopping rules that may look at the whole batch."""
    others = {type(processor) for processor in processors} - ROW_PROCESSORS
    return sorted(kind.__name__ for kind in others | ({type(rule) for rule in criteria} - ROW_RULES))
