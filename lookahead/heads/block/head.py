"""A block drafter as users hold it, and how the model reads it: files of older kinds do not say."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product
from math import log
from os import PathLike
from typing import Any, ClassVar, NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead._per_model import PerModel, latest
from lookahead.heads.base import check_sizes, fitted, warn_of_another
from lookahead.heads.block.files import made, read, write
from lookahead.heads.block.network import BlockNetwork
from lookahead.heads.storage import are_layers
from lookahead.models.fingerprint import weights_stamp
from lookahead.models.hidden_states import decoder_layers
from lookahead.models.output_layer import output_layer, output_sizes
from lookahead.sources.vocabularies import same_but_for_padding

_EVIDENCE = 5.0  # nats by which another reading has to be likelier than the file's: odds of 150 to 1
_TRIED, _BEHIND, _SLOTS = 8, 128, 4  # blocks that are tried, among so many last tokens; tokens of each that count

_log = logging.getLogger("lookahead")
_assistants: PerModel[dict[Any, Any]] = PerModel(dict)  # as heads
_readings: PerModel[WeakKeyDictionary[Any, "Reading"]] = PerModel(WeakKeyDictionary)  # of heads that were tried


class Reading(NamedTuple):
    """How a drafter is read: which states it reads, as ``hidden_states`` count, and whether its first place drafts."""

    layers: tuple[int, ...]
    anchor_first: bool


class BlockHead(nn.Module):
    """One drafter, ready to draft beside models of its sizes.

    Attributes:
        network: its weights.
        feature_layers: which states of the model it reads, as ``hidden_states`` count.
        anchor_first: whether the last token's place drafts. What of these two is not given is tried on the first prompt
            that is long enough: a file is not believed if another reading makes the prompt much likelier.
    """

    formats: ClassVar[tuple[str, ...]] = ("deepspec",)  # that it is written in
    assistants: ClassVar[tuple[str, ...]] = ("MuseGlimmerAssistantModel",)  # of transformers that are such drafters

    def __init__(self, network: Any, feature_layers: tuple[int, ...] = (), anchor_first: bool | None = None) -> None:
        super().__init__()
        if not are_layers(feature_layers):
            raise LookaheadError(f"feature_layers= must be a tuple as (2, 12), of layers: got {feature_layers!r}.")
        self.network: BlockNetwork = network
        self.feature_layers, self.anchor_first = tuple(feature_layers), anchor_first

    @classmethod
    def from_pretrained(
        cls,
        source: str | PathLike[str],
        *,
        model: PreTrainedModel | None = None,
        feature_layers: tuple[int, ...] = (),
        anchor_first: bool | None = None,
        **hub: Any,
    ) -> Self:
        """Read a drafter from a folder, a file or a repository of the hub (``hub`` says how to download).

        With ``model`` it is checked against that, and put on its device in the dtype that it computes in.

        Raises:
            LookaheadError: what is missing, foreign, broken, or does not fit the model.
        """
        return fitted(cls(read(source, hub), feature_layers, anchor_first), model)

    @classmethod
    def of(cls, assistant: PreTrainedModel) -> "BlockHead":
        """One of transformers' :attr:`assistants` as a drafter, with the same weights."""

        def read_once() -> BlockHead:
            network = made(assistant.state_dict(), assistant.config.to_dict(), type(assistant).__name__)
            return cls(network, network.sizes.feature_layers, network.sizes.anchor_first)

        return latest(_assistants.of(assistant), weights_stamp(assistant.parameters()), read_once)

    def save_pretrained(self, folder: str | PathLike[str], *, bits: int = 16) -> None:
        """Write ``config.json`` and ``model.safetensors`` as DeepSpec does, with what the layout leaves open; a
        LookaheadError if that fails, or for NaN."""
        layers, first = self.read_as
        self.network.sizes = replace(self.network.sizes, feature_layers=layers, anchor_first=first)
        write(self.network, folder, bits)

    def facts(self) -> dict[str, Any]:
        """What it looks like."""
        return asdict(self.network.sizes)

    @property
    def read_as(self) -> Reading:
        """How it is read if nothing speaks against it."""
        sizes, first = self.network.sizes, self.anchor_first
        return Reading(self.feature_layers or sizes.feature_layers, sizes.anchor_first if first is None else first)

    def readings(self, model: Any) -> list[Reading]:
        """How it may have to be read beside ``model``, the likeliest first; one if that is known."""
        if (known := _readings.of(model).get(self)) is not None:
            return [known]
        (layers, first), count = self.read_as, len(decoder_layers(model))
        moved = [tuple(index + by for index in layers) for by in (0, 1, -1)[: 1 if self.feature_layers else 3]]
        fitting = [each for each in moved if all(0 <= index < count for index in each)]
        firsts = [first, not first] if self.anchor_first is None and self.network.sizes.block_size > 1 else [first]
        return [Reading(*each) for each in product(fitting, firsts)]

    def taps(self, model: Any) -> tuple[str, ...]:
        """The hidden states of ``model`` that it reads, or may have to, by the names of taps."""
        return tuple(f"layer.{index}" for index in sorted({i for each in self.readings(model) for i in each.layers}))

    @torch.no_grad()
    def tried(self, model: Any, tokens: Sequence[int], features: Callable[[Reading], Tensor]) -> Reading:
        """The reading that makes a text's ``tokens`` likeliest, by the ``features`` ``[token, channel]`` of each."""
        readings, network = self.readings(model), self.network
        slots = min(network.sizes.block_size - 1, _SLOTS)
        last = len(tokens) - slots
        if len(readings) == 1 or slots < 1 or last <= _TRIED:
            return readings[0]
        text = torch.tensor(tokens, device=network.fc.weight.device)
        at = torch.linspace(max(1, last - _BEHIND), last - 1, _TRIED, device=text.device).long().unique()
        places, found = torch.arange(len(text), device=text.device)[None], []
        before, truth = (text[at[:, None] + by + places[0, :slots]] for by in (0, 1))
        known = slice(None) if network.d2t is None else network.scored()
        for reading in readings:
            pairs = network.remember(features(reading)[None], places)
            out = network(text[None, at], at[None], pairs, places, model.get_input_embeddings())[0]
            hidden = out[:, :slots] if reading.anchor_first else out[:, 1 : slots + 1]
            scores = network.added(network.logits(hidden, output_layer(model)), network.after(before, hidden))
            said = scores.new_zeros(*truth.shape, output_sizes(model)[1])  # tokens without scores tell nothing
            said[..., known] = scores.log_softmax(-1)
            found.append(float(said.gather(-1, truth[..., None]).sum()))
        best = found.index(max(found))
        if found[best] < found[0] + _EVIDENCE or found[best] < -truth.numel() * log(output_sizes(model)[1]):
            best = 0  # what is less likely than by chance is no evidence
        if best:
            told = f"{readings[best]} makes the text {found[best] - found[0]:.0f} nats likelier than {readings[0]}"
            _log.warning("This block drafter is read as its file does not say: %s.", told)
        _readings.of(model)[self] = readings[best]
        return readings[best]

    def check(self, model: PreTrainedModel) -> None:
        """Refuse, with a LookaheadError, a model that the drafter does not fit; warn where the file names another."""
        sizes, (hidden, vocab) = self.network.sizes, output_sizes(model)
        tokens, channels = model.get_input_embeddings().weight.shape
        own, markov = sizes.own_embeddings, self.network.markov_head
        facts: dict[str, tuple[int | None, int]] = {"reads features of size": (sizes.target_size, hidden)}
        facts["reads the model's embeddings, of size"] = None if own else sizes.hidden_size, channels
        lent = None if sizes.own_output else sizes.hidden_size
        facts["scores by the model's output layer states of size"] = lent, hidden
        check_sizes("This block drafter", facts, model)
        d2t, layers, count = self.network.d2t, self.read_as.layers, len(decoder_layers(model))
        tables = [own, None if d2t is not None else sizes.draft_vocab_size, markov and markov.markov_w1.num_embeddings]
        most = max(sizes.mask_token, -1 if d2t is None else int(self.network.scored().max()))
        wrong = [f"has a table of {each} tokens" for each in tables if each and not same_but_for_padding(each, vocab)]
        wrong += [f"uses token {most}"] * (most >= tokens or sizes.mask_token >= (own or tokens))
        wrong += [f"reads states {list(layers)}"] * (len(layers) != len(sizes.feature_layers) or max(layers) >= count)
        if wrong:
            theirs = f"{type(model).__name__} has {vocab} tokens, and {count} states to be read"
            raise LookaheadError(f"This block drafter {wrong[0]}, and {theirs}: it is another model's.")
        warn_of_another("block drafter", self, sizes.base_model, model)
