"""The strategies: lookahead decoding, automatic or with given numbers, and Jacobi decoding."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jacobi import Drafter, JacobiDrafter, LookaheadError, PlainDrafter, guesser
from jacobi.drafter import JacobiMode
from lookahead.automatic import AutomaticDrafter, Planner
from lookahead.memory import Memory
from lookahead.pool import NgramPool
from lookahead.sources import PoolSource, RecyclingSource, Source, SuffixSource, WindowSource
from lookahead.sources.recycling import BEST
from lookahead.step_times import StepTimes
from lookahead.strategy import CallContext, Drafts, RowContext, Strategy
from lookahead.tuning import step_times
from lookahead.window import LookaheadDrafter

SourceFactory = Callable[[RowContext], Source]

_SOURCES: dict[str, Callable[[RowContext, Memory], Source]] = {
    "recycling": lambda row, memory: RecyclingSource(memory.table),
    "suffix": lambda row, memory: SuffixSource(),
    "pool": lambda row, memory: PoolSource(),
    "window": lambda row, memory: WindowSource(row.rng, row.vocab_size),
}
_DEFAULT_SOURCES = ("recycling", "suffix", "window")
_MOST_NODES = 512
_SHORT_CALL = 32  # new tokens; below, the prompt's successors are not gathered
_PROMPT_TOKENS = 128  # of the prompt, from its end, at which successors are gathered at most
_PROMPT_LOGITS = 1 << 23  # numbers that this may take: 32 MB in float32


@dataclass(frozen=True, kw_only=True)
class Lookahead(Strategy):
    """Exact decoding from drafts that cost no training: automatic, or lookahead decoding with given W, N and G.

    ``Lookahead()`` is the automatic mode. Every pass scores one tree, filled best first from all ``sources`` by how
    likely their candidates are to be accepted, which is learnt while decoding, and as large as the step-time curve of
    this model on this machine makes worthwhile: down to plain decoding where nothing pays. With any of
    ``window_size``, ``ngram_size`` and ``verification_set_size`` given, it is lookahead decoding as published (Fu et
    al., arXiv 2402.02057) with just these numbers; those not given are 7, 5 and 7.

    Attributes:
        window_size: W, columns of the Jacobi window, at least 1.
        ngram_size: N, length of an n-gram; the window has N-1 levels. 2 is Jacobi decoding; 1 is plain decoding and
            needs ``window_size=1`` and ``verification_set_size=0``.
        verification_set_size: G, most guesses verified in a pass; 0 verifies the window's own paths only.
        pool_from_prompt: (given W, N, G) the n-gram pool starts with the prompt's n-grams.
        pool_from_output: (given W, N, G) every n-gram of the output goes into the pool.
        always_forward_one: (given W, N, G) the window moves by one column a pass; otherwise by the number of tokens
            written.
        sources: (automatic) where candidates come from, in the order in which they are credited: ``"recycling"``,
            ``"suffix"``, ``"pool"``, ``"window"``, or functions that make a :class:`lookahead.sources.Source` from a
            :class:`RowContext`. None is recycling, suffix and window.
        nodes: (automatic) draft so many nodes a pass whatever they cost, to compare drafts; None = as many as pay.
        max_nodes: (automatic) the most drafted nodes of a row.
        tuning: (automatic) a step-time curve, or the file of a saved one. It is taken as it is: with a ``seed``, the
            same call then always runs the same passes. None = the curve measured for this machine if there is one,
            corrected by the passes themselves.
        remember: (automatic) start from what drafts learnt in earlier calls on this model (successors and acceptance;
            see :mod:`lookahead.memory`). Calls with a ``seed`` never do. Step times, which are the machine's, are
            kept in any case.
        verification, seed, stats, static: see :class:`Strategy`.

    With given W, N and G, a pass feeds at most (W+G)(N-1) tokens once the window is filled. For example::

        model.generate(**inputs, use_lookahead=True)
        model.generate(**inputs, use_lookahead=True, lookahead_strategy=Lookahead(window_size=10, ngram_size=4))
    """

    name: ClassVar[str] = "lookahead"

    window_size: int | None = None
    ngram_size: int | None = None
    verification_set_size: int | None = None
    pool_from_prompt: bool = True
    pool_from_output: bool = True
    always_forward_one: bool = True
    sources: tuple[str | SourceFactory, ...] | None = None
    nodes: int | None = None
    max_nodes: int = 128
    tuning: StepTimes | dict[str, Any] | str | Path | None = None
    remember: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag in ("pool_from_prompt", "pool_from_output", "always_forward_one", "remember"):
            self._flag(flag)
        if self.automatic:
            self._check_automatic()
            return
        for name, default, least in (("window_size", 7, 1), ("ngram_size", 5, 1), ("verification_set_size", 7, 0)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
            self._whole(name, least)
        if self.ngram_size == 1 and (self.window_size, self.verification_set_size) != (1, 0):
            raise LookaheadError(
                "Lookahead(ngram_size=1) is plain decoding and needs window_size=1 and verification_set_size=0: got "
                f"window_size={self.window_size}, verification_set_size={self.verification_set_size}."
            )
        for name in ("sources", "nodes", "tuning"):
            if getattr(self, name) is not None:
                raise LookaheadError(
                    f"Lookahead({name}=) belongs to the automatic mode: got window_size, ngram_size or "
                    "verification_set_size as well. Leave those out, or drop it."
                )

    def _check_automatic(self) -> None:
        self._whole("max_nodes", 1)
        if self.nodes is not None:
            self._whole("nodes", 1)
        for name in ("nodes", "max_nodes"):
            if (getattr(self, name) or 0) > _MOST_NODES:
                raise LookaheadError(f"Lookahead({name}=) must be at most {_MOST_NODES}: got {getattr(self, name)}.")
        if isinstance(self.tuning, dict):  # as to_dict wrote it
            object.__setattr__(self, "tuning", StepTimes.from_dict(self.tuning, frozen=True))
        if self.tuning is not None and not isinstance(self.tuning, StepTimes):
            if not isinstance(self.tuning, str | Path):
                raise LookaheadError(
                    f"Lookahead(tuning=) must be a StepTimes or the file of a saved one: got {self.tuning!r}."
                )
            StepTimes.load(self.tuning)  # what cannot be read is told now
        given = self.sources
        if given is None:
            return
        known = ", ".join(map(repr, _SOURCES))
        if not isinstance(given, tuple | list) or not given:
            raise LookaheadError(
                f"Lookahead(sources=) must be a tuple of one or more of {known}, or functions that make a Source: "
                f"got {given!r}."
            )
        for source in given:
            if not callable(source) and not (isinstance(source, str) and source in _SOURCES):
                raise LookaheadError(f"Unknown source {source!r}: expected {known}, or a function that makes a Source.")
        if len(set(given)) < len(given):
            raise LookaheadError(f"Lookahead(sources=) names a source twice: got {given!r}.")
        object.__setattr__(self, "sources", tuple(given))

    @property
    def automatic(self) -> bool:
        """No W, N or G is given: sizes are chosen while decoding."""
        return self.window_size is None and self.ngram_size is None and self.verification_set_size is None

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

    @property
    def remembers(self) -> bool:
        """In the automatic mode without a seed, unless it is switched off."""
        return self.automatic and self.remember and self.seed is None

    def step_times(self) -> StepTimes | None:
        """The curve given as ``tuning``, which then stays as it is."""
        if isinstance(self.tuning, str | Path):
            return StepTimes.load(self.tuning)
        return self.tuning.as_frozen() if isinstance(self.tuning, StepTimes) else None

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain data, for JSON; ``from_dict`` reads it back, but for sources of the caller's own.

        Those stand there by their names, which ``from_dict`` does not know.
        """
        settings = super().to_dict()
        if self.sources is not None:
            settings["sources"] = [
                source if isinstance(source, str) else getattr(source, "__qualname__", repr(source))
                for source in self.sources
            ]
        if isinstance(self.tuning, StepTimes):
            settings["tuning"] = self.tuning.to_dict()
        elif self.tuning is not None:
            settings["tuning"] = str(self.tuning)
        return settings

    def drafts(self, call: CallContext) -> Drafts:
        """The automatic mode's drafters share one planner; others have nothing in common."""
        if not self.automatic:
            return super().drafts(call)
        names = self.sources or _DEFAULT_SOURCES
        rows = [
            [_SOURCES[name](row, call.memory) if isinstance(name, str) else name(row) for name in names]
            for row in call.rows
        ]
        kinds = tuple((source.name, len(source.priors)) for source in rows[0])
        acceptance = call.memory.acceptance((kinds, call.choice), rows[0], call.trust)
        window = [isinstance(source, WindowSource) for source in rows[0]]
        planner = Planner(
            step_times(call.model, len(rows), call.memory.times, self.step_times()),
            acceptance,
            batch=len(rows),
            most_nodes=self.max_nodes,
            nodes=self.nodes,
            window=any(window),
            window_only=all(window),
        )
        drafters = [
            AutomaticDrafter(row.prompt, sources, planner, acceptance)
            for row, sources in zip(call.rows, rows, strict=True)
        ]
        return Drafts(drafters, BEST, _prompt_harvest(call), planner)

    def drafter(self, row: RowContext) -> Drafter:
        """With given W, N and G: a window and a pool of the row's own."""
        if self.window_size is None or self.ngram_size is None or self.verification_set_size is None:
            raise TypeError("The automatic mode makes its drafters together: use drafts().")
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


def _prompt_harvest(call: CallContext) -> int:
    """At how many of the prompt's tokens successors are gathered: none but the last where the call is short.

    Their logits cost a part of the prompt's pass, and memory, which is bounded here.
    """
    if call.new_tokens < _SHORT_CALL:
        return 1
    fit = _PROMPT_LOGITS // (len(call.rows) * max(row.vocab_size for row in call.rows))
    return max(1, min(_PROMPT_TOKENS, fit))


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
