"""Verification of drawn candidates through ``generate``: other draws, and the model's distribution."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.distributions import SMALL_VOCAB, drawn_by_the_model, small_model
from helpers.eagle import random_network
from helpers.marks import few
from helpers.models import VOCAB, fresh_model, prompts, run, same_as_plain, tiny_model
from helpers.mtp import mimo, written
from helpers.redrafter import random_head
from transformers import LogitsProcessor, LogitsProcessorList

from jacobi import LookaheadError
from lookahead import Jacobi, Lookahead
from lookahead.eagle import Eagle, EagleHead
from lookahead.mtp import Mtp
from lookahead.redrafter import ReDrafter

pytestmark = pytest.mark.usefixtures("augmented")


def strategies(verification: Any, vocab: int = SMALL_VOCAB) -> dict[str, Any]:
    head, recurrent = EagleHead(random_network(1)), random_head(vocab_size=vocab)
    draft = fresh_model("llama", seed=5, vocab_size=vocab, num_hidden_layers=1, initializer_range=0.2)
    how = {"verification": verification}
    return {
        "eagle-1": Eagle(head, tree="eagle-1", **how),
        "eagle-2": Eagle(head, tree="eagle-2", top_k=3, depth=2, total_tokens=10, **how),
        "eagle": Eagle(head, sources=("eagle",), nodes=6, **how),
        "redrafter": ReDrafter(recurrent, sources=("redrafter",), nodes=6, **how),
        "beams": ReDrafter(recurrent, tree="beam", beam_width=3, beam_length=4, **how),
        "draft model": Lookahead(draft_model=draft, sources=("draft",), nodes=6, **how),
    }


WAYS = [(kind, way) for kind in strategies("exact") for way in ("rejection", "traversal")]
QUICK = [("eagle-1", "rejection"), ("redrafter", "traversal")]


@pytest.mark.parametrize("way", few(WAYS, *QUICK), ids=str)
def test_samples_follow_the_model(way: tuple[str, str]) -> None:
    kind, verification = way
    samples, temperature = 1500, 0.7 if way in QUICK else 1.0
    accepted = drawn_by_the_model(strategies(verification)[kind], samples, 250, temperature)
    assert accepted > samples / 2, "six tokens of the vocabulary are soon guessed"


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["rejection", "traversal"])
def test_samples_of_mtp_layers_follow_the_model(verification: Any, tmp_path: Path) -> None:
    model = small_model()
    folder = written(tmp_path / "layers", model, mimo(model, prefix="mtp_layers"))
    strategy = Mtp(folder, sources=("mtp",), nodes=6, verification=verification)
    assert drawn_by_the_model(strategy, 1500, 250) > 750


@pytest.mark.parametrize("verification", ["rejection", "traversal"])
def test_greedy_texts_are_plain(verification: str) -> None:
    """Without sampling nothing is drawn, neither tokens nor candidates."""
    for strategy in strategies(verification, VOCAB).values():
        if isinstance(strategy, Lookahead):
            strategy = Lookahead(draft_model=1, sources=("draft",), nodes=6, verification=verification)
        same_as_plain(tiny_model("llama"), prompts(2), strategy, max_new_tokens=16)


@pytest.mark.parametrize("verification", ["rejection", "traversal"])
def test_a_seed_repeats_the_call(verification: str) -> None:
    """Candidates are drawn by the generator that everybody seeds, so that no two calls have the same by mistake."""
    strategy = strategies(verification, VOCAB)["redrafter"]
    settings = {
        "max_new_tokens": 20,
        "do_sample": True,
        "lookahead_strategy": strategy,
        "return_dict_in_generate": True,
    }
    first, again, other = (run(tiny_model("llama"), prompts(2), seed=seed, **settings)[0] for seed in (3, 3, 4))
    assert first.sequences.tolist() == again.sequences.tolist() != other.sequences.tolist()
    assert first.stats.drafted == again.stats.drafted > 40


def test_what_a_traversal_writes_is_whole() -> None:
    """With end tokens, lengths inside a path, recorded scores and rows that end early."""
    model = small_model()
    strategy = strategies("traversal")["eagle-1"]
    ids = torch.randint(0, SMALL_VOCAB, (4, 9), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for length in (1, 2, 3, 17):
        settings = {"max_new_tokens": length, "eos_token_id": 5, "output_scores": True, "repetition_penalty": 1.3}
        settings |= {"do_sample": True, "lookahead_strategy": strategy, "return_dict_in_generate": True}
        output = run(model, inputs, **settings)[0]
        written = output.sequences[:, 9:]
        assert len(output.scores) == written.shape[1] <= length
        for row, line in enumerate(written.tolist()):
            end = line.index(5) + 1 if 5 in line else len(line)
            assert not any(line[end:]), "padded"
            for index in range(end):
                with torch.no_grad():
                    logits = model(output.sequences[row : row + 1, : 9 + index]).logits[0, -1].float()
                seen = output.sequences[row, : 9 + index].unique()
                logits[seen] = torch.where(logits[seen] < 0, logits[seen] * 1.3, logits[seen] / 1.3)
                torch.testing.assert_close(output.scores[index][row], logits, atol=1e-4, rtol=1e-4)


class Watching(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def test_what_a_traversal_cannot_do() -> None:
    head = EagleHead(random_network(1))
    wanted = r"verification='traversal'\) needs candidates of a model or a head alone"
    for make in (
        lambda: Lookahead(verification="traversal"),
        lambda: Lookahead(draft_model=1, nodes=8, verification="traversal"),
        lambda: Jacobi(verification="traversal"),
        lambda: Eagle(head, verification="traversal"),
        lambda: Eagle(head, sources=("eagle",), verification="traversal"),
        lambda: ReDrafter(random_head(), nodes=8, sources=("redrafter", "suffix"), verification="traversal"),
    ):
        with pytest.raises(LookaheadError, match=wanted):
            make()
    strategy = Eagle(head, tree="eagle-1", verification="traversal")
    settings = {"do_sample": True, "lookahead_strategy": strategy, "max_new_tokens": 8}
    with pytest.raises(LookaheadError, match=r"Traversal verification writes each row .* Watching may look"):
        run(tiny_model("llama"), prompts(2), logits_processor=LogitsProcessorList([Watching()]), **settings)
    run(tiny_model("llama"), prompts(1), logits_processor=LogitsProcessorList([Watching()]), **settings)
