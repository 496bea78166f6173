"""A recurrent head as something to train: fresh for a model, and its loss."""

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lookahead.heads.redrafter.head import RecurrentHead, RecurrentSizes
from lookahead.heads.redrafter.settings import ReDrafterSettings
from lookahead.heads.redrafter.strategy import ReDrafter
from lookahead.models.hidden_states import LAST
from lookahead.models.output_layer import copyable_weight, output_layer, output_sizes, placement
from lookahead.training.data import IGNORE, Examples
from lookahead.training.drafter import Seen, TrainedHead, in_parts

# Of the output layer, in a fresh head. Nats a token after 60 steps of the bundled model: 0.3 5.1, 1 5.2; at random 5.5.
_FRESH = 0.3


class TrainedRecurrent(TrainedHead):
    """A recurrent head that is trained."""

    settings = ReDrafterSettings
    source = "redrafter"
    strategy = ReDrafter
    use = """from lookahead.redrafter import RecurrentHead, ReDrafter

head = RecurrentHead.from_pretrained("folder or name of this repository", model=model)
model.generate(**inputs, custom_generate=ReDrafter(head))"""
    title = "ReDrafter head"
    head: RecurrentHead
    _settings: ReDrafterSettings

    @classmethod
    def fresh(cls, model: Any, settings: Any, examples: Examples = (), name: str | None = None) -> Self:
        """With a float32 head: drawn states, empty blocks, and the model's output layer in part for both halves."""
        hidden, vocab = output_sizes(model)
        sizes = RecurrentSizes(vocab, hidden, settings.exit_size, settings.num_layers, settings.rnn)
        weight = copyable_weight(output_layer(model))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(settings.seed)
            head = RecurrentHead(sizes)
            if weight is not None and settings.exit_size is None:
                head.weight.copy_(_FRESH * torch.cat([weight, weight], dim=1).float())
        head.to(placement(model)[0])
        head.check(model)
        return cls(head, settings)

    def taps(self, model: Any) -> tuple[str, ...]:
        return (LAST,)

    def losses(self, seen: Seen, model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of the steps' mean cross-entropies (as Cheng et al. train), and how often each is right."""
        losses: list[Tensor] = []
        parts: dict[str, Tensor] = {}
        for step, (hidden, states) in enumerate(self.unrolled(seen, model)):
            kept = seen.labels[:, 2 + step :] != IGNORE
            tokens = seen.labels[:, 2 + step :][kept]
            targets = tokens
            if self._settings.targets == "model":
                targets = seen.logits[:, 1 + step : -1][kept].float().softmax(-1)
            rows, count = (hidden[kept], states[kept], targets, tokens), max(1, len(tokens))
            total, right = in_parts(self._part, rows, self.head.sizes.vocab_size, states.sum() * 0.0)
            losses.append(total / count)
            parts |= {f"loss_{step}": losses[-1].detach(), f"right_{step}": right / count}
        return torch.stack(losses).sum(), parts

    def unrolled(self, seen: Seen, model: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """The model's hidden states and the head's own, ``[batch, place, hidden]`` each, for every step: of place i in
        step s, what the output layer read at token i, and tokens i + 1 to i + 1 + s taken in; token i + 2 + s is to be
        predicted::

            tokens   a b c d e         step 0  h_a, "b" -> c    h_b, "c" -> d    h_c, "d" -> e
                                       step 1  h_a, "b c" -> d  h_b, "c d" -> e
        """
        head, weight = self.head, self.head.weight
        with torch.no_grad():
            embedded = model.get_input_embeddings()(seen.tokens).to(weight)
        hidden = seen.states[LAST].to(weight)
        states = torch.zeros_like(hidden)
        for step in range(self._settings.unroll):
            places = seen.tokens.shape[1] - 2 - step
            states = head.step(states[:, :places], embedded[:, 1 + step : 1 + step + places])
            yield hidden[:, :places], states

    def _part(self, hidden: Tensor, states: Tensor, targets: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(hidden, states).float()
        right = (scores.argmax(-1) == tokens).sum()
        return cross_entropy(scores, targets, reduction="sum"), right.float()
