"""Block drafters: decoding with one, as one source of the automatic tree."""

from dataclasses import KW_ONLY, dataclass
from functools import partial
from os import PathLike
from typing import ClassVar, Literal

from transformers import PreTrainedModel

from lookahead.draft.context import CallContext, Drafts, RowContext
from lookahead.heads.base import HeadStrategy, fixed_tree
from lookahead.heads.block.head import BlockHead
from lookahead.heads.block.source import BlockCandidates, BlockSource
from lookahead.strategies.automatic import DEFAULT_SOURCES, FREE_SOURCES


@dataclass(frozen=True)
class Block(HeadStrategy):
    """Decoding with a block drafter: DFlash, DSpark or JetSpec.

    The drafter fills a block of masked places behind the text's last token in one pass, from the model's features, and
    is one source among others in the automatic mode's tree. The text is plain ``generate``'s, greedy and sampled.

    Attributes:
        head: the drafter, or a folder or hub name that holds it, which is read once, and computes as the model does.
        sources: where candidates come from, in the order of credit: ``"block"``, and any that
            :class:`lookahead.Lookahead` knows.
        tree: ``"chain"`` drafts the best token of every place from the drafter alone, in place of the automatic tree.
        nodes, max_nodes, tuning, remember: see :class:`lookahead.Lookahead`.
        verification, seed, stats, static: see :class:`lookahead.strategies.base.Strategy`.

    For example::

        model.generate(**inputs, custom_generate=Block("folder of the drafter"))
    """

    name: ClassVar[str] = "block"
    known_sources: ClassVar[tuple[str, ...]] = ("block", *FREE_SOURCES)
    kind: ClassVar[type[BlockHead]] = BlockHead
    expected: ClassVar[str] = "a BlockHead or the folder it lies in"
    title: ClassVar[str] = "The block drafter is"

    head: BlockHead | str | PathLike[str] | None = None
    _: KW_ONLY
    tree: Literal["chain"] | None = None

    @property
    def draws_candidates(self) -> bool:
        """Never: what is said of a place goes for many nodes."""
        return False

    def taps(self, model: PreTrainedModel) -> tuple[str, ...]:
        return self.heads_for(model).taps(model)

    def drafts(self, call: CallContext) -> Drafts:
        head, rows = self.heads_for(call.model), call.rows
        assert call.hidden is not None  # it is wanted
        candidates = BlockCandidates(head, call.model, call.hidden, len(rows), rows[0].vocab_size)

        def made(row: RowContext, _: object = None) -> BlockSource:
            return BlockSource(candidates, row.index, row.draw)

        if self.tree is None:
            return self.automatic_drafts(call, self.sources or (self.name, *DEFAULT_SOURCES), {self.name: made})
        chain = [(0,) * depth for depth in range(1, head.network.sizes.block_size + 1)]
        return self._drafts_of(call, made, partial(fixed_tree, chain))
