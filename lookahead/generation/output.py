"""What ``generate(..., return_dict_in_generate=True)`` returns with lookahead."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from jacobi import Drafter, JacobiDrafter
from lookahead.generation.call import Call
from lookahead.models.names import CACHE
from lookahead.stats import DecodingStats
from lookahead.verify.sequences import Sequences
from lookahead.verify.verifier import Verifier


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
    call: Call, fields: dict[str, Any], stats: DecodingStats | None, trajectories: list[list[list[int]]] | None = None
) -> LookaheadOutput | LookaheadSeq2SeqOutput:
    """What a call with ``return_dict_in_generate`` returns: ``fields`` of transformers' own output, and ours."""
    output = (LookaheadSeq2SeqOutput if call.traits.is_encoder_decoder else LookaheadOutput)(**fields)
    output.stats, output.trajectories = stats, trajectories
    return output


def decoded(
    call: Call, sequences: Sequences, verifier: Verifier, drafters: Iterable[Drafter], stats: DecodingStats | None
) -> LookaheadOutput | LookaheadSeq2SeqOutput | Tensor:
    """What ``generate`` returns of a call that is written."""
    if not call.config.return_dict_in_generate:
        return sequences.padded()
    fields: dict[str, Any] = {
        "sequences": sequences.padded(),
        "scores": verifier.recorded("scores"),
        "logits": verifier.recorded("logits"),
        CACHE: call.cache if call.exports_cache else None,
    }
    told = [each.trajectory for each in drafters if isinstance(each, JacobiDrafter) and each.trajectory is not None]
    return output_of(call, fields, stats, told or None)
