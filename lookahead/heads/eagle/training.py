"""An EAGLE head as something to train: made of the model's own last layer where that fits, unrolled passes, losses."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from jacobi import LookaheadError
from lookahead.heads.eagle.head import EagleHead
from lookahead.heads.eagle.network import EagleNetwork, EagleSizes, PairCache
from lookahead.heads.eagle.settings import EagleSettings
from lookahead.heads.eagle.strategy import Eagle
from lookahead.models.hidden_states import decoder_layers
from lookahead.models.output_layer import output_layer, output_sizes, placement
from lookahead.training.data import IGNORE, Examples
from lookahead.training.drafter import Seen, TrainedHead, in_parts, take_output
from lookahead.training.stage import check_gradient

_FRESH = 0.1  # how much of a fresh projection of features stays beside what passes one of them on


class UnrolledPairs(PairCache):
    """What pairs see in EAGLE-3's training-time test (Li et al., arXiv 2503.01840, section 3.2), an unrolled pass. Step
    0 is the text's pairs, as decoding feeds them. In step s, row i is the draft that began behind pair i, s tokens
    deep: it sees the text's pairs up to i, its own rows of the steps 1 to s, and of no other draft anything::

                    step 0        step 1      step 2
        row         0 1 2 3       0 1 2 3     0 1 2 3
        2, step 0   x x x .
        2, step 1   x x x .       . . x .
        2, step 2   x x x .       . . x .     . . x .
    """

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """``queries``, ``keys`` and ``values`` ``[batch, head, pair, channel]`` of one more step."""
        held = self._held[layer]
        held.append((keys, values))
        if len(held) == 1:
            return scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        count = keys.shape[-2]
        grouped = queries.unflatten(1, (keys.shape[1], -1)) * queries.shape[-1] ** -0.5  # [batch, key head, group, ...]
        (text, said), drafts = held[0], held[1:]
        seen = torch.ones(count, count, dtype=torch.bool, device=keys.device).tril()
        scores = (grouped @ text[:, :, None].transpose(-1, -2)).masked_fill(~seen, float("-inf"))
        own = [(grouped * key[:, :, None]).sum(-1, keepdim=True) for key, _ in drafts]
        weights = torch.cat([scores, *own], dim=-1).float().softmax(-1).to(queries.dtype)
        total = weights[..., :count] @ said[:, :, None]
        for step, (_, value) in enumerate(drafts):
            total = total + weights[..., count + step, None] * value[:, :, None]
        return total.flatten(1, 2)


class TrainedEagle(TrainedHead):
    """An EAGLE head that is trained."""

    settings = EagleSettings
    source = "eagle"
    strategy = Eagle
    title = "EAGLE-3 head"
    use = """from lookahead.eagle import Eagle, EagleHead

