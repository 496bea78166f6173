"""Whether sampled texts are distributed as a model says."""

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from helpers.models import fresh_model, run
from torch import Tensor

SMALL_VOCAB = 6


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """How many standard deviations the chi-square statistic lies above its mean; rare cells are put together."""
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]]).clamp(min=1e-9)
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(expected) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


def small_model() -> Any:
    """A model of few tokens, so that all texts of three can be counted."""
    return fresh_model("llama", seed=2, vocab_size=SMALL_VOCAB, initializer_range=0.2)


def drawn_by_the_model(strategy: Any, samples: int, rows: int, temperature: float = 1.0) -> int:
    """Assert by chi-square that three tokens of many samples, ``rows`` a call, have the joint distribution that the
    small model gives them; return how many drafted tokens were accepted."""
    vocab, model = SMALL_VOCAB, small_model()
    # A prompt of the model's own words, so that its n-grams are plausible guesses.
    prompt = run(model, {"input_ids": torch.tensor([[1, 2, 3]])}, seed=0, max_new_tokens=40, do_sample=True)[0][:, -24:]
    paths = torch.cartesian_prod(*[torch.arange(vocab)] * 3)
    with torch.no_grad():
        logits = model(torch.cat([prompt.expand(len(paths), -1), paths], dim=1)).logits[:, -4:-1]
    expected = (logits / temperature).softmax(-1).gather(2, paths[:, :, None])[:, :, 0].prod(1) * samples

    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": True, "temperature": temperature}
    settings |= {"lookahead_strategy": strategy, "return_dict_in_generate": True}
    inputs = {"input_ids": prompt.expand(rows, -1), "attention_mask": torch.ones(rows, 24, dtype=torch.long)}
    outputs = [run(model, inputs, seed=seed, **settings)[0] for seed in range(samples // rows)]
    drawn = torch.cat([output.sequences for output in outputs])[:, 24:27]
    counts = torch.bincount(drawn @ torch.tensor([vocab**2, vocab, 1]), minlength=vocab**3).double()
    assert chi_square(counts, expected) < 4
    pairs = counts.view(vocab, vocab, vocab)
    for axis in ((0, 1), (0, 2), (1, 2)):
        assert chi_square(pairs.sum(axis), expected.view(vocab, vocab, vocab).sum(axis)) < 4
    return sum(output.stats.accepted for output in outputs)


class Chance:
    """Stands for torch's draws, so that every way they can fall is seen, and how likely it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._falls: list[int] = []  # of the run that is going on, and how far it has got
        self._place = 0
        self._open: list[list[int]] = [[]]
        self._weight = 1.0

    def outcomes(self, run: Callable[[], Hashable]) -> dict[Any, float]:
        """The exact distribution of what ``run`` returns."""
        found: dict[Any, float] = {}
        with self._monkeypatch.context() as patched:
            patched.setattr(torch, "rand", lambda *args, **settings: self)
            patched.setattr(torch, "multinomial", self._multinomial)
            while self._open:
                self._falls, self._place, self._weight = self._open.pop(), 0, 1.0
                result = run()
                found[result] = found.get(result, 0.0) + self._weight
        self._open = [[]]
        return found

    def __lt__(self, chance: Any) -> bool:
        heads = min(1.0, float(chance))
        return self._one_of([1.0 - heads, heads]) == 1

    def _multinomial(self, weights: Tensor, count: int, generator: Any = None) -> Tensor:
        assert count == 1
        return torch.tensor([self._one_of((weights / weights.sum()).tolist())])

    def _one_of(self, chances: list[float]) -> int:
        if self._place == len(self._falls):
            first, *others = [choice for choice, chance in enumerate(chances) if chance > 0.0]
            self._open += [[*self._falls, other] for other in others]
            self._falls.append(first)
        choice = self._falls[self._place]
        self._place += 1
        self._weight *= chances[choice]
        return choice
