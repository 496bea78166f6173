"""A request on its way through the engine, what it is told, and its answers' texts on their way to the client."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from lookahead.generation.watch import Pass
from lookahead.pieces import PieceStreamer
from lookahead.scheduling import Ticket
from lookahead.serve.errors import client_left
from lookahead.serve.plans import LogProbs, RequestPlan
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
    """A request on its way, from an ``address``; ``tell`` is called from the engine's thread."""

    def __init__(self, plan: RequestPlan, tell: Listener, address: str = "") -> None:
        self.plan, self.tell, self.address = plan, tell, address
        self.client = address, plan.request.user
        self.begun = 0  # answers that were begun
        self.begin = 0.0  # when the first of them was
        self.tasks: dict[Ticket, AnswerStream] = {}  # answers that are being written
        self.answers: list[Answer] = []  # that are done
        self._ended: Exception | None = None

    def cancel(self, reason: Exception | None = None) -> None:
        """End it at its next pass, or leave it out where it has not begun; ``reason`` is what it is told."""
        self._ended = self._ended or reason or client_left()

    def check(self) -> None:
        if self._ended is not None:
            raise self._ended


class AnswerStream(PieceStreamer):
    """Tells a job of an answer's text as it is written, and ends the call when nobody waits for it."""

    def __init__(self, job: Job, index: int, tokenizer: Any) -> None:
        super().__init__(job.plan.tokenizer or tokenizer, job.plan.request.stops)
        self._job, self.index = job, index
        self.logs = None if job.plan.logprobs is None else LogProbs(job.plan.logprobs)
        self._tokens: list[dict[str, Any]] = []  # not told yet
        self._passes = 0
        self.drafts = 0  # passes that had drafted tokens to score
        self._begin = perf_counter()

    def see(self, record: Pass) -> None:
        self._job.check()
        super().see(record)
        self._passes = record.index + 1
        self.drafts += len(record.rows[0].tokens) > 1

    def tell(self, piece: str, drafted: bool = False, source: str = "") -> None:
        self._job.check()
        super().tell(piece)
        self._tokens.append({"text": piece, "drafted": drafted, "source": source})
        if piece:
            tokens, self._tokens = [token for token in self._tokens if token["text"]], []
            speed = self.count / max(1e-9, perf_counter() - self._begin)
            self._job.tell(Piece(self.index, piece, tokens, self._passes or self.count, speed))
