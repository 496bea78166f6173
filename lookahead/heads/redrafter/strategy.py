"""ReDrafter: a recurrent head as one source of the automatic tree, or its beams as published."""

from dataclasses import KW_ONLY, dataclass
from functools import partial
from os import PathLike
from typing import ClassVar, Literal

from transformers import PreTrainedModel

from lookahead.draft.context import CallContext, Drafts, RowContext
from lookahead.heads.base import HeadStrategy
from lookahead.heads.redrafter.beams import beam_search
from lookahead.heads.redrafter.head import RecurrentHead, RecurrentPasses
from lookahead.models.hidden_states import LAST
from lookahead.strategies.automatic import FREE_SOURCES


@dataclass(frozen=True)
class ReDrafter(HeadStrategy):
    """Decoding with a recurrent head (Cheng et al., arXiv 2403.09919).

    The head is one source among others in the automatic mode's tree: it is asked level by level, about all nodes that
    wait, and only where that pays. The text is plain ``generate``'s, greedy and sampled.

    Attributes:
        head: the head, or a folder or hub name that holds it, which is read once, and computes as the model does.
        sources: where candidates come from, in the order of credit: ``"redrafter"``, and any that
            :class:`lookahead.Lookahead` knows.
        tree: ``"beam"`` drafts as published, from the head alone, in place of the automatic tree.
        beam_width, beam_length: (beam) how many beams there are, and their tokens, the last written one counted.
        nodes, max_nodes, tuning, remember: see :class:`lookahead.Lookahead`.
        verification, seed, stats, static: see :class:`lookahead.strategies.base.Strategy`.

    For example::

        model.generate(**inputs, custom_generate=ReDrafter(RecurrentHead.from_pretrained("folder", model=model)))
    """

    name: ClassVar[str] = "redrafter"
    known_sources: ClassVar[tuple[str, ...]] = ("redrafter", *FREE_SOURCES)
    kind: ClassVar[type[RecurrentHead]] = RecurrentHead
    expected: ClassVar[str] = "a RecurrentHead or the folder it lies in"
    title: ClassVar[str] = "The ReDrafter head is"
    trees: ClassVar[tuple[str, ...]] = ("beam",)

    head: RecurrentHead | str | PathLike[str] | None = None
    _: KW_ONLY
    tree: Literal["beam"] | None = None
    beam_width: int = 10
    beam_length: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole("beam_width", 1)
        self._whole("beam_length", 2)

    def taps(self, model: PreTrainedModel) -> tuple[str, ...]:
        return (LAST,)

    def drafts(self, call: CallContext) -> Drafts:
        embed, hidden, head = call.model.get_input_embeddings(), call.hidden, self.heads_for(call.model)
        assert hidden is not None  # it is wanted

        def passes(row: RowContext) -> RecurrentPasses:
            return RecurrentPasses(head, partial(hidden.of, LAST), row.index, embed, row.vocab_size)

        grow = partial(beam_search, width=self.beam_width, length=self.beam_length)
        return self._drafts_of(call, passes, None if self.tree is None else grow)
