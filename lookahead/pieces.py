"""A text as it is streamed: whole characters, and nothing that may turn out to be a stop string."""

import re
from collections import deque
from collections.abc import Sequence
from itertools import compress, takewhile
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation.streamers import BaseStreamer

LETTERS: dict[str, int] = {letter: byte for byte, letter in bytes_to_unicode().items()}  # GPT-2's, for bytes
_CONTEXT = 6  # tokens before a piece that decide about its spaces
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Pieces:
    """Turns tokens into pieces of text, whose sum is the answer: it ends before the first stop string.

    The three bytes of a euro sign, a token each, and a stop string "ab" whose first half comes to nothing::

        token    E2    82    AC    "a"   "c"
        piece    ""    ""    "€"   ""    "ac"

    Special tokens are not shown, but stop strings may hold them.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = list(stops)
        self._tokens: list[int] = []
        self._read = 0  # tokens whose text is known: the text so far ends with a whole character
        self._special = self._trail = 0  # tokens up to the last special one, characters of those without others between
        self._held = ""  # may be the beginning of a stop string
        self._marks: list[bool] = []  # of its characters: whether they are shown
        self.stopped = False

    def add(self, token: int) -> str:
        """What can be shown now that a token was written."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        if self._stops and (special := special_text(self._tokenizer, token)):
            parts = text_of(self._tokenizer, self._tokens[max(self._read, self._special) : -1])
            self._special, self._trail = len(self._tokens), len(special) + (0 if parts else self._trail)
            return self._shown(parts + special, self._trail)
        piece = self._decoded()
        if not piece or piece.endswith(_UNFINISHED):
            return ""
        self._read = len(self._tokens)
        return self._shown(piece)

    def close(self) -> str:
        """What is left when the text is over."""
        if self.stopped:
            return ""
        shown = self._shown(self._decoded())
        held, self._held = "".join(compress(self._held, self._marks)), ""
        return shown if self.stopped else shown + held

    def _decoded(self) -> str:
        start = max(0, self._read - _CONTEXT)
        before = text_of(self._tokenizer, self._tokens[start : self._read])
        return text_of(self._tokenizer, self._tokens[start:])[len(before) :]

    def _shown(self, piece: str, trail: int = 0) -> str:
        """What can be shown now that a piece was written; ``trail`` characters of special tokens at its end hide it."""
        text, marks = self._held + piece, self._marks + [not trail] * len(piece)
        end = min((place for place in map(text.find, self._stops) if place >= 0), default=None)
        self.stopped = end is not None
        if end is None:
            end = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held, self._marks = text[end:], marks[end:]
        parts = self._decoded() if self.stopped and len(self._held) <= trail else ""  # of a character without its end
        return "".join(compress(text[:end], marks)) + parts


class PieceStreamer(BaseStreamer):
    """Streamer of one text in pieces, each told with whether its last token was drafted, and by which source.

    Attributes:
        text: that was told.
        count: of tokens written.
    """

    lookahead_draws_nothing = True

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._pieces = Pieces(tokenizer, stops)
        self._known: deque[tuple[bool, str]] = deque()  # of tokens that a pass has written: drafted, source
        self._prompt_seen = False
        self.text, self.count = "", 0

    def see(self, record: Any) -> None:
        """Take in a :class:`lookahead.generation.watch.Pass`, before its tokens are put."""
        row = record.rows[0]
        self._known.extend((True, row.sources[node]) for node in row.accepted[1 : len(row.written)])
        self._known.append((False, ""))

    def put(self, value: Any) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in value.tolist():
            self.count += 1
            self.tell(self._pieces.add(token), *(self._known.popleft() if self._known else ()))

    def end(self) -> None:
        """Nothing: :meth:`close` is called when the call has succeeded."""

    def close(self) -> bool:
        """Tell the rest; whether a stop string ended the text."""
        self.tell(self._pieces.close())
        return self._pieces.stopped

    def tell(self, piece: str, drafted: bool = False, source: str = "") -> None:
        """Tell a piece, which may be empty."""
        self.text += piece


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Tokens as text, without special tokens."""
    settings = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(list(tokens), **settings)) if tokens else ""


def special_text(tokenizer: Any, token: int) -> str:
    """What a token stands for that texts do not show; empty for any other."""
    return "" if text_of(tokenizer, [token]) else str(tokenizer.decode([token], skip_special_tokens=False))


def tokens_of(tokenizer: Any, tokens: Sequence[int], text: str) -> int:
    """How many of the first tokens it takes until their text begins with ``text``, as that of all of them does."""
    count = len(tokens)
    while count and text_of(tokenizer, tokens[: count - 1]).startswith(text):
        count -= 1
    return count


def starts_of(tokenizer: Any, tokens: Sequence[int]) -> list[int]:
    """Where in the text of all tokens each of them begins; every part of a character does where that begins."""
    whole = text_of(tokenizer, tokens)
    starts, read, place = list[int](), 0, 0  # so many tokens are so many characters
    for count in range(len(tokens)):
        start = max(0, read - _CONTEXT)
        piece = text_of(tokenizer, tokens[start:count])[len(text_of(tokenizer, tokens[start:read])) :]
        right = (whole[at : at + 1] == letter for at, letter in enumerate(piece, start=place))
        starts.append(place + len(list(takewhile(bool, right))))
        if piece and not piece.endswith(_UNFINISHED):
            read, place = count, place + len(piece)
    return starts


def bytes_of(tokenizer: Any, token: int) -> bytes:
    """The bytes that a token stands for, in byte-level and byte-fallback vocabularies maybe a part of a character."""
    name, text = str(tokenizer.convert_ids_to_tokens(token)), text_of(tokenizer, [token])
    if _UNFINISHED in text:
        if re.fullmatch("<0x[0-9A-F]{2}>", name):
            return bytes.fromhex(name[3:5])
        if all(letter in LETTERS for letter in name):
            return bytes(LETTERS[letter] for letter in name)
    return text.encode()


def _overlap(text: str, stop: str) -> int:
    """The most characters at a text's end with which a stop string begins."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
