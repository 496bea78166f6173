"""Answers in OpenAI's shapes: whole, in chunks, with log probabilities and usage."""

import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lookahead.pieces import bytes_of, starts_of
from lookahead.serve.jobs import Answer, Piece
from lookahead.serve.plans import RequestPlan
from lookahead.serve.tools import Reader
from lookahead.stats import DecodingStats


@dataclass
class Shape:
    """Makes the documents of one request; ``chat`` or plain completions."""

    model: str
    tokenizer: Any
    plan: RequestPlan
    chat: bool
    id: str = field(default_factory=partial(secrets.token_hex, 12))
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._readers = defaultdict[int, Reader](self.plan.reader)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        choices = []
        for answer in sorted(answers, key=lambda answer: answer.index):
            self._readers[answer.index].feed(answer.text, last=True)
            shown: dict[str, Any] = {"text": self.echo(answer.index) + answer.text}
            if self.chat:
                shown = {"message": {"role": "assistant"} | self._readers[answer.index].message() | {"refusal": None}}
            choices.append(self._ended(answer) | shown)
        return self._document(choices) | {"usage": self.usage(answers)}

    def echo(self, index: int) -> str:
        """Text before an answer: its prompt, if asked for."""
        if not self.plan.echo:
            return ""
        return str(self.tokenizer.decode(self.plan.prompts[index // self.plan.request.n], skip_special_tokens=True))

    def begin(self, index: int) -> dict[str, Any]:
        """The chunk that opens an answer."""
        return self._chunk({"index": index}, {"role": "assistant", "content": ""}, self.echo(index))

    def piece(self, piece: Piece) -> dict[str, Any]:
        """The chunk of a piece; empty where it may begin a call."""
        choice: dict[str, Any] = {"index": piece.index}
        if self.plan.request.lookahead.details:
            keys = {"tokens": piece.tokens, "passes": piece.passes, "pass": piece.passes - 1}
            choice["lookahead"] = keys | {"tokens_per_second": piece.tokens_per_second}
        delta = self._readers[piece.index].feed(piece.text)
        return self._chunk(choice, delta, piece.text) if delta or len(choice) > 1 else {}

    def end(self, answer: Answer, text: str | None) -> dict[str, Any]:
        """The chunk that closes an answer; with log probabilities it has all of the text."""
        delta = self._readers[answer.index].feed(text or "", last=True)
        return self._chunk(self._ended(answer), delta, text or "")

    def last(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The chunk with the usage alone."""
        return self._document([], ".chunk") | {"usage": self.usage(answers)}

    def usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Token counts; ``lookahead`` has what speculation did. As OpenAI has it, a prompt counts once however many
        answers it has, and so does what was cached of it when its first answer began; what answers wrote, and what of
        the prediction they did not, is the sum over all of them."""
        stats = sum((answer.stats for answer in answers), DecodingStats())
        written = sum(len(answer.tokens) for answer in answers)
        prompts = sum(map(len, self.plan.prompts))
        cached = sum(answer.cached_tokens for answer in answers if answer.index % self.plan.request.n == 0)
        predicted = sum(map(len, self.plan.references))
        accepted = [answer.stats.sources.get("reference", 0) for answer in answers]
        return {
            "prompt_tokens": prompts,
            "completion_tokens": written,
            "total_tokens": prompts + written,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(accepted),
                "rejected_prediction_tokens": sum(max(0, predicted - count) for count in accepted),
            },
            "lookahead": {
                "passes": stats.steps,
                "tokens_per_pass": written / stats.steps if stats.steps else 0.0,
                "drafted_tokens": stats.drafted,
                "accepted_tokens": stats.accepted,
                "acceptance_rate": stats.acceptance_rate,
                "sources": stats.sources,
                "plain": stats.plain,
            },
        }

    def _chunk(self, choice: dict[str, Any], delta: dict[str, Any], text: str) -> dict[str, Any]:
        shown: dict[str, Any] = {"delta": delta} if self.chat else {"text": text}
        empty = {"finish_reason": None, "logprobs": None}
        return self._document([empty | shown | choice], ".chunk")

    def _document(self, choices: list[dict[str, Any]], part: str = "") -> dict[str, Any]:
        kind = f"chat.completion{part}" if self.chat else "text_completion"
        head = {"id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}", "object": kind, "created": self.created}
        return head | {"model": self.model, "system_fingerprint": None, "choices": choices}

    def _ended(self, answer: Answer) -> dict[str, Any]:
        finish = "tool_calls" if answer.finish == "stop" and self._readers[answer.index].calls else answer.finish
        return {"index": answer.index, "finish_reason": finish, "logprobs": self._logprobs(answer)}

    def _logprobs(self, answer: Answer) -> dict[str, Any] | None:
        if answer.logprobs is None:
            return None
        tokens = answer.tokens[: len(answer.logprobs)]
        lines = list(zip(tokens, answer.logprobs, strict=True))
        if self.chat:
            content = [
                self._token(token, log) | {"top_logprobs": [self._token(*other) for other in others]}
                for token, (log, others) in lines
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._text(token) for token in tokens],
            "token_logprobs": [log for _, (log, _) in lines],
            "top_logprobs": [{self._text(other): log for other, log in others} for _, (_, others) in lines],
            "text_offset": starts_of(self.tokenizer, tokens),
        }

    def _token(self, token: int, log: float) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": log, "bytes": list(bytes_of(self.tokenizer, token))}

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
