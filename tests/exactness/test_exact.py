"""Through ``model.generate``: the text, the draws, the scores and the cache of plain decoding, whatever the draft."""

import copy
import random
from typing import Any

import pytest
import torch
from helpers.models import (
    F32,
    MODELS,
    VOCAB,
    counting_model,
    fresh_model,
    initialised,
    prompts,
    run,
    same_as_plain,
    same_caches,
    successor_model,
    tiny_model,
)
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    DynamicCache,
    GenerationConfig,
    GPTNeoConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    StaticCache,
)

from lookahead import Jacobi, Lookahead, LookaheadError

pytestmark = pytest.mark.usefixtures("augmented")


def random_strategy(rng: random.Random) -> Lookahead:
    """A legal (W, N, G) with its other settings, small ones more often than large ones."""
    return Lookahead(
        window_size=rng.choice([1, 2, 3, 5, 7, 15]),
        ngram_size=rng.choice([2, 3, 4, 5, 8]),
        verification_set_size=rng.choice([0, 1, 3, 7, 15]),
        pool_from_prompt=rng.random() < 0.5,
        pool_from_output=rng.random() < 0.5,
        always_forward_one=rng.random() < 0.5,
        seed=rng.randrange(1000),
    )


STRATEGIES = [None, *(random_strategy(random.Random(n)) for n in range(2))]
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


def ids_of(sequences: Tensor, index: int) -> list[int]:
    """The token that each row writes at ``index`` (prompts are 12 long)."""
    return sequences[:, 12 + index].tolist()


# --- greedy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
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


@pytest.mark.parametrize("seed", range(12))
def test_random_settings(seed: int) -> None:
    """Model, batch, prompt and (W, N, G) drawn together, on texts that repeat themselves more and less."""
    rng = random.Random(100 + seed)
    name = rng.choice(["llama", "mistral", "gpt2", "qwen2_mixed", "gpt_neox"])
    inputs = prompts(rng.choice([1, 2, 5]), rng.randint(2, 20), seed)
    same_as_plain(tiny_model(name), inputs, random_strategy(rng), max_new_tokens=rng.randint(2, 44))


@pytest.mark.parametrize("batch", [1, 3])
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
    ],
    ids=lambda s: f"{s.mode}-{s.block_size}",
)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_jacobi(name: str, strategy: Jacobi, batch: int) -> None:
    """Every Jacobi mode and guess, with end tokens that watched modes react to."""
    model = tiny_model(name)
    same_as_plain(model, prompts(batch), strategy, max_new_tokens=30)
    ends = ids_of(run(model, prompts(batch), max_new_tokens=20)[0], 15)
    same_as_plain(model, prompts(batch), strategy, max_new_tokens=30, eos_token_id=ends)


def test_drafts_are_accepted() -> None:
    """On a text that repeats itself, lookahead needs a fraction of the passes; so the tests here test something."""
    output = same_as_plain(counting_model(), prompts(1), Lookahead(window_size=7, seed=0), max_new_tokens=60)
    assert output.stats.mean_acceptance_length > 3
    output = same_as_plain(counting_model(), prompts(3), Lookahead(window_size=7, seed=0), max_new_tokens=60)
    assert output.stats.mean_acceptance_length > 3


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


# --- rows that end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", [False, True], ids=["text", "scores"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3", "llama4"])
def test_rows_end_at_different_times(name: str, recorded: bool) -> None:
    """Finished rows are padded as plain generate pads them; scores, cache and stats are those of the whole batch."""
    model, inputs = tiny_model(name), prompts(4)
    text = run(model, inputs, max_new_tokens=30)[0]
    for index in (0, 4, 28):
        for row in range(4):
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
        same_as_plain(
            model,
            prompts(batch),
            max_new_tokens=20,
            eos_token_id=firsts[:count],
            output_scores=True,
            output_logits=True,
        )


def test_pad_is_the_end_token() -> None:
    """As in many tokenizers without a pad token."""
    model, inputs = tiny_model("gpt2"), prompts(3)
    text = run(model, inputs, max_new_tokens=30)[0]
    for index in (0, 5, 17):
        end = int(text[1, 12 + index])
        same_as_plain(model, inputs, max_new_tokens=30, eos_token_id=end, pad_token_id=end, output_scores=True)


