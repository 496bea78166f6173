"""A request on its way through the engine, and what it is told."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lookahead.serve.plans import Plan
from lookahead.stats import DecodingStats


class Cancelled(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class Piece:
    """A bit of an answer's text, with what is known of its tokens: text, whether it was drafted, and the source."""

    index: int
    text: str
    tokens: list[dict[str, Any]] = field(default_factory=list)
    passes: int = 0
    tokens_per_second: float = 0.0


@dataclass
class Answer:
    """One answer when it is done.

    Attributes:
        tokens: all that were written, those of a stop string included.
        drafts: passes that had drafted tokens to score.
        text: what is shown, cut before a stop string.
        logprobs: of the tokens that the text has begun with: as many as are shown.
    """

    index: int
    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    finish: str  # "stop" or "length"
    stats: DecodingStats
    drafts: int = 0
    text: str = ""
    logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None


Told = Callable[[Piece | Answer | BaseException | None], None]  # None = all answers are done


class Job:
    """A request on its way. ``tell`` is called from the engine's thread."""

    def __init__(self, plan: Plan, tell: Told) -> None:
        self.plan, self.tell = plan, tell
        self.begun = 0  # answers that were begun
        self.begin = 0.0  # when the first of them was
        self.tasks: list[Any] = []  # answers that are being written
        self._ended: Exception | None = None

    def cancel(self, reason: Exception | None = None) -> None:
        """End it at its next pass, or leave it out where it has not begun; ``reason`` is what it is told."""
        self._ended = self._ended or reason or Cancelled()

    def check(self) -> None:
        if self._ended is not None:
            raise self._ended
