"""Models of which it is known beforehand what their passes do, so that less of it has to be tried."""

from transformers import PreTrainedModel

from lookahead.models.code_safety import is_safe
from lookahead.models.conformance import recorded_routes
from lookahead.models.limits import index_limit, position_limit
from lookahead.models.traits import counts_slots, decoder_config, is_seq2seq


def unfamiliar(model: PreTrainedModel) -> str | None:
    """What class and config say against it; None = it is a decoder of text that was found to take trees."""
    if is_seq2seq(model) or decoder_config(model) is not model.config:
        return "it is more than a decoder of text"
    if position_limit(model) is not None or index_limit(model) is not None:
        return "its passes change with the text's length"
    if counts_slots(model):
        return "it is given places for each pass"
    if recorded_routes(model) != {"tree"}:
        return "it is not among the classes that were found to take trees"
    return None


def changed(model: PreTrainedModel) -> str | None:
    """What was done to a model since its class was tried; None = it runs transformers' and torch's own code."""
    if any(module.training for module in model.modules()) or not is_safe(model):
        return "other code than transformers' has a part in its passes, or may be handed their tensors"
    return None
