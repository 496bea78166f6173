"""Everything else that ``generate`` can do works as with plain decoding: processors, stopping, streaming, settings."""

import copy
import json
import random
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from helpers.models import (
    MODELS,
    VOCAB,
    counting_model,
    fresh_model,
    prompts,
    registries,
    run,
    same_as_plain,
    same_tensors,
    tiny_model,
)
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

import lookahead
from lookahead import DecodingStats, Jacobi, Lookahead, LookaheadOutput

augmented = pytest.mark.usefixtures("augmented")


# --- processors ----------------------------------------------------------------------------------------------------


def allowed_tokens(row: int, ids: Tensor) -> list[int]:
    """Another third of the vocabulary after every token, and another one in every row."""
    return [token for token in range(VOCAB) if (token + int(ids[-1]) + row) % 3]


GREEDY: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "no_repeat_ngram_size_1": {"no_repeat_ngram_size": 1, "max_new_tokens": 20},
    "min_length": {"min_length": 25, "eos_token_id": list(range(1, 20))},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(1, 20))},
    "bad_words": {"bad_words_ids": [[3], [4, 5], [18, 4, 12], [7, 7]]},
    "forced_eos": {"forced_eos_token_id": [5], "eos_token_id": 5},
    "forced_eos_in_the_middle": {"forced_eos_token_id": 6, "max_length": 20, "max_new_tokens": None},
    "forced_bos": {"forced_bos_token_id": 9},
    "prefix": {"prefix_allowed_tokens_fn": allowed_tokens},
    "sequence_bias": {"sequence_bias": [[[18], 4.0], [[4, 12], -10.0], [[2, 3, 4], 6.0]]},
    "decay": {"exponential_decay_length_penalty": (5, 1.3), "eos_token_id": 11},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat": {"encoder_no_repeat_ngram_size": 1},
    "suppress": {"suppress_tokens": [3, 4, 18], "begin_suppress_tokens": [8, 25]},
    "remove_invalid": {"remove_invalid_values": True, "renormalize_logits": True},
    "guidance": {"guidance_scale": 1.7},
    "watermark": {"watermarking_config": {"greenlist_ratio": 0.4, "bias": 3.0, "seeding_scheme": "lefthash"}},
    "many": {
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[4]],
        "min_new_tokens": 6,
        "eos_token_id": [5, 6, 7],
    },
}
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.4},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "top_h": {"top_h": 0.4},
    "typical_p": {"typical_p": 0.5},
    "epsilon": {"epsilon_cutoff": 0.05},
    "eta": {"eta_cutoff": 0.05},
    "all": {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.9, "repetition_penalty": 1.1},
    "prefix": {"prefix_allowed_tokens_fn": allowed_tokens},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5, "temperature": 0.5},
    "synthid": {"watermarking_config": transformers.SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)},
}


@augmented
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", GREEDY)
def test_processors(name: str, batch: int) -> None:
    """Greedy, on a chaotic text and on one that repeats itself, where whole blocks are accepted."""
    settings = {"max_new_tokens": 30, "output_scores": True, "output_logits": True} | GREEDY[name]
    same_as_plain(tiny_model("llama"), prompts(batch), **settings)
    same_as_plain(counting_model(), prompts(batch), Lookahead(window_size=7, seed=0), **settings)


@augmented
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", SAMPLED)
def test_warpers(name: str, batch: int) -> None:
    """Sampled: the same draws from the same, warped distributions."""
    settings = {"max_new_tokens": 30, "output_scores": True, "do_sample": True} | SAMPLED[name]
    same_as_plain(tiny_model("llama"), prompts(batch), **settings)
    same_as_plain(counting_model(sharpness=6.0), prompts(batch), **settings)


