"""The unrolled pass of EAGLE's training is what drafting says, draft by draft."""

from typing import Any

import pytest
import torch
from helpers.eagle import random_network
from helpers.models import VOCAB, fresh_model
from torch import Tensor

from jacobi import Path
from lookahead.heads.eagle.head import EagleHead
from lookahead.heads.eagle.settings import EagleSettings
from lookahead.heads.eagle.strategy import eagle_passes
from lookahead.heads.eagle.training import TrainedEagle
from lookahead.training.data import Example, collate
from lookahead.training.drafter import BesideModel

LAYERS = (2, 3, 4)
KINDS: dict[str, Any] = {
    "eagle-3": {"feature_layers": LAYERS},
    "two layers": {"feature_layers": LAYERS, "layers": 2},
    "normed": {"feature_layers": LAYERS, "feature_norms": "all", "norm_output": True, "norm_before_residual": True},
    "small vocabulary": {"feature_layers": LAYERS, "draft_vocab_size": 20},
    "the model's output": {"feature_layers": LAYERS, "draft_vocab_size": None, "own_output": False},
}


def drafted(head: EagleHead, model: Any, features: Tensor, text: list[int], tokens: list[int]) -> list[Tensor]:
    """Log-probabilities that decoding finds behind ``text`` and each further one of ``tokens``, ``[draft token]``."""
    network = head.network
    now = features[None]
    passes = eagle_passes(network, lambda: now, 0, model.get_input_embeddings(), model.lm_head, VOCAB)
    passes.start(text[:-1])
    passes.write(Path([0], text[-1:]))
    found = []
    for depth in range(len(tokens) + 1):
        (said,) = passes.after([tuple(tokens[:depth])])
        assert said is not None
        line = torch.full((VOCAB,), -torch.inf)
        line[torch.from_numpy(said[0].copy())] = torch.from_numpy(said[1].copy())
        found.append(line)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_of_an_unrolled_pass_is_a_draft(kind: str) -> None:
    """Step s at pair i says what decoding says behind tokens 0 to i + 1 and a draft of the text's next s tokens."""
    model = fresh_model("llama", num_hidden_layers=7)
    network = random_network(3, **KINDS[kind])
    head, steps = EagleHead(network), 4
    learner = BesideModel(model, TrainedEagle(head, EagleSettings(unroll=steps)), 1e-3)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in (9, 6)]
    seen = learner.look(**collate([Example.of(text) for text in texts], 0))
    with torch.no_grad():
        outputs = learner.drafter.unrolled(seen, model, steps)
    assert [tuple(out.shape) for out in outputs] == [(2, 8 - step, 32) for step in range(steps)]
    ids = torch.arange(VOCAB) if network.d2t is None else network.scored()
    for row, text in enumerate(texts):
        features = torch.cat([seen.states[tap][row] for tap in head.taps(model)], dim=-1)
        for pair in range(len(text) - 1):
            known = text[: pair + 2]
            said = drafted(head, model, features[: len(known) - 1], known, text[pair + 2 : pair + 1 + steps])
            for step, expected in enumerate(said):
                with torch.no_grad():
                    logits = network.logits(outputs[step][row, pair], model.lm_head)
                ours = torch.full((VOCAB,), -torch.inf)
                ours[ids] = logits.float().log_softmax(-1)
                torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_the_loss_is_the_formula() -> None:
    """Soft cross-entropy over the draft vocabulary, where the model's best token is in it, 0.8 ** s times step s."""
    model = fresh_model("llama", num_hidden_layers=7)
    network = random_network(3, feature_layers=LAYERS, draft_vocab_size=20)
    learner = BesideModel(model, TrainedEagle(EagleHead(network), EagleSettings(unroll=3)), 1e-3)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in (12, 8)]
    flags = [[bool(place % 3) for place in range(len(text))] for text in texts]
    given = collate([Example.of(text, flag) for text, flag in zip(texts, flags, strict=True)], 0)
    seen = learner.look(**given)
    loss, parts = learner.drafter.losses(seen, model)
    total = 0.0
    for step, out in enumerate(learner.drafter.unrolled(seen, model, 3)):
        losses, right, places = [], 0, 0
        for row, text in enumerate(texts):
            for pair in range(len(text) - 2 - step):
                if not flags[row][pair + 2 + step]:
                    continue
                places += 1
                target = seen.logits[row, pair + 1 + step]
                best = int(target.argmax())
                if best % 2 or best >= 40:
                    continue
                scores = network.logits(out[row, pair], model.lm_head).float().log_softmax(-1)
                losses.append(-(target[:40:2].float().softmax(-1) * scores).sum().item())
                right += int(scores.argmax()) * 2 == best
        mean = sum(losses) / max(1, len(losses))
        assert parts[f"loss_{step}"].item() == pytest.approx(mean, rel=1e-5)
        assert parts[f"right_{step}"].item() == pytest.approx(right / places)
        total += 0.8**step * mean
    assert loss.item() == pytest.approx(total, rel=1e-5)


def test_many_logits_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same gradients."""
    model = fresh_model("llama", num_hidden_layers=7).requires_grad_(False)
    examples = [Example.of(list(range(1, 15)))]
    grads = []
    for size in (1 << 22, 3 * VOCAB):
        monkeypatch.setattr("lookahead.training.data._LOGITS", {"cpu": size, "cuda": size})
        network = random_network(3, feature_layers=LAYERS)
        learner = BesideModel(model, TrainedEagle(EagleHead(network), EagleSettings(unroll=2)), 1e-3)
        learner(**collate(examples, 0))["loss"].backward()
        grads.append([weight.grad for weight in network.parameters()])
    torch.testing.assert_close(*grads)
