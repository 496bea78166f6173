"""Texts that follow a grammar: JSON of a schema, a regular expression, a choice. What it forces need not be guessed."""

import json
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from jacobi import LookaheadError
from lookahead._per_model import PerModel
from lookahead.sources.forced import ForcedSource
from lookahead.sources.vocabularies import is_tokenizer

# JSON as Python's json.dumps writes it, which models have read most of. Spaces where any may stand force nothing.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammar(LogitsProcessor):
    """Lets a model write nothing but texts of a grammar: a logits processor for any ``generate``, which adds nothing to
    what the model wants but takes away what may not follow. With ``use_lookahead=True`` the text is the same, and what
    the grammar forces (keys, punctuation) is drafted whole, the source ``"grammar"``::

        schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
        grammar = lookahead.Grammar(tokenizer, json_schema=schema)
        model.generate(**inputs, logits_processor=[grammar], use_lookahead=True)

    The grammar begins where a call's prompts end, and lets a text end where it is whole. One object serves call after
    call, but no two at a time, and no prompt that goes on where its last text stood: make another one for that, which
    costs little, since compiled grammars are kept. Needs ``llguidance``.

    Args:
        tokenizer: the model's, a fast one.
        json_schema: a JSON schema, as an object or as text.
        json_object: any JSON object.
        regex: a regular expression that the whole text has to match, in the syntax of Rust's ``regex``.
        grammar: a context-free grammar, in llguidance's dialect of Lark or in GBNF.
        choice: the texts that there are.
        eos_token_id: what ends a text; None = the tokenizer's. Give ``model.generation_config.eos_token_id`` where that
            is another one.

    Raises:
        LookaheadError: not one of these is given, it cannot be compiled, or llguidance is missing.
    """

    lookahead_row_wise = True  # what may follow a text depends on that text alone

    def __init__(
        self,
        tokenizer: Any,
        *,
        json_schema: Any = None,
        json_object: bool = False,
        regex: str | None = None,
        grammar: str | None = None,
        choice: Sequence[str] | None = None,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> None:
        schema = {"type": "object"} if json_object else None
        kinds = {"json_object": schema, "json_schema": json_schema, "regex": regex, "grammar": grammar}
        kinds["choice"] = choice
        given = {kind: what for kind, what in kinds.items() if what is not None}
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise LookaheadError(f"A grammar is given as one of {', '.join(kinds)}: got {got}.")
        if not is_tokenizer(tokenizer):
            raise LookaheadError(f"Grammar() takes the model's tokenizer first: got a {type(tokenizer).__name__}.")
        ends = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
        key = tuple(ends) if isinstance(ends, list | tuple) else (ends,)
        kept = _compilers.of(tokenizer)
        compiler = kept[key] = kept.get(key) or _Compiler(tokenizer, key)
        ((kind, what),) = given.items()
        self._matcher, self._tokenizer = compiler.compiled(kind, _text(kind, what)), compiler.tokenizer
        self._walks: list[_Walk] = []
        self._prompts: set[bytes] = set()
        self._begin = self._most = 0  # tokens of the prompts, and of the longest text that was seen

    def lookahead_source(self, row: Any) -> ForcedSource:
        """The source of what is forced in one sequence."""
        return ForcedSource(self._matcher.deep_copy(), self._tokenizer)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answers = self._answers(input_ids.cpu().numpy())
        allowed = np.zeros((len(answers), scores.shape[1]), bool)
        for line, answer in zip(allowed, answers, strict=True):
            walk = min(self._walks, key=lambda walk: walk.way(answer))
            if walk.go(answer):
                bits = np.frombuffer(walk.matcher.compute_bitmask(), np.uint8)
                known = np.unpackbits(bits, count=min(8 * len(bits), len(line)), bitorder="little")
                line[: len(known)] = known
            elif walk.matcher.is_error():
                raise LookaheadError(f"llguidance gives this grammar up: {walk.matcher.get_error()[:200]}.")
            else:  # it has ended, or was never one
                line[:] = True
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)

    def _answers(self, texts: np.ndarray) -> list[list[int]]:
        """What follows the prompts. Texts that do not go on where those before stood are prompts of a new call."""
        width = texts.shape[1]
        prompts = [text[: self._begin].tobytes() for text in texts]
        if not self._begin < width <= self._most + 1 or not self._prompts.issuperset(prompts):
            if width != self._begin or self._most > width:
                self._prompts.clear()
                self._begin = self._most = width
            self._prompts.update(text.tobytes() for text in texts)
            rows = max(len(texts), len(self._prompts))
            self._walks += [_Walk(self._matcher.deep_copy()) for _ in range(rows - len(self._walks))]
        self._most = max(self._most, width)
        return [text[self._begin :].tolist() for text in texts]


