"""What ``generate(..., return_dict_in_generate=True)`` returns with lookahead."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from lookahead.models.traits import is_seq2seq
from lookahead.stats import DecodingStats


@dataclass
class LookaheadOutput(GenerateDecoderOnlyOutput):
    """What ``generate(..., return_dict_in_generate=True)`` returns.

    Attributes:
        stats: what the decode did; None with ``stats="none"``.
        trajectories: with ``Jacobi(return_trajectory=True)``, every iterate fed to the model, ``[row][pass]``.
    """

    stats: DecodingStats | None = None
    trajectories: list[list[list[int]]] | None = None


@dataclass
class LookaheadSeq2SeqOutput(GenerateEncoderDecoderOutput):
    """What ``generate(..., return_dict_in_generate=True)`` of an encoder-decoder model returns.

    ``stats`` and ``trajectories`` are those of :class:`LookaheadOutput`. They are plain attributes, no items: a model's
    own ``generate`` around ours (Whisper's) takes every item apart by rows.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stats: DecodingStats | None = None
        self.trajectories: list[list[list[int]]] | None = None


def output_of(
    model: PreTrainedModel,
    fields: dict[str, Any],
    stats: DecodingStats | None,
    trajectories: list[list[list[int]]] | None,
) -> LookaheadOutput | LookaheadSeq2SeqOutput:
    """What a call of ``model`` returns.

    Args:
        model: a causal or an encoder-decoder model.
        fields: of transformers' own output.
        stats: see :class:`LookaheadOutput`.
        trajectories: likewise.
    """
    if not is_seq2seq(model):
        return LookaheadOutput(**fields, stats=stats, trajectories=trajectories)
    output = LookaheadSeq2SeqOutput(**fields)
    output.stats, output.trajectories = stats, trajectories
    return output
