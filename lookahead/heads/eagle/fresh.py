"""An EAGLE head before it has learnt anything: made of the model's own last layer, as far as that fits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jacobi import LookaheadError
from lookahead.heads.eagle.head import EagleHead
from lookahead.heads.eagle.network import EagleNetwork, EagleSizes
from lookahead.heads.eagle.settings import EagleSettings
from lookahead.models.hidden_states import decoder_layers, final_norm
from lookahead.models.output_layer import copyable_weight, output_layer, output_sizes, placement
from lookahead.training.data import Example
from lookahead.training.stage import check_gradient

_FRESH = 0.1  # how much of a fresh projection of features stays beside what passes one of them on


def fresh_head(
    model: Any, settings: EagleSettings, examples: Sequence[Example] = (), name: str | None = None
) -> EagleHead:
    """A head for a model, float32: weights of the model's last layer, final norm and output layer, and the rest drawn
    by ``settings.seed``. ``examples`` tell which tokens are frequent, where it is to score only some. A LookaheadError
    says what the model cannot give."""
    if model.config.is_encoder_decoder:
        raise LookaheadError(f"{type(model).__name__} is an encoder-decoder model: EAGLE heads need a causal one.")
    hidden, vocab = output_sizes(model)
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    three = settings.version == "eagle-3"
    channels = model.get_input_embeddings().weight.shape[1]
    if channels != hidden:
        raise LookaheadError(f"{type(model).__name__} has embeddings of {channels} channels and features of {hidden}.")
    scored = None if not three or not settings.own_output else settings.draft_vocab or vocab
    if scored is not None and scored > vocab:
        raise LookaheadError(f"draft_vocab={scored}: {type(model).__name__} has {vocab} tokens. Give fewer.")
    layers = settings.feature_layers or _usual_layers(model)
    sizes = EagleSizes(
        version=3 if three else 1,
        hidden_size=hidden,
        target_size=hidden,
        features=len(layers) if three else 1,
        heads=heads,
        key_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or hidden // heads,
        feed_forward=settings.feed_forward or getattr(config, "intermediate_size", None) or 4 * hidden,
        layers=settings.num_layers,
        draft_vocab_size=scored,
        own_output=scored is not None,
        vocab_size=vocab,
        final_norm=three,
        eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        max_positions=getattr(config, "max_position_embeddings", 2048),
        feature_layers=layers if three else (),
        base_model=name or getattr(model.config, "name_or_path", None) or None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        network = EagleNetwork(sizes)
        for name, weight in network.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02 if "lm_head" in name else weight.shape[1] ** -0.5)
    network.to(placement(model)[0])
    _take_layer(network, model)
    _take_output(network, model, examples)
    head = EagleHead(network)
    head.check(model)
    if network.lm_head is None:
        check_gradient(model, hidden)
    return head


def _usual_layers(model: Any) -> tuple[int, ...]:
    """The input of layer 2, of the middle one and of the third from the end; of a small model, spread over all."""
    count = len(decoder_layers(model))
    usual = (2, count // 2, count - 3)
    return usual if len(set(usual)) == 3 and min(usual) >= 0 else tuple(round(count * part / 3) for part in (1, 2, 3))


@torch.no_grad()
def _take_layer(network: EagleNetwork, model: Any) -> None:
    """Begin as the model's last layer, over the last feature that is not its output, where both have the same parts.
    Of wider parts the rest stays as it was drawn, and gives nothing yet."""
    hidden, ids = network.sizes.hidden_size, network.sizes.feature_layers or (0,)
    layers = decoder_layers(model)
    network.fc.weight.mul_(_FRESH)
    column = max((place for place, index in enumerate(ids) if index < len(layers)), default=0) * hidden
    column = hidden if network.sizes.version == 1 else column
    network.fc.weight[:, column : column + hidden] += torch.eye(hidden, device=network.fc.weight.device)
    theirs = dict(layers[-1].named_parameters()) if len(layers) else {}
    if network.sizes.version == 3:
        theirs["hidden_norm.weight"] = theirs.pop("input_layernorm.weight", None)
    for name, weight in network.layers[0].named_parameters():
        own = theirs.get(name)
        if own is None or own.ndim != weight.ndim or not own.is_floating_point() or own.is_meta:
            continue
        if any(small > large for small, large in zip(own.shape, weight.shape, strict=True)):
            continue
        if "down_proj" in name:
            weight.zero_()
        columns = slice(-own.shape[-1], None) if "self_attn" in name else slice(None, own.shape[-1])
        (weight[: own.shape[0], columns] if own.ndim == 2 else weight).copy_(own)


@torch.no_grad()
def _take_output(network: EagleNetwork, model: Any, examples: Sequence[Example]) -> None:
    """Begin with the model's final norm and its output layer, or the lines of it that stand for frequent tokens."""
    if network.norm is not None:
        weight = getattr(final_norm(model), "weight", None)
        if isinstance(weight, Tensor) and weight.shape == network.norm.weight.shape:
            network.norm.weight.copy_(weight)
    if network.lm_head is None:
        return
    size, vocab = network.lm_head.weight.shape[0], output_sizes(model)[1]
    ids = torch.arange(vocab)
    if size < vocab:
        counts = torch.zeros(vocab, dtype=torch.long)
        for example in examples:
            counts += torch.bincount(example.ids[example.loss].long(), minlength=vocab)
        ids = counts.argsort(descending=True, stable=True)[:size].sort().values
        network.d2t = (ids - torch.arange(size)).to(network.lm_head.weight.device)
    weight = copyable_weight(output_layer(model))
    if weight is not None:
        network.lm_head.weight.copy_(weight[ids.to(weight.device)])
