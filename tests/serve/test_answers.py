"""What the server answers is what plain ``generate`` writes; penalties, biases and seeds against formulas."""

import socket
from typing import Any

import pytest
import torch
from helpers.serving import NAME, PROMPT, bundled, client, plain, served
from openai import OpenAI
from transformers import LogitsProcessor

from lookahead import Lookahead
from lookahead.chat_format import render
from lookahead.serve import Limits

pytestmark = pytest.mark.usefixtures("augmented")
SAMPLING = {"temperature": 0.8, "top_p": 0.9}


def completed(openai: OpenAI, prompt: Any = PROMPT, **settings: Any) -> Any:
    return openai.completions.create(**{"model": NAME, "prompt": prompt, "max_tokens": 40} | settings)


def test_greedy_completion(openai: OpenAI) -> None:
    answer = completed(openai, temperature=0)
    assert answer.choices[0].text == plain(PROMPT, max_new_tokens=40, do_sample=False)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 40)
    told = answer.usage.lookahead
    assert 0 < told["passes"] <= 40 and told["tokens_per_pass"] == 40 / told["passes"]


@pytest.mark.parametrize("seed", [1, 2, 2**63 - 1])
def test_seeded_completions_repeat(openai: OpenAI, seed: int) -> None:
    expected = plain(PROMPT, seed, max_new_tokens=40, do_sample=True, **SAMPLING)
    for use in (True, False):
        answer = completed(openai, seed=seed, **SAMPLING, extra_body={"use_lookahead": use})
        assert answer.choices[0].text == expected


def test_several_prompts_and_answers(openai: OpenAI) -> None:
    prompts = [PROMPT, "class Stack:\n"]
    answer = completed(openai, prompts, n=2, seed=5, echo=True, **SAMPLING)
    expected = [
        prompt + plain(prompt, 5 + copy, max_new_tokens=40, do_sample=True, **SAMPLING)
        for prompt in prompts
        for copy in range(2)
    ]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_token_ids(openai: OpenAI) -> None:
    ids = bundled()[1](PROMPT)["input_ids"]
    expected = plain(PROMPT, max_new_tokens=40, do_sample=False)
    for prompt in (ids, [ids]):
        assert completed(openai, prompt, temperature=0).choices[0].text == expected


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_chat(openai: OpenAI, stream: bool) -> None:
    messages: Any = [{"role": "system", "content": "Write code."}, {"role": "user", "content": "def add(a, b):"}]
    expected = plain(render(bundled()[1], messages), max_new_tokens=40, do_sample=False)
    settings: Any = {"model": NAME, "messages": messages, "max_completion_tokens": 40, "temperature": 0}
    if not stream:
        answer = openai.chat.completions.create(**settings)
        assert answer.choices[0].message.content == expected
        return
    chunks = list(openai.chat.completions.create(stream=True, stream_options={"include_usage": True}, **settings))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 40


def test_streams_tell_which_tokens_were_drafted() -> None:
    """With trees of one size: the automatic one follows the clock."""
    text, tokens, last = "", [], None
    with served(strategy=Lookahead(nodes=24, seed=0)) as address, client(address) as openai:
        for chunk in completed(openai, stream=True, temperature=0, extra_body={"lookahead": {"details": True}}):
            text += chunk.choices[0].text
            if (last := getattr(chunk.choices[0], "lookahead", None)) is not None:
                tokens += last["tokens"]
                passes = last["passes"]
    assert text == "".join(token["text"] for token in tokens) == plain(PROMPT, max_new_tokens=40, do_sample=False)
    drafted = sum(token["drafted"] for token in tokens)
    assert 0 < drafted == len(tokens) - passes
    assert all(token["source"] for token in tokens if token["drafted"])


