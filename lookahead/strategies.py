"""Strategies: frozen settings that say how a draft is grown, and are themselves callable as ``custom_generate``."""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from jacobi import Drafter, JacobiDrafter, LookaheadError, PlainDrafter, guesser
from jacobi.drafter import JacobiMode
from lookahead.pool import NgramPool
from lookahead.window import LookaheadDrafter

Stats = Literal["none", "summary", "detailed"]


@dataclass(frozen=True, slots=True)
class RowContext:
    """What a drafter may know of its row: the prompt's tokens, the vocabulary, pad and end tokens, and a generator."""

    prompt: Sequence[int]
    vocab_size: int
    pad: int
    end_tokens: frozenset[int]
    rng: random.Random


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What all strategies have in common.

    Attributes:
        verification: ``"exact"`` takes one draw (or the argmax) at each visited node, so that a seed gives plain
            ``generate``'s text; ``"rejection"`` is the papers' scheme, with the same distribution but other draws.
        seed: seeds the tokens that drafts are started from, so that step counts repeat. It never touches the text.
        stats: how much is counted; see :class:`lookahead.stats.DecodingStats`.
    """

    name: ClassVar[str]

    verification: Literal["exact", "rejection"] = "exact"
    seed: int | None = None
    stats: Stats = "summary"

    def __post_init__(self) -> None:
        self._one_of("verification", ("exact", "rejection"))
        self._one_of("stats", ("none", "summary", "detailed"))
        if self.seed is not None:
            self._whole("seed")

    def _one_of(self, field: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, field)
        if not isinstance(value, str) or value not in allowed:
            raise LookaheadError(
                f"{type(self).__name__}({field}=) must be one of {', '.join(map(repr, allowed))}: got {value!r}."
            )

    def _whole(self, field: str, least: int | None = None) -> None:
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int):
            raise LookaheadError(
                f"{type(self).__name__}({field}=) must be a whole number: got {value!r} of type {type(value).__name__}."
            )
        if least is not None and value < least:
            raise LookaheadError(f"{type(self).__name__}({field}=) must be at least {least}: got {value}.")

    def _flag(self, field: str) -> None:
        value = getattr(self, field)
        if not isinstance(value, bool):
            raise LookaheadError(f"{type(self).__name__}({field}=) must be True or False: got {value!r}.")

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain data, for JSON; ``from_dict`` reads it back."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"strategy": self.name} | {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        """Make the strategy from plain data.

        Raises:
            LookaheadError: an unknown field (all of them are named), another strategy's data, or a value out of range.
        """
        settings = dict(settings)
        named = settings.pop("strategy", cls.name)
        if named != cls.name:
            raise LookaheadError(f"These are settings of strategy {named!r}: expected {cls.name!r}.")
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(map(str, set(settings) - set(known)))
        if unknown:
            raise LookaheadError(
                f"Unknown field {', '.join(map(repr, unknown))} for {cls.__name__}: it knows {', '.join(known)}."
            )
        return cls(**settings)

    def drafter(self, row: RowContext) -> Drafter:
        """Make the drafter of one row."""
        raise TypeError(f"{type(self).__name__} has no drafter; use Lookahead or Jacobi.")

    def __call__(
        self,
        model: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        lookahead_streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decode with this strategy: ``model.generate(**inputs, custom_generate=strategy)``, with nothing patched.

        transformers hands no ``streamer`` to a ``custom_generate`` function, so on this path pass it as
        ``lookahead_streamer=`` (the prompt is put first, as usual). ``stop_strings`` needs :func:`augment_all`.
        """
        from lookahead.generate import generate  # not at the top: generate reads this module's settings

        if lookahead_streamer is not None:
            lookahead_streamer.put(input_ids.cpu())
        return generate(
            self,
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            streamer=lookahead_streamer,
            model_kwargs=model_kwargs,
        )


