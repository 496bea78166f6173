"""From a request to what ``generate`` is asked for, with everything checked that can be checked beforehand."""

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from lookahead.chat_format import end_tokens, sampling_of, turns, written
from lookahead.pieces import Pieces
from lookahead.serve.bodies import MOST_VALUES, ChatRequest, CompletionRequest, Request, read, text_of
from lookahead.serve.errors import ApiError
from lookahead.serve.tools import Reader, ToolTemplate, each_text

_CHARACTERS = 16  # of a text for each token of the context: of a longer one, so many are looked at first
_BREAK = "\u200b"  # of no width, within the text of a special token
_LEAST = -9999.0  # log probability of what is impossible, for which JSON has no number
SpecialTokens = Literal["escape", "refuse", "allow"]


@dataclass(frozen=True)
class Limits:
    """Limits of a server's requests.

    Attributes:
        context: tokens of prompt and answer together; None = the model says nothing.
        new_tokens: the most that are written where a request does not say how many.
        queue: requests that may wait; further ones are told to come back.
        body: bytes of a body.
        timeout: seconds that a request may take, waiting included.
        client_timeout: seconds that a client may take to send its request, or to read what was written.
        special_tokens: of the model in the messages of a chat: they are broken up, refused, or mean what they say.
    """

    context: int | None = None
    new_tokens: int = 1024
    queue: int = 32
    body: int = 8 << 20
    timeout: float = 600.0
    client_timeout: float = 60.0
    special_tokens: SpecialTokens = "escape"


@dataclass(frozen=True)
class RequestPlan:
    """A request, ready to be decoded: one answer after the other, in the order of ``prompts``, n of each."""

    prompts: list[list[int]]
    room: list[int]  # tokens that each prompt's answers may have
    settings: dict[str, Any]  # of ``generate``
    request: Request = field(default_factory=Request)
    seed: int = 0
    references: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None  # how many alternatives; None = no log probabilities
    echo: bool = False
    grammar: dict[str, Any] = field(default_factory=dict)  # of a :class:`.Grammar`; empty = answers follow none
    reader: Callable[[], Reader] = Reader  # makes one for each answer
    tokenizer: Any = None  # by which answers are read as text; None = the model's

    @property
    def count(self) -> int:
        """Number of answers."""
        return len(self.prompts) * self.request.n


