"""Multi-token prediction: layers that a model was trained with draft for it, as one source of the automatic tree."""

from dataclasses import KW_ONLY, dataclass
from os import PathLike
from typing import Any, ClassVar

from transformers import PreTrainedModel

from lookahead.draft.context import CallContext, Drafts, RowContext
from lookahead.heads.base import HeadStrategy
from lookahead.heads.mtp.heads import MtpHeads
from lookahead.heads.pairs import PairPasses, joined_features
from lookahead.models.hidden_states import NORM, final_norm
from lookahead.models.output_layer import output_layer
from lookahead.strategies.automatic import FREE_SOURCES


@dataclass(frozen=True)
class Mtp(HeadStrategy):
    """Decoding with a model's multi-token-prediction layers (DeepSeek-V3: arXiv 2412.19437, section 2.2).

    The layers are one source among others in the automatic mode's tree, asked level by level where that pays. They are
    used again and again, so drafts may be deeper than there are layers. The text is plain ``generate``'s, greedy and
    sampled. ``model.generate(**inputs, use_lookahead=True, use_mtp=True)`` is short for the model's own layers.

    Attributes:
        heads: the layers, or the folder or hub name of a checkpoint that has them, which is read once a model; None =
            the checkpoint that the model was loaded from.
        sources: where candidates come from, in the order of credit: ``"mtp"``, and any that
            :class:`lookahead.Lookahead` knows.
        nodes, max_nodes, tuning, remember: see :class:`lookahead.Lookahead`.
        verification, seed, stats, static: see :class:`lookahead.strategies.base.Strategy`.

    For example::

        model.generate(**inputs, custom_generate=Mtp(MtpHeads.from_pretrained("folder", model=model)))
    """

    name: ClassVar[str] = "mtp"
    known_sources: ClassVar[tuple[str, ...]] = ("mtp", *FREE_SOURCES)
    field: ClassVar[str] = "heads"
    kind: ClassVar[Any] = MtpHeads | None
    expected: ClassVar[str] = "MtpHeads or the folder they lie in"
    title: ClassVar[str] = "The MTP layers are"

    heads: MtpHeads | str | PathLike[str] | None = None
    _: KW_ONLY

    def predicting(self) -> "Mtp":
        return self

    @property
    def _read(self) -> Any:
        return self.heads  # where they lie, they are read beside the model

    def heads_for(self, model: PreTrainedModel) -> MtpHeads:
        if isinstance(self.heads, MtpHeads):
            return self.heads
        return MtpHeads.of(model, None if self.heads is None else str(self.heads))

    def taps(self, model: PreTrainedModel) -> tuple[str, ...]:
        return (NORM,)

    def drafts(self, call: CallContext) -> Drafts:
        model, heads = call.model, self.heads_for(call.model)
        assert call.hidden is not None  # it is wanted
        features = joined_features(call.hidden, (NORM,), final_norm(model))
        given = (heads.embedder(model), output_layer(model))

        def passes(row: RowContext) -> PairPasses:
            networks = [(layer, layer.cache()) for layer in heads.networks()]
            return PairPasses(networks, heads.first.fc.weight, features, row.index, *given, row.vocab_size)

        return self._drafts_of(call, passes)