@dataclass(frozen=True, kw_only=True)
class Lookahead(Strategy):
    """Lookahead decoding (Fu et al., arXiv 2402.02057).

    Attributes:
        window_size: W, columns of the Jacobi window, at least 1.
        ngram_size: N, length of an n-gram; the window has N-1 levels. 2 is Jacobi decoding; 1 is plain decoding and
            needs ``window_size=1`` and ``verification_set_size=0``.
        verification_set_size: G, most guesses verified in a pass; 0 verifies the window's own paths only.
        pool_from_prompt: the n-gram pool starts with the prompt's n-grams.
        pool_from_output: every n-gram of the output goes into the pool.
        always_forward_one: the window moves by one column a pass; otherwise by the number of tokens written.
        verification, seed, stats: see :class:`Strategy`.

    Once the window is filled, a pass feeds at most (W+G)(N-1) tokens. For example::

        model.generate(**inputs, use_lookahead=True, lookahead_strategy=Lookahead(window_size=10, ngram_size=4))
    """

    name: ClassVar[str] = "lookahead"

    window_size: int = 7
    ngram_size: int = 5
    verification_set_size: int = 7
    pool_from_prompt: bool = True
    pool_from_output: bool = True
    always_forward_one: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole("window_size", 1)
        self._whole("ngram_size", 1)
        self._whole("verification_set_size", 0)
        for field in ("pool_from_prompt", "pool_from_output", "always_forward_one"):
            self._flag(field)
        if self.ngram_size == 1 and (self.window_size, self.verification_set_size) != (1, 0):
            raise LookaheadError(
                "Lookahead(ngram_size=1) is plain decoding and needs window_size=1 and verification_set_size=0: got "
                f"window_size={self.window_size}, verification_set_size={self.verification_set_size}."
            )

    @classmethod
    def from_lade(
        cls, *, LEVEL: int, WINDOW_SIZE: int, GUESS_SET_SIZE: int, POOL_FROM_PROMPT: bool = False
    ) -> "Lookahead":
        """The settings of ``lade.config_lade``: LEVEL is N, and -1 as GUESS_SET_SIZE means WINDOW_SIZE."""
        guesses = WINDOW_SIZE if GUESS_SET_SIZE == -1 else GUESS_SET_SIZE
        return cls(
            window_size=WINDOW_SIZE,
            ngram_size=LEVEL,
            verification_set_size=guesses,
            pool_from_prompt=bool(POOL_FROM_PROMPT),
            pool_from_output=False,
        )

    def drafter(self, row: RowContext) -> Drafter:
        """A window and a pool of the row's own."""
        if self.ngram_size == 1:
            return PlainDrafter()
        return LookaheadDrafter(
            window_size=self.window_size,
            ngram_size=self.ngram_size,
            verification_set_size=self.verification_set_size,
            prompt=row.prompt,
            vocab_size=row.vocab_size,
            rng=row.rng,
            pool=NgramPool(self.ngram_size, self.verification_set_size),
            pool_from_prompt=self.pool_from_prompt,
            pool_from_output=self.pool_from_output,
            always_forward_one=self.always_forward_one,
        )


@dataclass(frozen=True, kw_only=True)
class Jacobi(Strategy):
    """Jacobi decoding (Santilli et al., ACL 2023); see :class:`jacobi.JacobiDrafter` for the modes.

    Attributes:
        mode: ``"jacobi"`` (block Jacobi), ``"gauss-seidel"``, ``"hybrid"`` or ``"sliding"``.
        block_size: tokens in a block; None is all that is still to be written, and only block Jacobi can do that.
        initial_guess: what new places of a block start from: ``"text"`` draws from the text so far, ``"tail"`` copies
            its end, ``"pad"`` repeats the pad token; or token ids, used in order.
        return_trajectory: with ``return_dict_in_generate``, the output's ``trajectories`` holds every iterate fed to
            the model, as ``[row][pass]`` lists of token ids.
        verification, seed, stats: see :class:`Strategy`.
    """

    name: ClassVar[str] = "jacobi"

    mode: JacobiMode = "sliding"
    block_size: int | None = 16
    initial_guess: str | tuple[int, ...] = "text"
    return_trajectory: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("mode", ("jacobi", "gauss-seidel", "hybrid", "sliding"))
        self._flag("return_trajectory")
        if self.block_size is not None:
            self._whole("block_size", 1)
        elif self.mode != "jacobi":
            raise LookaheadError(f"Jacobi(mode={self.mode!r}) needs a block_size of at least 1: got None.")
        if isinstance(self.initial_guess, str):
            self._one_of("initial_guess", ("text", "tail", "pad"))
            return
        given = self.initial_guess
        if not isinstance(given, list | tuple) or not given or not all(type(t) is int and t >= 0 for t in given):
            raise LookaheadError(
                f"Jacobi(initial_guess=) must be 'text', 'tail', 'pad' or a list of token ids: got {given!r}."
            )
        object.__setattr__(self, "initial_guess", tuple(given))

    def drafter(self, row: RowContext) -> Drafter:
        """A block of the row's own."""
        kind: Any = self.initial_guess
        if not isinstance(kind, str) and max(kind) >= row.vocab_size:
            raise LookaheadError(
                f"Jacobi(initial_guess=) holds token {max(kind)}: this model's vocabulary ends at {row.vocab_size - 1}."
            )
        text = list(row.prompt)
        guess = guesser(kind, text, row.vocab_size, row.pad, row.rng)
        return JacobiDrafter(self.mode, self.block_size, guess, row.end_tokens, text, self.return_trajectory)


_BY_NAME: dict[str, type[Strategy]] = {"lookahead": Lookahead, "jacobi": Jacobi}


def strategy_from(value: Any) -> Strategy:
    """The strategy that a user's ``lookahead_strategy`` means: a strategy, its dict, or None for the default.

    Raises:
        LookaheadError: a dict that names no strategy or an unknown field, or any other type.
    """
    if value is None:
        return Lookahead()
    if isinstance(value, Strategy):
        return value
    if not isinstance(value, dict):
        raise LookaheadError(
            "lookahead_strategy must be Lookahead(...), Jacobi(...) or a dict of their settings: "
            f"got {value!r} of type {type(value).__name__}."
        )
    name = value.get("strategy", "lookahead")
    if not isinstance(name, str) or name not in _BY_NAME:
        raise LookaheadError(f"Unknown strategy {name!r} in lookahead_strategy: expected {', '.join(_BY_NAME)}.")
    return _BY_NAME[name].from_dict(value)
