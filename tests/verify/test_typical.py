"""Lossy acceptance: the rules against their formulas, paths against all paths, whole texts against a slow reference."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.acceptance import Accepts, slow_nucleus, slow_typical, softmax
from helpers.calls import LengthIs
from helpers.distributions import chi_square
from helpers.medusa import counting, random_heads
from helpers.models import VOCAB, fresh_model, prompts, run, tiny_model
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from jacobi import LookaheadError
from lookahead import DecodingStats
from lookahead.medusa import Medusa, MedusaHeads, choices_from, output_layer
from lookahead.models.names import CACHE

LOSSY = ("typical", "nucleus")


def slow_decode(
    model: Any,
    heads: MedusaHeads,
    choices: Sequence[Sequence[int]],
    prompt: Sequence[int],
    new_tokens: int,
    accepts: Accepts,
    processors: LogitsProcessorList,
    end_tokens: Sequence[int] = (),
) -> tuple[list[int], list[int]]:
    """Lossy decoding from the papers' description: no tree pass, no cache, every path on its own.

    Returns:
        The new tokens, and how many each pass wrote.
    """
    layer = output_layer(model)
    inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    known: dict[tuple[int, ...], tuple[list[float], Tensor]] = {}

    def look(text: Sequence[int]) -> tuple[list[float], Tensor]:
        """The processed distribution after a text, and the hidden state it comes from."""
        key = tuple(text)
        if key not in known:
            ids = torch.tensor([key])
            logits = model(ids).logits[:, -1].float()
            known[key] = softmax(processors(ids, logits)[0].tolist()), inputs[-1][0, -1]
        return known[key]

    def greedy(text: Sequence[int]) -> int:
        chances = look(text)[0]
        return chances.index(max(chances))

    text, written = list(prompt), []
    try:
        text.append(greedy(text))
        written.append(1)
        while len(text) - len(prompt) < new_tokens and text[-1] not in end_tokens:
            logits = heads(look(text[:-1])[1], layer)
            ranked = [line.argsort(descending=True).tolist() for line in logits]
            best: tuple[int, float, list[int]] = (0, 0.0, [])
            for choice in choices:
                if len(choice) > new_tokens - (len(text) - len(prompt)) - 1:
                    continue
                path = [ranked[head][rank] for head, rank in enumerate(choice)]
                value, kept = 0.0, []
                for token in path:
                    chances = look(text + kept)[0]
                    if not accepts(chances, token):
                        break
                    value += math.log(chances[token])
                    kept.append(token)
                    if token in end_tokens:
                        break
                best = max(best, (len(kept), value, kept), key=lambda each: each[:2])
            kept = best[2]
            if not kept or kept[-1] not in end_tokens:
                kept = [*kept, greedy(text + kept)]
            text += kept
            written.append(len(kept))
    finally:
        hook.remove()
    return text[len(prompt) :], written


def processors_of(settings: dict[str, Any]) -> LogitsProcessorList:
    made = LogitsProcessorList()
    for name, kind in (
        ("repetition_penalty", logits_process.RepetitionPenaltyLogitsProcessor),
        ("no_repeat_ngram_size", logits_process.NoRepeatNGramLogitsProcessor),
        ("temperature", logits_process.TemperatureLogitsWarper),
        ("top_k", logits_process.TopKLogitsWarper),
    ):
        if name in settings:
            made.append(kind(settings[name]))
    return made


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.6, "top_k": 0},
    {"temperature": 3.0, "top_k": 0},
    {"temperature": 2.0, "top_k": 5},
    {"temperature": 1.5, "top_k": 0, "repetition_penalty": 1.4},
    {"temperature": 2.5, "top_k": 0, "no_repeat_ngram_size": 2},
]


def lossy(model: Any, inputs: dict[str, Any], strategy: Medusa, **settings: Any) -> Any:
    settings = {"do_sample": True, "top_k": 0, "return_dict_in_generate": True} | settings
    return run(model, inputs, custom_generate=strategy, **settings)[0]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("acceptance", LOSSY)
@torch.no_grad()
def test_against_the_slow_reference(acceptance: str, settings: dict[str, Any]) -> None:
    """Token for token and pass for pass; processors look at every candidate's own prefix."""
    choices = choices_from([[0, 0, 0], [0, 1], [1, 0], [2], [1, 1, 0], [3]]).paths
    accepts = slow_typical(0.09, 0.3) if acceptance == "typical" else slow_nucleus(0.8)
    used = settings if settings["top_k"] else {name: value for name, value in settings.items() if name != "top_k"}
    models = [(model, random_heads(model)) for model in map(tiny_model, ("llama", "gpt2"))]
    if "no_repeat_ngram_size" not in settings:  # after which ties would decide
        models.append(counting(3, sharpness=5.0))
    for model, heads in models:
        inputs = prompts(1)
        prompt = inputs["input_ids"][0].tolist()
        text, written = slow_decode(model, heads, choices, prompt, 25, accepts, processors_of(used))
        strategy = Medusa(heads, choices, acceptance=acceptance, stats="detailed")
        output = lossy(model, inputs, strategy, max_new_tokens=25, **settings)
        assert output.sequences[0, 12:].tolist() == text
        assert [record["tokens"][0] for record in output.stats.passes] == written


