"""MTP layers as users hold them."""

from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead._per_model import PerModel
from lookahead.heads.mtp.network import MtpLayer
from lookahead.heads.mtp.reading import LayerTensors, read
from lookahead.heads.storage import check_names
from lookahead.models.compat import MODEL_ERRORS
from lookahead.models.hidden_states import final_norm
from lookahead.models.one_layer import one_layer
from lookahead.models.output_layer import copyable_weight, output_layer, output_sizes, placement
from lookahead.models.traits import decoder_config

_read: PerModel[dict[str, "MtpHeads"]] = PerModel(dict)  # by where they were read from


class MtpHeads(nn.Module):
    """The MTP layers of a checkpoint, ready to draft beside its model.

    Attributes:
        layers: one or more, which take turns: layer d modulo their number drafts the token at depth d + 1.
        source: the file that they were read from.
    """

    def __init__(self, layers: Sequence[MtpLayer], source: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.source = source

    @classmethod
    def from_pretrained(
        cls, source: str | PathLike[str] | None = None, *, model: PreTrainedModel, **hub: Any
    ) -> "MtpHeads":
        """Read the layers from a folder, a file or a repository of the hub (``hub`` says how to download); None = where
        ``model`` was loaded from, of which transformers does not tell the revision. They are built of the model's own
        kind of layer, and put where its output layer is.

        Raises:
            LookaheadError: what is missing, foreign, broken, quantised, or does not fit the model.
        """
        name = type(model).__name__
        if source is None:
            source = model.name_or_path
            if not source:
                raise LookaheadError(
                    f"{name} was not loaded from a checkpoint, so there are no MTP layers of its own: name one that "
                    "has them, Mtp(MtpHeads.from_pretrained(FOLDER, model=model))."
                )
        final_norm(model)  # tells if there is none to read hidden states behind
        file, found = read(str(source), hub, int(decoder_config(model).num_hidden_layers), name)
        layers = [_built(model, layer, index, f"{file}: MTP layer {index}") for index, layer in enumerate(found)]
        heads = cls(layers, file).to(placement(model)[0]).eval()
        for index, layer in enumerate(layers):
            _try(layer, f"{file}: MTP layer {index}")
        return heads

    @classmethod
    def of(cls, model: PreTrainedModel, source: str | None = None) -> "MtpHeads":
        """The layers of ``source``, or of the model's own checkpoint, read once a model."""
        known, key = _read.of(model), source or model.name_or_path
        if key not in known:
            known[key] = cls.from_pretrained(source, model=model)
        if known[key].first.fc.weight.device != (device := placement(model)[0]):
            known[key].to(device)
        return known[key]

    def networks(self) -> list[MtpLayer]:
        """The layers, in turn."""
        return [layer for layer in self.layers if isinstance(layer, MtpLayer)]

    @property
    def first(self) -> MtpLayer:
        return self.networks()[0]

    def check(self, model: PreTrainedModel) -> None:
        """Refuse, with a LookaheadError, a model that the layers were not made for."""
        own, kind, hidden = type(self.first.decoder), type(model.get_decoder()), output_sizes(model)[0]
        if own is not kind or self.first.fc.out_features != hidden:
            raise LookaheadError(
                f"These MTP layers belong to a {own.__name__} of {self.first.fc.out_features} channels, and "
                f"{type(model).__name__} is a {kind.__name__} of {hidden}: they are another model's."
            )

    def embedder(self, model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
        """How tokens are embedded: by the layers' own table, or the model's, without a norm that it may have in it."""
        if self.first.embed is not None:
            return self.first.embed
        module = model.get_input_embeddings()
        return partial(embedding, weight=module.weight) if hasattr(module, "embed_norm") else module


def _built(model: PreTrainedModel, tensors: LayerTensors, index: int, source: str) -> MtpLayer:
    name, dtype = type(model).__name__, placement(model)[1]
    hidden, vocab = output_sizes(model)
    table, norm = (model.get_input_embeddings().weight.shape[0], hidden), (hidden,)
    expected = {"fc": (hidden, 2 * hidden), "embed_norm": norm, "hidden_norm": norm, "norm": norm}
    expected |= {"embed": table, "head": (vocab, hidden)}
    for part, tensor in sorted(tensors.parts.items()):
        if tuple(tensor.shape) != expected[part]:
            wanted = f"expected {list(expected[part])} for {name}: the layers are another model's"
            raise LookaheadError(f"{source}: {part} is {list(tensor.shape)}, {wanted}.")
    parts = {part: tensor.to(dtype) for part, tensor in tensors.parts.items()}
    for part, layer in (("embed", model.get_input_embeddings()), ("head", output_layer(model))):
        own = copyable_weight(layer)
        if part in parts and own is not None and torch.equal(parts[part].to(own.device), own):
            del parts[part]  # a copy of the model's
    built = one_layer(model, tensors.block, parts.get("norm", torch.ones(hidden, dtype=dtype)), index, dtype)
    check_names(built.missing, built.foreign, source, f"decoder layer of {name}")
    for part, got, wanted_shape in built.misshapen:
        raise LookaheadError(f"{source}: {part} is {list(got)}, expected {list(wanted_shape)}, as {name} has it.")
    return MtpLayer(built.decoder, parts, tensors.hidden_first)


@torch.no_grad()
def _try(layer: MtpLayer, source: str) -> None:
    """Run a layer on two pairs and a node behind them; a LookaheadError if it cannot be, or gives NaN."""
    states = torch.ones(3, layer.fc.out_features).to(layer.fc.weight)
    mask, places, cache = torch.ones(3, 3, dtype=torch.bool).tril().to(states.device), torch.arange(3), layer.cache()
    try:
        for part in (slice(0, 2), slice(2, 3)):
            joined = layer.joined(states[part], states[part])
            out = layer(joined, states[part], places[part].to(states.device), cache, mask[part, : part.stop])
            cache.crop(part.stop)
    except MODEL_ERRORS as error:
        raise LookaheadError(
            f"{source}, a {type(layer.decoder).__name__} of one layer, cannot be run by itself: {error} Decode without "
            "use_mtp."
        ) from error
    if not bool(out.isfinite().all()):
        raise LookaheadError(f"{source} gives NaN or infinite numbers: check its weights and its dtype.")