class Recorder(LogitsProcessor):
    """A processor with a memory: bans what has been written as often as it has been called; remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = input_ids.tolist()
        if self.calls:
            assert [row[:-1] for row in ids] == self.calls[-1], "every call sees one token more of the same text"
        self.calls.append(ids)
        assert input_ids.is_contiguous()
        assert scores.shape == (len(ids), VOCAB)
        assert scores.dtype is torch.float32
        for row, text in enumerate(ids):
            scores[row, (text[-1] * 3 + len(self.calls)) % VOCAB] += 2.0
        return scores


@augmented
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("repetitive", [False, True])
def test_a_processor_sees_the_true_prefix(repetitive: bool, batch: int, sample: bool) -> None:
    """Every call shows exactly the text so far, in order, as in plain decoding; never a draft."""
    model = counting_model(sharpness=9.0) if repetitive else tiny_model("llama")
    kept: list[Recorder] = []

    def new() -> LogitsProcessorList:
        kept.append(Recorder())
        return LogitsProcessorList([kept[-1]])

    # Row 0 ends first, the others go on: finished rows are shown padded.
    text = run(model, prompts(batch), max_new_tokens=30, logits_processor_new=new, do_sample=sample)[0]
    kept.clear()
    output = same_as_plain(
        model,
        prompts(batch),
        Lookahead(window_size=7, seed=0),
        max_new_tokens=30,
        logits_processor_new=new,
        eos_token_id=None if repetitive else int(text[0, 30]),
        do_sample=sample,
        output_scores=True,
        output_logits=True,
    )
    plain, ours = kept
    assert ours.calls == plain.calls
    assert ours.calls[0] == prompts(batch)["input_ids"].tolist()
    assert ours.calls[-1] == output.sequences[:, :-1].tolist()
    assert not repetitive or output.stats.mean_acceptance_length > 2


@augmented
def test_a_processor_that_keeps_its_input() -> None:
    """What a processor was shown does not change under its hands afterwards."""
    shown: list[tuple[Tensor, list[list[int]]]] = []

    def keep(input_ids: Tensor, scores: Tensor) -> Tensor:
        shown.append((input_ids, input_ids.tolist()))
        return scores

    for batch in (1, 3):
        same_as_plain(counting_model(), prompts(batch), max_new_tokens=30, logits_processor=[keep])
    assert all(ids.tolist() == then for ids, then in shown)


@augmented
def test_the_callers_ids_are_never_written() -> None:
    """Nor are the mask, the prompt's list of processors or the config."""
    inputs = prompts(3)
    before = {name: value.clone() for name, value in inputs.items()}
    config = GenerationConfig(max_new_tokens=20, eos_token_id=4, use_lookahead=True)
    settings = config.to_dict()
    processors = LogitsProcessorList([Recorder()])
    tiny_model("llama").generate(**inputs, generation_config=config, logits_processor=processors)
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)
    assert config.to_dict() == settings
    assert len(processors) == 1


@augmented
def test_generate_inside_a_processor() -> None:
    """An inner call, with lookahead or without, on the same model or another, disturbs nothing."""
    model = tiny_model("llama")
    inner = [run(m, prompts(1, 6), max_new_tokens=6)[0].tolist() for m in (model, tiny_model("mistral"))]

    def nested(input_ids: Tensor, scores: Tensor) -> Tensor:
        for other, expected in zip((model, tiny_model("mistral")), inner, strict=True):
            for asked in ({"use_lookahead": True}, {}):
                assert other.generate(**prompts(1, 6), max_new_tokens=6, do_sample=False, **asked).tolist() == expected
        return scores

    for batch in (1, 2):
        same_as_plain(model, prompts(batch), max_new_tokens=8, logits_processor=[nested])


# --- stopping ------------------------------------------------------------------------------------------------------


@augmented
@pytest.mark.parametrize("batch", [1, 3])
def test_several_end_tokens(batch: int) -> None:
    """Each of them ends a row, also in the middle of an accepted block."""
    for ends in ([5], [5, 6], [6, 5, 40], [40]):
        for new_tokens in (9, 30):
            output = same_as_plain(
                counting_model(),
                prompts(batch),
                Lookahead(window_size=7, seed=0),
                max_new_tokens=new_tokens,
                eos_token_id=ends,
            )
            assert output.stats.emitted == sum(
                next((i + 1 for i, token in enumerate(row) if token in ends), new_tokens)
                for row in output.sequences[:, 12:].tolist()
            )


@augmented
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("new_tokens", range(1, 25))
def test_length_inside_a_block(new_tokens: int, batch: int) -> None:
    """Every length is met exactly, though blocks of five tokens are accepted."""
    output = same_as_plain(
        counting_model(), prompts(batch), Lookahead(window_size=7, seed=0), max_new_tokens=new_tokens
    )
    assert output.sequences.shape[1] == 12 + new_tokens
    output = same_as_plain(
        counting_model(),
        prompts(batch),
        Lookahead(window_size=7, seed=0),
        max_length=12 + new_tokens,
        output_scores=True,
    )
    assert output.sequences.shape[1] == 12 + new_tokens


class LengthIs(StoppingCriteria):
    """Stops every row at a length; remembers which lengths it was shown."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.shown: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.shown.append(input_ids.shape[1])
        return torch.full((input_ids.shape[0],), input_ids.shape[1] == self.length)


class RowEnds(StoppingCriteria):
    """Stops row r at the r-th length; a row that has stopped is not stopped again."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return self.lengths == input_ids.shape[1]


