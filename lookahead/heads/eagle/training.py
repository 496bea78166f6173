"""An EAGLE head as something to train: its unrolled passes, and its losses."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, smooth_l1_loss

from lookahead.heads.eagle.fresh import fresh_head
from lookahead.heads.eagle.head import EagleHead
from lookahead.heads.eagle.network import PairCache
from lookahead.heads.eagle.settings import EagleSettings
from lookahead.heads.eagle.strategy import Eagle
from lookahead.models.output_layer import output_layer
from lookahead.training.data import IGNORE, Example
from lookahead.training.drafter import Seen, TrainedHead, in_parts

_SOFT = 0.1  # (eagle-1) weight of the cross-entropy beside that of the features
_NOISE_TOKENS = 512  # (eagle-1) length of the texts for which the noise is given


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
    use = """from lookahead.eagle import Eagle, EagleHead

head = EagleHead.from_pretrained("folder or name of this repository", model=model)
model.generate(**inputs, custom_generate=Eagle(head))"""
    head: EagleHead
    _settings: EagleSettings

    @classmethod
    def fresh(cls, model: Any, settings: Any, examples: Sequence[Example] = (), name: str | None = None) -> Self:
        return cls(fresh_head(model, settings, examples, name), settings)

    @property
    def title(self) -> str:
        return f"{self._settings.version.upper()} head"

    def taps(self, model: Any) -> tuple[str, ...]:
        return self.head.taps(model)

    def losses(self, seen: Seen, model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted mean of the steps' soft cross-entropies; with EAGLE-1, that of features and a tenth of it."""
        if self.head.network.sizes.version == 1:
            return self._feature_loss(seen, model)
        losses: list[Tensor] = []
        parts: dict[str, Tensor] = {}
        for step, out in enumerate(self.unrolled(seen, model, self._settings.steps)):
            loss, right = self._step_loss(seen, model, out, step)
            losses.append(loss * self._settings.decay**step)
            parts |= {f"loss_{step}": loss.detach(), f"right_{step}": right}
        return torch.stack(losses).sum(), parts

    def unrolled(self, seen: Seen, model: Any, steps: int) -> Sequence[Tensor]:
        """What comes out of the head at all pairs of a text, ``[batch, pair, hidden]`` for each step.

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
        states, pairs, outputs = self._features(seen, model), UnrolledPairs(network.sizes.layers), []
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
        states = [seen.states[tap] for tap in self.taps(model)]
        norm = self.head.norm(model)
        with torch.no_grad():
            features = torch.cat(states, dim=-1) if norm is None else norm(states[0])
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

    def _feature_loss(self, seen: Seen, model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """EAGLE-1's (arXiv 2401.15077, section 3.2): the next feature, and the distribution that the model's output
        layer makes of it."""
        network = self.head.network
        noisy = features = self._features(seen, model)
        if self.training and self._settings.noise:
            width = self._settings.noise * _NOISE_TOKENS / features.shape[1]
            noisy = features + (torch.rand_like(features) - 0.5) * width
        embed = network.embed_tokens or model.get_input_embeddings()
        with torch.no_grad():
            embedded = embed(seen.tokens[:, 1:]).to(features)
        positions = torch.arange(features.shape[1], device=features.device)
        out = network(network.joined(noisy, embedded), embedded, positions, UnrolledPairs(network.sizes.layers), None)
        kept = seen.labels[:, 2:] != IGNORE
        off = smooth_l1_loss(out[:, : kept.shape[1]][kept], features[:, 1:][kept], reduction="none").mean(-1)
        feature = off.sum() / max(1, len(off))
        soft, right = self._step_loss(seen, model, out, 0)
        parts = {"loss_feature": feature.detach(), "loss_0": soft.detach(), "right_0": right}
        return feature + _SOFT * soft, parts