def test_no_pad_token() -> None:
    """transformers then pads with the first end token."""
    model, inputs = fresh_model("gpt2"), prompts(3)
    model.generation_config = GenerationConfig()
    text = run(model, inputs, max_new_tokens=30)[0]
    for index in (0, 5, 17):
        same_as_plain(model, inputs, max_new_tokens=30, eos_token_id=[int(text[1, 12 + index]), 5])


# --- sampling ------------------------------------------------------------------------------------------------------

WARPERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 0.7, "top_k": 8, "top_p": 0.9},
    {"temperature": 0.6, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("warper", WARPERS, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma2", "qwen2_mixed", "gpt_oss"])
def test_sampling_from_a_seed(name: str, batch: int, warper: dict[str, Any]) -> None:
    """The same text, and the generator is left in the same state."""
    for seed in range(3):
        same_as_plain(tiny_model(name), prompts(batch), max_new_tokens=30, do_sample=True, seed=seed, **warper)


@pytest.mark.parametrize("strategy", [*STRATEGIES[1:], Jacobi(), Jacobi(mode="jacobi", block_size=None)])
def test_sampling_with_any_strategy(strategy: Any) -> None:
    """Drafts have no influence on draws."""
    for batch in (1, 4):
        same_as_plain(
            counting_model(sharpness=6.0),
            prompts(batch),
            strategy,
            max_new_tokens=40,
            do_sample=True,
            output_scores=True,
        )


@pytest.mark.parametrize("recorded", [False, True], ids=["text", "scores"])
def test_sampled_rows_end(recorded: bool) -> None:
    """Noise is drawn once for each index that plain decoding reaches, however early a row ends or runs ahead."""
    accepted = 0
    for seed in range(10):
        output = same_as_plain(
            counting_model(sharpness=6.0),
            prompts(4),
            max_new_tokens=40,
            do_sample=True,
            seed=seed,
            eos_token_id=[30, 31, 32],
            output_scores=recorded,
        )
        accepted += output.stats.accepted
    assert accepted > 100


def test_a_sampled_row_runs_far_ahead() -> None:
    """One row is as good as certain, the others are noise: the first has to wait for them, and for their draws."""
    model = successor_model({token: token % 7 + 1 for token in range(8)}, sharpness=20.0, free=8)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [20, 21, 22, 23, 24, 25], [30, 31, 32, 33, 34, 35]])
    output = same_as_plain(
        model, {"input_ids": ids}, Lookahead(window_size=7, seed=0), max_new_tokens=150, do_sample=True
    )
    assert output.sequences[0, 6:].max() <= 7
    assert output.sequences[1:].min() >= 8
    assert output.stats.mean_acceptance_length > 1.1
    same_as_plain(
        model,
        {"input_ids": ids},
        Lookahead(window_size=7, seed=0),
        max_new_tokens=150,
        do_sample=True,
        eos_token_id=40,
        seed=1,
    )


