"""EAGLE: a head that drafts from the model's features, as one source of the automatic tree."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from os import PathLike
from typing import Any, ClassVar, Literal

from torch import Tensor
from transformers import PreTrainedModel

from lookahead.draft.context import CallContext, Drafts, RowContext
from lookahead.heads.base import HeadStrategy, fixed_tree
from lookahead.heads.eagle.head import EagleHead
from lookahead.heads.eagle.network import EagleNetwork, PairCache
from lookahead.heads.eagle.trees import FIXED, ranked_again
from lookahead.heads.pairs import PairPasses, joined_features
from lookahead.models.output_layer import output_layer
from lookahead.strategies.automatic import FREE_SOURCES


@dataclass(frozen=True)
class Eagle(HeadStrategy):
    """Decoding with an EAGLE head (EAGLE-1: Li et al., arXiv 2401.15077; EAGLE-2: 2406.16858; EAGLE-3: 2503.01840).

    The head is one source among others in the automatic mode's tree: it is asked level by level, about all nodes that
    wait, and only where that pays. The text is plain ``generate``'s, greedy and sampled.

    Attributes:
        head: the head, or a folder or hub name that holds it, which is read once, and computes as the model does.
        sources: where candidates come from, in the order of credit: ``"eagle"``, and any that
            :class:`lookahead.Lookahead` knows.
        tree: a published tree, of the head's candidates alone, in place of the automatic one: ``"eagle-1"``, 25 nodes
            of fixed shape, or ``"eagle-2"``, expanded by the head's own probabilities and ranked again.
        top_k, depth, total_tokens: (eagle-2) nodes of a level that are expanded, and children of each; levels beyond
            the first; tokens of the tree with its root.
        nodes, max_nodes, tuning, remember: see :class:`lookahead.Lookahead`.
        verification, seed, stats, static: see :class:`lookahead.strategies.base.Strategy`.

    For example::

        model.generate(**inputs, custom_generate=Eagle(EagleHead.from_pretrained("folder", model=model)))
    """

    name: ClassVar[str] = "eagle"
    known_sources: ClassVar[tuple[str, ...]] = ("eagle", *FREE_SOURCES)
    kind: ClassVar[type[EagleHead]] = EagleHead
    expected: ClassVar[str] = "an EagleHead or the folder it lies in"
    title: ClassVar[str] = "The EAGLE head is"
    trees: ClassVar[tuple[str, ...]] = ("eagle-1", "eagle-2")

    head: EagleHead | str | PathLike[str] | None = None
    _: KW_ONLY
    tree: Literal["eagle-1", "eagle-2"] | None = None
    top_k: int = 10
    depth: int = 7
    total_tokens: int = 60

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, least in (("top_k", 1), ("depth", 0), ("total_tokens", 2)):
            self._whole(field, least)

    @property
    def draws_candidates(self) -> bool:
        """For the fixed tree, and where the head alone fills a given number of nodes."""
        return (self.tree == "eagle-1" and self.verification != "exact") or super().draws_candidates

    def taps(self, model: PreTrainedModel) -> tuple[str, ...]:
        return self.heads_for(model).taps(model)

    def drafts(self, call: CallContext) -> Drafts:
        head, model = self.heads_for(call.model), call.model
        assert call.hidden is not None  # it is wanted
        features = joined_features(call.hidden, head.taps(model), head.norm(model))
        given = (model.get_input_embeddings(), output_layer(model))

        def passes(row: RowContext) -> PairPasses:
            return eagle_passes(head.network, features, row.index, *given, row.vocab_size)

        if self.tree == "eagle-1":
            return self._drafts_of(call, passes, partial(fixed_tree, FIXED, draw=call.rows[0].chance))
        grow = partial(ranked_again, top_k=self.top_k, depth=self.depth, total_tokens=self.total_tokens)
        return self._drafts_of(call, passes, grow if self.tree == "eagle-2" else None)


def eagle_passes(
    network: EagleNetwork, features: Callable[[], Tensor], row: int, embed: Any, *others: Any
) -> PairPasses:
    """An EAGLE head's :class:`PairPasses`, with the model's ``embed`` and output where the head has none of its own."""
    networks = [(network, PairCache(network.sizes.layers))]
    return PairPasses(networks, network.fc.weight, features, row, network.embed_tokens or embed, *others)
