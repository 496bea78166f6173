"""EAGLE: a head that drafts from the model's features, as one source of the automatic tree."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from os import PathLike
from typing import Any, ClassVar, Literal

from torch import Tensor
from transformers import PreTrainedModel

from jacobi import TokenTree
from lookahead.draft.context import CallContext, Drafts, RowContext
from lookahead.heads.base import HeadStrategy, fixed_tree
from lookahead.heads.eagle.head import EagleHead
from lookahead.heads.eagle.network import EagleNetwork, PairCache
from lookahead.heads.pairs import PairPasses, joined_features
from lookahead.models.output_layer import output_layer
from lookahead.sources.draft_model import Branch, Passes
from lookahead.strategies.automatic import FREE_SOURCES

# EAGLE-1's 25 nodes by the ranks of their tokens among their siblings (mc_sim_7b_63).
FIXED = tuple(
    tuple(map(int, ranks))
    for ranks in (
        *("0", "1", "2", "3"),
        *("00", "01", "02", "10", "11", "20", "21", "30"),
        *("000", "001", "002", "010", "011", "020", "021", "100"),
        *("0000", "0001", "0002", "00000", "00001"),
    )
)

Made = tuple[float, Branch]  # a candidate: sum of log-probabilities, branch


def ranked_again(
    root: int, passes: Passes, room: int, chain: bool = False, *, top_k: int, depth: int, total_tokens: int
) -> TokenTree:
    """EAGLE-2's tree (section 4), at most ``room`` deep; a ``chain`` has one branch. ``depth`` times the ``top_k``
    nodes of a level with the best cumulative log-probabilities are expanded by ``top_k`` children each, and of all that
    were made the ``total_tokens - 1`` best are kept. With top_k = 2, depth = 2 and 6 tokens, log-probabilities and
    their sums::

        root -+- A -0.2 -+- C -0.5 (-0.7) -+- G -0.3 (-1.0)      kept: A, C, D, G, I
              |          |                 +- H -1.4 (-2.1)
              |          +- D -1.0 (-1.2) -+- I -0.2 (-1.4)
              |                            +- J -1.9 (-3.1)
              +- B -1.7 --- E -0.1 (-1.8), F -2.5 (-4.2)         C and D are expanded, E and F are not
    """
    width = 1 if chain else top_k
    made: list[Made] = []
    frontier: list[Made] = [(0.0, ())]
    for _ in range(min(depth + 1, room)):
        new: list[Made] = []
        for (score, branch), said in zip(frontier, passes.after([branch for _, branch in frontier]), strict=True):
            if said is not None:
                best = zip(said[0][:width].tolist(), said[1][:width].tolist(), strict=True)
                new += [(score + chance, (*branch, token)) for token, chance in best]
        made += new
        frontier = _best(new, width)
        if not frontier:
            break
    kept = {branch for _, branch in _best(made, total_tokens - 1)}
    return TokenTree.from_paths(root, [branch for _, branch in made if branch in kept])


def _best(made: list[Made], count: int) -> list[Made]:
    """Of equals those made first, so that no child comes before its parent."""
    return sorted(made, key=lambda each: -each[0])[:count]


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


def eagle_passes(network: EagleNetwork, features: Callable[[], Tensor], row: int, embed: Any, *rest: Any) -> PairPasses:
    """An EAGLE head's :class:`PairPasses`, with the model's ``embed`` and output where the head has none of its own."""
    networks = [(network, PairCache(network.sizes.layers))]
    return PairPasses(networks, network.fc.weight, features, row, network.embed_tokens or embed, *rest)