@augmented
@pytest.mark.parametrize("eos", [None, 40, 6], ids=["no-eos", "unused-eos", "eos"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", range(13, 41, 3))
def test_a_criterion_inside_a_block(length: int, batch: int, eos: int | None) -> None:
    """A rule of the user's is asked after every token, once, and obeyed at once."""
    kept: list[LengthIs] = []

    def new() -> StoppingCriteriaList:
        kept.append(LengthIs(length))
        return StoppingCriteriaList([kept[-1]])

    output = same_as_plain(
        counting_model(),
        prompts(batch),
        Lookahead(window_size=7, seed=0),
        max_new_tokens=40,
        stopping_criteria_new=new,
        eos_token_id=eos,
    )
    plain, ours = kept
    assert ours.shown == plain.shown == list(range(13, output.sequences.shape[1] + 1))
    if eos is None and length > 30:
        assert output.stats.mean_acceptance_length > 2


@augmented
@pytest.mark.parametrize("eos", [None, 40], ids=["no-eos", "eos"])
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", [[15, 20, 33], [33, 14, 14], [13, 13, 13], [40, 50, 60]])
def test_a_criterion_for_each_row(lengths: list[int], sample: bool, eos: int | None) -> None:
    """Rows stop one by one; without an end token, stopped rows write on until the last has stopped."""
    for model in (counting_model(sharpness=7.0), tiny_model("mistral")):
        same_as_plain(
            model,
            prompts(3),
            Lookahead(window_size=7, seed=0),
            max_new_tokens=40,
            stopping_criteria_new=lambda: StoppingCriteriaList([RowEnds(lengths)]),
            eos_token_id=eos,
            do_sample=sample,
            output_scores=True,
            output_logits=True,
        )


class EndsAt(StoppingCriteria):
    """A rule of the user's with an attribute by which transformers knows rules about end tokens, of any type."""

    def __init__(self, eos_token_id: Any) -> None:
        self.eos_token_id = eos_token_id

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.isin(input_ids[:, -1], torch.as_tensor(self.eos_token_id))


@augmented
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("rule", ["int", "list", "tensor", "transformers", "length", "both"])
def test_rules_given_as_criteria(rule: str, batch: int) -> None:
    """End tokens and lengths that come as criteria rather than as settings."""
    model = tiny_model("llama")
    text = run(model, prompts(3), max_new_tokens=20)[0]
    ends = [int(text[0, 16]), int(text[1, 20])]

    def new() -> StoppingCriteriaList:
        rules = {
            "int": [EndsAt(ends[0])],
            "list": [EndsAt(ends)],
            "tensor": [EndsAt(torch.tensor(ends))],
            "transformers": [EosTokenCriteria(ends)],
            "length": [MaxLengthCriteria(19)],
            "both": [EosTokenCriteria(ends[0]), EndsAt(ends[1]), MaxLengthCriteria(22)],
        }
        return StoppingCriteriaList(rules[rule])

    same_as_plain(model, prompts(batch), max_new_tokens=25, stopping_criteria_new=new, output_scores=True)
    same_as_plain(model, prompts(batch), max_new_tokens=25, stopping_criteria_new=new, do_sample=True)
    same_as_plain(counting_model(), prompts(batch), max_new_tokens=25, stopping_criteria_new=new)


@augmented
@pytest.mark.parametrize("batch", [1, 3])
def test_a_criterion_sees_the_scores(batch: int) -> None:
    """If scores are recorded, a rule is given all of them up to now; otherwise None."""

    def shown(recorded: bool, **asked: Any) -> list[Any]:
        seen: list[Any] = []

        def look(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            seen.append(None if scores is None else [line.double() for line in scores])
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        settings = {"return_dict_in_generate": True, "output_scores": recorded, "max_new_tokens": 12}
        run(counting_model(), prompts(batch), stopping_criteria=[look], **settings, **asked)
        return seen

    assert shown(False, use_lookahead=True) == shown(False) == [None] * 12
    for ours, plain in zip(shown(True, use_lookahead=True), shown(True), strict=True):
        same_tensors(tuple(ours), tuple(plain), 1e-5)


@augmented
@pytest.mark.parametrize("eos", [None, 40], ids=["no-eos", "eos"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("strings", ["d", ["cde"], ["gab", "nm"], ["t", "g", "m"], ["x", "ijk"], ["never"]], ids=str)
def test_stop_strings(strings: Any, batch: int, eos: int | None, tokenizer: PreTrainedTokenizerFast) -> None:
    """Strings that are a token, are a part of one, span several, or never come."""
    settings = {"stop_strings": strings, "tokenizer": tokenizer, "max_new_tokens": 24, "eos_token_id": eos}
    same_as_plain(counting_model(), prompts(batch), Lookahead(window_size=7, seed=0), **settings)
    same_as_plain(tiny_model("llama"), prompts(batch), output_scores=True, **settings)


@augmented
def test_stop_strings_that_rows_meet_apart(tokenizer: PreTrainedTokenizerFast) -> None:
    """Row by row, with and without an end token, greedy and sampled."""
    model = tiny_model("llama")
    text = run(model, prompts(3), max_new_tokens=30)[0]
    strings = [tokenizer.decode(text[row, 12 + at : 14 + at]) for row, at in ((0, 3), (1, 11), (2, 20))]
    for eos in (None, 40):
        for sample in (False, True):
            same_as_plain(
                model,
                prompts(3),
                stop_strings=strings,
                tokenizer=tokenizer,
                max_new_tokens=40,
                eos_token_id=eos,
                do_sample=sample,
            )


@augmented
@pytest.mark.parametrize("batch", [1, 3])
def test_max_time(batch: int) -> None:
    """Time runs out between two tokens: after the first if there is none, never if there is enough."""
    output = same_as_plain(counting_model(), prompts(batch), max_new_tokens=30, max_time=1e-9)
    assert output.sequences.shape[1] == 13
    same_as_plain(counting_model(), prompts(batch), max_new_tokens=30, max_time=1000.0)

    def slow(input_ids: Tensor, scores: Tensor) -> Tensor:
        time.sleep(0.02)
        return scores

    output = counting_model().generate(
        **prompts(1), max_new_tokens=200, max_time=0.3, logits_processor=[slow], use_lookahead=True
    )
    assert 13 <= output.shape[1] <= 12 + 16


# --- streaming -----------------------------------------------------------------------------------------------------


class Puts(BaseStreamer):
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.puts: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert not self.ends, "nothing comes after the end"
        self.puts.append(value)

    def end(self) -> None:
        self.ends += 1


@augmented
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("eos", [None, 6])
@pytest.mark.parametrize("batch", [1, 3])
def test_streamer(batch: int, eos: int | None, sample: bool) -> None:
    """The prompt, then one 1-D put for each token of the batch, in order, then one end; as plain generate does it."""
    for model in (counting_model(), tiny_model("llama")):
        kept: list[Puts] = []

        def new(kept: list[Puts] = kept) -> Puts:
            kept.append(Puts())
            return kept[-1]

        output = same_as_plain(
            model, prompts(batch), max_new_tokens=25, streamer_new=new, eos_token_id=eos, do_sample=sample
        )
        plain, ours = kept
        assert ours.ends == plain.ends == 1
        assert [put.shape for put in ours.puts] == [put.shape for put in plain.puts]
        assert [put.tolist() for put in ours.puts] == [put.tolist() for put in plain.puts]
        assert all(put.shape == (batch,) and put.dtype is torch.int64 for put in ours.puts[1:])
        assert torch.stack(ours.puts[1:], dim=1).tolist() == output.sequences[:, 12:].tolist()


@augmented
def test_streaming_is_not_late() -> None:
    """Tokens are put after the pass that decided them, not at the end."""
    model, streamer = counting_model(), Puts()
    put_before_pass: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: put_before_pass.append(len(streamer.puts)))
    settings = {
        "lookahead_strategy": Lookahead(window_size=7, seed=0, stats="detailed"),
        "return_dict_in_generate": True,
    }
    output = model.generate(**prompts(1), max_new_tokens=40, do_sample=False, streamer=streamer, **settings)
    handle.remove()
    written = [sum(step["tokens"]) for step in output.stats.passes]
    expected = [1 + sum(written[:index]) for index in range(len(written))]  # the prompt is a put as well
    assert put_before_pass[-len(expected) :] == expected


@augmented
def test_text_streamers(tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers' own streamers, one of them read from another thread."""
    model, inputs = counting_model(), prompts(1)
    text = tokenizer.decode(run(model, inputs, max_new_tokens=20)[0][0, 12:])
    model.generate(**inputs, max_new_tokens=20, use_lookahead=True, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == text
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60.0)
    settings = {"max_new_tokens": 20, "use_lookahead": True, "streamer": streamer}
    thread = threading.Thread(target=model.generate, kwargs=inputs | settings)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces).strip() == text
    assert len(pieces) > 10


# --- everything at once --------------------------------------------------------------------------------------------


def check_a_random_call(seed: int) -> None:
    """Model, batch, prompt, settings, rules and strategy drawn at random, nothing kept apart."""
    rng = random.Random(seed)
    name = rng.choice([*MODELS, *["counting"] * 6])
    model = counting_model(sharpness=6.5) if name == "counting" else tiny_model(name)
    batch, length = rng.choice([1, 1, 2, 3, 5]), rng.randint(1, 20)
    settings: dict[str, Any] = {"max_new_tokens": rng.randint(1, 44), "seed": rng.randrange(1000)}

    def sometimes(chance: float, **more: Any) -> bool:
        taken = rng.random() < chance
        settings.update(more if taken else {})
        return taken

    if sometimes(0.5, do_sample=True):
        sometimes(0.5, temperature=rng.choice([0.3, 0.7, 1.5]))
        sometimes(0.3, num_return_sequences=rng.choice([2, 3]))
        sometimes(0.2, top_k=5, top_p=0.9)
    if sometimes(0.5, eos_token_id=rng.sample(range(VOCAB), rng.choice([1, 3, 8]))):
        sometimes(0.3, min_new_tokens=min(rng.randint(1, 10), settings["max_new_tokens"]))
        sometimes(0.2, pad_token_id=rng.randrange(VOCAB))
    sometimes(0.3, output_scores=True)
    sometimes(0.3, output_logits=True)
    sometimes(0.2, repetition_penalty=1.3)
    sometimes(0.15, no_repeat_ngram_size=rng.choice([2, 3]))
    sometimes(0.1, encoder_repetition_penalty=1.4)
    sometimes(0.1, prefix_allowed_tokens_fn=allowed_tokens)
    sometimes(0.1, use_cache=False)
    lengths = [length + rng.randint(1, 30) for _ in range(batch * settings.get("num_return_sequences", 1))]
    stopped = sometimes(0.15, stopping_criteria_new=lambda: StoppingCriteriaList([RowEnds(lengths)]))
    strategy: Any = Lookahead(
        window_size=rng.choice([1, 2, 3, 5, 7, 15, 30]),
        ngram_size=rng.choice([2, 3, 4, 5, 8]),
        verification_set_size=rng.choice([0, 1, 3, 7, 20]),
        pool_from_prompt=rng.random() < 0.5,
        pool_from_output=rng.random() < 0.5,
        always_forward_one=rng.random() < 0.5,
        seed=seed,
    )
    if rng.random() < 0.3:
        mode: Any = rng.choice(["jacobi", "gauss-seidel", "hybrid", "sliding"])
        guess = rng.choice(["text", "tail", "pad", (1, 2, 3)])
        strategy = Jacobi(mode=mode, block_size=rng.choice([1, 3, 8, 20]), initial_guess=guess, seed=seed)
    output = same_as_plain(model, prompts(batch, length, seed, ragged=rng.random() < 0.7), strategy, **settings)
    if not stopped:
        ends = set(settings.get("eos_token_id", ()))
        new = output.sequences[:, length:].tolist()
        assert output.stats.emitted == sum(
            next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in new
        )


@augmented
@pytest.mark.parametrize("seed", range(60))
def test_a_random_call(seed: int) -> None:
    """A few of them always."""
    check_a_random_call(seed)


@augmented
@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_random_calls(block: int) -> None:
    """More of them when there is time."""
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        check_a_random_call(seed)


# --- the ways to ask for it ----------------------------------------------------------------------------------------


def test_custom_generate_needs_no_patch() -> None:
    """A strategy is a ``custom_generate`` callable: nothing of transformers is replaced, the text is the same."""
    sample, validate = GenerationMixin._sample, GenerationMixin._validate_generation_mode
    for strategy in (Lookahead(window_size=7, seed=0), Jacobi()):
        for batch in (1, 3):
            for do_sample in (False, True):
                settings = {"max_new_tokens": 25, "do_sample": do_sample, "eos_token_id": [5, 30]}
                plain, plain_state = run(tiny_model("llama"), prompts(batch), **settings)
                ours, state = run(tiny_model("llama"), prompts(batch), custom_generate=strategy, **settings)
                assert ours.tolist() == plain.tolist()
                assert torch.equal(state, plain_state)
    output = tiny_model("llama").generate(
        **prompts(1),
        custom_generate=Lookahead(),
        max_new_tokens=9,
        return_dict_in_generate=True,
        output_scores=True,
        logits_processor=[Recorder()],
        stopping_criteria=[LengthIs(17)],
    )
    assert isinstance(output, LookaheadOutput)
    assert output.stats.emitted == len(output.scores) == 5
    assert GenerationMixin._sample is sample
    assert GenerationMixin._validate_generation_mode is validate
    assert not hasattr(GenerationConfig, "use_lookahead")


@pytest.mark.parametrize("patched", [False, True])
def test_custom_generate_streams(patched: bool) -> None:
    """transformers keeps the streamer to itself on this path, so ours has another name."""
    if patched:
        lookahead.augment_all()
    streamer = Puts()
    text = tiny_model("llama").generate(
        **prompts(2), custom_generate=Lookahead(), lookahead_streamer=streamer, max_new_tokens=15, do_sample=False
    )
    assert streamer.puts[0].tolist() == prompts(2)["input_ids"].tolist()
    assert torch.stack(streamer.puts[1:], dim=1).tolist() == text[:, 12:].tolist()
    assert streamer.ends == 1


@augmented
@pytest.mark.parametrize(
    "strategy",
    [
        {"window_size": 3, "ngram_size": 4},
        {"strategy": "jacobi", "mode": "gauss-seidel", "block_size": 4},
        {"strategy": "jacobi", "initial_guess": [1, 2, 3]},
        Lookahead(window_size=2).to_dict(),
        Jacobi(mode="jacobi", block_size=None).to_dict(),
    ],
    ids=str,
)
def test_a_strategy_as_a_dict(strategy: dict[str, Any]) -> None:
    """As JSON has it; asking for a strategy is asking for lookahead."""
    model = tiny_model("llama")
    output, _ = run(model, prompts(1), lookahead_strategy=strategy, max_new_tokens=15, return_dict_in_generate=True)
    assert isinstance(output, LookaheadOutput)
    assert output.sequences.tolist() == run(model, prompts(1), max_new_tokens=15)[0].tolist()
    assert json.loads(json.dumps(strategy)) == strategy


def asked(output: Any) -> bool:
    """Whether lookahead decoding made this output."""
    return isinstance(output, LookaheadOutput)


@augmented
def test_who_is_asked() -> None:
    """``use_lookahead=False`` overrules everything; a strategy alone is enough; nothing is plain decoding."""
    model = fresh_model("llama")

    def ask(**settings: Any) -> bool:
        output, _ = run(model, prompts(1), return_dict_in_generate=True, max_new_tokens=4, **settings)
        return asked(output)

    assert not ask()
    assert not ask(use_lookahead=False)
    assert not ask(use_lookahead=False, lookahead_strategy=Lookahead())
    assert ask(use_lookahead=True)
    assert ask(lookahead_strategy=Lookahead())
    assert ask(generation_config=GenerationConfig(use_lookahead=True))
    assert ask(generation_config=GenerationConfig(lookahead_strategy={"window_size": 2}))
    assert not ask(generation_config=GenerationConfig(use_lookahead=True), use_lookahead=False)
    model.generation_config.use_lookahead = True
    assert ask()
    assert ask(generation_config=GenerationConfig(max_new_tokens=3))
    assert not ask(use_lookahead=False)
    lookahead.restore_all()
    assert not ask(), "a default on the model means nothing without the patch"


@augmented
def test_a_config_in_json(tmp_path: Any) -> None:
    """A generation config carries both fields through JSON, files and a saved model."""
    settings = {"window_size": 3, "ngram_size": 3, "stats": "detailed"}
    config = GenerationConfig(use_lookahead=True, lookahead_strategy=settings, max_new_tokens=9, do_sample=False)
    copies = [
        GenerationConfig.from_dict(json.loads(config.to_json_string(use_diff=False))),
        GenerationConfig(**json.loads(config.to_json_string())),
        copy.deepcopy(config),
    ]
    config.save_pretrained(tmp_path)
    copies.append(GenerationConfig.from_pretrained(tmp_path))
    for loaded in copies:
        assert loaded.use_lookahead is True
        assert loaded.lookahead_strategy == settings
        loaded.return_dict_in_generate = True
        output = tiny_model("llama").generate(**prompts(1), generation_config=loaded)
        assert asked(output)
        assert len(output.stats.passes) == output.stats.steps

    model = fresh_model("llama")
    model.generation_config.use_lookahead = True
    model.generation_config.lookahead_strategy = settings
    model.save_pretrained(tmp_path / "model")
    loaded_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    output = loaded_model.generate(**prompts(1), max_new_tokens=5, return_dict_in_generate=True)
    assert asked(output)


@augmented
def test_a_strategy_object_in_a_config() -> None:
    """A config that holds an object rather than a dict can be shown, copied and used."""
    config = GenerationConfig(lookahead_strategy=Lookahead(window_size=3), max_new_tokens=5)
    assert "lookahead_strategy" in repr(config)
    assert copy.deepcopy(config).lookahead_strategy == Lookahead(window_size=3)
    output = tiny_model("llama").generate(**prompts(1), generation_config=config, return_dict_in_generate=True)
    assert asked(output)


@augmented
@pytest.mark.parametrize("when", ["call", "init", "config"])
def test_pipeline(when: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    """``pipeline`` hands ``use_lookahead`` on, given at the call, at the start or in a config; also for a list."""
    calls: list[int] = []
    original = lookahead.patch.generate
    monkeypatch.setattr(lookahead.patch, "generate", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    model = fresh_model("llama").float()
    settings = {"max_new_tokens": 12, "do_sample": False}
    words = ["abc", "hi jk lm", "z"]
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")(words, **settings)
    assert not calls
    if when == "config":
        settings["generation_config"] = GenerationConfig(use_lookahead=True)
    at_start = {"use_lookahead": True} if when == "init" else {}
    if when == "call":
        settings["use_lookahead"] = True
    ours = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu", **at_start)(words, **settings)
    assert ours == plain
    assert calls
    calls.clear()
    batched = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu", batch_size=2, **at_start)
    assert batched(words, **settings) == plain
    assert len(calls) == 2


# --- the patch -----------------------------------------------------------------------------------------------------


def test_the_patch_can_be_put_on_and_taken_off_at_will() -> None:
    """Once or twice, in any order: afterwards transformers is exactly what it was."""
    mixin, config, tables = dict(vars(GenerationMixin)), set(vars(GenerationConfig)), registries()
    lookahead.restore_all()
    assert dict(vars(GenerationMixin)) == mixin
    for _ in range(2):
        lookahead.augment_all()
        once = dict(vars(GenerationMixin))
        lookahead.augment_all()
        assert dict(vars(GenerationMixin)) == once != mixin
        run(tiny_model("llama"), prompts(1), max_new_tokens=9, use_lookahead=True)
        lookahead.restore_all()
        assert dict(vars(GenerationMixin)) == mixin
        lookahead.restore_all()
        assert dict(vars(GenerationMixin)) == mixin
        assert set(vars(GenerationConfig)) == config
        assert registries() == tables
    with pytest.raises(ValueError, match="use_lookahead"):
        tiny_model("llama").generate(**prompts(1), max_new_tokens=9, use_lookahead=True)


def test_without_use_lookahead_everything_is_transformers() -> None:
    """Patched and unpatched calls give the same output, of the same class, from the same code."""
    calls: list[str] = []

    def everything() -> list[Any]:
        model = tiny_model("llama")
        outputs = []
        for settings in (
            {},
            {"do_sample": True, "temperature": 0.7, "top_k": 10},
            {"do_sample": True, "num_return_sequences": 2, "output_scores": True},
            {"num_beams": 3},
            {"num_beams": 2, "do_sample": True},
            {"eos_token_id": [3, 4], "repetition_penalty": 1.2, "streamer_new": Puts},
            {"prompt_lookup_num_tokens": 3},
        ):
            batch = 1 if {"streamer_new", "prompt_lookup_num_tokens"} & set(settings) else 3
            output, state = run(model, prompts(batch), max_new_tokens=15, return_dict_in_generate=True, **settings)
            scores = None if output.scores is None else torch.stack(output.scores)
            outputs.append((type(output), output.sequences, scores, state))
        return outputs

    before = everything()
    lookahead.augment_all()
    original = lookahead.patch.generate
    lookahead.patch.generate = lambda *a, **k: calls.append("ours")
    try:
        after = everything()
    finally:
        lookahead.patch.generate = original
    assert not calls
    for (kind, text, scores, state), (kind_after, text_after, scores_after, state_after) in zip(
        before, after, strict=True
    ):
        assert kind is kind_after
        assert torch.equal(text, text_after)
        assert torch.equal(state, state_after)
        assert (scores is None and scores_after is None) or torch.equal(scores, scores_after)


@augmented
def test_nothing_is_left_on_the_model() -> None:
    """No attribute, hook or config field is added by a call."""
    model = fresh_model("gemma3")
    before = [(name, set(vars(module))) for name, module in model.named_modules()]
    settings = model.config.to_dict(), model.generation_config.to_dict(), model.config._attn_implementation
    tables = registries()
    run(model, prompts(3), max_new_tokens=9, use_lookahead=True, do_sample=True)
    assert [(name, set(vars(module))) for name, module in model.named_modules()] == before
    assert (model.config.to_dict(), model.generation_config.to_dict(), model.config._attn_implementation) == settings
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert registries() == tables


# --- statistics ----------------------------------------------------------------------------------------------------


@augmented
@pytest.mark.parametrize("eos", [None, 6, [1, 2, 3, 25, 26]], ids=["none", "one", "many"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
def test_stats_add_up(sample: bool, batch: int, eos: Any, together: bool) -> None:
    """Emitted tokens are those of every row up to its end, pads not counted; every other count fits to them."""
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    settings = {"pad_token_id": 7, "max_new_tokens": 33, "eos_token_id": eos, "do_sample": sample}
    if together:  # a processor that is not known has to see all rows at the same time
        settings["logits_processor"] = [lambda input_ids, scores: scores]
    for model in (counting_model(), tiny_model("llama")):
        for recorded in (False, True):  # with scores, finished rows are fed pads, which do not count
            output = same_as_plain(
                model,
                prompts(batch),
                Lookahead(window_size=7, seed=0, stats="detailed"),
                output_scores=recorded,
                **settings,
            )
            stats, rows = output.stats, output.sequences[:, 12:].tolist()
            lengths = [next((i + 1 for i, token in enumerate(row) if token in ends), len(row)) for row in rows]
            assert stats.emitted == sum(lengths)
            assert stats.emitted == sum(tokens * count for tokens, count in stats.histogram.items())
            assert stats.row_steps == sum(stats.histogram.values())
            assert stats.accepted == stats.emitted - stats.row_steps
            assert stats.accepted <= stats.drafted
            assert stats.steps == len(stats.passes)
            assert max(lengths) / max(stats.histogram) <= stats.steps <= max(lengths)
            assert stats.mean_acceptance_length == stats.emitted / stats.row_steps
            assert stats.passes[0]["nodes"] == [1] * batch


@augmented
@pytest.mark.parametrize("recorded", [False, True], ids=["text", "scores"])
@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
def test_a_draft_of_pads_does_not_count(together: bool, recorded: bool) -> None:
    """Rows end inside a block, and their trees go on with what happens to be the pad token."""
    inputs = {"input_ids": torch.tensor([[(start + at) % 7 + 1 for at in range(15)] for start in (0, 2, 3)])}
    processors = [lambda input_ids, scores: scores] if together else []
    output = same_as_plain(
        counting_model(),
        inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])},
        Lookahead(window_size=7, seed=0),
        max_new_tokens=30,
        eos_token_id=6,
        pad_token_id=7,
        logits_processor=processors,
        output_scores=recorded,
    )
    rows = output.sequences[:, 15:].tolist()
    assert [row.index(6) for row in rows] == [4, 2, 1]
    assert output.stats.emitted == 5 + 3 + 2
    assert output.stats.accepted == output.stats.emitted - output.stats.row_steps


@augmented
def test_how_much_is_counted(passes: Callable[[Any], list[int]]) -> None:
    """``none`` counts nothing, ``summary`` sums up, ``detailed`` keeps every pass; the text is the same."""
    model = tiny_model("llama")
    outputs = {
        kind: same_as_plain(model, prompts(1), Lookahead(window_size=7, seed=0, stats=kind), max_new_tokens=20)
        for kind in ("none", "summary", "detailed")
    }
    assert outputs["none"].stats is None
    assert outputs["summary"].stats.passes == []
    counted = outputs["detailed"].stats
    assert counted.steps == outputs["summary"].stats.steps
    seen = passes(model)
    again, _ = run(
        model,
        prompts(1),
        lookahead_strategy=Lookahead(window_size=7, seed=0, stats="detailed"),
        max_new_tokens=20,
        return_dict_in_generate=True,
    )
    assert seen[0] == 12
    assert seen[1:] == [step["nodes"][0] for step in again.stats.passes[1:]]
    assert len(seen) == counted.steps


@augmented
def test_stats_add_over_calls_and_go_through_json() -> None:
    """Sums of sums."""
    model = counting_model()
    calls = [
        same_as_plain(model, prompts(batch), Lookahead(window_size=7, seed=0), max_new_tokens=20).stats
        for batch in (1, 2, 3)
    ]
    total = sum(calls, DecodingStats())
    assert total.emitted == 20 * 6
    assert total.steps == sum(stats.steps for stats in calls)
    assert sum(k * v for k, v in total.histogram.items()) == total.emitted
    assert DecodingStats.from_dict(json.loads(total.to_json())) == total
    assert sum(calls) == total


@augmented
def test_trajectories() -> None:
    """A Jacobi decode shows every iterate; the last ones are the text."""
    strategy = Jacobi(mode="jacobi", block_size=None, return_trajectory=True, seed=0)
    output = same_as_plain(tiny_model("llama"), prompts(2), strategy, max_new_tokens=15)
    assert len(output.trajectories) == 2
    for row, iterates in enumerate(output.trajectories):
        text = output.sequences[row, 12:].tolist()
        assert len(iterates[0]) == 13, "all but the first token, which the prompt gives, and the last, which is carried"
        assert all(len(after) < len(before) for before, after in pairwise(iterates))
        for before, after in pairwise(iterates):
            fixed = len(before) - len(after)
            assert before[: fixed - 1] == text[14 - len(before) :][: fixed - 1]
    plain = same_as_plain(tiny_model("llama"), prompts(2), Jacobi(), max_new_tokens=15)
    assert plain.trajectories is None


@pytest.mark.usefixtures("augmented")
def test_ended_rows_are_fed_no_more_than_they_need() -> None:
    """Rows that have ended neither widen the passes of the others nor draft where nobody reads them."""
    model, rows = counting_model(), prompts(3)
    for processors in ([], [lambda ids, scores: scores]):
        settings = {"eos_token_id": 6, "pad_token_id": 7, "max_new_tokens": 60, "logits_processor": processors}
        strategy = Lookahead(window_size=1, ngram_size=1, verification_set_size=0, stats="detailed")
        output = model.generate(**rows, **settings, lookahead_strategy=strategy, return_dict_in_generate=True)
        nodes = [count for record in output.stats.passes for count in record["nodes"]]
        live = [record for record in output.stats.passes if any(record["tokens"])]
        assert max(count for record in live for count in record["nodes"]) == 1, nodes
