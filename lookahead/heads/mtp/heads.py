"""MTP layers as users hold them: each a decoder layer of the model's own kind, over pairs of a hidden state and the
token after it; and what it keeps of one sequence's pairs, in caches of transformers' own."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import DynamicCache, PreTrainedModel

from jacobi import LookaheadError
from lookahead._per_model import PerModel
from lookahead.heads.mtp.reading import LayerTensors, read
from lookahead.heads.storage import check_names
from lookahead.models.compat import MODEL_ERRORS
from lookahead.models.hidden_states import final_norm
from lookahead.models.mask_rules import MaskRule, mask_rules
from lookahead.models.names import CACHE
from lookahead.models.one_layer import one_layer
from lookahead.models.output_layer import copyable_weight, output_layer, output_sizes, placement
from lookahead.models.traits import ModelTraits, decoder_config
from lookahead.runtime.cache.snapshots import Snapshot, recurrent_layers
from lookahead.runtime.masks import map_rules

Decode = Callable[[DynamicCache, Tensor, Tensor, Any], Tensor]  # of states [pair, hidden], positions [pair], masks

_INDEXED = "indexed_attention"
_read: PerModel[dict[str, Any]] = PerModel(dict)  # by where they were read from


class AttentionCache:
    """Keys and values of a layer of attention, one entry a pair, and the pairs' positions."""

    def __init__(self, config: Any) -> None:
        # Without a config nothing is dropped that a window does not see any more; indexers need one.
        kinds = getattr(config, "layer_types", None) or ()
        self.states = DynamicCache(config=config) if _INDEXED in kinds else DynamicCache()
        self.positions = torch.empty(0, dtype=torch.long)

    @property
    def length(self) -> int:
        return len(self.positions)

    def crop(self, length: int) -> None:
        """Forget all pairs behind the first ``length``."""
        if length < self.length:
            self.states.crop(length - self.length)
            self.positions = self.positions[:length]


