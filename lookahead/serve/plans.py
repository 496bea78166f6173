"""From a request to what ``generate`` is asked for, with everything checked that can be checked beforehand."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from lookahead.chat_format import render
from lookahead.pieces import Pieces
from lookahead.serve.bodies import ChatRequest, CompletionRequest, Request, text_of
from lookahead.serve.errors import ApiError


@dataclass(frozen=True)
class Limits:
    """What a server allows.

    Attributes:
        context: tokens of prompt and answer together; None = the model says nothing.
        new_tokens: the most that are written where a request does not say how many.
        queue: requests that may wait; further ones are told to come back.
        body: bytes of a body.
        timeout: seconds that a request may take, waiting included.
    """

    context: int | None = None
    new_tokens: int = 1024
    queue: int = 32
    body: int = 8 << 20
    timeout: float = 600.0


@dataclass(frozen=True)
class Plan:
    """A request, ready to be decoded: one answer after the other, in the order of ``prompts``, n of each."""

    prompts: list[list[int]]
    n: int
    seed: int
    settings: dict[str, Any]  # of ``generate``
    penalties: tuple[float, float]  # for every occurrence, and for any
    stops: list[str]
    lookahead: bool
    references: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None  # how many alternatives; None = no log probabilities
    details: bool = False
    echo: bool = False
    room: list[int] = field(default_factory=list)  # tokens that each prompt's answers may have

    @property
    def count(self) -> int:
        """How many answers."""
        return len(self.prompts) * self.n


class Planner:
    """Makes plans for one model."""

    def __init__(self, model: Any, tokenizer: Any, limits: Limits, template: str | None = None) -> None:
        self._model, self._tokenizer, self.limits, self._template = model, tokenizer, limits, template
        self._vocab_size = model.get_input_embeddings().weight.shape[0]

    def chat(self, request: ChatRequest) -> Plan:
        """The plan of a conversation's next answer."""
        messages = [message.as_text() for message in request.messages]
        _check_text(*(message["content"] for message in messages))
        prompt = render(self._tokenizer, messages, self._template)
        most = request.max_completion_tokens or request.max_tokens
        if request.top_logprobs and not request.logprobs:
            raise ApiError("top_logprobs needs logprobs: true.", param="top_logprobs")
        return self._plan(request, [prompt], most, (request.top_logprobs or 0) if request.logprobs else None)

    def completion(self, request: CompletionRequest) -> Plan:
        """The plan of a prompt's continuation; OpenAI's default are 16 tokens."""
        if request.echo and request.logprobs is not None:
            told = "logprobs are of the answer's tokens alone, and echo adds the prompt. Leave one of them out."
            raise ApiError(told, param="echo", code="unsupported_parameter")
        prompt: Any = request.prompt
        if isinstance(prompt, str):
            prompts = [self._ids(prompt)]
        elif prompt and isinstance(prompt[0], str):
            prompts = [self._ids(text) for text in prompt]
        elif prompt and isinstance(prompt[0], int):
            prompts = [prompt]
        else:
            prompts = list(prompt)
        if len(prompts) > self.limits.queue:
            raise ApiError(f"prompt holds {len(prompts)} texts: at most {self.limits.queue}.", param="prompt")
        for ids in prompts:
            self._check_ids(ids)
        return self._plan(request, prompts, request.max_tokens or 16, request.logprobs, bool(request.echo))

    def _ids(self, text: str) -> list[int]:
        _check_text(text)
        return list(self._tokenizer(text)["input_ids"])

    def _check_ids(self, ids: Sequence[int]) -> None:
        if any(not 0 <= token < self._vocab_size for token in ids):
            raise ApiError(f"prompt holds token ids outside of 0 to {self._vocab_size - 1}.", param="prompt")

    def _plan(
        self, request: Request, prompts: list[list[int]], most: int | None, logprobs: int | None, echo: bool = False
    ) -> Plan:
        if not prompts or not all(prompts):
            raise ApiError("The prompt is empty: expected at least one token.", param="prompt")
        references: tuple[tuple[int, ...], ...] = ()
        if request.prediction is not None:
            text = text_of(request.prediction.content)
            _check_text(text)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            references = (tuple(ids),) if ids else ()
        if any(not stop for stop in request.stops):
            raise ApiError("stop holds an empty text.", param="stop")
        _check_text(*request.stops)
        return Plan(
            prompts,
            request.n or 1,
            secrets.randbits(62) if request.seed is None else request.seed,
            self._settings(request),
            (request.frequency_penalty or 0.0, request.presence_penalty or 0.0),
            request.stops,
            request.use_lookahead is not False,
            references,
            logprobs,
            request.lookahead is not None and request.lookahead.details,
            echo,
            [self._room(len(ids), most, request) for ids in prompts],
        )

    def _room(self, length: int, most: int | None, request: Request) -> int:
        context = self.limits.context
        if context is None:
            return most or self.limits.new_tokens
        if length + (most or 1) > context:
            asked = f"{length} in the prompt and {most or 1} of the answer"
            text, wide = "prompt", "max_tokens"
            if isinstance(request, ChatRequest):
                text, wide = "messages", "max_completion_tokens" if request.max_completion_tokens else wide
            raise ApiError(
                f"This model's context holds {context} tokens: got {asked}. Shorten one of them.",
                code="context_length_exceeded",
                param=wide if length < context else text,
            )
        return most or min(self.limits.new_tokens, context - length)

    def _settings(self, request: Request) -> dict[str, Any]:
        """Where neither a temperature nor anything else of sampling is given, the model's own defaults hold."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        settings: dict[str, Any] = {name: value for name in names if (value := getattr(request, name)) is not None}
        if request.temperature == 0.0:
            settings = {name: value for name, value in settings.items() if name == "repetition_penalty"}
            settings["do_sample"] = False
        elif request.temperature is not None or not settings.keys().isdisjoint(("top_p", "top_k", "min_p")):
            settings["do_sample"] = True
        if request.logit_bias:
            settings["sequence_bias"] = {(self._token(name),): bias for name, bias in request.logit_bias.items()}
        return settings

    def _token(self, name: str) -> int:
        if not name.isascii() or not name.isdigit() or len(name) > 9 or int(name) >= self._vocab_size:
            raise ApiError(f"logit_bias names {name[:40]!r}: expected token ids.", param="logit_bias")
        return int(name)


class Penalties(LogitsProcessor):
    """OpenAI's frequency and presence penalties: they are subtracted from the logits of tokens in the answer."""

    lookahead_row_wise = True  # it draws nothing, and keeps nothing

    def __init__(self, prompt_length: int, frequency: float, presence: float) -> None:
        self._from, self._frequency, self._presence = prompt_length, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[:, self._from :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0).to(scores.dtype)


class StopStrings(StoppingCriteria):
    """Ends a text that contains a stop string; asked after every token, as both loops do."""

    lookahead_row_wise = True  # it draws nothing, and sees one text

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._pieces = Pieces(tokenizer, stops)

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        self._pieces.add(int(input_ids[0, -1]))
        return torch.full((len(input_ids),), self._pieces.stopped, dtype=torch.bool, device=input_ids.device)


def _check_text(*texts: str) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError("A text holds half of a surrogate pair: expected whole characters.") from error
