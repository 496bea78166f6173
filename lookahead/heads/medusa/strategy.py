"""Decoding with Medusa's heads: the settings."""

import math
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache, cached_property, partial
from os import PathLike
from typing import Any, ClassVar, Literal

from torch import Tensor
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.draft.context import CallContext, Drafts
from lookahead.draft.published import HeadDrafter
from lookahead.heads.base import HeadStrategy, fixed_tree
from lookahead.heads.medusa.choices import ChoiceTree, choices_from
from lookahead.heads.medusa.heads import MedusaHeads, tree_beside
from lookahead.heads.medusa.source import DRAWN, HeadCandidates, HeadsPasses, HeadsSource
from lookahead.models.output_layer import output_layer, output_sizes
from lookahead.models.traits import ModelTraits
from lookahead.strategies.automatic import FREE_SOURCES, Maker
from lookahead.verify.typical import nucleus, typical


@cache
def _published() -> ChoiceTree:
    """The tree where none is named. The automatic tree has as many candidates of a head as it has."""
    return choices_from("mc_sim_7b_63")


@dataclass(frozen=True)
class Medusa(HeadStrategy):
    """Decoding with Medusa's heads (Cai et al., arXiv 2401.10774), which guess the tokens after the next one.

    By default as published: one pass scores a tree of fixed shape, filled from the heads' best candidates (with a
    recurrent model, the linear draft of every head's best). With ``sources`` it is the automatic mode of
    :class:`lookahead.Lookahead`, in which the heads are one source among others in a tree that is as large as pays.

    Attributes:
        heads: the heads, or a folder or hub name that holds them, which is read once, and compute as the model does.
        choices: the tree's shape, in any form that :func:`lookahead.medusa.choices_from` reads. None is the calibrated
            tree beside the heads (``tree.json``), else the published ``mc_sim_7b_63``, cut to what the heads can fill.
        acceptance: ``"exact"`` writes the text of plain ``generate``. The other two are *lossy*: sampled text drifts
            from the model's distribution towards what the heads guess. ``"typical"`` keeps candidates that are likely
            enough (section 2.3.1), ``"nucleus"`` those inside the top-p set; written are the likeliest of the longest
            paths kept, and after it the most likely token. Without sampling both are greedy decoding. Logits processors
            run along several candidate paths, so the caller's own must not keep state.
        posterior_threshold: (typical) epsilon: no candidate has to be likelier than this. Above 0, below 1.
        posterior_alpha: (typical) delta: a candidate has to be likelier than this share of ``exp(-entropy)``.
        top_p: (nucleus) probability of the set; above 0, at most 1.
        sources: switches the automatic mode on: where candidates come from, in the order of credit. ``"heads"``, and
            any that :class:`lookahead.Lookahead` knows.
        nodes, max_nodes, tuning, remember: (automatic) see :class:`lookahead.Lookahead`.
        verification, seed, stats, static: see :class:`lookahead.strategies.base.Strategy`.

    For example::

        model.generate(**inputs, custom_generate=Medusa("folder of the heads"))
        model.generate(**inputs, lookahead_strategy=Medusa(heads, sources=("heads", "recycling", "suffix")))
    """

    name: ClassVar[str] = "medusa"
    known_sources: ClassVar[tuple[str, ...]] = ("heads", *FREE_SOURCES)
    field: ClassVar[str] = "heads"
    kind: ClassVar[type[MedusaHeads]] = MedusaHeads
    expected: ClassVar[str] = "MedusaHeads or the folder they lie in"
    title: ClassVar[str] = "The heads are"
    sharded: ClassVar[bool] = True

    heads: MedusaHeads | str | PathLike[str] | None = None
    choices: Any = None
    _: KW_ONLY
    acceptance: Literal["exact", "typical", "nucleus"] = "exact"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    top_p: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._between("posterior_threshold", "above 0 and below 1", lambda value: 0.0 < value < 1.0)
        self._between("posterior_alpha", "above 0", lambda value: 0.0 < value < math.inf)
        self._between("top_p", "above 0 and at most 1", lambda value: 0.0 < value <= 1.0)
        if self.acceptance != "exact" and self.verification != "exact":
            raise LookaheadError(
                f"Medusa(acceptance={self.acceptance!r}) has a rule of its own for what is accepted: got "
                f"verification={self.verification!r} as well. Drop one of the two."
            )
        if self.choices is not None and not isinstance(self.choices, str):
            given = self.choices
            object.__setattr__(self, "choices", str(given) if isinstance(given, PathLike) else choices_from(given))
        if not self.automatic:
            self._refuse_automatic("no sources. Name them, or drop it.")
            self.tree(self._read.vocab_size or sys.maxsize)
            return
        if self.choices is not None:
            got = f"got sources={self.sources!r} as well"
            raise LookaheadError(f"Medusa(choices=) belongs to the fixed tree: {got}. Drop one of them.")

    @property
    def draws_candidates(self) -> bool:
        """Never: what a head says goes for all nodes of a depth, and is no chance of one."""
        return False

    @property
    def automatic(self) -> bool:
        """Whether sources are named; then sizes are chosen while decoding."""
        return self.sources is not None

    @property
    def rule(self) -> Callable[[Tensor], Tensor] | None:
        """The lossy rule; None with exact acceptance."""
        if self.acceptance == "typical":
            return partial(typical, posterior_threshold=self.posterior_threshold, posterior_alpha=self.posterior_alpha)
        return partial(nucleus, top_p=self.top_p) if self.acceptance == "nucleus" else None

    def tree(self, vocab_size: int) -> ChoiceTree:
        """The shape of the fixed tree; a LookaheadError if it asks for more than the heads and the vocabulary have."""
        num_heads = self._read.num_heads
        if self._chosen is not None:
            self._chosen.check(num_heads, vocab_size)
            return self._chosen
        paths = _published().paths
        return ChoiceTree(tuple(path for path in paths if len(path) <= num_heads and max(path) < vocab_size))

    @cached_property
    def _chosen(self) -> ChoiceTree | None:
        if self.choices is not None:
            return choices_from(self.choices)
        return tree_beside(self.heads) if isinstance(self.heads, str) else None

    def to_dict(self) -> dict[str, Any]:
        settings = super().to_dict()
        if isinstance(self.choices, ChoiceTree):
            settings["choices"] = [list(path) for path in self.choices.paths]
        return settings

    def check(self, model: PreTrainedModel) -> None:
        """Refuse heads and a tree that do not fit the model, and broken heads, with a LookaheadError."""
        super().check(model)
        if not self.automatic:
            self.tree(_proposable(model))

    def taps(self, model: PreTrainedModel) -> tuple[str, ...]:
        return ("last",)

    def drafts(self, call: CallContext) -> Drafts:
        heads, vocab_size = self.heads_for(call.model), _proposable(call.model)
        assert call.hidden is not None  # it is wanted
        tree = None if self.automatic else self.tree(vocab_size)
        if tree is not None and call.rows[0].chain:
            tree = ChoiceTree(tuple((0,) * depth for depth in range(1, heads.num_heads + 1)))
        most = max((tree or _published()).candidates)
        if call.rows[0].draw is not None:
            most = max(most, DRAWN)
        candidates = HeadCandidates(heads, output_layer(call.model), call.hidden, most, vocab_size)
        if tree is not None:
            grow = partial(fixed_tree, tree.paths)
            passes = (HeadsPasses(candidates, row.index, row.draw) for row in call.rows)
            return Drafts([HeadDrafter("heads", (), each, grow, call.rows[0].chain) for each in passes])
        lossy = None if self.rule is None else (self.acceptance, self.posterior_threshold, self.posterior_alpha)
        call = replace(call, choice=(call.choice, lossy, self.top_p))
        heads_source: dict[str, Maker] = {"heads": lambda row, call: HeadsSource(candidates, row.index, row.draw)}
        return self.automatic_drafts(call, self.sources or (), heads_source)


def _proposable(model: PreTrainedModel) -> int:
    """How many tokens the model scores and can be fed as well."""
    return min(output_sizes(model)[1], ModelTraits.of(model).vocab_size)