@pytest.mark.parametrize("batch", [1, 2])
def test_num_return_sequences(batch: int) -> None:
    """Several samples of each prompt."""
    output = same_as_plain(
        tiny_model("llama"),
        prompts(batch),
        max_new_tokens=30,
        do_sample=True,
        temperature=0.5,
        num_return_sequences=3,
        output_scores=True,
        eos_token_id=[5, 6],
    )
    assert output.sequences.shape[0] == 3 * batch


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """How many standard deviations the chi-square statistic lies above its mean; rare cells are put together."""
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]]).clamp(min=1e-9)
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = len(expected) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("verification", ["rejection", "exact"])
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "batch"])
def test_samples_follow_the_model(verification: Any, alone: bool) -> None:
    """Three drafted tokens have the joint distribution that the model gives them."""
    vocab = 6
    model = fresh_model("llama", seed=2, vocab_size=vocab, initializer_range=0.2)
    # A prompt of the model's own words, so that its n-grams are plausible guesses.
    prompt = run(model, {"input_ids": torch.tensor([[1, 2, 3]])}, seed=0, max_new_tokens=40, do_sample=True)[0][:, -24:]
    samples = 500 if alone else 4000
    paths = torch.cartesian_prod(*[torch.arange(vocab)] * 3)
    with torch.no_grad():
        logits = model(torch.cat([prompt.expand(len(paths), -1), paths], dim=1)).logits[:, -4:-1]
    expected = logits.softmax(-1).gather(2, paths[:, :, None])[:, :, 0].prod(1) * samples

    strategy = Lookahead(window_size=4, ngram_size=4, verification_set_size=5, verification=verification, seed=2)
    settings = {"max_new_tokens": 4, "do_sample": True, "lookahead_strategy": strategy, "return_dict_in_generate": True}
    rows = 1 if alone else 250
    inputs = {"input_ids": prompt.expand(rows, -1), "attention_mask": torch.ones(rows, 24, dtype=torch.long)}
    outputs = [run(model, inputs, seed=seed, **settings)[0] for seed in range(samples // rows)]
    assert sum(output.stats.accepted for output in outputs) > samples / 2
    drawn = torch.cat([output.sequences for output in outputs])[:, 24:27]
    counts = torch.bincount(drawn @ torch.tensor([vocab**2, vocab, 1]), minlength=vocab**3).double()
    assert chi_square(counts, expected) < 4
    pairs = counts.view(vocab, vocab, vocab)
    for axis in ((0, 1), (0, 2), (1, 2)):
        assert chi_square(pairs.sum(axis), expected.view(vocab, vocab, vocab).sum(axis)) < 4


def test_greedy_rejection_is_greedy() -> None:
    """Without sampling there is nothing to reject."""
    same_as_plain(tiny_model("llama"), prompts(3), Lookahead(verification="rejection"), max_new_tokens=30)


# --- what else is returned -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_scores_logits_and_cache(name: str, batch: int, sample: bool) -> None:
    """One [batch, vocab] for each index; the cache holds all but the last token, in plain decoding's layers."""
    output = same_as_plain(
        tiny_model(name), prompts(batch), max_new_tokens=20, do_sample=sample, output_scores=True, output_logits=True
    )
    assert len(output.scores) == len(output.logits) == 20
    assert output.scores[0].shape == (batch, VOCAB)
    assert output.past_key_values.get_seq_length() == 12 + 20 - 1


@pytest.mark.parametrize("kind", ["output_scores", "output_logits"])
def test_one_kind_of_scores(kind: str) -> None:
    """Only what is asked for is returned."""
    output = same_as_plain(tiny_model("llama"), prompts(3), max_new_tokens=9, repetition_penalty=1.3, **{kind: True})
    assert (output.scores is None) == (kind == "output_logits")
    assert (output.logits is None) == (kind == "output_scores")


def test_processors_change_scores_but_not_logits() -> None:
    """Also in rows that have ended."""
    same_as_plain(
        tiny_model("llama"),
        prompts(3),
        max_new_tokens=24,
        no_repeat_ngram_size=2,
        suppress_tokens=[3, 4],
        eos_token_id=ids_of(run(tiny_model("llama"), prompts(3), max_new_tokens=9)[0], 7),
        output_scores=True,
        output_logits=True,
    )


@pytest.mark.parametrize("ours_first", [False, True], ids=["from-plain", "from-ours"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma3", "qwen2_mixed", "cohere2", "llama4"])
def test_continue_from_a_cache(name: str, batch: int, ours_first: bool) -> None:
    """A second call with all ids and the first call's cache, which is updated in place."""
    model, inputs = tiny_model(name), prompts(batch)
    settings = {"return_dict_in_generate": True, "max_new_tokens": 15, "use_lookahead": ours_first}
    first, _ = run(model, inputs, **settings)
    more = prompts(batch, 4, seed=5, ragged=False)
    following = {
        "input_ids": torch.cat([first.sequences, more["input_ids"]], dim=1),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(batch, 19, dtype=torch.long)], dim=1),
    }
    caches = [copy.deepcopy(first.past_key_values) for _ in range(2)]
    plain, _ = run(model, following, past_key_values=caches[0], max_new_tokens=15)
    ours, _ = run(model, following, past_key_values=caches[1], max_new_tokens=15, use_lookahead=True)
    assert ours.tolist() == plain.tolist()
    assert caches[1].get_seq_length() == 12 + 15 + 4 + 15 - 1
    same_caches(caches[1], caches[0], 1e-4 if model.dtype is F32 else 1e-9)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_continue_with_the_new_tokens_only(name: str, batch: int) -> None:
    """The other way transformers knows: new ids, and a mask for everything."""
    model, inputs = tiny_model(name), prompts(batch)
    first, _ = run(model, inputs, return_dict_in_generate=True, max_new_tokens=16)
    mask = torch.cat([inputs["attention_mask"], torch.ones(batch, 15 + 4, dtype=torch.long)], dim=1)
    following = {"input_ids": prompts(batch, 4, seed=5, ragged=False)["input_ids"], "attention_mask": mask}
    caches = [copy.deepcopy(first.past_key_values) for _ in range(2)]
    plain, _ = run(model, following, past_key_values=caches[0], max_new_tokens=15)
    ours, _ = run(model, following, past_key_values=caches[1], max_new_tokens=15, use_lookahead=True)
    assert ours.tolist() == plain.tolist()
    same_caches(caches[1], caches[0], 1e-9)


def test_a_conversation_of_many_turns() -> None:
    """One cache handed from call to call, plain and lookahead in turn, stays what plain calls alone make of it."""
    model = tiny_model("mistral")
    texts, caches = [prompts(1)["input_ids"]] * 2, [DynamicCache(config=model.config) for _ in range(2)]
    for turn in range(6):
        for who in range(2):
            asked = {"use_lookahead": True} if who and turn % 3 else {}
            texts[who], _ = run(
                model, {"input_ids": texts[who]}, past_key_values=caches[who], max_new_tokens=7 + turn, **asked
            )
            texts[who] = torch.cat([texts[who], prompts(1, 3, seed=turn)["input_ids"]], dim=1)
        assert texts[1].tolist() == texts[0].tolist()
        same_caches(caches[1], caches[0], 1e-9)


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("configured", [False, True])
def test_an_empty_cache_given(name: str, batch: int, returned: bool, configured: bool) -> None:
    """A caller's own empty cache is filled, whether its layers are made already or not."""
    model = tiny_model(name)
    caches = [DynamicCache(config=model.config) if configured else DynamicCache() for _ in range(2)]
    settings = {"max_new_tokens": 15, "return_dict_in_generate": returned, "eos_token_id": 8}
    run(model, prompts(batch), past_key_values=caches[0], **settings)
    output, _ = run(model, prompts(batch), past_key_values=caches[1], use_lookahead=True, **settings)
    same_caches(caches[1], caches[0], 1e-9)
    assert not returned or output.past_key_values is caches[1]


@pytest.mark.parametrize("batch", [1, 3])
def test_static_cache(batch: int) -> None:
    """A static cache is filled as plain decoding fills it, prepared by transformers or given."""
    model, inputs = tiny_model("llama"), prompts(batch)
    same_as_plain(model, inputs, max_new_tokens=20, cache_implementation="static")
    caches = [StaticCache(config=model.config, max_cache_len=12 + 20) for _ in range(2)]
    plain, _ = run(model, inputs, past_key_values=caches[0], max_new_tokens=10)
    ours, _ = run(model, inputs, past_key_values=caches[1], max_new_tokens=10, use_lookahead=True)
    assert ours.tolist() == plain.tolist()
    same_caches(caches[1], caches[0], 1e-9)
    mask = torch.cat([inputs["attention_mask"], torch.ones(batch, 10, dtype=torch.long)], dim=1)
    plain, _ = run(model, {"input_ids": plain, "attention_mask": mask}, past_key_values=caches[0], max_new_tokens=9)
    ours, _ = run(
        model,
        {"input_ids": ours, "attention_mask": mask},
        past_key_values=caches[1],
        max_new_tokens=9,
        use_lookahead=True,
    )
    assert ours.tolist() == plain.tolist()
    same_caches(caches[1], caches[0], 1e-9)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_without_a_cache(name: str) -> None:
    """``use_cache=False`` is about what is returned; the text is the same."""
    output = same_as_plain(tiny_model(name), prompts(3), max_new_tokens=15, use_cache=False)
    assert output.past_key_values is None


# --- unusual input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_short_prompts_and_texts(name: str) -> None:
    """One token of prompt, one token of text, and both."""
    model = tiny_model(name)
    for length, new_tokens in ((1, 1), (1, 2), (1, 25), (2, 25), (12, 1), (12, 2), (12, 3)):
        for sample in (False, True):
            same_as_plain(model, prompts(1, length), max_new_tokens=new_tokens, do_sample=sample)
    ids = {"input_ids": torch.tensor([[5], [6], [7]])}
    same_as_plain(model, ids, max_new_tokens=20)


def test_no_prompt_but_a_begin_token() -> None:
    """transformers starts with ``bos_token_id`` then."""
    same_as_plain(tiny_model("llama"), {}, max_new_tokens=20, bos_token_id=3)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "llama4"])
