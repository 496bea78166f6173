"""An EAGLE head as users hold it."""

from dataclasses import asdict, replace
from os import PathLike
from typing import Any, ClassVar, Literal, Self

from torch import nn
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.heads.base import check_sizes, fitted, warn_of_another
from lookahead.heads.eagle.files import FORMATS, Format, read, write
from lookahead.heads.eagle.network import EagleNetwork
from lookahead.heads.storage import are_layers
from lookahead.models.hidden_states import NORM, decoder_layers, final_norm
from lookahead.models.output_layer import output_sizes
from lookahead.sources.vocabularies import same_but_for_padding

Count = Literal["inputs", "outputs"]


class EagleHead(nn.Module):
    """One head, ready to draft beside models of its sizes.

    Attributes:
        network: its weights.
        feature_layers: (EAGLE-3) which states of the model it reads, as ``hidden_states`` count: 0 is the embedding, i
            what layer i (counted from 0) reads. Empty = the usual ones of the model it is used with: 2, the middle one,
            and the third from the end. With ``layers="outputs"`` numbers, given or the file's, say what a layer gives,
            which is what the next one reads: most files say ``"inputs"``, and nothing in a file tells.
    """

    formats: ClassVar[tuple[Format, ...]] = FORMATS  # that it is written in

    def __init__(
        self, network: EagleNetwork, feature_layers: tuple[int, ...] = (), *, layers: Count = "inputs"
    ) -> None:
        super().__init__()
        self.network = network
        self.feature_layers = _counted(_numbers(feature_layers, layers) or network.sizes.feature_layers, layers)

    @classmethod
    def from_pretrained(
        cls,
        source: str | PathLike[str],
        *,
        model: PreTrainedModel | None = None,
        feature_layers: tuple[int, ...] = (),
        layers: Count = "inputs",
        **hub: Any,
    ) -> Self:
        """Read a head from a folder, a file or a repository of the hub (``hub`` says how to download).

        With ``model`` it is checked against that, and put on its device in the dtype that it computes in;
        ``feature_layers`` and ``layers`` as in :class:`EagleHead`.

        Raises:
            LookaheadError: what is missing, foreign, broken, or does not fit the model.
        """
        numbers = _numbers(feature_layers, layers)
        network = read(source, hub, None if model is None else output_sizes(model)[0], len(numbers) or None)
        return fitted(cls(network, numbers, layers=layers), model)

    def save_pretrained(self, folder: str | PathLike[str], *, format: Format = "safeailab", bits: int = 16) -> None:
        """Write ``config.json`` and ``model.safetensors`` as SafeAILab or speculators do, beside what else is there.

        Raises:
            LookaheadError: the format is unknown, a weight is not finite, the size of the model's vocabulary is unknown
                to a head that scores only some of it, or the folder cannot be written.
        """
        if format not in self.formats:
            raise LookaheadError(
                f"EAGLE heads cannot be written as {format!r}: expected one of {', '.join(self.formats)}."
            )
        self.network.sizes = replace(self.network.sizes, feature_layers=self.feature_layers)
        write(self.network, folder, format, bits)

    def facts(self) -> dict[str, Any]:
        """What it looks like."""
        return asdict(self.network.sizes)

    def taps(self, model: PreTrainedModel) -> tuple[str, ...]:
        """The hidden states of ``model`` that the head reads, by the names of taps."""
        if self.network.sizes.version != 3:
            return (NORM,)
        count = len(decoder_layers(model))
        ids = self.feature_layers or (2, count // 2, count - 3)
        if len(ids) != self.network.sizes.features or not all(0 <= index <= count for index in ids):
            given = "its config names none, and the usual ones are" if not self.feature_layers else "it reads"
            raise LookaheadError(
                f"This EAGLE head takes {self.network.sizes.features} features, {given} {list(ids)}, and "
                f"{type(model).__name__} has {count} layers: expected as many states from 0 to {count}. Give "
                "feature_layers=."
            )
        return tuple(NORM if index == count else f"layer.{index}" for index in ids)

    def norm(self, model: PreTrainedModel) -> nn.Module | None:
        """What features go through before the head reads them: EAGLE-1 and -2 read the final norm's output."""
        return final_norm(model) if self.network.sizes.version != 3 else None

    def check(self, model: PreTrainedModel) -> None:
        """Refuse, with a LookaheadError, a model that the head does not fit; warn where the file names another."""
        sizes, (hidden, vocab) = self.network.sizes, output_sizes(model)
        tokens, channels = model.get_input_embeddings().weight.shape
        name, joined, table = type(model).__name__, self.network.fc.in_features, sizes.own_embeddings
        if sizes.version == 3 and sizes.target_size != hidden and joined % hidden == 0 and not self.feature_layers:
            raise LookaheadError(
                f"This EAGLE head reads {joined} channels, which are {joined // hidden} features of {name}, and its "
                "config names no layers: expected them by EagleHead.from_pretrained(..., model=model, feature_layers=)."
            )
        facts = {"reads features of size": (sizes.target_size, hidden), "has embeddings for": (table, tokens)}
        facts["reads the model's embeddings, of size"] = None if table else sizes.hidden_size, channels
        lent = None if sizes.own_output else sizes.hidden_size
        facts["scores by the model's output layer states of size"] = lent, hidden
        check_sizes("This EAGLE head", facts, model)
        self._check_vocabulary(name, vocab)
        self.taps(model)
        warn_of_another("EAGLE head", self, self.network.sizes.base_model, model)

    def _check_vocabulary(self, name: str, vocab: int) -> None:
        """A head scores all tokens of the model, or says which; padding behind them does not count."""
        sizes, offsets = self.network.sizes, self.network.d2t
        if offsets is None and sizes.draft_vocab_size and not same_but_for_padding(sizes.draft_vocab_size, vocab):
            raise LookaheadError(
                f"This EAGLE head scores {sizes.draft_vocab_size} tokens, and {name} has {vocab}: it is another "
                "model's, or lacks the d2t or t2d that says which tokens they are."
            )
        most = 0 if offsets is None else int(self.network.scored().max())
        if most >= vocab:
            raise LookaheadError(
                f"This EAGLE head proposes tokens up to {most}, and {name} has {vocab}: it is another model's, or its "
                "d2t holds tokens in place of offsets."
            )
        if sizes.vocab_size is not None and not same_but_for_padding(sizes.vocab_size, vocab):
            raise LookaheadError(
                f"This EAGLE head is for a vocabulary of {sizes.vocab_size}, and {name} has {vocab}: it is another "
                "model's."
            )


def _numbers(given: Any, layers: Any) -> tuple[int, ...]:
    if layers not in ("inputs", "outputs"):
        raise LookaheadError(f"layers= must be one of 'inputs', 'outputs': got {layers!r}.")
    if not are_layers(given):
        raise LookaheadError(f"feature_layers= must be a tuple of layer numbers, as (2, 12, 21): got {given!r}.")
    return tuple(given)


def _counted(numbers: tuple[int, ...], layers: Count) -> tuple[int, ...]:
    """The states that layers of these numbers read or give, as ``hidden_states`` count."""
    if layers == "outputs" and not numbers:
        raise LookaheadError(
            "layers='outputs' says how numbers of layers count, and this EAGLE head names none: expected them by "
            "feature_layers=. Give those, or leave layers out."
        )
    return tuple(number + 1 for number in numbers) if layers == "outputs" else numbers
