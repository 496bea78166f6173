"""Texts of a grammar: whole and valid, plain ``generate``'s with the same processor, and mostly drafted."""

import json
import random
import re
import sys
from collections.abc import Callable
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


TREE = {"anyOf": [DIGIT, {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}]}
LINKED = thing(head={"$ref": "#/$defs/part"}, tail={"$ref": "#/$defs/part"}) | {"$defs": {"part": thing(size=DIGIT)}}
PERSON = thing(name=WORD, age=DIGIT, colour={"enum": ["red", "green", "blue"]}, address=thing(street=WORD, city=WORD))
SCHEMAS: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "object": (thing(name=WORD, size=DIGIT), lambda found: list(found) == ["name", "size"] and found["size"] <= 9),
    "nested": (PERSON, lambda found: set(found["address"]) == {"street", "city"}),
    "deep": (thing(a=thing(b=thing(c=thing(d=DIGIT)))), lambda found: 0 <= found["a"]["b"]["c"]["d"] <= 9),
    "optional": (thing("a", a=DIGIT, b=DIGIT), lambda found: {"a"} <= set(found) <= {"a", "b"}),
    "enum": ({"enum": ["north", "south", 4, None]}, lambda found: found in ("north", "south", 4, None)),
    "enum of objects": ({"enum": [{"a": 1}, {"b": [2]}]}, lambda found: found in ({"a": 1}, {"b": [2]})),
    "const": ({"const": {"kind": "fixed", "parts": [1, 2]}}, lambda found: found == {"kind": "fixed", "parts": [1, 2]}),
    "array": ({"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 4}, lambda found: 2 <= len(found) <= 4),
    "tuple": (
        {"type": "array", "prefixItems": [DIGIT, {"type": "boolean"}], "minItems": 2, "items": False},
        lambda found: len(found) == 2 and isinstance(found[1], bool),
    ),
    "array of objects": (
        {"type": "array", "items": thing(id=DIGIT), "minItems": 1, "maxItems": 2},
        lambda found: all(list(each) == ["id"] for each in found),
    ),
    "empty array": ({"type": "array", "maxItems": 0}, lambda found: found == []),
    "any of": ({"anyOf": [thing(a=DIGIT), {"type": "null"}]}, lambda found: found is None or list(found) == ["a"]),
    "one of": ({"oneOf": [thing(kind={"const": "a"}), thing(kind={"const": "b"})]}, lambda it: it["kind"] in "ab"),
    "all of": (
        {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 7}]},
        lambda found: 3 <= found <= 7,
    ),
    "several types": ({"type": ["boolean", "null"]}, lambda found: found in (True, False, None)),
    "bounds": ({"type": "integer", "minimum": -20, "exclusiveMaximum": -5}, lambda found: -20 <= found < -5),
    "multiple": ({"type": "integer", "minimum": 10, "maximum": 99, "multipleOf": 7}, lambda found: found % 7 == 0),
    "number": ({"type": "number", "minimum": 1, "maximum": 2, "multipleOf": 0.25}, lambda found: 1 <= found <= 2),
    "pattern": ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, lambda it: re.fullmatch("[A-Z]{2}-\\d{3}", it)),
    "format": ({"type": "string", "format": "date"}, lambda found: re.fullmatch("\\d{4}-\\d\\d-\\d\\d", found)),
    "lengths": ({"type": "string", "minLength": 3, "maxLength": 5}, lambda found: 3 <= len(found) <= 5),
    "references": (LINKED, lambda found: found["head"]["size"] <= 9 and set(found) == {"head", "tail"}),
    "recursive": (TREE, lambda found: isinstance(found, int | list)),
    "map": (
        {"type": "object", "additionalProperties": DIGIT, "maxProperties": 1},
        lambda found: all(each <= 9 for each in found.values()),
    ),
    "escapes": ({"const": 'ä "q" \\ \n 😀'}, lambda found: found == 'ä "q" \\ \n 😀'),
}  # fmt: skip


