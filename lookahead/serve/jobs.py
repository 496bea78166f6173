"""A request on its way through the engine, what it is told, and its answers' texts on their way to the client."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from transformers.generation.streamers import BaseStreamer

from lookahead.generation.watch import Pass
from lookahead.pieces import Pieces
from lookahead.serve.errors import client_left
from lookahead.serve.plans import RequestPlan
from lookahead.stats import DecodingStats


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


Listener = Callable[[Piece | Answer | BaseException | None], None]  # None = all answers are done


class Job:
    """A request on its way. ``tell`` is called from the engine's thread."""

    def __init__(self, plan: RequestPlan, tell: Listener) -> None:
        self.plan, self.tell = plan, tell
        self.begun = 0  # answers that were begun
        self.begin = 0.0  # when the first of them was
        self.tasks: list[Any] = []  # answers that are being written
        self.answers: list[Answer] = []  # that are done
        self._ended: Exception | None = None

    def cancel(self, reason: Exception | None = None) -> None:
        """End it at its next pass, or leave it out where it has not begun; ``reason`` is what it is told."""
        self._ended = self._ended or reason or client_left()

    def check(self) -> None:
        if self._ended is not None:
            raise self._ended


class AnswerStream(BaseStreamer):
    """Tells a job of its text as it is written, and ends the call when nobody waits for it."""

    lookahead_draws_nothing = True

    def __init__(self, job: Job, index: int, tokenizer: Any) -> None:
        self._job, self._index = job, index
        self._pieces = Pieces(tokenizer, job.plan.request.stops)
        self.text = ""
        self._known: deque[tuple[bool, str]] = deque()  # of tokens that a pass has written: drafted, source
        self._tokens: list[dict[str, Any]] = []  # not told yet
        self._prompt_seen = False
        self._passes = self._count = 0
        self.drafts = 0  # passes that had drafted tokens to score
        self._begin = perf_counter()

    def see(self, record: Pass) -> None:
        self._job.check()
        self._passes = record.index + 1
        row = record.rows[0]
        self.drafts += len(row.tokens) > 1
        sources = [row.sources[node] for node in row.accepted[1:]]
        bonus = len(row.written) - 1
        self._known.extend((place < bonus, sources[place] if place < bonus else "") for place in range(bonus + 1))

    def put(self, value: Any) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._job.check()
        for token in value.tolist():
            self._count += 1
            self._tell(self._pieces.add(token), *(self._known.popleft() if self._known else ()))

    def end(self) -> None:
        """Nothing: :meth:`close` is called when the call has succeeded."""

    def close(self) -> bool:
        """Tell the rest; whether a stop string ended the text."""
        self._tell(self._pieces.close())
        return self._pieces.stopped

    def _tell(self, text: str, drafted: bool = False, source: str = "") -> None:
        self._tokens.append({"text": text, "drafted": drafted, "source": source})
        if not text:
            return
        self.text += text
        tokens, self._tokens = [token for token in self._tokens if token["text"]], []
        speed = self._count / max(1e-9, perf_counter() - self._begin)
        passes = self._passes or self._count
        self._job.tell(Piece(self._index, text, tokens, passes, speed))
