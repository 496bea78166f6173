"""``lookahead.learn``: a model writes, and later calls on it draft better."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from helpers.chat_model import save_chat_model
from helpers.cli import run
from helpers.hybrids import fresh_hybrid
from helpers.models import fresh_model
from helpers.refusals import refuses

import lookahead
from lookahead import Lookahead
from lookahead.generation.memories import memory_file
from lookahead.sources.learned import Learned
from lookahead.training.teaching import learn

pytestmark = pytest.mark.usefixtures("curves")


class OneToken:
    """A tokenizer of texts that are one token again and again."""

    added_tokens_decoder: Mapping[int, Any] = MappingProxyType({})
    all_special_ids: tuple[int, ...] = ()
    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * len(text)}

    def apply_chat_template(self, messages: Any, **settings: Any) -> str:
        return "x"

    def convert_ids_to_tokens(self, token: int) -> str:
        return str(token)


def passes_of(model: Any, tokenizer: Any, text: str) -> tuple[list[int], int]:
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    settings = {"do_sample": False, "max_new_tokens": 48, "return_dict_in_generate": True}
    output = model.generate(ids, custom_generate=Lookahead(nodes=16), **settings)
    return output.sequences[0].tolist(), output.stats.steps


def test_later_calls_take_fewer_passes_and_write_the_same() -> None:
    model, tokenizer = lookahead.load_bundled()
    asked = ["class Queue:\n    def __init__(self):", "def parse(text):", "import os\n\n\ndef read(path):"]
    text, cold = passes_of(model, tokenizer, 'class Stack:\n    """A stack."""\n\n    def __init__(self):')
    shares: list[float] = []
    state = torch.get_rng_state()
    found = learn(model, tokenizer, asked, tokens=600, report=shares.append)
    assert torch.equal(torch.get_rng_state(), state)
    assert found.file == memory_file(model) and 600 <= found.stats.emitted < 900
    assert shares == sorted(shares) and shares[-1] == 1.0
    rows = Learned.load(found.file)
    assert len(rows) == found.stats.emitted
    lookahead.release(model)
    later, passes = passes_of(model, tokenizer, 'class Stack:\n    """A stack."""\n\n    def __init__(self):')
    assert later == text and passes < cold


def test_what_a_model_writes_by_itself_repeats_by_its_seed(tmp_path: Path) -> None:
    model, tokenizer = lookahead.load_bundled()
    files = [
        learn(model, tokenizer, tokens=100, seed=seed, out=tmp_path / f"{seed}{turn}").file
        for seed, turn in ((1, "a"), (1, "b"), (2, "a"))
    ]
    first, again, other = ({tuple(line) for line in Learned.load(file).contexts.tolist()} for file in files)
    assert first == again != other


def test_a_chat_model_asks_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = lookahead.load_model(save_chat_model(tmp_path / "chat"))
    heard, own = list[str](), lookahead.training.teaching.prompt_ids  # type: ignore[attr-defined]

    def asked(tokenizer: Any, text: str) -> list[int]:
        heard.append(text)
        return own(tokenizer, text)  # type: ignore[no-any-return]

    monkeypatch.setattr("lookahead.training.teaching.prompt_ids", asked)
    found = learn(model, tokenizer, tokens=8)
    assert len(heard) == 8 and all(heard)
    assert found.stats.emitted <= 8


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokens": 0}, "tokens must be a whole number above 0"),
        ({"tokens": True}, "tokens must be a whole number above 0"),
        ({"prompts": []}, "prompts must be texts"),
        ({"prompts": "one"}, "prompts must be texts"),
        ({"prompts": [""]}, "The prompt is empty"),
    ],
)
def test_wrong_arguments_are_told_before_any_work(change: dict[str, Any], match: str, curves: Path) -> None:
    model, tokenizer = lookahead.load_bundled()
    refuses(match, learn, model, tokenizer, **change)
    assert not list(curves.glob("memory-*"))


def test_texts_end_at_the_last_position() -> None:
    model, tokenizer = fresh_model("gpt2"), OneToken()
    assert learn(model, tokenizer, ["x" * 60], tokens=9).stats.emitted >= 9
    refuses("reaches position 299", learn, model, tokenizer, ["x" * 300])


def test_a_model_without_trees_is_refused() -> None:
    refuses("cannot learn for later", learn, fresh_hybrid("mamba"), OneToken(), ["x"])


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("def add(a, b):\nclass Point:\n")
    out = tmp_path / "memory.safetensors"
    told = json.loads(run("learn", "--prompts", tmp_path / "prompts.txt", "--tokens", 60, "--out", out, "--json").out)
    assert told["file"] == str(out) and told["bytes"] == out.stat().st_size and told["tokens"] >= 60 and told["S"] >= 1
    assert "MB, of" in run("learn", "--tokens", 20).out
    assert memory_file(lookahead.load_bundled()[0]).exists()
    refused = run("learn", "--out", tmp_path / "none" / "memory")
    assert refused.status == 2 and "there is no folder" in refused.err