def asked(*prompts: str) -> Any:
    tokenizer = bundled()[1]
    return dict(tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left"))


def answers(inputs: Any, output: Any) -> list[str]:
    texts = output.sequences[:, inputs["input_ids"].shape[1] :]
    return list(bundled()[1].batch_decode(texts, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_is_valid_and_plain_generate_s(name: str) -> None:
    schema, fits = SCHEMAS[name]
    model, tokenizer = bundled()
    grammar, inputs = Grammar(tokenizer, json_schema=schema), asked("value = ")
    output = same_as_plain(model, inputs, STRATEGY, logits_processor=[grammar], max_new_tokens=90)
    assert int(output.sequences[0, -1]) == tokenizer.eos_token_id
    (text,) = answers(inputs, output)
    assert fits(json.loads(text)), text
    assert text == json.dumps(json.loads(text), ensure_ascii=False) or name in ("number", "escapes")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"choice": ["yes", "no", "may be"]}, "yes|no|may be"),
        ({"grammar": 'start: "(" start ")" | "x"'}, "\\(*x\\)*"),
        ({"grammar": 'root ::= ("ab" | "cd") "!"'}, "(ab|cd)!"),
        ({"json_object": True}, "\\{.*\\}"),
    ],
)
def test_other_grammars(given: Any, expected: str) -> None:
    inputs, processors = asked("value = "), [Grammar(bundled()[1], **given)]
    output = same_as_plain(bundled()[0], inputs, STRATEGY, logits_processor=processors, max_new_tokens=40)
    assert re.fullmatch(expected, answers(inputs, output)[0])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_sample": True, "temperature": 0.8},
        {"do_sample": True, "top_k": 0, "top_p": 0.9},
        {"output_scores": True},
    ],
    ids=["greedy", "sampled", "top p", "scores"],
)
def test_batches_and_draws_are_plain_generate_s(rows: int, settings: Any) -> None:
    """One object serves call after call: other prompts, and the same ones again."""
    model, tokenizer = bundled()
    grammar = Grammar(tokenizer, json_schema=PERSON)
    for prompts in (("class Person:\n", "x = ", "def f(name):\n"), ("# one\n", "import json\n", "y")):
        inputs = asked(*prompts[:rows])
        output = same_as_plain(model, inputs, STRATEGY, logits_processor=[grammar], max_new_tokens=70, **settings)
        assert all(set(json.loads(text)) == set(PERSON["required"]) for text in answers(inputs, output))


def test_a_device_that_works_by_itself_chooses_at_every_node() -> None:
    model, tokenizer = bundled()
    settings = {"max_new_tokens": 60, "logits_processor": [Grammar(tokenizer, json_schema=PERSON)], "do_sample": False}
    inputs = asked("class Person:\n", "x = ")
    plain = model.generate(**inputs, **settings)
    with working_alone():
        ours = model.generate(**inputs, **settings, use_lookahead=True, lookahead_strategy=STRATEGY)
    assert torch.equal(ours, plain)


def test_what_is_forced_is_drafted() -> None:
    model, inputs = bundled()[0], asked("class Person:\n")
    settings = {"return_dict_in_generate": True, "do_sample": False, "lookahead_strategy": STRATEGY}
    processors = [Grammar(bundled()[1], json_schema=PERSON)]
    free = model.generate(**inputs, **settings, use_lookahead=True, max_new_tokens=39).stats
    held = model.generate(
        **inputs, **settings, use_lookahead=True, max_new_tokens=60, logits_processor=processors
    ).stats
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


def test_a_model_may_score_more_tokens_than_its_tokenizer_has() -> None:
    masked = Grammar(bundled()[1], regex="a")(torch.tensor([[1, 2]]), torch.zeros(1, 5000))
    assert masked[0].isfinite().sum() == 1 and masked[0, 4096:].isinf().all()


def test_end_tokens_are_the_ones_named() -> None:
    tokenizer = bundled()[1]
    ids, scores = tokenizer("yes")["input_ids"], torch.zeros(1, 4096)
    for ends in (0, [0, 1]):
        grammar = Grammar(tokenizer, choice=["yes"], eos_token_id=ends)
        for length in range(len(ids) + 1):
            masked = grammar(torch.tensor([[5, 6, *ids[:length]]]), scores)
        assert masked[0].isfinite().nonzero().flatten().tolist() == ([0] if ends == 0 else ends)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "one of json_object, json_schema, regex, grammar, choice: got none"),
        ({"regex": "a", "json_object": True}, "got json_object and regex"),
        ({"regex": 5}, "regex must be text: got 5"),
        ({"choice": []}, "choice must be texts"),
        ({"choice": ["a", 1]}, "choice must be texts"),
        ({"json_schema": {"type": "nothing"}}, "Invalid type: nothing"),
        ({"json_schema": "{"}, "EOF while parsing"),
        ({"json_schema": {"a": object()}}, "json_schema must be JSON"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "cannot be compiled"),
        ({"regex": "("}, "unclosed group"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"regex": "a", "eos_token_id": 1 << 20}, "out of range"),
    ],
)
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


def test_a_matcher_that_has_given_up_is_named() -> None:
    grammar = Grammar(bundled()[1], regex="[ab]+")
    scores = torch.zeros(1, 4096)
    grammar(torch.tensor([[5]]), scores)
    grammar._walks[0].matcher.consume_token(7)
    with pytest.raises(LookaheadError, match="gives this grammar up"):
        grammar(torch.tensor([[5, 66]]), scores)
