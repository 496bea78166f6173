"""The self-test of a model, put off until a draft promises more than the test costs.

The test takes a dozen plain passes' time, which is a quarter of a short text. Plain passes do not need it where the
record says that the model's class is decoded exactly, so a model of transformers' own is tested right before its first
tree. How much a tree has to promise until then is decided as one decides between renting and buying: the test may cost
what could be saved in the tokens still to come, or in as many as were already written without it.
"""

import math
import threading
import weakref
from collections.abc import Callable

import transformers
from transformers import PreTrainedModel

from lookahead.models.conformance import recorded_version
from lookahead.models.familiar import changed, unfamiliar
from lookahead.support.self_test import is_tested, tree_error

_COST = 12.0  # passes over one node that the test is taken to cost; measured 8 to 13
_HOPELESS = 2 * _COST  # tokens, with those written before, whose passes a draft would have to halve to pay for the test
_PROBES_AFTER = 512  # tokens written without the test, after which a draft may be tried only to learn what it brings

_untested: "weakref.WeakKeyDictionary[PreTrainedModel, int]" = weakref.WeakKeyDictionary()  # tokens written
_untested_lock = threading.Lock()


def can_wait(model: PreTrainedModel) -> bool:
    """Whether plain passes over an untested model are known to be exact, so that only trees need the self-test.

    That is so for code that was found to take trees in this version of transformers, with nobody's changes on it, for
    models of text alone whose passes do not change with its length.
    """
    if is_tested(model) or recorded_version() != transformers.__version__:
        return False
    return unfamiliar(model) is None and changed(model) is None


def too_short(model: PreTrainedModel, new_tokens: float) -> bool:
    """Whether a call ends before it is likely that a draft pays for the test, which waits: no drafts are needed at all.

    Args:
        model: any model.
        new_tokens: most tokens that the call writes.
    """
    return new_tokens + _untested_tokens(model) <= _HOPELESS and can_wait(model)


def wrote_untested(model: PreTrainedModel, tokens: int) -> None:
    """Take in that so many tokens were written without the test."""
    with _untested_lock:
        _untested[model] = _untested.get(model, 0) + tokens


def _untested_tokens(model: PreTrainedModel) -> int:
    with _untested_lock:
        return _untested.get(model, 0)


class PostponedTest:
    """One call's waiting for the self-test.

    Args:
        model: for which :func:`can_wait` is true.
        new_tokens: most tokens that the call writes.
        failed: is told why the model cannot be given a tree, if that is what the test says.
    """

    def __init__(self, model: PreTrainedModel, new_tokens: int, failed: Callable[[str], None]) -> None:
        self._model = model
        self._new_tokens = new_tokens
        self._failed = failed
        self._before = _untested_tokens(model)

    @property
    def probes(self) -> bool:
        """Whether enough was written without a draft to try one that does not seem to pay."""
        return self._before >= _PROBES_AFTER

    def gain(self, written: int) -> float:
        """The gain of speed that a draft has to promise after so many tokens, for the test to pay."""
        tokens = max(0, self._new_tokens - written) + self._before
        return math.inf if tokens <= _COST else tokens / (tokens - _COST)

    def passes(self) -> bool:
        """Run the test."""
        error = tree_error(self._model)
        if error is not None:
            self._failed(error)
        return error is None

    def close(self, written: int) -> None:
        """The call has ended without the test, after so many tokens."""
        wrote_untested(self._model, written)