class LinearCache:
    """The cache of a layer that also has convolution or recurrent states, which follow one branch at a time. They are
    copied where the text ends. A node on another branch than the last one is reached from there::

        text   a b c | copied      fed d, e: the states are at c-d-e
        node f below c-d           back to c; d is fed again, then f
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._text = 0  # pairs of it
        self._nodes: list[tuple[Tensor, Tensor]] = []  # state and position of every pair behind the text
        self._branch: list[int] = []  # the nodes that the states have seen
        self._states = DynamicCache(config=config)
        self._snapshot = Snapshot(self._states)  # of the end of the text

    @property
    def length(self) -> int:
        return self._text + len(self._nodes)

    def _back(self) -> None:
        """To the end of the text."""
        if self._text:
            self._snapshot.restore()
        else:
            self._states = DynamicCache(config=self._config)
            self._snapshot = Snapshot(self._states)
        self._branch = []

    def crop(self, length: int) -> None:
        """Forget all pairs behind the first ``length``: those of the text, or all that are held, which then are it."""
        if self._nodes and length == self.length and self._branch == list(range(len(self._nodes))):
            self._text, self._branch = length, []
            self._snapshot.take()
        elif self._branch:
            self._back()
        self._nodes = []

    def run(self, decode: Decode, states: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """What comes out for pairs ``[pair, hidden]``, which see the text and nodes by ``mask`` ``[pair, pairs]``."""
        first = len(self._nodes)
        self._nodes += zip(states.split(1), positions.split(1), strict=True)
        seen = mask[:, self._text :]
        if self._branch == list(range(first)) and bool((seen == torch.ones_like(seen).tril(first)).all()):
            self._branch = list(range(len(self._nodes)))  # the text, or one branch, goes on
            return decode(self._states, states, positions, None)
        reached = []  # what comes out at the last node of each branch
        for branch in (line.nonzero()[:, 0].tolist() for line in seen):
            if self._branch != branch[:-1]:
                self._back()
            new = [self._nodes[node] for node in branch[len(self._branch) :]]
            self._branch = branch
            states, positions = (torch.cat(each) for each in zip(*new, strict=True))
            reached.append(decode(self._states, states, positions, None)[-1:])
        return torch.cat(reached)


def _linear(weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


class MtpLayer(nn.Module):
    """One layer, as DeepSeek-V3's (arXiv 2412.19437, section 2.2)::

        hidden state at token i ------- hidden_norm --+
                                                      +-- fc -- decoder layer -- norm -- z    scored by the model's
        token i+1 -- the model's embed -- embed_norm -+                                       output layer, fed back

    Args:
        decoder: the decoder layer with ``norm`` behind it, as a decoder of one layer.
        parts: the other parts' tensors, by name; ``embed`` and ``head`` only where they are not the model's.
        hidden_first: whether ``fc`` reads the hidden state before the embedding.
    """

    d2t: Tensor | None = None  # it scores all tokens

    def __init__(self, decoder: PreTrainedModel, parts: Mapping[str, Tensor], hidden_first: bool) -> None:
        super().__init__()
        norm, self.decoder = decoder.norm, decoder
        self.fc = _linear(parts["fc"])
        self.head = _linear(parts["head"]) if "head" in parts else None
        self.embed = nn.Embedding.from_pretrained(parts["embed"]) if "embed" in parts else None
        self.embed_norm, self.hidden_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        for own in ("embed_norm", "hidden_norm"):
            getattr(self, own).weight = nn.Parameter(parts[own], requires_grad=False)
        if "norm" not in parts:
            decoder.norm = nn.Identity()
        self._hidden_first = hidden_first
        self.is_linear = bool(recurrent_layers(DynamicCache(config=decoder.config)))  # and follows no tree
        self._rules = mask_rules(decoder, ModelTraits.of(decoder))
        self._scale = float(getattr(decoder.config, "logits_mup_width_multiplier", None) or 1.0)

    def joined(self, features: Tensor, embedded: Tensor, fed_back: bool = False) -> Tensor:
        """What the decoder layer reads ``[pair, hidden]``, of hidden states and embeddings ``[pair, hidden]``."""
        parts = [self.embed_norm(embedded), self.hidden_norm(features)]
        return self.fc(torch.cat(parts[::-1] if self._hidden_first else parts, dim=-1))

    def cache(self) -> AttentionCache | LinearCache:
        return LinearCache(self.decoder.config) if self.is_linear else AttentionCache(self.decoder.config)

    def forward(
        self, states: Tensor, embedded: Tensor, positions: Tensor, cache: AttentionCache | LinearCache, mask: Tensor
    ) -> Tensor:
        """What comes out ``[pair, hidden]``, by bool ``mask`` ``[pair, pairs in the cache and these]``."""
        if isinstance(cache, LinearCache):
            return cache.run(self._decoded, states, positions, mask)
        cache.positions = torch.cat([cache.positions.to(positions), positions])
        masks = self._masks(mask, positions, cache.positions, states.dtype)
        return self._decoded(cache.states, states, positions, masks)

    def _decoded(self, cache: DynamicCache, states: Tensor, positions: Tensor, masks: Any) -> Tensor:
        outputs = self.decoder(
            inputs_embeds=states[None],
            position_ids=positions[None],
            attention_mask=masks,
            use_cache=True,
            **{CACHE: cache},
        )
        return outputs.last_hidden_state[0]

    def _masks(self, mask: Tensor, positions: Tensor, keys: Tensor, dtype: torch.dtype) -> Any:
        """What attention adds ``[1, 1, pair, key]``, by the layer's own rule as well, in the form that it takes."""
        first = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=mask.device)

        def build(rule: MaskRule) -> Tensor:
            seen = mask[None, None]
            if rule is not None:
                seen = seen & rule(first, first, positions[None, None, :, None], keys[None, None, None, :])
            return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)

        return map_rules(self._rules, build)

    def logits(self, states: Tensor, output: nn.Module) -> Tensor:
        """Scores ``[pair, token]`` by the model's ``output`` layer, or the layer's own."""
        output = self.head or output
        weight = getattr(output, "weight", None)
        states = states.to(weight.dtype if isinstance(weight, Tensor) else states.dtype)
        return output(states / self._scale)


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
    def from_pretrained(cls, source: str | PathLike[str] | None = None, *, model: PreTrainedModel, **hub: Any) -> Self:
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
    def of(cls, model: PreTrainedModel, source: str | None = None) -> Self:
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
        told = f"{source}, a {type(layer.decoder).__name__} of one layer, cannot be run by itself: {error}"
        raise LookaheadError(f"{told} Decode without use_mtp.") from error
    if not bool(out.isfinite().all()):
        raise LookaheadError(f"{source} gives NaN or infinite numbers: check its weights and its dtype.")
