"""A text as it is streamed: whole characters, and nothing that may turn out to be a stop string."""

from collections.abc import Sequence
from typing import Any

_CONTEXT = 6  # tokens before a piece that decide about its spaces
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_MOST_UNFINISHED = 8  # tokens of one character; what is longer is no character


class Pieces:
    """Turns tokens into pieces of text, whose sum is the answer: it ends before the first stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = list(stops)
        self._context: list[int] = []
        self._waiting: list[int] = []
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False

    def add(self, token: int) -> str:
        """What can be shown now that a token was written."""
        self._waiting.append(token)
        piece = self._decoded()
        if piece.endswith(_UNFINISHED) and len(self._waiting) < _MOST_UNFINISHED:
            return ""
        self._settle()
        return self._shown(piece)

    def close(self) -> str:
        """What is left when the text is over."""
        piece = self._decoded() if self._waiting else ""
        self._settle()
        shown = self._shown(piece)
        held, self._held = self._held, ""
        return shown if self.stopped else shown + held

    def _decoded(self) -> str:
        before = _text(self._tokenizer, self._context)
        return _text(self._tokenizer, self._context + self._waiting)[len(before) :]

    def _settle(self) -> None:
        self._context = (self._context + self._waiting)[-_CONTEXT:]
        self._waiting = []

    def _shown(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        found = [place for place in map(text.find, self._stops) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _text(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _overlap(text: str, stop: str) -> int:
    """The most characters at a text's end with which a stop string begins."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