head = EagleHead.from_pretrained("folder or name of this repository", model=model)
model.generate(**inputs, custom_generate=Eagle(head))"""
    head: EagleHead
    _settings: EagleSettings

    @classmethod
    def fresh(cls, model: Any, settings: Any, examples: Examples = (), name: str | None = None) -> Self:
        return cls(fresh_head(model, settings, examples, name), settings)

    def losses(self, seen: Seen, model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted mean of the steps' soft cross-entropies."""
        losses: list[Tensor] = []
        parts: dict[str, Tensor] = {}
        for step, out in enumerate(self.unrolled(seen, model, self._settings.steps)):
            loss, right = self._step_loss(seen, model, out, step)
            losses.append(loss * self._settings.decay**step)
            parts |= {f"loss_{step}": loss.detach(), f"right_{step}": right}
        return torch.stack(losses).sum(), parts

    def unrolled(self, seen: Seen, model: Any, steps: int) -> Sequence[Tensor]:
        """What comes out at all pairs of a text, ``[batch, pair, hidden]`` a step.

        Pair i is the features of token i and token i + 1; in step s it is its output of the step before and token
        i + 1 + s, at position i + s. There are pairs for as long as there are tokens::

            tokens   a b c d e         step 0  (h_a, b) (h_b, c) (h_c, d) (h_d, e)
                                       step 1  (z_0, c) (z_1, d) (z_2, e)
        """
        network = self.head.network
        weight, count = network.fc.weight, seen.tokens.shape[1] - 1
        embed = network.embed_tokens or model.get_input_embeddings()
        with torch.no_grad():
            embedded = embed(seen.tokens).to(weight)
        states = self._features(seen, model)
        pairs, outputs = UnrolledPairs(network.sizes.layers), []
        for step in range(steps):
            following = embedded[:, 1 + step :]
            following = torch.cat([following, following.new_zeros(len(following), step, following.shape[-1])], dim=1)
            positions = torch.arange(step, step + count, device=weight.device)
            joined = network.joined(states, following, fed_back=step > 0)
            states = network(joined, following, positions, pairs, None)
            outputs.append(states[:, : count - step])
        return outputs

    def _features(self, seen: Seen, model: Any) -> Tensor:
        """What the head reads of the model, of all tokens but the last, ``[batch, pair, channel]``."""
        features = torch.cat([seen.states[tap] for tap in self.taps(model)], dim=-1)
        return features[:, :-1].to(self.head.network.fc.weight)

    def _step_loss(self, seen: Seen, model: Any, out: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The mean soft cross-entropy against the model's own distribution, over the tokens that the head scores, where
        the model's best token is one of them; and the share of all places where both have the same best token."""
        kept = seen.labels[:, 2 + step :] != IGNORE  # where pair i has token i + 2 + step to predict
        states, logits = out[:, : kept.shape[1]][kept], seen.logits[:, 1 + step : -1][kept]
        ids = self.scored(logits.shape[-1], logits.device)
        best = logits.argmax(-1)
        if ids is not None:
            inside = torch.zeros(logits.shape[-1], dtype=torch.bool, device=ids.device).scatter(0, ids, True)[best]
            states, best, logits = states[inside], best[inside], logits[inside]
        loss = partial(self._soft, ids=ids, model=model)
        total, right = in_parts(loss, (states, logits, best), logits.shape[-1], out.sum() * 0.0)
        return total / max(1, len(states)), right / max(1, int(kept.sum()))

    def _soft(
        self, states: Tensor, target: Tensor, best: Tensor, ids: Tensor | None, model: Any
    ) -> tuple[Tensor, Tensor]:
        scores = self.head.network.logits(states, output_layer(model)).float()
        target = (target if ids is None else target[:, ids]).float().softmax(-1)
        said = scores.argmax(-1)
        right = ((said if ids is None else ids[said]) == best).sum()
        return -(target * scores.log_softmax(-1)).sum(), right.float()

    def scored(self, vocab: int, device: Any) -> Tensor | None:
        """The ids of the tokens that the head scores, ``[draft token]``; None where these are the model's own."""
        network = self.head.network
        if network.d2t is not None:
            return network.scored().to(device)
        size = network.sizes.draft_vocab_size or vocab
        return None if size == vocab else torch.arange(size, device=device)


def fresh_head(model: Any, settings: EagleSettings, examples: Examples = (), name: str | None = None) -> EagleHead:
    """A float32 head: weights of the model's last layer, final norm and output layer, and the rest drawn. ``examples``
    tell which tokens are frequent, where it scores only some. A LookaheadError says what the model cannot give."""
    if model.config.is_encoder_decoder:
        raise LookaheadError(f"{type(model).__name__} is an encoder-decoder model: EAGLE heads need a causal one.")
    hidden, vocab = output_sizes(model)
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 1)
    channels = model.get_input_embeddings().weight.shape[1]
    if channels != hidden:
        raise LookaheadError(f"{type(model).__name__} has embeddings of {channels} channels and features of {hidden}.")
    scored = settings.draft_vocab or (vocab if settings.own_output else None)
    if scored is not None and scored > vocab:
        raise LookaheadError(f"draft_vocab={scored}: {type(model).__name__} has {vocab} tokens. Give fewer.")
    layers = settings.feature_layers or _usual_layers(model)
    sizes = EagleSizes(
        version=3,
        hidden_size=hidden,
        target_size=hidden,
        features=len(layers),
        heads=heads,
        key_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or hidden // heads,
        feed_forward=settings.feed_forward or getattr(config, "intermediate_size", None) or 4 * hidden,
        layers=settings.num_layers,
        draft_vocab_size=scored,
        own_output=settings.own_output,
        vocab_size=vocab,
        final_norm=True,
        eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        max_positions=getattr(config, "max_position_embeddings", 2048),
        feature_layers=layers,
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
    take_output(network, model, examples, scored)
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
    hidden, ids = network.sizes.hidden_size, network.sizes.feature_layers
    layers = decoder_layers(model)
    network.fc.weight.mul_(_FRESH)
    column = max((place for place, index in enumerate(ids) if index < len(layers)), default=0) * hidden
    network.fc.weight[:, column : column + hidden] += torch.eye(hidden, device=network.fc.weight.device)
    theirs = dict(layers[-1].named_parameters()) if len(layers) else {}
    theirs["hidden_norm.weight"] = theirs.pop("input_layernorm.weight", None)
    for name, weight in network.layers[0].named_parameters():
        own = theirs.get(name)
        if own is None or own.ndim != weight.ndim or not own.is_floating_point() or own.is_meta:
            continue
        if any(small > large for small, large in zip(own.shape, weight.shape, strict=True)):
            continue
        if "down_proj" in name:
            weight.zero_()
        columns = slice(-own.shape[-1], None) if "self_attn" in name else slice(own.shape[-1])
        weight[(slice(own.shape[0]), columns)[: own.ndim]].copy_(own)