def test_one_padded_row(name: str) -> None:
    """Left padding is not only for batches."""
    inputs = prompts(1)
    inputs["attention_mask"][0, :5] = 0
    same_as_plain(tiny_model(name), inputs, max_new_tokens=24, output_scores=True)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "qwen2_mixed", "gemma3"])
def test_a_hole_in_the_mask(name: str, batch: int) -> None:
    """Rows glued together from earlier, padded texts are masked in the middle."""
    inputs = prompts(batch)
    inputs["attention_mask"][0, 8:10] = 0
    same_as_plain(tiny_model(name), inputs, max_new_tokens=20)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "qwen2_mixed"])
def test_positions_given(name: str) -> None:
    """A caller's own ``position_ids``: the text goes on from the last one."""
    for batch in (1, 3):
        positions = torch.arange(10, 22).expand(batch, -1) + torch.arange(batch)[:, None]
        inputs = prompts(batch, ragged=False) | {"position_ids": positions.contiguous()}
        same_as_plain(tiny_model(name), inputs, max_new_tokens=20)


@pytest.mark.parametrize("chunk", [1, 5, 12, 50])
def test_prefill_in_chunks(chunk: int) -> None:
    """The prompt's pass may come in pieces."""
    for name in ("llama", "mistral", "gpt2"):
        same_as_plain(tiny_model(name), prompts(3), max_new_tokens=15, prefill_chunk_size=chunk)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_inputs_embeds(name: str, sample: bool, batch: int) -> None:
    """Embeddings for a prompt: the output holds the new tokens only."""
    model, inputs = tiny_model(name), prompts(batch)
    ids = inputs.pop("input_ids")
    inputs["inputs_embeds"] = model.get_input_embeddings()(ids).detach()
    output = same_as_plain(model, inputs, max_new_tokens=20, do_sample=sample, output_scores=True)
    assert output.sequences.shape == (batch, 20)
    same_as_plain(model, inputs | {"input_ids": ids}, max_new_tokens=20, do_sample=sample)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_types(dtype: torch.dtype) -> None:
    """The output has the type that plain generate returns."""
    inputs = {"input_ids": prompts(3, ragged=False)["input_ids"].to(dtype)}
    same_as_plain(tiny_model("llama"), inputs, max_new_tokens=12)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_mask_types(name: str, dtype: torch.dtype) -> None:
    """transformers takes masks of any type."""
    for batch in (1, 3):
        inputs = prompts(batch)
        inputs["attention_mask"][0, :2] = 0
        inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
        same_as_plain(tiny_model(name), inputs, max_new_tokens=12)


