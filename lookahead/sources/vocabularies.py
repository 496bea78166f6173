"""What a draft model's tokens are called in the model's vocabulary, and the other way round."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lookahead.pieces import LETTERS

_SPACE = "\u2581"  # how SentencePiece writes a space

_PADDED = 64  # tokens to whose multiples vocabularies are often padded
_MOST_PADDING = 0.01  # of a large vocabulary


def same_but_for_padding(one: int, other: int) -> bool:
    """Whether vocabularies of these sizes may be the same, one of them padded."""
    large, small = max(one, other), min(one, other)
    padded = large % _PADDED == 0 and large - small < _PADDED
    return padded or large - small <= _MOST_PADDING * large


class SameVocabulary:
    """Both models have the same tokens, but for padding behind them: ``size`` and ``draft_size`` can be fed."""

    def __init__(self, size: int, draft_size: int) -> None:
        self._size, self._draft_size = size, draft_size

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        """A prompt in the draft model's tokens."""
        return [self.fed(token)[0] for token in tokens]

    def fed(self, token: int) -> tuple[int, ...]:
        """One token of the model in the draft model's tokens, at least one."""
        return (token if token < self._draft_size else 0,)

    def proposed(self, tokens: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A draft model's best next tokens ``[rank]`` as the model's, and their logits; those it has not are gone."""
        known = tokens < self._size
        return tokens[known], logits[known]


class OtherVocabulary:
    """The models have tokenizers of their own. Tokens that are spelt alike stand for each other; the draft model reads
    the spelling of others::

        model's      "hel" "lo"           proposed, if the draft model has it:  " world"
        draft's      "h" "el" "lo"        not proposed, as the model has no such token:  " wor"

    Timor et al. (arXiv 2502.05202) compare ways to draft across vocabularies.
    """

    def __init__(
        self, size: int, draft_size: int, tokenizer: PreTrainedTokenizerBase, draft_tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._tokenizer, self._draft_tokenizer = tokenizer, draft_tokenizer
        self._spelling = {token: spelt for spelt, token in spellings(tokenizer).items() if token < size}
        theirs = {spelt: token for spelt, token in spellings(draft_tokenizer).items() if token < draft_size}
        self._fed: dict[int, tuple[int, ...]] = {
            token: (theirs[spelt],) for token, spelt in self._spelling.items() if spelt in theirs
        }
        for name in ("eos_token_id", "bos_token_id"):
            ours, others = getattr(tokenizer, name), getattr(draft_tokenizer, name)
            if None not in (ours, others) and ours < size and others < draft_size:
                self._fed.setdefault(ours, (others,))
        names = ("unk_token_id", "eos_token_id", "pad_token_id")
        stand_ins = (getattr(draft_tokenizer, name) for name in names)
        self._stand_in = (next((each for each in stand_ins if isinstance(each, int) and each < draft_size), 0),)
        self._back = np.full(draft_size, -1, np.int64)
        self._back[[other for (other,) in self._fed.values()]] = list(self._fed)

    @property
    def shared(self) -> int:
        """How many tokens both have."""
        return int((self._back >= 0).sum())

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return list(self._draft_tokenizer(text).input_ids) or list(self._stand_in)

    def fed(self, token: int) -> tuple[int, ...]:
        if token not in self._fed:
            self._fed[token] = self._read(token) or self._stand_in
        return self._fed[token]

    def _read(self, token: int) -> tuple[int, ...]:
        try:
            text = self._spelling[token].decode()
        except (KeyError, UnicodeDecodeError):  # a special token, or a part of a character
            return ()
        return tuple(self._draft_tokenizer.encode(text, add_special_tokens=False))

    def proposed(self, tokens: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        known = tokens < len(self._back)
        ours = self._back[np.where(known, tokens, 0)]
        known &= ours >= 0
        return ours[known], logits[known]


Vocabulary = SameVocabulary | OtherVocabulary


def is_tokenizer(given: Any) -> bool:
    """Whether something has what :class:`OtherVocabulary` asks of a tokenizer."""
    needed = ("get_vocab", "decode", "encode", "__call__")
    return all(callable(getattr(given, name, None)) for name in needed) and hasattr(given, "all_special_ids")


def spellings(tokenizer: PreTrainedTokenizerBase) -> dict[bytes, int]:
    """The bytes of every token of a tokenizer that is not special."""
    special = set(tokenizer.all_special_ids)
    names: dict[str, int] = tokenizer.get_vocab()
    # Byte-level tokens are written with one letter a byte, as GPT-2 does, where a space is a letter of its own.
    byte_level = sum(name.startswith("\u0120") for name in names) > sum(name.startswith(_SPACE) for name in names)
    read = _bytes_of_letters if byte_level else _bytes_of_piece
    return {spelt: token for name, token in names.items() if token not in special and (spelt := read(name))}


def _bytes_of_letters(name: str) -> bytes | None:
    return bytes(LETTERS[letter] for letter in name) if all(letter in LETTERS for letter in name) else None


def _bytes_of_piece(name: str) -> bytes:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes.fromhex(name[3:5])
    return name.replace(_SPACE, " ").encode()
