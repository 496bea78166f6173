"""What strategies with an automatic mode have in common: one tree from all sources, sized by the latency curve."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jacobi import LookaheadError
from lookahead.draft.acceptance import Acceptance
from lookahead.draft.automatic import AutomaticDrafter
from lookahead.draft.context import CallContext, Drafts, RowContext, Wants
from lookahead.draft.drawn_trees import DrawnTree
from lookahead.draft.latency import StepTimes
from lookahead.draft.planner import Planner
from lookahead.draft.published import HeadDrafter
from lookahead.sources import PoolSource, RecyclingSource, Source, SuffixSource
from lookahead.sources.base import CheckedSource, is_expensive
from lookahead.sources.draft_model import DraftModelSource, Passes
from lookahead.sources.learned import Learned, MemoryFile
from lookahead.sources.recycling import BEST, DRAWN_BEST, embed_of
from lookahead.sources.references import References, ReferenceSource, references_of
from lookahead.strategies.base import Strategy

SourceFactory = Callable[[RowContext], Source]
Maker = Callable[[RowContext, CallContext], Source]

FREE_SOURCES: dict[str, Maker] = {
    "recycling": lambda row, call: RecyclingSource(  # greedy chains pay only where they are likely to be right
        call.memory.table, row.draw, embed_of(call.model), guess=row.draw is not None or not row.chain
    ),
    "suffix": lambda row, call: SuffixSource(),
    "pool": lambda row, call: PoolSource(),
}
DEFAULT_SOURCES = ("recycling", "suffix")  # where none are named, beside a head or a draft model too
_MOST_NODES = 512
_SHORT_CALL = 32  # new tokens; below, nothing is gathered at the prompt's tokens but the last
_PROMPT_TOKENS = 128  # of all prompts together, from their ends, at which next tokens are gathered at most
_PROMPT_LOGITS = 1 << 23  # numbers that this may take: 32 MB in float32


@dataclass(frozen=True, kw_only=True)
class AutomaticStrategy(Strategy):
    """A strategy that can fill one tree a pass from several sources, as large as pays: the automatic mode.
    :class:`lookahead.Lookahead` describes its fields; :attr:`automatic` says whether a strategy is in it."""

    known_sources: ClassVar[tuple[str, ...]] = tuple(FREE_SOURCES)

    sources: tuple[str | SourceFactory, ...] | None = None
    nodes: int | None = None
    max_nodes: int = 128
    tuning: StepTimes | dict[str, Any] | str | Path | None = None
    remember: bool = True
    memory: str | Path | None = None
    references: References | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.automatic:
            self._check_automatic()

    def _check_automatic(self) -> None:
        for field in ("max_nodes",) if self.nodes is None else ("max_nodes", "nodes"):
            self._whole(field, 1)
            if getattr(self, field) > _MOST_NODES:
                self._refuse(field, f"at most {_MOST_NODES}")
        if isinstance(self.tuning, dict):  # as to_dict wrote it
            object.__setattr__(self, "tuning", StepTimes.from_dict(self.tuning, frozen=True))
        if isinstance(self.tuning, str | Path):
            StepTimes.load(self.tuning)  # what cannot be read is told now
        elif not isinstance(self.tuning, StepTimes | None):
            self._refuse("tuning", "a StepTimes or the file of a saved one")
        if self.memory is not None:
            if not isinstance(self.memory, str | Path):
                self._refuse("memory", "the file of a memory")
            if not isinstance(self.memory, MemoryFile):
                Learned.load(Path(self.memory).expanduser())  # what cannot be read is told now
                object.__setattr__(self, "memory", MemoryFile(self.memory))
        if self.references is not None:
            object.__setattr__(self, "references", references_of(self.references))
        given = self.sources
        if given is None:
            return
        known = ", ".join(map(repr, self.known_sources))
        if not isinstance(given, tuple | list) or not given:
            self._refuse("sources", f"a tuple of one or more of {known}, or functions that make a Source")
        for source in given:
            if not callable(source) and not (isinstance(source, str) and source in self.known_sources):
                raise LookaheadError(f"Unknown source {source!r}: expected {known}, or a function that makes a Source.")
        if len(set(given)) < len(given):
            raise LookaheadError(f"{type(self).__name__}(sources=) names a source twice: got {given!r}.")
        object.__setattr__(self, "sources", tuple(given))

    def _refuse_automatic(self, got: str) -> None:
        for field in ("sources", "nodes", "tuning", "memory", "references"):
            if getattr(self, field) is not None:
                raise LookaheadError(f"{type(self).__name__}({field}=) belongs to the automatic mode: got {got}")

    @property
    def remembers(self) -> bool:
        """In the automatic mode without a seed, unless it is switched off."""
        return self.automatic and self.remember and self.seed is None

    def _draws_from(self, source: str) -> bool:
        """Whether ``source`` alone fills a given number of nodes, for a verification that makes use of draws."""
        alone = self.sources is not None and tuple(self.sources) == (source,)
        return self.automatic and self.nodes is not None and alone and self.verification != "exact"

    def step_times(self) -> StepTimes | None:
        """The curve given as ``tuning``, which then stays as it is."""
        if isinstance(self.tuning, str | Path):
            return StepTimes.load(self.tuning)
        return self.tuning.as_frozen() if isinstance(self.tuning, StepTimes) else None

    def planner(self, find: Callable[[], StepTimes], acceptance: Acceptance, **known: Any) -> Planner:
        """A planner by the curve that is given, or else by the one that ``find`` finds."""
        given = self.step_times()
        curve = find if given is None else lambda: given
        return Planner(curve(), acceptance, most_nodes=self.max_nodes, nodes=self.nodes, anew=curve, **known)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain data, for JSON; ``from_dict`` reads all of it but names of the caller's own sources."""
        settings = super().to_dict()
        if self.sources is not None:
            settings["sources"] = [
                source if isinstance(source, str) else getattr(source, "__qualname__", repr(source))
                for source in self.sources
            ]
        if isinstance(self.tuning, StepTimes):
            settings["tuning"] = self.tuning.to_dict()
        files = {name: str(settings[name]) for name in ("tuning", "memory") if isinstance(settings[name], str | Path)}
        return settings | files

    def wants(self, *, batch: int, vocab_size: int, new_tokens: int, drawn: bool) -> Wants:
        """The best next tokens at every node; in long calls at many of the prompt's, whose logits cost memory."""
        if not self.automatic:
            return super().wants(batch=batch, vocab_size=vocab_size, new_tokens=new_tokens, drawn=drawn)
        fit = min(_PROMPT_TOKENS // batch, _PROMPT_LOGITS // (batch * vocab_size))
        return Wants(DRAWN_BEST if drawn else BEST, max(1, fit) if new_tokens >= _SHORT_CALL else 1)

    def passes_drafts(self, call: CallContext, passes: Callable[[RowContext], Passes], name: str) -> Drafts:
        """Drafts of a model or a head, the source ``name``, from ``passes`` beside each sequence: drawn by chance where
        that is wanted, else in the automatic tree, with the default sources where none are named."""
        if self.nodes is not None and call.rows[0].chance is not None:
            drawn = DrawnTree(call.rows[0].chance, self.nodes)
            grow, learn = drawn.grow, drawn.rates.learn
            return Drafts([HeadDrafter(name, row.prompt, passes(row), grow, row.chain, learn) for row in call.rows])
        made = {name: lambda row, call: DraftModelSource(passes(row), row.draw, name)}
        return self.automatic_drafts(call, self.sources or (name, *DEFAULT_SOURCES), made)

    def automatic_drafts(
        self, call: CallContext, names: Sequence[str | SourceFactory], extra: Mapping[str, Maker] | None = None
    ) -> Drafts:
        """The automatic mode's drafters, which share one planner; only this strategy knows the ``extra`` sources."""
        makers = FREE_SOURCES | dict(extra or {})
        if self.references:
            if (most := max(map(max, self.references))) >= (vocab_size := call.rows[0].vocab_size):
                raise LookaheadError(
                    f"references hold token {most}: expected tokens below the model's {vocab_size}. "
                    "Tokenize them with the model's own tokenizer."
                )
            makers["reference"] = lambda row, call: ReferenceSource(self.references or ())
            names = ["reference", *names]
        rows = [
            [
                makers[name](row, call) if isinstance(name, str) else CheckedSource(name(row), row.vocab_size)
                for name in (*call.sources, *names)
            ]
            for row in call.rows
        ]
        key = (tuple((source.name, tuple(source.priors)) for source in rows[0]), call.choice)
        planner = self.planner(
            call.curve,
            call.memory.acceptance(key, rows[0], call.trust),
            limits=call.limits,
            batch=len(rows),
            expensive=call.memory.expensive_sources(key) if any(map(is_expensive, rows[0])) else None,
            guard=call.memory.guard(key, len(rows)),
        )
        top_k = BEST if call.rows[0].draw is None else DRAWN_BEST
        drafters = [
            AutomaticDrafter(row.prompt, sources, planner, row.chain, top_k, call.memory.notes)
            for row, sources in zip(call.rows, rows, strict=True)
        ]
        return Drafts(drafters, planner)