class RequestPlanner:
    """Makes plans for one model."""

    def __init__(self, model: Any, tokenizer: Any, limits: Limits, template: str | None = None) -> None:
        self._model, self._tokenizer, self.limits, self._template = model, tokenizer, limits, template
        self._vocab_size = model.get_input_embeddings().weight.shape[0]
        self._tools = ToolTemplate(tokenizer, template)
        self._ends, marks = turns(model, tokenizer, template)
        texts = "|".join(re.escape(text) for text in marks.values() if text)
        self._mark = re.compile(f"(?={texts or '(?!)'}).", re.DOTALL)  # the first character of one
        pairs = ((token, tokenizer(self._broken(text), add_special_tokens=False)) for token, text in marks.items())
        self._sticks = any(token in ids["input_ids"] for token, ids in pairs if token != tokenizer.unk_token_id)

    def plan(self, raw: bytes, chat: bool, name: str) -> RequestPlan:
        """The plan of a request for the model of that name, by its body."""
        kind: type[ChatRequest | CompletionRequest] = ChatRequest if chat else CompletionRequest
        request = read(raw, kind, max(MOST_VALUES, 2 * (self.limits.context or 0)))
        if request.model not in (None, name):
            told = f"The model {request.model[:100]!r} does not exist here: this server has {name!r}."
            raise ApiError(told, 404, code="model_not_found", param="model")
        return self.chat(request) if isinstance(request, ChatRequest) else self.completion(request)

    def chat(self, request: ChatRequest) -> RequestPlan:
        """The plan of a conversation's next answer."""
        messages = [message.as_text() for message in request.messages]
        tools = self._tools.tools(messages, request)
        prompt = self._conversation(messages, tools)
        most = request.max_completion_tokens or request.max_tokens
        if request.top_logprobs and not request.logprobs:
            raise ApiError("top_logprobs needs logprobs: true.", param="top_logprobs")
        calls = [("tools", self._tools.grammar(tools, request))] if tools else []
        plan = self._plan(request, [prompt], most, request.top_logprobs if request.logprobs else None, calls=calls)
        made = self._tools
        return replace(plan, reader=made.reader(tools, prompt, request), tokenizer=made.tokenizer) if tools else plan

    def completion(self, request: CompletionRequest) -> RequestPlan:
        """The plan of a prompt's continuation; OpenAI's default are 16 tokens."""
        if request.echo and request.logprobs is not None:
            told = "logprobs are of the answer's tokens alone, and echo adds the prompt. Leave one of them out."
            raise ApiError(told, param="echo", code="unsupported_parameter")
        prompt: Any = request.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if len(prompt) > self.limits.queue:
            raise ApiError(f"prompt holds {len(prompt)} texts: at most {self.limits.queue}.", param="prompt")
        if request.best_of not in (None, 1, request.n):
            raise ApiError("best_of is not supported. Leave it out.", param="best_of", code="unsupported_parameter")
        prompts = [self._ids(each) if isinstance(each, str) else each for each in prompt]
        if any(not 0 <= token < self._vocab_size for ids in prompts for token in ids):
            raise ApiError(f"prompt holds token ids outside of 0 to {self._vocab_size - 1}.", param="prompt")
        return replace(self._plan(request, prompts, request.max_tokens or 16, request.logprobs), echo=request.echo)

    def _conversation(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """The prompt of messages and tools, whose texts are text: no part of one ends it, or begins another."""
        change = str if self.limits.special_tokens == "allow" else self._broken
        talk, ours = [each_text(said, change) | {"role": said["role"]} for said in messages], each_text(tools, change)
        if (talk, ours) != (messages, tools) and (self._sticks or self.limits.special_tokens == "refuse"):
            told = "A message holds a special token of the model: expected text alone. Leave it out."
            raise ApiError(told, param="messages", code="special_token")
        text, special = written(self._tokenizer, talk, self._template, tools=ours)
        return self._ids(text, special, "messages")

    def _broken(self, text: str) -> str:
        return self._mark.sub(rf"\g<0>{_BREAK}", text)

    def _ids(self, text: str, special: bool = True, param: str = "prompt") -> list[int]:
        """The tokens of a text; one that cannot fit is not read to its end."""
        _check_text(text)
        context = self.limits.context
        if context is not None and len(text) > 2 * (some := _CHARACTERS * context):
            least = len(self._tokenizer(text[:some], add_special_tokens=special)["input_ids"]) - 1
            if least > context:
                raise self._too_long(f"more than {least} in the prompt", param)
        return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def _plan(
        self, request: Request, prompts: list[list[int]], most: int | None, logprobs: int | None, calls: Any = ()
    ) -> RequestPlan:
        if not prompts or not all(prompts):
            raise ApiError("The prompt is empty: expected at least one token.", param="prompt")
        references: tuple[tuple[int, ...], ...] = ()
        if request.prediction is not None:
            text = text_of(request.prediction.content)
            _check_text(text)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            references = (tuple(ids),) if ids else ()
        room = [self._room(len(ids), most, request) for ids in prompts]
        if request.min_tokens > min(room):
            raise ApiError(f"min_tokens is {request.min_tokens}: the answer may have {min(room)}.", param="min_tokens")
        if any(not stop for stop in request.stops):
            raise ApiError("stop holds an empty text.", param="stop")
        _check_text(*request.stops)
        seed = secrets.randbits(62) if request.seed is None else request.seed
        settings = self._settings(request)
        ends = settings.get("eos_token_id") or end_tokens(self._model) or None
        grammar = request.grammar(self._tokenizer, ends, *calls)
        return RequestPlan(prompts, room, settings, request, seed, references, logprobs, grammar=grammar)

    def _room(self, length: int, most: int | None, request: Request) -> int:
        context = self.limits.context
        if context is None:
            return most or self.limits.new_tokens
        if length + (most or 1) > context:
            asked = f"{length} in the prompt and {most or 1} of the answer"
            text, wide = "prompt", "max_tokens"
            if isinstance(request, ChatRequest):
                text, wide = "messages", "max_completion_tokens" if request.max_completion_tokens else wide
            raise self._too_long(asked, wide if length < context else text)
        return most or min(self.limits.new_tokens, context - length)

    def _too_long(self, asked: str, param: str) -> ApiError:
        told = f"This model's context holds {self.limits.context} tokens: got {asked}. Shorten one of them."
        return ApiError(told, code="context_length_exceeded", param=param)

    def _settings(self, request: Request) -> dict[str, Any]:
        settings = sampling_of(request)
        if request.logit_bias:
            settings["sequence_bias"] = {(self._token(name),): bias for name, bias in request.logit_bias.items()}
        if settings.get("top_k") == -1:
            settings["top_k"] = 0
        if request.min_tokens:
            settings["min_new_tokens"] = request.min_tokens
        if self._ends and isinstance(request, ChatRequest):
            settings["eos_token_id"] = self._ends
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


class LogProbs(LogitsProcessor):
    """The log probability of each token of an answer by the model's own logits, with the likeliest ``most`` beside it;
    known when the next token is chosen, so that no logits are kept."""

    lookahead_first = True  # before any other processor

    def __init__(self, most: int) -> None:
        self._most = most
        self._logs: Tensor | None = None  # of the next token
        self._found: list[tuple[float, list[tuple[int, float]]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._logs is not None:
            self._add(int(input_ids[0, -1]))
        self._logs = torch.log_softmax(scores[0].float(), dim=-1)
        return scores

    def all(self, tokens: Sequence[int]) -> list[tuple[float, list[tuple[int, float]]]]:
        """Those of a whole answer, once."""
        for token in tokens[len(self._found) :]:
            self._add(token)
        return self._found

    def _add(self, token: int) -> None:
        assert self._logs is not None  # a token was chosen by them
        best = torch.topk(self._logs, self._most)
        others = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        log = max(_LEAST, float(self._logs[token]))
        self._found.append((log, [(other, max(_LEAST, log)) for other, log in others]))


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