@pytest.mark.parametrize("acceptance", LOSSY)
@torch.no_grad()
def test_an_end_token_inside_a_path(acceptance: str) -> None:
    """Nothing is kept after it, and a path that ends early is no longer than it is."""
    model = tiny_model("llama")
    heads = random_heads(model)
    choices = choices_from([4, 3, 2]).paths
    accepts = slow_typical(0.09, 0.3) if acceptance == "typical" else slow_nucleus(0.8)
    strategy = Medusa(heads, choices, acceptance=acceptance)
    prompt = prompts(1)["input_ids"][0].tolist()
    warm = processors_of({"temperature": 4.0})
    text, _ = slow_decode(model, heads, choices, prompt, 24, accepts, warm)
    lengths = set()
    for end in sorted(set(text))[::2]:
        expected, _ = slow_decode(model, heads, choices, prompt, 24, accepts, warm, [end])
        output = lossy(model, prompts(1), strategy, temperature=4.0, max_new_tokens=24, eos_token_id=end)
        assert output.sequences[0, 12:].tolist() == expected
        lengths.add(len(expected))
    assert len(lengths) > 4


@pytest.mark.parametrize("new_tokens", range(1, 9))
@torch.no_grad()
def test_length_inside_a_path(new_tokens: int) -> None:
    """The tree is cut to what may still be written."""
    model, heads = counting(4, sharpness=3.0)
    output = lossy(model, prompts(2), Medusa(heads, acceptance="typical"), max_new_tokens=new_tokens)
    assert output.sequences.shape[1] == 12 + new_tokens
    assert output.stats.emitted == 2 * new_tokens


@pytest.mark.parametrize("acceptance", LOSSY)
def test_greedy_is_exact(acceptance: str) -> None:
    """Without sampling nothing is lost; and as the temperature goes to 0 sampling becomes just that."""
    for model, heads in ((tiny_model("llama"), random_heads(tiny_model("llama"))), counting()):
        strategy = Medusa(heads, acceptance=acceptance)
        plain, _ = run(model, prompts(3), do_sample=False, max_new_tokens=30)
        for settings in ({"do_sample": False}, {"temperature": 1e-4}):
            output = lossy(model, prompts(3), strategy, max_new_tokens=30, **settings)
            assert output.sequences.tolist() == plain.tolist()


