"""Verification of drawn candidates through ``generate``: other draws, and the model's distribution."""

from pathlib import Path
from typing import Any

import pytest
from helpers.distributions import SMALL_VOCAB, drawn_by_the_model, small_model
from helpers.eagle import random_network
from helpers.marks import few
from helpers.models import VOCAB, fresh_model, prompts, run, same_as_plain, tiny_model
from helpers.mtp import mimo, written
from helpers.redrafter import random_head

from lookahead import Lookahead
from lookahead.eagle import Eagle, EagleHead
from lookahead.mtp import Mtp
from lookahead.redrafter import ReDrafter

pytestmark = pytest.mark.usefixtures("augmented")


def strategies(vocab: int = SMALL_VOCAB) -> dict[str, Any]:
    head, recurrent = EagleHead(random_network(1)), random_head(vocab_size=vocab)
    draft = fresh_model("llama", seed=5, vocab_size=vocab, num_hidden_layers=1, initializer_range=0.2)
    how: Any = {"verification": "rejection"}
    return {
        "eagle-1": Eagle(head, tree="eagle-1", **how),
        "eagle-2": Eagle(head, tree="eagle-2", top_k=3, depth=2, total_tokens=10, **how),
        "eagle": Eagle(head, sources=("eagle",), nodes=6, **how),
        "redrafter": ReDrafter(recurrent, sources=("redrafter",), nodes=6, **how),
        "beams": ReDrafter(recurrent, tree="beam", beam_width=3, beam_length=4, **how),
        "draft model": Lookahead(draft_model=draft, sources=("draft",), nodes=6, **how),
    }


QUICK = ("eagle-1", "redrafter")


@pytest.mark.parametrize("kind", few([*strategies()], *QUICK))
def test_samples_follow_the_model(kind: str) -> None:
    samples, temperature = 1000, 0.7 if kind in QUICK else 1.0
    accepted = drawn_by_the_model(strategies()[kind], samples, 250, temperature)
    assert accepted > samples / 2, "six tokens of the vocabulary are soon guessed"


@pytest.mark.slow
def test_samples_of_mtp_layers_follow_the_model(tmp_path: Path) -> None:
    model = small_model()
    folder = written(tmp_path / "layers", model, mimo(model, prefix="mtp_layers"))
    strategy = Mtp(folder, sources=("mtp",), nodes=6, verification="rejection")
    assert drawn_by_the_model(strategy, 1500, 250) > 750


def test_greedy_texts_are_plain() -> None:
    """Without sampling nothing is drawn, neither tokens nor candidates."""
    for strategy in strategies(VOCAB).values():
        if isinstance(strategy, Lookahead):
            strategy = Lookahead(draft_model=1, sources=("draft",), nodes=6, verification="rejection")
        same_as_plain(tiny_model("llama"), prompts(2), strategy, max_new_tokens=16)


def test_a_seed_repeats_the_call() -> None:
    """Candidates are drawn by the generator that everybody seeds, so that no two calls have the same by mistake."""
    strategy = strategies(VOCAB)["redrafter"]
    settings = {
        "max_new_tokens": 20,
        "do_sample": True,
        "lookahead_strategy": strategy,
        "return_dict_in_generate": True,
    }
    first, again, other = (run(tiny_model("llama"), prompts(2), seed=seed, **settings)[0] for seed in (3, 3, 4))
    assert first.sequences.tolist() == again.sequences.tolist() != other.sequences.tolist()
    assert first.stats.drafted == again.stats.drafted > 40