def test_stop_strings_are_left_out_of_texts_and_log_probabilities(openai: OpenAI) -> None:
    whole = plain(PROMPT, max_new_tokens=60, do_sample=False)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    expected = whole[: whole.index(stop)]
    answer = completed(openai, temperature=0, max_tokens=60, stop=["never in it", stop])
    assert answer.choices[0].text == expected and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 60
    chunks = list(completed(openai, temperature=0, max_tokens=60, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    answer = completed(openai, temperature=0, max_tokens=60, stop=stop, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == expected
    found = choice.logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) <= answer.usage.completion_tokens
    text = "".join(found.tokens)
    assert text.startswith(expected) and len(text) - len(found.tokens[-1]) < len(expected)
    assert found.text_offset == [len("".join(found.tokens[:place])) for place in range(len(found.tokens))]
    messages: Any = [{"role": "user", "content": "x"}]
    chat: Any = {"model": NAME, "messages": messages, "max_tokens": 40, "temperature": 0}
    chat["stop"] = str(openai.chat.completions.create(**chat).choices[0].message.content)[30:33]
    cut: Any = openai.chat.completions.create(**chat, logprobs=True).choices[0]
    tokens = [each.token for each in cut.logprobs.content]
    assert "".join(tokens).startswith(cut.message.content) and len("".join(tokens[:-1])) < len(cut.message.content)
    streamed: Any = list(openai.chat.completions.create(**chat, logprobs=True, stream=True))[-1].choices[0]
    assert [each.token for each in streamed.logprobs.content] == tokens
    empty = completed(openai, temperature=0, stop=whole[0], logprobs=1).choices[0]
    assert (empty.text, empty.logprobs.tokens, empty.logprobs.text_offset) == ("", [], [])


def test_log_probabilities(openai: OpenAI) -> None:
    model, tokenizer = bundled()
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    settings: Any = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    tokens = output.sequences[0, ids.shape[1] :].tolist()
    logs = [torch.log_softmax(line[0], -1) for line in output.logits]
    found = completed(openai, temperature=0, max_tokens=12, logprobs=3).choices[0].logprobs
    assert found.tokens == [tokenizer.decode([token]) for token in tokens]
    assert found.token_logprobs == pytest.approx(
        [float(log[token]) for log, token in zip(logs, tokens, strict=True)], abs=1e-3
    )
    assert all(len(best) <= 3 for best in found.top_logprobs)
    messages: Any = [{"role": "user", "content": "x"}]
    chat: Any = {"model": NAME, "messages": messages, "max_tokens": 6, "temperature": 0, "logprobs": True}
    whole = openai.chat.completions.create(**chat, top_logprobs=2).choices[0]
    assert len(whole.logprobs.content) == 6
    assert all(each.top_logprobs[0].logprob == each.logprob for each in whole.logprobs.content)
    streamed = list(openai.chat.completions.create(**chat, top_logprobs=2, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == whole.message.content


def test_usage_of_several_answers() -> None:
    with served(rows=1) as address, client(address) as openai:
        given: Any = {"temperature": 1, "seed": 1, "n": 3, "max_tokens": 8, "prompt": PROMPT * 4}
        first = completed(openai, **given).usage
        prediction = {"type": "content", "content": "def"}
        usage = completed(openai, **given, extra_body={"prediction": prediction}).usage
    assert first.prompt_tokens_details.cached_tokens == 0 and usage.prompt_tokens == first.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == (first.prompt_tokens - 1) // 16 * 16 > 0
    told, length = usage.completion_tokens_details, len(bundled()[1]("def")["input_ids"])
    assert told.rejected_prediction_tokens <= 3 * length
    assert told.rejected_prediction_tokens >= 3 * length - told.accepted_prediction_tokens


def test_a_right_prediction_doubles_the_tokens_a_pass() -> None:
    """With trees of one size: the automatic one follows the clock."""
    expected, passes = plain("class Queue:\n", max_new_tokens=64, do_sample=False), []
    with served(strategy=Lookahead(nodes=24, seed=0)) as address, client(address) as openai:
        for prediction in (None, {"type": "content", "content": expected}):
            extra = {"extra_body": {"prediction": prediction}} if prediction else {}
            answer = completed(openai, "class Queue:\n", temperature=0, max_tokens=64, **extra)
            assert answer.choices[0].text == expected
            passes.append(answer.usage.lookahead["passes"])
    assert 2 * passes[1] <= passes[0], passes
    counts = answer.usage.completion_tokens_details
    assert counts.accepted_prediction_tokens > 32 and counts.rejected_prediction_tokens < 32


def test_a_wrong_prediction_changes_nothing(openai: OpenAI) -> None:
    extra = {"prediction": {"type": "content", "content": [{"type": "text", "text": "Entirely different words."}]}}
    answer = completed(openai, temperature=0, extra_body=extra)
    assert answer.choices[0].text == plain(PROMPT, max_new_tokens=40, do_sample=False)
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens > 0


def test_models_health_and_metrics(openai: OpenAI) -> None:
    assert [model.id for model in openai.models.list()] == [NAME]
    assert openai.models.retrieve(NAME).id == NAME
    root = openai.base_url.copy_with(path="/")
    assert openai._client.get(root.join("health")).json() == {"status": "ok"}
    before = _metric(openai, "generation_tokens_total")
    completed(openai, temperature=0)
    assert _metric(openai, "generation_tokens_total") == before + 40
    for name in ("spec_decode_num_accepted_tokens_total", "num_requests_waiting", "prompt_tokens_total"):
        assert _metric(openai, name) >= 0
    page = openai._client.get(root)
    assert "sha256-" in page.headers["content-security-policy"] and "lookahead chat" in page.text


def _metric(openai: OpenAI, name: str) -> float:
    text = openai._client.get(openai.base_url.copy_with(path="/metrics")).text
    line = next(line for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))
    return float(line.rpartition(" ")[2])


def text(openai: OpenAI, **settings: Any) -> str:
    return str(completed(openai, **{"max_tokens": 60} | settings).choices[0].text)


class Slow(LogitsProcessor):
    """OpenAI's penalties, token by token."""

    def __init__(self, frequency: float, presence: float) -> None:
        self.frequency, self.presence = frequency, presence
        self.start = len(bundled()[1](PROMPT)["input_ids"])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores, new = scores.clone(), input_ids[0, self.start :].tolist()
        for token in set(new):
            scores[0, token] -= self.frequency * new.count(token) + self.presence
        return scores


@pytest.mark.parametrize("seed", [None, 4, 5])
@pytest.mark.parametrize(("frequency", "presence"), [(1.5, 0.0), (0.0, 1.5), (-1.0, 0.5)])
def test_penalties(openai: OpenAI, seed: int | None, frequency: float, presence: float) -> None:
    given: Any = {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 0.9}
    processor = Slow(frequency, presence)
    expected = plain(PROMPT, seed, max_new_tokens=60, logits_processor=[processor], **given)
    asked: Any = {"temperature": 0} if seed is None else {"temperature": 0.9, "seed": seed}
    assert text(openai, frequency_penalty=frequency, presence_penalty=presence, **asked) == expected


def test_biases_and_a_repetition_penalty(openai: OpenAI) -> None:
    first = bundled()[1](plain(PROMPT, max_new_tokens=1, do_sample=False))["input_ids"][0]
    expected = plain(PROMPT, 3, max_new_tokens=60, do_sample=True, sequence_bias={(first,): -100.0, (5,): 1.5})
    assert text(openai, temperature=1, seed=3, logit_bias={str(first): -100, "5": 1.5}) == expected
    repeated = completed(openai, temperature=0, extra_body={"repetition_penalty": 1.3}).choices[0].text
    assert repeated == plain(PROMPT, max_new_tokens=40, do_sample=False, repetition_penalty=1.3)


@pytest.mark.parametrize("seed", [-1, -(2**63), 0, 2**63 - 1])
def test_seeds_are_those_of_torch(openai: OpenAI, seed: int) -> None:
    assert text(openai, temperature=1, seed=seed) == plain(PROMPT, seed, max_new_tokens=60, do_sample=True)


def test_a_temperature_draws_and_no_seed_is_another_text_each_time(openai: OpenAI) -> None:
    assert len({text(openai, temperature=1.5, logit_bias={"0": -100}) for _ in range(3)}) == 3
    assert text(openai) == plain(PROMPT, max_new_tokens=60, do_sample=False)
    assert text(openai, top_p=0.9, seed=6) == plain(PROMPT, 6, max_new_tokens=60, do_sample=True, top_p=0.9)


def test_a_body_that_never_ends_is_given_up() -> None:
    with served(limits=Limits(1024, timeout=0.5)) as address:
        port = int(address.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            answer = slow.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408 ")
        with socket.create_connection(("127.0.0.1", port), timeout=20) as gone:
            gone.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        with client(address) as openai:
            assert len(text(openai, max_tokens=4, temperature=0)) > 0
