"""Training data: files to items, the held-out split, tokens with the places that carry loss."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import save_tiny_model
from helpers.refusals import refuses
from transformers import AutoTokenizer

from jacobi import LookaheadError
from lookahead.training.data import IGNORE, Example, collate, encode, prompts
from lookahead.training.items import Item, read_items, split

END = 256
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
ASKS = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}"
TAGGED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "fg"},
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Tokens are bytes; the end token is 256."""
    return AutoTokenizer.from_pretrained(save_tiny_model(tmp_path_factory.mktemp("tiny")))


def ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text)["input_ids"]
    return found


def learnt(tokenizer: Any, example: Example) -> str:
    """The text of the tokens that carry loss, with a bar between runs."""
    text, before = "", False
    for token, loss in zip(example.ids.tolist(), example.loss.tolist(), strict=True):
        text += ("|" if text and not before else "") * loss + tokenizer.decode([token]) * loss
        before = loss
    return text


# --- files ------------------------------------------------------------------------------------------------------


def test_a_file_of_lines_holds_every_form(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    lines: list[dict[str, Any]] = [
        {"text": "a", "id": 3},
        {"prompt": "b", "completion": "c"},
        {"prompt": "d", "response": "e"},
        {"prompt": "f"},
        {"messages": [{"role": "user", "content": "g"}, {"role": "assistant", "content": "h"}]},
        {"id": "x", "conversations": [{"from": "gpt", "value": "i"}, {"from": "human", "value": "j"}]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    items = read_items(file)
    assert [item.source for item in items] == [f"{file}, line {line}" for line in range(1, 7)]
    assert [(item.text, item.prompt) for item in items[:4]] == [("a", None), ("c", "b"), ("e", "d"), ("", "f")]
    assert items[4].messages == ({"role": "user", "content": "g"}, {"role": "assistant", "content": "h"})
    assert items[5].messages == ({"role": "user", "content": "j"},), "an answer to nothing is dropped"


def test_a_list_is_read_like_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a"}, {"text": "b"}]))
    assert [item.text for item in read_items(tmp_path / "a.json")] == ["a", "b"]


def test_a_folder_is_searched_for_texts_and_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, content in {
        "b.py": b"b = 1",
        "a/c.txt": b"c",
        "a/d.jsonl": b'{"text": "d"}',
        "_e.py": b"e = 2\r\n",
        ".hidden/f.py": b"f",
        "g.bin": b"g",
        "settings.json": b"{}",
        "empty.py": b" \n",
        "h.py": b"\xff",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    items = read_items(tmp_path)
    assert [item.text for item in items] == ["e = 2\r\n", "c", "d", "b = 1"]
    assert items[1].source == str(tmp_path / "a" / "c.txt")
    assert "1 files under" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty: expected at least one item"),
        ('{"text"', r"d.jsonl, line 1 is not JSON .*: expected an object with \"text\""),
        ("[1]", r"line 1: expected an object with one of .*; got list"),
        ('{"txt": "a", "id": 1}', r"line 1: expected an object with one of .*; got the keys 'id', 'txt'"),
        ('{"text": "a", "prompt": "b"}', "expected an object with one of"),
        ('{"text": "a"}\n{"text": 3}', "line 2: 'text' must be a text, got '3'"),
        ('{"prompt": "a", "completion": ""}', "'completion' must be a text"),
        ('{"messages": []}', "'messages' must be a list of messages"),
        ('{"messages": ["a"]}', "expected messages like .*; got a"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "roles human, user, gpt"),
        ('{"messages": [{"role": "user", "content": null}]}', "expected messages like"),
        ('{"conversations": [{"from": "gpt", "value": "a"}]}', "every message is the assistant's"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "d.jsonl").write_text(content)
    refuses(message, read_items, tmp_path / "d.jsonl")


def test_bad_files_are_named(tmp_path: Path) -> None:
    refuses("none does not exist: expected a file or a folder", read_items, tmp_path / "none")
    refuses(r"is empty: expected at least one item; in a folder, files .jsonl .txt", read_items, tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xff")
    refuses(r"a.txt cannot be read", read_items, tmp_path / "a.txt")
    (tmp_path / "a.json").write_text("{}")
    refuses(r"a.json holds no list", read_items, tmp_path / "a.json")


# --- the split --------------------------------------------------------------------------------------------------


def test_the_hash_of_a_texts_bytes_decides() -> None:
    items = [Item("", f"text {number}\r\n") for number in range(200)]
    train, held_out = split(items, 10)
    held = {f"text {n}\r\n" for n in range(200)} - {item.text for item in train}
    assert held == {item.text for item in held_out}
    digests = {item.text: hashlib.sha256(item.text.encode()).digest() for item in items}
    assert all((int.from_bytes(digests[text][:4], "big") % 10 == 0) is (text in held) for text in digests)
    assert 5 < len(held) < 40


def test_copies_land_on_the_same_side() -> None:
    items = [Item("a", "one"), Item("b", "two"), Item("c", "one"), Item("d", "two")]
    train, held_out = split(items, 10**9)
    assert {item.text for item in train}.isdisjoint({item.text for item in held_out})
    assert len(train) == len(held_out) == 2


def test_what_counts_of_an_item_is_all_of_its_content() -> None:
    items = [
        Item("a", "x"),
        Item("a", "x", prompt="p"),
        Item("a", "x", prompt="q"),
        Item("a", messages=({"role": "user", "content": "x"},)),
    ]
    assert len({item.number for item in items}) == 4
    assert Item("elsewhere", "x").number == items[0].number


def test_a_single_text_is_cut() -> None:
    train, held_out = split([Item("a", "0123456789")], 5)
    assert (train[0].text, held_out[0].text) == ("01234567", "89")


def test_no_item_left_to_learn_from_is_refused() -> None:
    refuses(r"All of the data .1 items. would be held out", split, [Item("a", "b", prompt="c")])
    refuses("One in 1 items cannot be held out", split, [Item("a", "b")], 1)


# --- tokens -----------------------------------------------------------------------------------------------------


def test_texts_are_packed_into_blocks(tokenizer: Any) -> None:
    items = [Item("", "abcde"), Item("", "fg"), Item("", "hij")]
    stream = [*ids(tokenizer, "abcde"), END, *ids(tokenizer, "fg"), END, *ids(tokenizer, "hij"), END]
    told: list[float] = []
    examples = encode(items, tokenizer, block_size=5, least=3, report=told.append)
    assert [example.ids.tolist() for example in examples] == [stream[:5], stream[5:10], stream[10:]]
    assert all(example.loss.all() for example in examples)
    assert told[-1] == 1.0
    short = encode(items, tokenizer, block_size=5, least=4)
    assert len(short) == 2, "the last three tokens are too few"


def test_only_the_completion_carries_loss(tokenizer: Any) -> None:
    (example,) = encode([Item("", "cd", prompt="ab")], tokenizer, block_size=9, least=2)
    assert example.ids.tolist() == [*ids(tokenizer, "abcd"), END]
    assert example.loss.tolist() == [False, False, True, True, True]


def test_items_that_are_too_short_or_have_no_completion_are_named(tokenizer: Any) -> None:
    with pytest.raises(LookaheadError, match=r'f, line 3: the prompt has no "completion" or "response"'):
        encode([Item("f, line 3", prompt="ab")], tokenizer, block_size=9, least=2)
    with pytest.raises(LookaheadError, match=r"too short \(f, ...\): expected at least one item of 6 tokens.* has 4"):
        encode([Item("f", "a"), Item("g", "b")], tokenizer, block_size=9, least=6)


@pytest.mark.parametrize("template", [TAGGED, ASKS])
def test_only_the_assistant_carries_loss(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    """With generation tags, and without them by the difference of renderings."""
    monkeypatch.setattr(tokenizer, "chat_template", template)
    (example,) = encode([Item("", messages=TALK)], tokenizer, block_size=99, least=2)
    assert learnt(tokenizer, example) == "cd<end>|fg<end>"
    text = tokenizer.decode(example.ids.tolist())
    assert text == "<system>s<end><user>ab<end><assistant>cd<end><user>e<end><assistant>fg<end>"
    (cut,) = encode([Item("", messages=TALK)], tokenizer, block_size=len("<system>s-<user>ab-<assistant>c"), least=2)
    assert learnt(tokenizer, cut) == "c"


def test_conversations_without_an_answer_are_left_out(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", ASKS)
    items = [Item("", messages=TALK), Item("", messages=TALK[:2])]
    assert len(encode(items, tokenizer, block_size=99, least=2)) == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "f is a conversation, and the tokenizer has no chat template"),
        ("{{ messages | length }}" + ASKS, "f: the chat template cannot tell which tokens are the assistant's"),
        (TURNS.replace("<{{ m.role }}>", ""), ""),
        ("{{ raise_exception('no system') }}", "f: the chat template refuses the conversation: no system"),
        (ASKS + "{% generation %}{% endgeneration %}", "f: the chat template has generation tags, and marks no token"),
        ("{% generation %}{% endgeneration %}{{ raise_exception('no') }}", "refuses the conversation: no"),
    ],
)
def test_templates_that_cannot_tell_are_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str | None, message: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    if not message:  # a template without any header still has a beginning and an end of every answer
        (example,) = encode([Item("f", messages=TALK)], tokenizer, block_size=99, least=2)
        assert learnt(tokenizer, example) == "cd<end>|fg<end>"
        return
    refuses(message, encode, [Item("f", messages=TALK)], tokenizer, block_size=99, least=2)


def test_prompts_for_own_answers(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", ASKS)
    text = "0123456789abcdef!"
    items = [Item("", messages=TALK), Item("", "cd", prompt="ab"), Item("", prompt="x"), Item("", text)]
    found = [tokenizer.decode(start) for start in prompts(items, tokenizer, block_size=8)]
    assert found == ["ant>", "ab", "x", "01", "89", "!"], "cut to half a block, from the left"
    assert [tokenizer.decode(start) for start in prompts(items[:1], tokenizer, block_size=99)] == [
        "<system>s<end><user>ab<end><assistant>"
    ]


def test_batches_are_padded_on_the_right() -> None:
    batch = collate([Example.of([5, 6, 7], [False, True, True]), Example.of([8, 9])], pad=3)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[IGNORE, 6, 7], [8, 9, IGNORE]]
    assert all(value.dtype is torch.int64 for value in batch.values())