@pytest.mark.parametrize("pad", [-1, VOCAB])
@pytest.mark.parametrize("strategy", [None, Jacobi(initial_guess="pad"), Jacobi(mode="hybrid")])
def test_a_pad_token_outside_the_vocabulary(strategy: Any, pad: int) -> None:
    """Nothing reads it as long as no row has to be padded."""
    same_as_plain(tiny_model("llama"), prompts(1), strategy, max_new_tokens=20, pad_token_id=pad, eos_token_id=-1)
    same_as_plain(
        tiny_model("llama"), prompts(2, ragged=False), strategy, max_new_tokens=20, pad_token_id=pad, eos_token_id=-1
    )


def test_images() -> None:
    """A vision-language model: its images belong to the prompt's pass only."""
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=8,
            patch_size=4,
            projection_dim=32,
        ),
        text_config=tiny_model("llama").config,
        image_token_index=VOCAB - 1,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlavaForConditionalGeneration(config).double().eval()
        image = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    model.generation_config = GenerationConfig(pad_token_id=0)
    inputs = prompts(1)
    inputs["input_ids"].clamp_(max=VOCAB - 2)
    same_as_plain(model, inputs, max_new_tokens=12)
    inputs["input_ids"][0, 2:6] = VOCAB - 1
    same_as_plain(model, inputs | {"pixel_values": image}, max_new_tokens=12)


