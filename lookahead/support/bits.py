"""What holds of a call's text whatever else changes: that it is plain decoding's, or at least the same each time."""

from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.models.code_safety import is_safe
from lookahead.models.mask_rules import mask_rules, shortest_window
from lookahead.models.traits import ModelTraits
from lookahead.runtime import ordered_attention
from lookahead.runtime.foreign_layers import foreign_layers, rounding_layer
from lookahead.runtime.layer_trials import RowRange
from lookahead.runtime.packed_layers import Invariance, computed_dtype
from lookahead.runtime.packing import packs_alike
from lookahead.runtime.quantised_layers import is_quantised
from lookahead.runtime.row_limits import rows_of_all
from lookahead.runtime.singly import how_singly

_TOGETHER = 32  # float32 numbers whose cosine torch computes in one go, at most; what is left over, one by one
_TURNS = 512  # positions up to which attention is plain decoding's, node by node: its price rises with the text


@dataclass(frozen=True, slots=True)
class Texts:
    """What a call writes: how many texts, of how many positions (0 = few); ``padded``: one, behind padding."""

    count: int = 1
    positions: int = 0
    padded: bool = False


@dataclass(frozen=True, slots=True)
class Bits:
    """What a call's numbers keep.

    Attributes:
        keeps: ``"plain"`` = the text is the one that plain ``generate`` writes, ``"repeatable"`` = it is the same each
            time, for the same seed; None = a rounding may decide it.
        reason: why it keeps no more; None = it keeps all.
        limits: within which linear layers are run for that; None = in any way that is fast.
    """

    keeps: Literal["plain", "repeatable"] | None
    reason: str | None = None
    limits: Invariance | None = None

    def repeatable(self) -> "Bits":
        """The same for a text whose prompt is read in order as well."""
        return self if self.limits is None else Bits("repeatable", self.reason, Invariance(self.limits.rows))

    def after(self, model: PreTrainedModel, wanted: bool | None) -> "Bits":
        """What a call has kept that is over; as :func:`nothing_kept` if its passes met attention of another kind."""
        reason = None if self.limits is None else ordered_attention.left_out(model)
        return self if reason is None else nothing_kept(reason, wanted)


def nothing_kept(reason: str, wanted: bool | None) -> Bits:
    """What a call keeps of which a rounding may decide the text; a LookaheadError if the same text is ``wanted``."""
    if wanted:
        raise LookaheadError(
            f"repeatable=True cannot be kept: {reason}. Leave repeatable unset, or load the model in float32."
        )
    return Bits(None, reason)


def bits_of(
    model: PreTrainedModel,
    traits: ModelTraits,
    route: str,
    wanted: bool | None = None,
    texts: Texts = Texts(),
    obstacle: str | None = None,
) -> Bits:
    """What a call keeps that is decoded by a ``route``.

    Args:
        wanted: whether the text has to be the same each time; None = where that costs next to nothing.
        texts: that it writes.
        obstacle: why not even its numbers are alike, beside what the model says; None = nothing is known.

    Raises:
        LookaheadError: it is ``wanted``, and cannot be had.
    """
    if route == "plain":
        return Bits("plain")
    if traits.dtype.itemsize > 2:
        return _kept_wide(model, wanted)
    if wanted is False:
        return Bits(None, "repeatable=False")
    reason = obstacle or _obstacle(model, traits, route)
    if reason is None and wanted is None and computed_dtype(traits.dtype) != traits.dtype:
        name = str(traits.dtype).removeprefix("torch.")
        reason = f"this processor has no instructions for {name}, and is faster where rows are not alike"
    rows = rows_of_all(model, several=texts.count > 1) if reason is None else None
    if rows is not None and wanted is None and not packs_alike(model, Invariance(rows)):
        reason, rows = "packed weights, which are faster, add in another order here", None
    if rows is not None:
        return _kept(model, traits, rows, bool(wanted) or is_quantised(model), texts)
    return nothing_kept(reason or "this machine's linear layers give other outputs for other numbers of rows", wanted)


def _kept_wide(model: PreTrainedModel, wanted: bool | None) -> Bits:
    """What passes keep in float32 and float64."""
    rounding = rounding_layer(model)
    return Bits("plain") if rounding is None else nothing_kept(f"{rounding} rounds its inputs", wanted)


def _kept(model: PreTrainedModel, traits: ModelTraits, rows: dict[int, RowRange], wanted: bool, texts: Texts) -> Bits:
    """What passes keep whose linear layers are alike for so many rows; ``wanted``: the same text is, at any price."""
    if texts.count == 1 and any(each.least > 1 for each in rows.values()):
        return Bits("repeatable", "linear layers give other outputs for one row than for two here", Invariance(rows))
    if singly := how_singly(model, traits, alone=texts.padded):
        return Bits("plain", None, Invariance(rows, singly=singly))
    if not wanted:
        return Bits("repeatable", "torch's attention of a single token adds in another order", Invariance(rows))
    turns = min(_TURNS, shortest_window(traits, mask_rules(model, traits)) or _TURNS)
    keeps: Literal["plain", "repeatable"] = "plain" if texts.positions <= turns else "repeatable"
    return Bits(keeps, f"after {turns} positions attention is not plain decoding's", Invariance(rows, turns))


def _obstacle(model: PreTrainedModel, traits: ModelTraits, route: str) -> str | None:
    """Why a node's numbers depend on more than its text, as far as can be told without a pass; None = it may not."""
    if traits.device.type != "cpu":
        return f"on a device of type {traits.device.type} kernels are chosen by what is in a pass"
    if route != "tree" or traits.is_encoder_decoder:
        return f"{traits.name} is given drafts by the route of a {route}, through attention of its own"
    if traits.attention != "sdpa" or not getattr(model, "_supports_attention_backend", False):
        return f"the attention of {traits.name} ({traits.attention}) is code of its own"
    return ordered_attention.obstacle(traits.dtype) or ordered_attention.left_out(model) or _odd_part(model)


def _odd_part(model: PreTrainedModel) -> str | None:
    foreign = set(foreign_layers(model))
    for module in model.modules():
        for name, weight in module._parameters.items():
            known = type(module) is nn.Linear or isinstance(module, nn.Embedding) or module in foreign
            if weight is not None and weight.ndim > 1 and not known:
                return f"{name} of {type(module).__name__} is multiplied by code of its own"
        frequencies = module._buffers.get("inv_freq")
        if frequencies is not None and 2 * frequencies.numel() % _TOGETHER:
            return f"positions turn {2 * frequencies.numel()} channels, and torch computes odd ones in another way"
    if is_safe(model, foreign):
        return None
    return "code other than transformers' runs in its passes, or may see their tensors"
