"""ReDrafter: a recurrent head as one source of the automatic tree, or its beams as published."""

from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from os import PathLike
from typing import Any, ClassVar, Literal

from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.draft.beam_search import BeamSearch
from lookahead.draft.context import CallContext, Drafts, RowContext
from lookahead.draft.published import HeadDrafter
from lookahead.models.hidden_states import LAST
from lookahead.models.output_layer import beside
from lookahead.sources.redrafter.head import RecurrentHead
from lookahead.sources.redrafter.passes import RecurrentPasses
from lookahead.strategies.automatic import FREE_SOURCES, AutomaticStrategy
from lookahead.strategies.draft_models import check_head, check_whole

_DEFAULT_SOURCES = ("redrafter", "recycling", "suffix")


@dataclass(frozen=True)
class ReDrafter(AutomaticStrategy):
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

    head: RecurrentHead | str | PathLike[str] | None = None
    _: KW_ONLY
    tree: Literal["beam"] | None = None
    beam_width: int = 10
    beam_length: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.head, PathLike):
            object.__setattr__(self, "head", str(self.head))
        if not isinstance(self.head, RecurrentHead | str):
            expected = "a RecurrentHead or the folder it lies in"
            raise LookaheadError(f"ReDrafter(head=) must be {expected}: got {self.head!r}.")
        if self.tree is not None:
            self._one_of("tree", ("beam",))
            self._refuse_automatic(f"tree={self.tree!r} as well. Drop one of the two.")
        self._whole("beam_width", 1)
        self._whole("beam_length", 2)
        self._must_name("redrafter")
        _ = self._read  # raises now what cannot be read

    @property
    def automatic(self) -> bool:
        return self.tree is None

    @property
    def draws_candidates(self) -> bool:
        """Where the head alone fills a given number of nodes."""
        return self._draws_from("redrafter")

    @cached_property
    def _read(self) -> RecurrentHead:
        return self.head if isinstance(self.head, RecurrentHead) else RecurrentHead.from_pretrained(str(self.head))

    def _beside(self, model: PreTrainedModel) -> RecurrentHead:
        return beside(model, self._read) if isinstance(self.head, str) else self._read

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain data; a head in memory is named by its class only."""
        return super().to_dict() | {"head": self.head if isinstance(self.head, str) else type(self.head).__name__}

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a head that is another model's."""
        self._check_causal(model)
        check_whole(model, type(self).__name__)
        head = self._beside(model)
        check_head(model, head, "The ReDrafter head is")
        head.check(model)

    def taps(self, model: PreTrainedModel) -> tuple[str, ...]:
        return (LAST,)

    def drafts(self, call: CallContext) -> Drafts:
        embed, hidden, head = call.model.get_input_embeddings(), call.hidden, self._beside(call.model)
        assert hidden is not None  # it is wanted

        def passes(row: RowContext) -> RecurrentPasses:
            return RecurrentPasses(head, partial(hidden.of, LAST), row.index, embed, row.vocab_size)

        if self.tree is not None:
            grow = BeamSearch(self.beam_width, self.beam_length).grow
            return Drafts([HeadDrafter("redrafter", row.prompt, passes(row), grow, row.chain) for row in call.rows])

        return self.passes_drafts(call, passes, "redrafter", _DEFAULT_SOURCES)