def test_segments() -> None:
    """GPT-2 adds an embedding for ``token_type_ids``, for type 0 too."""
    for batch in (1, 3):
        inputs = prompts(batch)
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        same_as_plain(tiny_model("gpt2"), inputs, max_new_tokens=20)


@pytest.mark.parametrize("strategy", [None, Lookahead(window_size=40, ngram_size=8), Jacobi(block_size=30)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("new_tokens", [50, 51, 52, 53])
def test_the_last_position(new_tokens: int, batch: int, strategy: Any) -> None:
    """A table of 64 learned positions is used to its end: 12 + 52 fit, and the last token needs no position."""
    same_as_plain(tiny_model("gpt2"), prompts(batch, ragged=False), strategy, max_new_tokens=new_tokens)
    same_as_plain(
        tiny_model("gpt2"), prompts(batch), strategy, max_new_tokens=new_tokens, eos_token_id=18, output_scores=True
    )


@pytest.mark.parametrize("batch", [1, 3])
def test_a_text_that_ends_before_the_table(batch: int) -> None:
    """More tokens are allowed than there are positions, but an end token comes first: no draft looks beyond."""
    model = tiny_model("gpt2")
    for at in (40, 46, 50, 51):
        text = run(model, prompts(batch, ragged=False), max_new_tokens=52)[0]
        ends = sorted({int(row[12 + at]) for row in text})
        same_as_plain(model, prompts(batch, ragged=False), max_new_tokens=300, eos_token_id=ends)

    def end_all(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 64)

    for strategy in (None, Jacobi(block_size=30), Jacobi(mode="jacobi", block_size=None)):
        same_as_plain(model, prompts(batch, ragged=False), strategy, max_new_tokens=300, stopping_criteria=[end_all])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_padding_needs_no_positions(name: str) -> None:
    """Rows of 70 slots of which 58 hold tokens fit in a table of 64."""
    model = fresh_model(name, **({} if name == "gpt2" else {"max_position_embeddings": 64}))
    inputs = prompts(2, 70, ragged=False)
    inputs["attention_mask"][:, :12] = 0
    for new_tokens in (6, 7):
        same_as_plain(model, inputs, max_new_tokens=new_tokens)


def test_a_prompt_that_fills_the_table() -> None:
    """One token can still be written."""
    same_as_plain(tiny_model("gpt2"), prompts(1, 64), max_new_tokens=1)
    same_as_plain(tiny_model("gpt2"), prompts(1, 63), max_new_tokens=2)


@pytest.mark.parametrize("new_tokens", [15, 40])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", ["dynamic", "yarn", "linear", "llama3"])
def test_scaled_positions(kind: str, batch: int, new_tokens: int) -> None:
    """RoPE variants on both sides of a table of 32; ``dynamic`` changes its frequencies there, or is refused."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = 16
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = fresh_model("llama", rope_parameters=rope, max_position_embeddings=32)
    for strategy in (None, Jacobi(), Lookahead(window_size=2, ngram_size=7)):
        try:
            same_as_plain(model, prompts(batch), strategy, max_new_tokens=new_tokens)
        except LookaheadError as error:
            assert "dynamic" in str(error)
            assert (kind, new_tokens) == ("dynamic", 40)


@pytest.mark.parametrize("window", [6, 20, 40, 100])
def test_local_attention_outside_the_masks(window: int) -> None:
    """GPT-Neo keeps its local windows in a table of its own: right or refused, but not wrong."""
    config = GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=window,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = initialised(config, dtype=F32)
    for batch in (1, 3):
        try:
            same_as_plain(model, prompts(batch), max_new_tokens=40)
        except LookaheadError as error:
            assert "GPTNeoForCausalLM" in str(error)


# --- numbers -------------------------------------------------------------------------------------------------------


def test_ties_in_float64_are_ties_in_float32() -> None:
    """Plain generate chooses from float32 logits, where the first of two equal tokens wins."""
    model = fresh_model("llama")
    with torch.no_grad():
        head = model.lm_head.weight
        head[24:] = head[:24] * (1 + 1e-13)
    for batch in (1, 3):
        same_as_plain(model, prompts(batch), max_new_tokens=30)


def test_exact_ties() -> None:
    """Among equal logits the first token is written, in every row and at every node."""
    model = fresh_model("llama")
    with torch.no_grad():
        head = model.lm_head.weight
        head[24:] = head[:24]
    for batch in (1, 3):
        output = same_as_plain(model, prompts(batch), max_new_tokens=30)
        assert output.sequences[:, 12:].max() < 24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs(dtype: torch.dtype) -> None:
    """Near-ties may flip in half precision, so only clear-cut texts are compared."""
    model = counting_model().to(dtype)
    for batch in (1, 3):
        same_as_plain(model, prompts(batch), max_new_tokens=30)
        same_as_plain(model, prompts(batch), max_new_tokens=30, do_sample=True)
    for name in ("llama", "mistral", "gpt2", "gemma2", "gpt_oss"):
        model = fresh_model(name).to(dtype)
        for sample in (False, True):
            output = model.generate(**prompts(3), max_new_tokens=20, do_sample=sample, use_lookahead=True)
            assert output.shape == (3, 32)


def test_inference_mode() -> None:
    """Masks that were first built under inference_mode can be used outside of it, and the other way round."""
    model = fresh_model("mistral", vocab_size=VOCAB)
    strategy = Lookahead(window_size=6, ngram_size=6, seed=3)
    with torch.inference_mode():
        same_as_plain(model, prompts(3), strategy, max_new_tokens=20)
    same_as_plain(model, prompts(3), strategy, max_new_tokens=20)
    model.requires_grad_(True)
    with torch.enable_grad():
        output = same_as_plain(model, prompts(1), strategy, max_new_tokens=20, output_scores=True)
    assert not output.scores[0].requires_grad
    with torch.inference_mode():
        same_as_plain(model, prompts(3), strategy, max_new_tokens=20)


def test_a_long_text() -> None:
    """Buffers grow on the way: a text far longer than the prompt, one long prompt, and both windows sliding."""
    for name in ("llama", "mistral"):
        same_as_plain(tiny_model(name), prompts(2, 5), Lookahead(window_size=7, seed=0), max_new_tokens=230)
    same_as_plain(tiny_model("mistral"), prompts(2, 200), Lookahead(window_size=7, seed=0), max_new_tokens=20)


# --- offloaded caches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("batch", [1, 3])
def test_offloaded_caches(name: str, batch: int) -> None:
    """Plain decoding needs CUDA for them; here the history lies on the host anyway, and the text is the usual one."""
    model = tiny_model(name)
    settings = {"max_new_tokens": 20, "return_dict_in_generate": True}
    expected, _ = run(model, prompts(batch), **settings)
    kinds = ["offloaded", *(["offloaded_static"] if name == "llama" else [])]
    for kind in kinds:
        output, _ = run(model, prompts(batch), cache_implementation=kind, use_lookahead=True, **settings)
        assert torch.equal(output.sequences, expected.sequences)
        assert output.past_key_values.offloading


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_given_offloaded_cache_is_filled_and_goes_on(name: str) -> None:
    model, inputs = tiny_model(name), prompts(2)
    caches = [DynamicCache(config=model.config, offloading=ours) for ours in (False, True)]
    for _ in range(2):
        plain, _ = run(model, inputs, past_key_values=caches[0], max_new_tokens=10)
        ours, _ = run(model, inputs, past_key_values=caches[1], max_new_tokens=10, use_lookahead=True)
        assert torch.equal(plain, ours)
        same_caches(caches[1], caches[0], 1e-9)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 11), value=1)
        inputs = {"input_ids": torch.nn.functional.pad(plain, (0, 1), value=5), "attention_mask": mask}


def test_an_offloaded_cache_and_static_shapes() -> None:
    """Static passes write on the device: they are left out, or refused where they were asked for."""
    model, inputs = tiny_model("llama"), prompts(1)
    with pytest.raises(LookaheadError, match="the cache is offloaded"):
        run(
            model, inputs, cache_implementation="offloaded", lookahead_strategy=Lookahead(static=True), max_new_tokens=5
        )
