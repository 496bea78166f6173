"""Names of before, until their last caller has changed."""

from transformers import PreTrainedModel

from lookahead.models.conformance import modified as changed
from lookahead.models.conformance import unrecorded
from lookahead.models.traits import ModelTraits

__all__ = ["changed", "unfamiliar"]


def unfamiliar(model: PreTrainedModel) -> str | None:
    """See :func:`lookahead.models.conformance.unrecorded`."""
    return unrecorded(model, ModelTraits.of(model))