@pytest.mark.parametrize("acceptance", LOSSY)
def test_more_is_accepted_at_higher_temperature(acceptance: str) -> None:
    model = tiny_model("llama")
    strategy = Medusa(random_heads(model), [4, 3, 2], acceptance=acceptance)
    lengths = []
    for temperature in (0.01, 0.3, 1.0, 3.0, 10.0, 100.0):
        output = lossy(model, prompts(8, ragged=False), strategy, temperature=temperature, max_new_tokens=60)
        lengths.append(output.stats.mean_acceptance_length)
    assert lengths == sorted(lengths), lengths
    assert lengths[0] < 1.6
    assert lengths[-1] > 3.0


def test_only_exact_acceptance_keeps_the_distribution() -> None:
    """Chi-square over all transitions of sampled texts, of a model whose distribution is known."""
    model, heads = counting(3, sharpness=4.0)
    sure = math.exp(4.0)
    chances = [sure / (sure + VOCAB - 1)] + [1 / (sure + VOCAB - 1)] * (VOCAB - 1)
    distances = {}
    for name, strategy in (
        ("exact", Medusa(heads)),
        ("rejection", Medusa(heads, verification="rejection")),
        ("combined", Medusa(heads, sources=("heads", "recycling"), nodes=12)),
        ("typical", Medusa(heads, acceptance="typical")),
        ("nucleus", Medusa(heads, acceptance="nucleus")),
    ):
        output = lossy(model, prompts(24, ragged=False), strategy, max_new_tokens=60, seed=3)
        counts = [0] * VOCAB
        for row in output.sequences[:, 12:].tolist():
            for token, following in pairwise(row):
                counts[(following - token % 7 - 1) % VOCAB] += 1
        assert output.stats.mean_acceptance_length > 1.5
        distances[name] = chi_square(torch.tensor(counts).double(), sum(counts) * torch.tensor(chances).double())
    assert all(distances[name] < 3 for name in ("exact", "rejection", "combined")), distances
    assert all(distances[name] > 8 for name in LOSSY), distances


@pytest.mark.parametrize("acceptance", LOSSY)
def test_rows_of_a_batch_are_written_as_alone(acceptance: str) -> None:
    """With padding and end tokens: nothing is drawn, so a row does not depend on the others."""
    model = tiny_model("llama")
    strategy = Medusa(random_heads(model), [4, 3, 2], acceptance=acceptance)
    batch = prompts(4)
    for settings in ({}, {"repetition_penalty": 1.3}, {"eos_token_id": [3, 11, 30]}):
        together = lossy(model, batch, strategy, temperature=3.0, max_new_tokens=30, **settings)
        emitted = 0
        for row in range(4):
            alone = {name: tensor[row : row + 1] for name, tensor in batch.items()}
            single = lossy(model, alone, strategy, temperature=3.0, max_new_tokens=30, **settings)
            text = single.sequences[0].tolist()
            assert together.sequences[row].tolist()[: len(text)] == text
            assert not any(together.sequences[row].tolist()[len(text) :])
            emitted += single.stats.emitted
        assert together.stats.emitted == emitted


def test_ended_rows_keep_up_where_scores_are_asked_for() -> None:
    """They are fed padding, as in plain decoding: one line of scores for every token of the longest row."""
    model = tiny_model("llama")
    strategy = Medusa(random_heads(model), [4, 3, 2], acceptance="typical")
    settings = {"temperature": 3.0, "max_new_tokens": 30, "eos_token_id": [3, 11, 30]}
    expected = lossy(model, prompts(4), strategy, **settings).sequences
    output = lossy(model, prompts(4), strategy, output_scores=True, **settings)
    assert output.sequences.tolist() == expected.tolist()
    assert [line.shape for line in output.scores] == [(4, VOCAB)] * (expected.shape[1] - 12)
    assert output[CACHE].get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("acceptance", LOSSY)