def _text(kind: str, what: Any) -> str:
    """A grammar as text; what is no text is JSON."""
    texts = what if kind == "choice" and isinstance(what, list | tuple) and what else [what]
    if not kind.startswith("json") and not all(isinstance(each, str) for each in texts):
        raise LookaheadError(f"{kind} must be {'texts' if kind == 'choice' else 'text'}: got {what!r:.80}.")
    try:
        return what if isinstance(what, str) and kind != "choice" else json.dumps(texts if kind == "choice" else what)
    except (RecursionError, TypeError, ValueError) as error:
        raise LookaheadError(f"{kind} must be JSON, or text: {error}.") from error


class _Walk:
    """A place in the grammar: a matcher, and the tokens that it has taken, of which it can take some back."""

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher
        self._tokens: list[int] = []

    def _shared(self, answer: Sequence[int]) -> int:
        if self._tokens == answer[: len(self._tokens)]:
            return len(self._tokens)
        pairs = zip(self._tokens, answer, strict=False)
        return next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), len(answer))

    def way(self, answer: Sequence[int]) -> int:
        """Tokens to take back and to take on the way to an answer."""
        return len(self._tokens) + len(answer) - 2 * self._shared(answer)

    def go(self, answer: Sequence[int]) -> bool:
        """Go to where an answer ends; False if that is outside of the grammar."""
        shared = self._shared(answer)
        if shared < len(self._tokens):
            self.matcher.rollback(len(self._tokens) - shared)
        taken = self.matcher.try_consume_tokens(answer[shared:])
        self._tokens[shared:] = answer[shared : shared + taken]
        return len(self._tokens) == len(answer)


class _Compiler:
    """Compiled grammars of one tokenizer, whose texts end with certain tokens."""

    def __init__(self, tokenizer: Any, ends: tuple[int, ...]) -> None:
        try:
            self._library = import_module("llguidance")
            self.tokenizer = import_module("llguidance.hf").from_tokenizer(tokenizer, eos_token=list(ends))
        except ImportError as error:
            raise LookaheadError(
                "Grammars need llguidance, which is missing: pip install lookahead-decoding[grammar]."
            ) from error
        except (TypeError, ValueError) as error:
            raise LookaheadError(
                f"{type(tokenizer).__name__} ending texts by {ends} has no grammars: {error}"
            ) from error
        self.compiled = lru_cache(self._compile)

    def _compile(self, kind: str, text: str) -> Any:
        matchers = self._library.LLMatcher
        try:
            if kind.startswith("json"):
                grammar = matchers.grammar_from_json_schema(text, defaults=_JSON)
            else:
                grammar = self._library.grammar_from(kind, text)
            wrong = matchers.validate_grammar(grammar, self.tokenizer)
        except (ValueError, TypeError) as error:
            wrong = str(error)
        if wrong:
            raise LookaheadError(f"The {kind} cannot be compiled: {' '.join(wrong.split())[:300]}. Got {text[:100]!r}.")
        return matchers(self.tokenizer, grammar, log_level=0)


_compilers: PerModel[dict[Any, _Compiler]] = PerModel(dict)
