"""ReDrafter: a recurrent head as one source of the automatic tree, or its beams as published."""

from dataclasses import KW_ONLY, dataclass
from functools import partial
from os import PathLike
from typing import ClassVar, Literal

import numpy as np
from transformers import PreTrainedModel

from jacobi import TokenTree
from lookahead.draft.context import CallContext, Drafts, RowContext
from lookahead.heads.base import HeadStrategy
from lookahead.heads.redrafter.head import RecurrentHead, RecurrentPasses
from lookahead.models.hidden_states import LAST
from lookahead.sources.draft_model import Branch, Passes
from lookahead.strategies.automatic import FREE_SOURCES

CANDIDATES = 50  # next tokens of a beam; others have no chance


def beam_search(root: int, passes: Passes, room: int, chain: bool = False, *, width: int, length: int) -> TokenTree:
    """ReDrafter's beams (arXiv 2403.09919, section 3), at most ``room`` deep; of a ``chain`` the best one only. They
    are the ``width`` likeliest continuations of ``length`` tokens, the root counted. In a tree, what several beams
    begin with is scored once::

        root a b c          root - a - b -+- c
        root a b d                 |      +- d
        root a e f                 +- e - f        9 drafted tokens in 6 nodes
    """
    beams: list[tuple[float, Branch]] = [(0.0, ())]
    for _ in range(min(length - 1, room)):
        longer: list[tuple[float, Branch]] = []
        for (score, branch), said in zip(beams, passes.after([branch for _, branch in beams]), strict=True):
            if said is not None and len(said[0]):
                tokens, logits = (each[:CANDIDATES] for each in said)
                lower = logits.astype(np.float64) - logits[0]  # log-probabilities as if there were no others
                sums = (score + (lower - np.log(np.exp(lower).sum()))).tolist()
                longer += [(total, (*branch, token)) for token, total in zip(tokens.tolist(), sums, strict=True)]
        if not longer:
            break
        beams = sorted(longer, key=lambda beam: -beam[0])[: 1 if chain else width]
    return TokenTree.from_paths(root, [branch for _, branch in beams])


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
