"""What a model has said in texts of its own, for calls and processes that come later, and files of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from jacobi import LookaheadError, Successors, TokenTree
from jacobi import Path as Walk
from lookahead._files import write_bytes
from lookahead.sources.successor_table import BEFORE, BEGIN, Context, SuccessorTable

MOST_ROWS = 3 << 16  # of a file, 40 MB at most; with 2**16 of the calls that use it they fill a table
_WIDTH = 32  # tokens of a row
_FORMAT = "1"
_SHAPES = {"contexts": 3, "tokens": _WIDTH, "logits": _WIDTH}


class MemoryFile(str):
    """The path of a file that was read when it was named: copies of a strategy do not read it again."""


@dataclass(frozen=True)
class Learned:
    """What a model said after contexts of three tokens, row by row as it wrote its texts.

    Attributes:
        contexts: ``[row, 3]``, int32, the last token last; -1 before a text's first token.
        tokens: the best next ones, best first, ``[row, rank]``.
        logits: theirs, less the best one's; ``-inf`` where there are fewer tokens. ``[row, rank]``, float16.
        weights: those that :class:`lookahead.draft.acceptance.Acceptance` learnt, by the sources that they belong to.
    """

    contexts: np.ndarray
    tokens: np.ndarray
    logits: np.ndarray
    weights: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.contexts)

    def __add__(self, other: "Learned") -> "Learned":
        """Both, of which ``other`` is the newer one; the oldest rows go where there are too many."""
        rows = {name: np.concatenate([getattr(self, name), getattr(other, name)])[-MOST_ROWS:] for name in _SHAPES}
        return Learned(**rows, weights={**self.weights, **other.weights})

    def save(self, file: Path, about: Mapping[str, str]) -> None:
        """Write a file that says what it is ``about``, all of it or nothing."""
        narrow = np.uint16 if self.tokens.max(initial=0) < 1 << 16 else np.int32
        tensors = {"contexts": self.contexts, "tokens": self.tokens.astype(narrow), "logits": self.logits}
        write_bytes(file, save(tensors, {"format": _FORMAT, "weights": json.dumps(dict(self.weights)), **about}))

    @classmethod
    def load(cls, file: Path, about: Mapping[str, str] | None = None, vocab_size: int = 1 << 31) -> "Learned":
        """Read a file; a LookaheadError says if it cannot be read, is no memory, or ``about`` another model."""
        made = "Make one with `lookahead learn`"
        try:
            with safe_open(file, framework="numpy") as held:
                told, names = held.metadata() or {}, set(held.keys())
                if told.get("format") != _FORMAT or names != set(_SHAPES):
                    raise LookaheadError(f"{file} is no memory of format {_FORMAT}: got {sorted(names)!r:.80}. {made}.")
                if about is not None and (wrong := {name: told.get(name) for name in about}) != dict(about):
                    got = f"it is of {wrong.get('model')}, and this is {about.get('model')}, or has other weights"
                    raise LookaheadError(f"{file} is of another model: {got}. {made} for this one.")
                arrays = {name: held.get_tensor(name) for name in _SHAPES}
                weights = {name: list(map(float, line)) for name, line in json.loads(told["weights"]).items()}
        except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise LookaheadError(f"{file} cannot be read as a memory ({error}). {made}.") from error
        count = len(arrays["contexts"])
        fits = all(each.shape == (count, _SHAPES[name]) for name, each in arrays.items())
        numbers = np.concatenate([arrays["contexts"].ravel(), arrays["tokens"].ravel()])
        if not fits or numbers.max(initial=0) >= vocab_size or numbers.min(initial=0) < BEFORE:
            raise LookaheadError(f"{file} holds other tokens or shapes than a memory of this model. {made}.")
        return cls(**arrays, weights=weights)

    def table(self, vocab_size: int, width: int) -> SuccessorTable:
        """A table of these rows, each ``width`` tokens wide, with as much room for the calls that use it."""
        capacity = 1 << (len(self) + (1 << 16) - 1).bit_length()
        table = SuccessorTable(capacity, vocab_size, width)
        gaps = (self.contexts[1:, :2] != self.contexts[:-1, 1:]).any(1).nonzero()[0] + 1
        ends = [0, *gaps.tolist(), len(self)]
        for begin, end in pairwise(ends):
            first, second, *tokens = self.contexts[begin, :2].tolist() + self.contexts[begin:end, 2].tolist()
            said = Successors(self.tokens[begin:end], self.logits[begin:end].astype(np.float32))
            table.put((first, second, tokens[0]), list(range(-1, len(tokens) - 1)), tokens, said)
        return table


class Notes:
    """Rows that are being gathered, of all sequences of a process; the newest :data:`MOST_ROWS` are kept."""

    def __init__(self) -> None:
        self._parts: list[tuple[list[Context], np.ndarray, np.ndarray]] = []
        self._count = 0

    def add(self, contexts: list[Context], tokens: np.ndarray, logits: np.ndarray) -> None:
        self._parts.append((contexts, tokens[:, :_WIDTH].copy(), logits[:, :_WIDTH] - logits[:, :1]))
        self._count += len(contexts)
        while self._count - len(self._parts[0][0]) >= MOST_ROWS:
            self._count -= len(self._parts.pop(0)[0])

    def learned(self, weights: Mapping[str, Sequence[float]]) -> Learned:
        """All that was gathered."""
        contexts = np.zeros((self._count, 3), np.int32)
        tokens = np.zeros((self._count, _WIDTH), np.int32)
        logits = np.full((self._count, _WIDTH), -np.inf, np.float16)
        at = 0
        for each, best, scores in self._parts:
            rows = slice(at, at := at + len(each))
            contexts[rows], tokens[rows, : best.shape[1]], logits[rows, : best.shape[1]] = each, best, scores
        return Learned(contexts, tokens, logits, weights)


class NoteTaker:
    """Notes what the model says where it writes one sequence; hears of passes as a source does."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._last: Context = BEGIN

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        first, second, third = [*BEGIN, *prompt][-3:]
        self._last = first, second, third
        if successors is not None and prompt:
            self._notes.add([self._last], successors.tokens[-1:], successors.logits[-1:])

    def learn(self, tree: TokenTree, path: Walk, successors: Successors | None) -> None:
        contexts = [self._last]
        for token in path.tokens:
            contexts.append((*contexts[-1][1:], token))
        self._last = contexts.pop()
        if successors is not None:
            self._notes.add(contexts, successors.tokens.take(path.nodes, 0), successors.logits.take(path.nodes, 0))
