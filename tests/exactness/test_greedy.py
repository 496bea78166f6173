"""Greedy decoding: the text is plain decoding's for every model, strategy and batch."""

import random

import pytest
import torch
from helpers.calls import BLOCKS, STRATEGIES, ids_of
from helpers.marks import few
from helpers.models import MODELS, fresh_model, prompts, run, same_as_plain, tiny_model
from transformers import GenerationConfig

from lookahead import Jacobi, Lookahead

pytestmark = pytest.mark.usefixtures("augmented")

WINDOWS = [
    (1, 1, 0),
    (1, 2, 0),
    (9, 2, 0),
    (9, 2, 4),
    (1, 5, 7),
    (1, 5, 0),
    (7, 5, 0),
    (3, 3, 1),
    (40, 3, 2),
    (3, 12, 5),
    (40, 12, 20),
]


@pytest.mark.parametrize("strategy", few(STRATEGIES, STRATEGIES[1]))
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_greedy(name: str, batch: int, strategy: Lookahead | None) -> None:
    """Every kind of model, alone and in a left-padded batch."""
    output = same_as_plain(tiny_model(name), prompts(batch), strategy, max_new_tokens=36)
    assert output.stats.emitted == 36 * batch


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("window", "ngram", "guesses"), WINDOWS)
def test_every_shape(window: int, ngram: int, guesses: int, batch: int) -> None:
    """The corners of (W, N, G), among them plain decoding, Jacobi decoding and windows far longer than the text."""
    strategy = Lookahead(window_size=window, ngram_size=ngram, verification_set_size=guesses, seed=1)
    for new_tokens in (1, 2, 9, 40):
        same_as_plain(tiny_model("llama"), prompts(batch), strategy, max_new_tokens=new_tokens)


@pytest.mark.parametrize(
    "strategy",
    [
        Jacobi(mode="jacobi", block_size=None),
        Jacobi(mode="jacobi", block_size=5),
        Jacobi(mode="gauss-seidel", block_size=4),
        Jacobi(mode="hybrid", block_size=6, initial_guess="tail"),
        Jacobi(mode="sliding", block_size=1),
        Jacobi(mode="sliding", block_size=8, initial_guess="pad"),
        Jacobi(mode="sliding", block_size=8, initial_guess=[3, 1, 4, 1, 5]),
        *BLOCKS,
    ],
    ids=lambda s: f"{s.mode}-{s.block_size}-{s.blocks}-{s.tails}",
)
@pytest.mark.parametrize(("name", "batch"), [("llama", 1), ("mistral", 3), ("gpt2", 3)])
def test_jacobi(name: str, strategy: Jacobi, batch: int) -> None:
    """Every Jacobi mode and guess, with end tokens that watched modes react to."""
    model = tiny_model(name)
    same_as_plain(model, prompts(batch), strategy, max_new_tokens=30)
    ends = ids_of(run(model, prompts(batch), max_new_tokens=20)[0], 15)
    same_as_plain(model, prompts(batch), strategy, max_new_tokens=30, eos_token_id=ends)


def test_greedy_leaves_all_random_generators_alone() -> None:
    """Drafts are drawn from a generator of their own."""
    random.seed(3)
    before = random.getstate(), torch.get_rng_state()
    fresh_model("llama").generate(**prompts(1), max_new_tokens=20, do_sample=False, use_lookahead=True)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_seed_repeats_the_passes() -> None:
    """Two runs with one seed make the same steps; the text never depends on it."""
    strategy = Lookahead(window_size=7, seed=5, stats="detailed")
    settings = {"return_dict_in_generate": True, "lookahead_strategy": strategy, "max_new_tokens": 30}
    first, second = (run(tiny_model("llama"), prompts(3), **settings)[0].stats for _ in range(2))
    assert [step["tokens"] for step in first.passes] == [step["tokens"] for step in second.passes]
    assert [step["nodes"] for step in first.passes] == [step["nodes"] for step in second.passes]


@pytest.mark.parametrize("recorded", [False, True], ids=["text", "scores"])
@pytest.mark.parametrize("name", few(["llama", "mistral", "gpt2", "gemma3", "llama4"], "llama", "gemma3"))
def test_rows_end_at_different_times(name: str, recorded: bool) -> None:
    """Finished rows are padded as plain generate pads them; scores, cache and stats are those of the whole batch."""
    model, inputs = tiny_model(name), prompts(4)
    text = run(model, inputs, max_new_tokens=30)[0]
    for index in (0, 4, 28):
        for row in (0, 3):
            end = int(text[row, 12 + index])
            output = same_as_plain(
                model, inputs, max_new_tokens=30, eos_token_id=end, output_scores=recorded, output_logits=recorded
            )
            new = output.sequences[:, 12:].tolist()
            lengths = [line.index(end) + 1 if end in line else len(line) for line in new]
            assert output.stats.emitted == sum(lengths)


@pytest.mark.parametrize("batch", [1, 3])
def test_end_token_comes_first(batch: int) -> None:
    """Rows whose first token ends them, one after another, up to all of them."""
    model = tiny_model("llama")
    firsts = ids_of(run(model, prompts(batch), max_new_tokens=4)[0], 0)
    for count in range(1, batch + 1):
        settings = {"max_new_tokens": 20, "eos_token_id": firsts[:count], "output_scores": True, "output_logits": True}
        same_as_plain(model, prompts(batch), **settings)


def test_pad_is_the_end_token() -> None:
    """As in many tokenizers without a pad token; where there is none, transformers pads with the first end token."""
    model, without, inputs = tiny_model("gpt2"), fresh_model("gpt2"), prompts(3)
    without.generation_config = GenerationConfig()
    text = run(model, inputs, max_new_tokens=30)[0]
    for index in (0, 5, 17):
        end = int(text[1, 12 + index])
        same_as_plain(model, inputs, max_new_tokens=30, eos_token_id=end, pad_token_id=end, output_scores=True)
        same_as_plain(without, inputs, max_new_tokens=30, eos_token_id=[end, 5])