def test_a_first_token_is_the_most_likely_one(acceptance: str, augmented: None) -> None:
    """Also where it is the only one, and in the automatic mode."""
    model = tiny_model("llama")
    plain, _ = run(model, prompts(2), max_new_tokens=1, do_sample=False)
    for sources in (None, ("heads",)):
        strategy = Medusa(random_heads(model), acceptance=acceptance, sources=sources)
        for seed in range(3):
            settings = {"do_sample": True, "max_new_tokens": 1, "temperature": 5.0, "seed": seed}
            assert run(model, prompts(2), lookahead_strategy=strategy, **settings)[0].tolist() == plain.tolist()


@pytest.mark.parametrize("acceptance", LOSSY)
def test_lossy_in_the_automatic_mode(acceptance: str) -> None:
    model, heads = counting(3, sharpness=5.0)
    strategy = Medusa(heads, acceptance=acceptance, sources=("heads", "suffix"), nodes=16, seed=0)
    for batch in (1, 3):
        stats = lossy(model, prompts(batch), strategy, temperature=1.5, max_new_tokens=40).stats
        assert isinstance(stats, DecodingStats)
        assert stats.mean_acceptance_length > 2
        assert sum(stats.sources.values()) == stats.accepted
        assert stats.sources["heads"] > 0


@pytest.mark.parametrize("batch", [1, 3])
def test_scores_and_logits_are_those_of_the_text(batch: int) -> None:
    """One line for each written token, as a pass over the finished text gives it."""
    model = fresh_model("llama")
    strategy = Medusa(random_heads(model), [4, 3, 2], acceptance="typical")
    inputs = prompts(batch, ragged=False)
    output = lossy(model, inputs, strategy, temperature=3.0, max_new_tokens=16, output_scores=True, output_logits=True)
    with torch.no_grad():
        logits = model(output.sequences).logits[:, 11:-1].float()
    torch.testing.assert_close(torch.stack(output.logits, dim=1), logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.stack(output.scores, dim=1), logits / 3.0, atol=1e-5, rtol=1e-5)
    assert output.stats.mean_acceptance_length > 1.5


def test_a_rule_is_asked_token_by_token() -> None:
    """About the text alone, never about a path that was not written."""
    model, heads = counting(4, sharpness=4.0)
    rule = LengthIs(21)
    output = lossy(model, prompts(1), Medusa(heads, acceptance="typical"), max_new_tokens=40, stopping_criteria=[rule])
    text = output.sequences[0].tolist()
    assert len(text) == 21
    assert rule.shown == [[text[:length]] for length in range(13, 22)]
    assert output.stats.steps < 9


class Doubled(LogitsProcessor):
    """A processor of the caller's own: no token follows itself."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0]
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


def test_processors_of_the_callers_own() -> None:
    """Asked along each candidate's own prefix; in a batch they might look at other rows, and are refused."""
    model = tiny_model("llama")
    strategy = Medusa(random_heads(model), [4, 3, 2], acceptance="typical")
    settings = {"temperature": 5.0, "max_new_tokens": 40, "logits_processor": [Doubled()]}
    output = lossy(model, prompts(1), strategy, **settings)
    text = output.sequences[0, 11:].tolist()
    assert all(token != following for token, following in pairwise(text))
    assert output.stats.mean_acceptance_length > 1.5
    with pytest.raises(LookaheadError, match=r"Doubled may look at the whole batch: got 2 rows.*acceptance='exact'"):
        lossy(model, prompts(2), strategy, **settings)
    with pytest.raises(LookaheadError, match="LengthIs may look at the whole batch"):
        lossy(model, prompts(2), strategy, max_new_tokens=5, stopping_criteria=[LengthIs(20)])


def test_processors_with_a_state_are_refused(passes: Callable[[Any], list[int]]) -> None:
    model = fresh_model("llama")
    seen = passes(model)
    strategy = Medusa(random_heads(model), acceptance="nucleus")
    with pytest.raises(LookaheadError, match="UnbatchedClassifierFreeGuidanceLogitsProcessor remembers the last one"):
        lossy(model, prompts(1), strategy, max_new_tokens=5, guidance_scale=1.5)
    assert seen == []
