"""Texts of a grammar: whole and valid, plain ``generate``'s with the same processor, and mostly drafted."""

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.devices import working_alone
from helpers.models import same_as_plain
from helpers.serving import bundled

from lookahead import Grammar, Lookahead, LookaheadError
from lookahead.strategies import grammar as module

pytest.importorskip("llguidance", reason="grammars need the extra 'grammar'")
pytestmark = pytest.mark.usefixtures("augmented")

STRATEGY = Lookahead(nodes=16, seed=0)
WORD = {"type": "string", "maxLength": 8}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def thing(*needed: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object that has nothing but these; all are needed, or those named."""
    required = list(needed or properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


PERSON = thing(name=WORD, age=DIGIT, colour={"enum": ["red", "green", "blue"]}, address=thing(street=WORD, city=WORD))
# Sixty kinds of schemas, and what a whole answer matches.
SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
    ({"choice": ["yes", "no", "may be"]}, "yes|no|may be"),
    ({"grammar": 'start: "(" start ")" | "x"'}, "\\(*x\\)*"),
    ({"grammar": 'root ::= ("ab" | "cd") "!"'}, "(ab|cd)!"),
    ({"json_object": True}, "{.*}"),
]


def asked(*prompts: str) -> Any:
    tokenizer = bundled()[1]
    return dict(tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left"))


def answers(inputs: Any, output: Any) -> list[str]:
    texts = output.sequences[:, inputs["input_ids"].shape[1] :]
    return list(bundled()[1].batch_decode(texts, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize(
    ("given", "expected"), [*(({"json_schema": one["schema"]}, one["matches"]) for one in SCHEMAS), *OTHERS]
)
def test_an_answer_is_whole_and_plain_generate_s(given: Any, expected: str) -> None:
    inputs, processors = asked("value = "), [Grammar(bundled()[1], **given)]
    output = same_as_plain(bundled()[0], inputs, STRATEGY, logits_processor=processors, max_new_tokens=90)
    (text,) = answers(inputs, output)
    assert output.sequences[0, -1] == 0 and re.fullmatch(expected, text), text


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8}, {"top_k": 0, "top_p": 0.9}, {"output_scores": True}])
def test_batches_and_draws_are_plain_generate_s(rows: int, settings: Any) -> None:
    """One object serves call after call: other prompts, and the same ones again."""
    model, grammar = bundled()[0], Grammar(bundled()[1], json_schema=PERSON)
    settings = {"do_sample": "temperature" in settings or "top_p" in settings} | settings
    for prompts in (("class Person:\n", "x = ", "def f(name):\n"), ("# one\n", "import json\n", "y")):
        inputs = asked(*prompts[:rows])
        output = same_as_plain(model, inputs, STRATEGY, logits_processor=[grammar], max_new_tokens=70, **settings)
        assert all(set(json.loads(text)) == set(PERSON["required"]) for text in answers(inputs, output))


def test_a_device_that_works_by_itself_chooses_at_every_node() -> None:
    settings = asked("class Person:\n", "x = ") | {"max_new_tokens": 60, "do_sample": False}
    settings["logits_processor"] = [Grammar(bundled()[1], json_schema=PERSON)]
    plain = bundled()[0].generate(**settings)
    with working_alone():
        assert torch.equal(bundled()[0].generate(**settings, use_lookahead=True, lookahead_strategy=STRATEGY), plain)


def test_what_is_forced_is_drafted() -> None:
    found = []
    for processors in ([], [Grammar(bundled()[1], json_schema=PERSON)]):
        settings = {"logits_processor": processors, "max_new_tokens": 60, "do_sample": False}
        settings |= {"return_dict_in_generate": True, "lookahead_strategy": STRATEGY, "use_lookahead": True}
        found.append(bundled()[0].generate(**asked("class Person:\n"), **settings).stats)
    free, held = found
    assert held.mean_acceptance_length >= 1.5 * free.mean_acceptance_length
    assert held.sources["grammar"] > held.emitted / 2


def test_masks_are_those_of_the_text_whatever_was_asked_before() -> None:
    """Branches of several texts in any order, as trees ask: matchers go back and forth."""
    tokenizer, draws = bundled()[1], random.Random(0)
    texts = ['{"name": "Ann", "age": 3, "colour": "red"', '{"name": "", "age": 4', '{"name": "Ann", "age": 30', '["a"]']
    branches = [tokenizer(text)["input_ids"] for text in texts]
    prompt, grammar = tokenizer("x = ")["input_ids"], Grammar(tokenizer, json_schema=PERSON)
    scores = torch.zeros(1, 4096)
    grammar(torch.tensor([prompt]), scores)
    places = [(branch, depth) for branch in branches for depth in range(1, len(branch))]
    grammar._most = 100  # of texts that were longer
    for branch, depth in draws.choices(places, k=80):
        fresh = Grammar(tokenizer, json_schema=PERSON)
        for length in range(depth + 1):
            expected = fresh(torch.tensor([prompt + branch[:length]]), scores)
        assert torch.equal(grammar(torch.tensor([prompt + branch[:depth]]), scores), expected)


def test_end_tokens_are_the_ones_named_and_a_model_may_score_more_tokens_than_there_are() -> None:
    ids, scores = bundled()[1]("yes")["input_ids"], torch.zeros(1, 5000)
    for ends in (0, [0, 1]):
        grammar = Grammar(bundled()[1], choice=["yes"], eos_token_id=ends)
        for length in range(len(ids) + 1):
            masked = grammar(torch.tensor([[5, 6, *ids[:length]]]), scores)
        assert masked[0].isfinite().nonzero().flatten().tolist() == ([0] if ends == 0 else ends)
    grammar._walks[0].matcher.consume_token(7)
    with pytest.raises(LookaheadError, match="gives this grammar up"):
        grammar(torch.tensor([[5, 6, ids[0], 7]]), scores)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "one of json_object, json_schema, regex, grammar, choice: got none"),
        ({"regex": "a", "json_object": True}, "got json_object and regex"), ({"regex": 5}, "regex must be text: got 5"),
        ({"choice": []}, "choice must be texts"), ({"choice": ["a", 1]}, "choice must be texts"),
        ({"json_schema": {"type": "x"}}, "Invalid type: x"), ({"json_schema": "{"}, "EOF while parsing"),
        ({"json_schema": {"a": object()}}, "json_schema must be JSON"), ({"regex": "("}, "unclosed group"),
        ({"grammar": "start: x"}, "unknown name"), ({"regex": "a", "eos_token_id": 1 << 20}, "out of range"),
    ],
)  # fmt: skip
def test_what_is_no_grammar_is_refused(given: Any, told: str) -> None:
    with pytest.raises(LookaheadError, match=re.escape(told)):
        Grammar(bundled()[1], **given)


def test_what_is_no_tokenizer_is_refused_and_a_missing_library_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LookaheadError, match="tokenizer first: got a str"):
        Grammar("text", regex="a")
    module._compilers.clear()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(LookaheadError, match=re.escape("pip install lookahead-decoding[grammar]")):
        Grammar(bundled()[1], regex="a")
