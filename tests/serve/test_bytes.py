"""Tokens that are parts of characters, stop strings in sampled texts, chat templates: on other models than the bundled
one, too."""

from typing import Any

import httpx
import pytest
import torch
from helpers.cli import save_tiny_model
from helpers.serving import NAME, client, served
from openai import OpenAI

import lookahead
from lookahead.pieces import Pieces, bytes_of, starts_of, text_of, tokens_of

pytestmark = pytest.mark.usefixtures("augmented")
PROMPT = "a ünd b"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A random model whose tokens are single bytes, so that most of what it writes is no character."""
    model, tokenizer = lookahead.load_model(save_tiny_model(tmp_path_factory.mktemp("bytes")))
    model.generation_config.pad_token_id = 257
    return model, tokenizer


def plain(loaded: tuple[Any, Any], seed: int, new_tokens: int, **settings: Any) -> str:
    model, tokenizer = loaded
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    torch.manual_seed(seed)
    settings = {"do_sample": True, "max_new_tokens": new_tokens, "temperature": 1.3} | settings
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def answers(openai: OpenAI, **settings: Any) -> tuple[str, str]:
    """A text as a whole and streamed."""
    given: Any = {"model": NAME, "prompt": PROMPT, "temperature": 1.3} | settings
    whole = openai.completions.create(**given).choices[0].text
    chunks = openai.completions.create(**given, stream=True)
    return whole, "".join(chunk.choices[0].text for chunk in chunks)


@pytest.mark.parametrize("seed", range(4))
def test_texts_of_broken_characters_are_plain_ones(openai: OpenAI, loaded: Any, seed: int) -> None:
    expected = plain(loaded, seed, 80)
    assert "\ufffd" in expected
    assert answers(openai, seed=seed, max_tokens=80) == (expected, expected)


@pytest.mark.parametrize("seed", range(4))
def test_sampled_texts_end_before_stop_strings(openai: OpenAI, loaded: Any, seed: int) -> None:
    whole = plain(loaded, seed, 80)
    letters = sorted({letter for letter in whole[20:] if letter.isprintable() and letter != "\ufffd"})
    for stop in letters[:2]:
        expected = whole[: whole.index(stop)]
        assert answers(openai, seed=seed, max_tokens=80, stop=[stop, "never in it"]) == (expected, expected)


def test_log_probabilities_tell_the_bytes(openai: OpenAI, loaded: Any) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    settings: Any = {"max_tokens": 30, "logprobs": True, "seed": 1, "temperature": 1.3}
    choice = openai.chat.completions.create(model=NAME, messages=messages, **settings).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    told = bytes(byte for token in choice.logprobs.content for byte in token.bytes or ())
    assert told.decode(errors="replace") == choice.message.content
    assert any(byte >= 128 for byte in told)


def test_parts_of_a_character_stand_where_it_begins(openai: OpenAI) -> None:
    given: Any = {"model": NAME, "prompt": PROMPT, "temperature": 1.3, "seed": 1, "max_tokens": 60, "logprobs": 0}
    choice = openai.completions.create(**given).choices[0]
    found = choice.logprobs
    assert found is not None and found.text_offset is not None and found.tokens is not None
    assert len(choice.text) < 60 == len(found.text_offset)
    for place, token in zip(found.text_offset, found.tokens, strict=True):
        assert token == "\ufffd" or choice.text[place] == token


def test_starts(loaded: Any) -> None:
    tokenizer = loaded[1]
    tokens = tokenizer("a€b")["input_ids"]
    assert starts_of(tokenizer, [*tokens, tokens[1], *tokens[4:]]) == [0, 1, 1, 1, 2, 3, 4]
    assert starts_of(tokenizer, []) == []
    assert [tokens_of(tokenizer, tokens, text) for text in ("", "a", "a€", "a€b")] == [0, 1, 4, 5]


def test_a_character_is_shown_when_its_last_byte_is_there(loaded: Any) -> None:
    """What is held back comes in the end."""
    tokenizer = loaded[1]
    pieces, tokens = Pieces(tokenizer, ["ab"]), tokenizer("€a€abc")["input_ids"]
    assert [pieces.add(token) for token in tokens] == ["", "", "€", "", "", "", "a€", "", "", ""]
    assert pieces.stopped and pieces.close() == ""
    assert b"".join(bytes_of(tokenizer, token) for token in tokens).decode() == "€a€abc"
    assert text_of(tokenizer, tokens) == "€a€abc"
    pieces, tokens = Pieces(tokenizer, ["abc"]), tokenizer("xab€")["input_ids"][:-1]
    assert "".join(map(pieces.add, tokens)) == "x"
    assert pieces.close() == "ab\ufffd"


def test_a_template_of_the_tokenizer_is_used_and_may_refuse() -> None:
    model, tokenizer = lookahead.load_bundled()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "# {{ m.content }}\n{% endfor %}"
    )
    user: Any = {"role": "user", "content": "read a file"}
    with served(model, tokenizer) as address, client(address) as openai:
        settings: Any = {"model": NAME, "max_tokens": 20, "temperature": 0}
        chat = openai.chat.completions.create(messages=[user], **settings).choices[0].message.content
        assert chat == openai.completions.create(prompt="# read a file\n", **settings).choices[0].text
        body = {"messages": [{"role": "system", "content": "x"}, user]}
        refused = httpx.post(f"{address}/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert "no system" in refused.json()["error"]["message"]
