"""How an EAGLE-3 head's file counts the layers whose states it reads: by what layer i reads, as most do, or by what it
gives, which is what layer i + 1 reads. Nothing in the file tells; the count is right under which the head finds texts
likelier."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lookahead._per_model import PerModel
from lookahead.models.compat import last_logits
from lookahead.models.hidden_states import HiddenStates, tapped
from lookahead.models.output_layer import output_layer
from lookahead.models.traits import ModelTraits
from lookahead.sources.eagle.network import EagleNetwork, PairCache

_LEAST, _MOST = 12, 64  # tokens of a text that are looked at
_CLEARLY = 5.0  # nats by which all texts so far are likelier under one of the two
_ENOUGH = 512  # tokens; a head that does not care by then will not be asked again


@dataclass
class _Evidence:
    tokens: int = 0
    gain: float = 0.0  # nats for "what it gives"

    @property
    def is_enough(self) -> bool:
        return abs(self.gain) > _CLEARLY or self.tokens >= _ENOUGH


_found: PerModel[WeakKeyDictionary[Any, _Evidence]] = PerModel(WeakKeyDictionary)  # by head


def counts_low(model: Any, head: Any) -> bool:
    """Whether the file of ``head`` counts by what layers give, as far as texts have told."""
    known = _found.of(model).get(head)
    return known is not None and known.gain > _CLEARLY


def is_told(model: Any, head: Any) -> bool:
    """Whether no more texts are needed."""
    known = _found.of(model).get(head)
    return known is not None and known.is_enough


def tell(model: Any, head: Any, network: EagleNetwork, ways: Sequence[tuple[str, ...]], text: Sequence[int]) -> None:
    """Take in what a ``text`` without padding says about the two ``ways``, each the taps of all features. A short one
    says nothing."""
    if len(text) < _LEAST:
        return
    as_read, as_given = _likelihoods(model, network, ways, list(text[-_MOST:]))
    known = _found.of(model).get(head, _Evidence())
    _found.of(model)[head] = _Evidence(known.tokens + len(as_read), known.gain + float((as_given - as_read).sum()))


@torch.no_grad()
def _likelihoods(
    model: Any, network: EagleNetwork, ways: Sequence[tuple[str, ...]], text: Sequence[int]
) -> list[Tensor]:
    """The log-probabilities under the head of the text's tokens that it scores, ``[token]`` for each way."""
    weight = network.fc.weight
    ids = torch.tensor([text], device=ModelTraits.of(model).device)
    with HiddenStates(tapped(model, sorted({tap for way in ways for tap in way}))) as hidden:
        hidden.expect()
        logits = model(input_ids=ids, use_cache=False, **last_logits(model, 1)).logits
        states = dict(zip(hidden.taps, hidden.take(logits, whole=True), strict=True))
    following, scored = ids[0, 1:-1], ids[0, 2:, None].to(weight.device)
    embedded = (network.embed_tokens or model.get_input_embeddings())(following).to(weight)
    positions = torch.arange(len(following), device=weight.device)
    mask = torch.ones(len(following), len(following), dtype=torch.bool, device=weight.device).tril()
    found = []
    for way in ways:
        features = torch.cat([states[tap][0, :-2] for tap in way], dim=-1).to(weight)
        joined = network.joined(features, embedded)
        out = network(joined, embedded, positions, PairCache(network.sizes.layers), mask)
        chances = network.logits(out, output_layer(model)).float().log_softmax(-1)
        ours = torch.arange(chances.shape[-1], device=weight.device) if network.d2t is None else network.scored()
        found.append(chances[ours == scored])
    return found
