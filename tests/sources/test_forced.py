"""Tokens that a grammar forces, as a source walks through them."""

from typing import Any

import pytest
from helpers.serving import bundled

from jacobi import Path, TokenTree
from lookahead import Grammar
from lookahead.sources.forced import ForcedSource

pytest.importorskip("llguidance", reason="grammars need the extra 'grammar'")


def source_of(**given: Any) -> ForcedSource:
    return Grammar(bundled()[1], **given).lookahead_source(None)


def walked(source: ForcedSource, state: Any) -> tuple[str, list[int]]:
    """All that is proposed from a state on, and its kinds."""
    found = list[Any]()
    while (said := source.propose(state)) and (0, 0) not in found:
        found += said
        state = source.step(state, said[0][0])
    return bundled()[1].decode([token for token, _ in found]), [kind for _, kind in found]


def after(source: ForcedSource, text: str) -> Any:
    state = source.root()
    for token in bundled()[1](text)["input_ids"]:
        state = source.step(state, token)
    return state


PROPERTIES = {"name": {"type": "string"}, "on": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["name", "on"], "additionalProperties": False}


def test_what_is_forced_is_proposed_to_its_end() -> None:
    source = source_of(json_schema=SCHEMA)
    text, kinds = walked(source, source.root())
    assert text == '{"name": "' and kinds[0] == 0 and kinds[-1] == 1  # a longer token may begin the string
    assert not source.propose(after(source, '{"name": "An'))
    assert walked(source, after(source, '{"name": "An"'))[0] == ', "on": '
    assert walked(source, after(source, '{"name": "An", "on": false')) == ("}<|endoftext|>", [0, 0])
    assert not source.propose(after(source, '["An"]'))


def test_siblings_do_not_see_each_other() -> None:
    source = source_of(regex="(abcdef|bcdefg|cdefgh)!")
    states = [after(source, first) for first in ("a", "b", "x", "c")]
    assert [walked(source, state)[0][:6] for state in states] == ["bcdef!", "cdefg!", "", "defgh!"]


def test_only_what_may_follow_is_allowed_where_it_was_asked() -> None:
    source = source_of(json_schema=SCHEMA)
    comma, word = (bundled()[1](text)["input_ids"][0] for text in (",", "An"))
    for text, allowed in (('{"name": "', [comma, word]), ('{"name": "A"', [comma]), ("{", []), ("[", [])):
        source.propose(after(source, text))
        assert [token for token, _ in source.allowed([(comma, 3), (word, 1)])] == allowed, text
    state = source.step(source.root(), source.propose(source.root())[0][0])
    known = source.propose(state)[0][0]
    assert source.allowed([(comma, 3), (known, 1)]) == [(known, 1)]


def test_the_root_moves_with_the_text_to_its_end_tokens() -> None:
    source = Grammar(bundled()[1], choice=["yes", "no"], eos_token_id=[0, 1]).lookahead_source(None)
    written = bundled()[1]("yes")["input_ids"]
    source.learn(TokenTree(0), Path(nodes=[0] * len(written), tokens=written), None)
    assert source.propose(source.root()) == [(0, 1)]  # of two it may be the other one
    assert source.allowed([(0, 5), (1, 5), (2, 5)]) == [(0, 5), (1, 5)]
