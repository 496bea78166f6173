"""Lookahead decoding: the automatic mode, or the published method with given W, N and G."""

from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any, ClassVar, Literal, Self

from torch import nn
from transformers import PreTrainedModel

from jacobi import Drafter, LookaheadError, PlainDrafter
from lookahead.draft.context import CallContext, Drafts, RowContext, Wants
from lookahead.draft.published import LookaheadDrafter
from lookahead.sources.draft_texts import DraftPasses, DraftTexts
from lookahead.sources.ngram_pool import NgramPool
from lookahead.sources.vocabularies import is_tokenizer
from lookahead.strategies.automatic import DEFAULT_SOURCES, FREE_SOURCES, AutomaticStrategy
from lookahead.strategies.base import Strategy
from lookahead.strategies.draft_models import (
    Tokenizers,
    check_draft_model,
    check_whole,
    draft_model_for,
    unwrapped,
    vocabulary_for,
)


@dataclass(frozen=True, kw_only=True)
class Lookahead(AutomaticStrategy):
    """Exact decoding from drafts that cost no training: automatic, or lookahead decoding with given W, N and G.

    ``Lookahead()`` is the automatic mode. Every pass scores one tree, filled best first from all ``sources`` with the
    candidates most likely to be accepted (which is learnt while decoding), and as large as the latency curve of this
    model on this machine makes worthwhile: down to plain decoding where nothing pays. With any of ``window_size``,
    ``ngram_size`` and ``verification_set_size`` it is lookahead decoding as published (Fu et al., arXiv 2402.02057);
    those not given are 7, 5 and 7. A pass then feeds at most (W+G)(N-1) tokens, once the window is filled.

    Attributes:
        window_size: W, columns of the Jacobi window, at least 1.
        ngram_size: N, length of an n-gram; the window has N-1 levels. 2 is Jacobi decoding; 1 is plain decoding and
            needs ``window_size=1`` and ``verification_set_size=0``.
        verification_set_size: G, most guesses verified in a pass; 0 verifies the window's own paths only.
        pool_from_prompt: (given W, N, G) the n-gram pool starts with the prompt's n-grams.
        pool_from_output: (given W, N, G) every n-gram of the output goes into the pool.
        always_forward_one: (given W, N, G) the window moves by one column a pass; else by the tokens written.
        sources: (automatic) where candidates come from, in the order in which they are credited: ``"recycling"``,
            ``"suffix"``, ``"pool"``, or functions that make a :class:`lookahead.sources.Source` from a
            :class:`lookahead.strategy.RowContext`. None is recycling and suffix, after ``"draft"`` where a
            ``draft_model`` is given.
        draft_model: (automatic) a small causal model that drafts, the source ``"draft"``; or a number, to draft with so
            many of the model's own first layers. ``generate(assistant_model=)`` and ``assistant_early_exit=`` set it.
        tokenizers: (automatic) the model's tokenizer and the draft model's, where they are not the same;
            ``generate(tokenizer=, assistant_tokenizer=)`` sets it.
        nodes: (automatic) draft so many nodes a pass whatever they cost, to compare drafts; None = as many as pay.
        max_nodes: (automatic) the most drafted nodes of a sequence.
        tuning: (automatic) a latency curve, or the file of a saved one, taken as it is: with a ``seed``, the same call
            then always runs the same passes. None = the curve measured for this machine, if any, corrected by passes.
        remember: (automatic) start from what drafts learnt in earlier calls on this model (see
            :mod:`lookahead.draft.memory`). Calls with a ``seed`` never do. The latency curve is kept in any case.
        memory: (automatic) the file of a memory that `lookahead learn` made: what the model has said in other texts.
            None = the one in the user's cache folder, if there is one for this model, and calls remember.
        references: (automatic) texts, as token ids, that the answer may repeat: an earlier version of it, a document.
            They are drafted from the first pass on, the source ``"reference"``; wrong ones cost little.
        parallel: ``"lookahead"`` = every rank of torch.distributed has the whole model, and scores a part of each tree
            (docs/parallel.md); the call is the same on all of them.
        verification, seed, stats, static: see :class:`Strategy`.

    A model that can only be given one branch a pass (`runtime.linear`) has linear drafts; given W, N and G it
    has no window, only the pool's n-grams. For example::

        model.generate(**inputs, use_lookahead=True)
        model.generate(**inputs, use_lookahead=True, lookahead_strategy=Lookahead(window_size=10, ngram_size=4))
    """

    name: ClassVar[str] = "lookahead"
    known_sources: ClassVar[tuple[str, ...]] = (*FREE_SOURCES, "draft")

    window_size: int | None = None
    ngram_size: int | None = None
    verification_set_size: int | None = None
    pool_from_prompt: bool = True
    pool_from_output: bool = True
    always_forward_one: bool = True
    draft_model: PreTrainedModel | int | None = None
    tokenizers: Tokenizers | None = None
    parallel: Literal["lookahead"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_draft_model()
        if self.automatic:
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
        self._refuse_automatic("window_size, ngram_size or verification_set_size as well. Leave those out, or drop it.")

    @property
    def automatic(self) -> bool:
        """No W, N or G is given: sizes are chosen while decoding."""
        return self.window_size is None and self.ngram_size is None and self.verification_set_size is None

    @property
    def draws_candidates(self) -> bool:
        """Where the draft model alone fills a given number of nodes."""
        return self._draws_from("draft")

    @classmethod
    def from_lade(cls, *, LEVEL: int, WINDOW_SIZE: int, GUESS_SET_SIZE: int, POOL_FROM_PROMPT: bool = False) -> Self:
        """The settings of ``lade.config_lade``: LEVEL is N, and -1 as GUESS_SET_SIZE means WINDOW_SIZE."""
        return cls(
            window_size=WINDOW_SIZE,
            ngram_size=LEVEL,
            verification_set_size=WINDOW_SIZE if GUESS_SET_SIZE == -1 else GUESS_SET_SIZE,
            pool_from_prompt=bool(POOL_FROM_PROMPT),
            pool_from_output=False,
        )

    def _check_draft_model(self) -> None:
        given = unwrapped(self.draft_model)
        object.__setattr__(self, "draft_model", given)
        if isinstance(given, bool) or not isinstance(given, PreTrainedModel | int | None):
            expected = "a causal model of transformers, or a number of the model's own layers"
            got = f"a {type(given).__name__}" if isinstance(given, nn.Module) else repr(given)
            raise LookaheadError(f"Lookahead(draft_model=) must be {expected}: got {got}.")
        if given is not None and not self.automatic:
            raise LookaheadError("Lookahead(draft_model=) belongs to the automatic mode: leave W, N and G out.")
        named = "draft" in (self.sources or ("draft",))
        if named != (given is not None) and (self.sources is not None):
            got = f"got sources={self.sources!r} and draft_model={'None' if given is None else 'a model'}"
            raise LookaheadError(f"The source 'draft' and a draft_model belong together: {got}. Give both or neither.")
        if self.tokenizers is not None:
            self._check_tokenizers(self.tokenizers)

    def _check_tokenizers(self, given: Any) -> None:
        fits = isinstance(given, tuple | list) and len(given) == 2 and all(map(is_tokenizer, given))
        if not fits or self.draft_model is None or isinstance(self.draft_model, int):
            kinds = [type(each).__name__ for each in given] if isinstance(given, tuple | list) else type(given).__name__
            expected = "the model's tokenizer and the draft model's, beside draft_model="
            raise LookaheadError(
                f"Lookahead(tokenizers=) must be {expected}: got {kinds} and draft_model="
                f"{type(self.draft_model).__name__}. In generate, give tokenizer= and assistant_tokenizer=."
            )
        object.__setattr__(self, "tokenizers", tuple(given))

    def assisted(self, draft: Any, tokenizers: Tokenizers | None = None) -> Strategy:
        if self.draft_model is not None:
            raise LookaheadError("assistant_model and Lookahead(draft_model=) both name a model that drafts: drop one.")
        if not self.automatic:
            return super().assisted(draft, tokenizers)
        # Heads stand above strategies: what tells their kinds is imported when one may be given.
        if (kind := import_module("lookahead.registry").drafts_with(draft)) is not None:
            return self._with(kind, draft)
        sources = self.sources if self.sources is None or "draft" in self.sources else ("draft", *self.sources)
        return replace(self, draft_model=draft, tokenizers=tokenizers, sources=sources)

    def predicting(self) -> AutomaticStrategy:
        if self.draft_model is not None:
            raise LookaheadError("use_mtp and Lookahead(draft_model=) both say what drafts: drop one of them.")
        if not self.automatic:
            return super().predicting()
        return self._with(import_module("lookahead.mtp").Mtp)

    def _with(self, kind: type[AutomaticStrategy], *head: Any) -> AutomaticStrategy:
        """The same settings in the strategy of a head."""
        shared = {field.name: getattr(self, field.name) for field in fields(AutomaticStrategy)}
        shared["sources"] = (kind.known_sources[0], *(self.sources or DEFAULT_SOURCES))
        return kind(*head, **shared)

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a draft model that cannot draft for the model."""
        if isinstance(self.draft_model, int):
            check_whole(model, "draft_model with a number of layers")
        if self.draft_model is not None:
            check_draft_model(model, draft_model_for(model, self.draft_model), self.tokenizers)

    def wants(self, *, batch: int, vocab_size: int, new_tokens: int, drawn: bool) -> Wants:
        wants = super().wants(batch=batch, vocab_size=vocab_size, new_tokens=new_tokens, drawn=drawn)
        return wants if self.automatic else replace(wants, choices=drawn)  # of which the window is made

    def drafts(self, call: CallContext) -> Drafts:
        """In the automatic mode drafters share one planner; others have nothing in common."""
        if not self.automatic:
            return super().drafts(call)
        if self.draft_model is None:
            return self.automatic_drafts(call, self.sources or DEFAULT_SOURCES)
        draft = draft_model_for(call.model, self.draft_model)
        vocabulary = vocabulary_for(call.model, draft, self.tokenizers)
        texts = DraftTexts(draft, vocabulary, len(call.rows), call.new_tokens, call.closing, self.traces, self.pack)
        return self.passes_drafts(call, lambda row: DraftPasses(texts, row.index), "draft")

    def drafter(self, row: RowContext) -> Drafter:
        if self.window_size is None or self.ngram_size is None or self.verification_set_size is None:
            raise TypeError("The automatic mode makes its drafters together: use drafts().")
        if self.ngram_size == 1:
            return PlainDrafter()
        return LookaheadDrafter(
            row,
            NgramPool(self.ngram_size, self.verification_set_size),
            self.window_size,
            pool_from_prompt=self.pool_from_prompt,
            pool_from_output=self.pool_from_output,
            always_forward_one=self.always_forward_one,
        )
