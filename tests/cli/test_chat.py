"""``lookahead chat`` in a terminal, and chat models: asked in their template, sampled as generation_config says."""

import contextlib
import io
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pexpect
import pytest
import torch
from helpers.chat_model import TEMPLATE, save_chat_model
from helpers.cli import PROMPT, run
from helpers.refusals import refuses
from helpers.serving import bundled, plain
from rich.console import Console
from transformers import AutoTokenizer, GenerationMixin

from lookahead import Lookahead, load_model
from lookahead.chat_format import render
from lookahead.cli import chat, common
from lookahead.cli.arguments import Chat
from lookahead.cli.prompts import CHAT_PROMPTS, PROMPTS
from lookahead.pieces import text_of

LENGTH = ("--max-new-tokens", "200")


@pytest.fixture
def terminal() -> Iterator[Any]:
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background are deaf to interrupts
    settings = {"env": os.environ | {"TERM": "dumb", "COLUMNS": "200"}, "encoding": "utf-8", "preexec_fn": heard}
    spawned = pexpect.spawn(sys.executable, ["-m", "lookahead", "chat", *LENGTH], timeout=300, **settings)
    spawned.setecho(False)
    spawned.expect(r"tells the commands\.\s+> ")
    yield spawned
    spawned.close(force=True)


def said(terminal: Any, line: str) -> str:
    terminal.sendline(line)
    terminal.expect(r"\n> ")
    return str(terminal.before).replace("\r", "")


def test_a_conversation(terminal: Any) -> None:
    tokenizer = bundled()[1]
    said(terminal, "/system Write code.")
    messages = [{"role": "system", "content": "Write code."}, {"role": "user", "content": "def add(a, b):"}]
    first = said(terminal, "def add(a, b):")
    ids = render(tokenizer, messages)
    expected = plain(ids, max_new_tokens=200, do_sample=False)
    assert expected.strip() in first
    told = said(terminal, "/stats")
    assert re.search(r"\d+ tokens in [\d.]+ m?s, ", told) and "S = " in told
    assert "Plain decoding." in said(terminal, "/plain")
    assert "There is no command /nothing" in said(terminal, "/nothing")
    assert "A new conversation." in said(terminal, "/clear")
    terminal.sendline("/exit")
    terminal.expect(pexpect.EOF)
    terminal.wait()
    assert terminal.exitstatus == 0


def test_interrupts_end_the_answer_alone(terminal: Any) -> None:
    said(terminal, "/plain")
    terminal.sendline("class Stack:")
    terminal.expect(r"\w+ \w+")
    terminal.sendintr()
    terminal.expect(r"\[stopped\]")
    terminal.expect(r"\n> ")
    terminal.sendintr()
    terminal.expect("leaves")
    terminal.expect(r"\n> ")
    assert "tokens in" in said(terminal, "/stats")
    terminal.sendeof()
    terminal.expect(pexpect.EOF)


class Interrupted(chat._Voice):
    """Ctrl-C after the twentieth token, or in the middle of something that hears of no error."""

    is_lost = False

    def put(self, value: Any) -> None:
        super().put(value)
        if self.count == 20:
            with contextlib.suppress(KeyboardInterrupt) if self.is_lost else contextlib.nullcontext():
                signal.raise_signal(signal.SIGINT)


class Swallowing(Interrupted):
    is_lost = True


def talking(written: io.StringIO, plain: bool) -> chat.Talk:
    settings = {"max_new_tokens": 60, "do_sample": False, "sequence_bias": {(0,): -100.0}}
    return chat.Talk(*bundled(), Lookahead(nodes=7), settings, Console(file=written), plain=plain)


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("plain", [False, True])
def test_a_lost_interrupt_ends_the_answer(monkeypatch: pytest.MonkeyPatch, plain: bool) -> None:
    written = io.StringIO()
    talk = talking(written, plain)
    monkeypatch.setattr(chat, "_Voice", Swallowing)
    before = signal.getsignal(signal.SIGINT)
    talk.answer("class Stack:")
    assert "20 tokens in" in talk.told() and written.getvalue().rstrip().endswith("[stopped]")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("plain", [False, True])
def test_a_stopped_answer_counts(monkeypatch: pytest.MonkeyPatch, plain: bool) -> None:
    talk = talking(io.StringIO(), plain)
    talk.answer("class Stack:")
    whole = talk.stats
    monkeypatch.setattr(chat, "_Voice", Interrupted)
    talk.answer("class Queue:")
    if plain:
        assert not talk.stats.steps and "Plain decoding." in talk.told()
        return
    more = talk.stats.emitted - whole.emitted
    assert 20 <= more < 60 and "20 tokens in" in talk.told() and f"{more} tokens in" in talk.last.splitlines()[1]
    for each in (whole, talk.stats):
        assert each.emitted == each.row_steps + each.accepted == sum(k * n for k, n in each.histogram.items())
        assert sum(each.sources.values()) <= each.accepted <= each.drafted
    assert talk.stats.drafted > whole.drafted and talk.stats.steps > whole.steps


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chatty"))


@pytest.fixture(scope="module")
def sampling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wanted = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.2}
    return save_chat_model(tmp_path_factory.mktemp("sampling"), **wanted)


def written(folder: Path, text: str, count: int = 12, **settings: Any) -> list[int]:
    """What plain ``generate`` writes after a text."""
    model, tokenizer = load_model(folder)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, max_new_tokens=count, pad_token_id=257, **settings)
    tokens: list[int] = output[0, ids.shape[1] :].tolist()
    return tokens


def in_template(text: str) -> str:
    return f"<user>{text}\n<assistant>"


@pytest.mark.parametrize(("given", "expected"), [((), in_template(PROMPT)), (("--raw",), PROMPT)])
def test_generate_answers_in_the_template(chatty: Path, given: tuple[str, ...], expected: str) -> None:
    ran = run("generate", "--model", chatty, "--prompt", PROMPT, "--new-tokens", 12, "--json", *given)
    document = json.loads(ran.out)
    assert (document["prompt"], document["tokens"]) == (PROMPT, written(chatty, expected, do_sample=False))


@pytest.mark.parametrize(("given", "expected"), [((), CHAT_PROMPTS), (("--raw",), PROMPTS)])
def test_built_in_prompts_suit_the_model(chatty: Path, given: tuple[str, ...], expected: tuple[str, ...]) -> None:
    ran = run("verify", "--model", chatty, "--new-tokens", 4, "--json", *given)
    assert [result["prompt"] for result in json.loads(ran.out)["results"]] == list(expected)
    assert {result["verdict"] for result in json.loads(ran.out)["results"]} == {"identical"}


def test_nothing_changes_without_a_template(folder: Path) -> None:
    ran = run("verify", "--model", folder, "--new-tokens", 4, "--json")
    assert [result["prompt"] for result in json.loads(ran.out)["results"]] == list(PROMPTS)


@pytest.mark.parametrize(("given", "first"), [((), CHAT_PROMPTS[0]), (("--raw",), PROMPTS[0])])
def test_a_traced_chat_model(chatty: Path, tmp_path: Path, given: tuple[str, ...], first: str) -> None:
    page = tmp_path / "page.html"
    ran = run("trace", "--model", chatty, "--new-tokens", 10, "-o", page, *given)
    assert ran.status == 0
    found = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    document = json.loads(found[1])
    assert (document["prompt"], document["title"]) == (first, f"{chatty.name}: 10 tokens")
    text = in_template(first) if not given else first
    tokens = written(chatty, text, 10, do_sample=False)
    assert "".join("".join(each["written"]) for each in document["passes"]) == AutoTokenizer.from_pretrained(
        chatty
    ).decode(tokens, skip_special_tokens=True)
    assert document["told"] in ran.out and document["told"].count("\n") <= 3


@pytest.mark.parametrize(("given", "templated"), [((), True), (("--raw",), False)])
def test_a_raced_and_tuned_chat_model(
    chatty: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: tuple[str, ...], templated: bool
) -> None:
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    asked: list[str] = []
    encode = common.encode

    def heard(tokenizer: Any, text: str, model: Any, raw: bool = True) -> Any:
        inputs = encode(tokenizer, text, model, raw)
        asked.append(tokenizer.decode(inputs["input_ids"][0]))
        return inputs

    monkeypatch.setattr(common, "encode", heard)
    expected = [in_template(text) for text in CHAT_PROMPTS] if templated else list(PROMPTS)
    ran = run("bench", "--model", chatty, "--modes", "greedy", "--new-tokens", 4, "--json", *given)
    assert (json.loads(ran.out)["chat_template"], asked) == (templated, expected)
    asked.clear()
    generate = GenerationMixin.generate

    def noting(self: Any, inputs: Any, **settings: Any) -> Any:
        asked.append(AutoTokenizer.from_pretrained(chatty).decode(inputs[0]))
        return generate(self, inputs, **settings)

    monkeypatch.setattr(GenerationMixin, "generate", noting)
    assert run("tune", "--model", chatty, "--seconds", 1, "--new-tokens", 4, *given).status == 0
    found = list(dict.fromkeys(asked))
    assert found and found == expected[: len(found)], "as many as fit into the time"


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {}),
        ({"temperature": 0.0}, {"do_sample": False}),
        ({"temperature": 0.5}, {"do_sample": True, "temperature": 0.5}),
        ({"top_p": 0.5}, {"do_sample": True, "top_p": 0.5}),
        ({"top_k": 5, "repetition_penalty": 1.1}, {"do_sample": True, "top_k": 5, "repetition_penalty": 1.1}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, {"do_sample": False, "repetition_penalty": 1.1}),
    ],
)
def test_options_of_chat_override_the_generation_config(options: dict[str, Any], settings: dict[str, Any]) -> None:
    assert chat.sampling_of(Chat(**options)) == settings


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"temperature": 1.3, "top_k": 50}])
@pytest.mark.parametrize("plain", [False, True])
def test_an_answer_is_drawn_as_the_model_says(sampling: Path, options: dict[str, Any], plain: bool) -> None:
    model, tokenizer = load_model(sampling)
    settings = chat.sampling_of(Chat(**options)) | {"max_new_tokens": 20}
    console = Console(file=io.StringIO())
    talk = chat.Talk(model, tokenizer, Lookahead(nodes=6, remember=False), settings, console, plain=plain)
    torch.manual_seed(3)
    answer = talk.answer(PROMPT)
    torch.manual_seed(3)
    tokens = written(sampling, in_template(PROMPT), 20, **{k: v for k, v in settings.items() if k != "max_new_tokens"})
    assert answer == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.usefixtures("augmented")
def test_the_speed_against_plain_answers_is_measured(chatty: Path) -> None:
    console = Console(file=io.StringIO())
    settings = {"max_new_tokens": 40, "do_sample": False}
    talk = chat.Talk(*load_model(chatty), Lookahead(nodes=6, seed=0), settings, console)
    talk.answer("aaaa")
    assert "x plain decoding, measured" not in talk.told()
    talk.plain = True
    talk.answer("bbbb")
    talk.plain = False
    talk.answer("cccc")
    last, ours, *legend = talk.told().splitlines()[1:]
    assert "x plain decoding, measured" in last and "x plain decoding, measured" in ours and len(legend) <= 3
    (plain_count, plain_s), (count, seconds) = talk.paces[True], talk.paces[False]
    assert f"{count / seconds * plain_s / plain_count:.2f}x plain decoding, measured" in ours


def test_a_draft_model_of_another_vocabulary_gets_both_tokenizers(chatty: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(chatty)
    assert common.drafting(Chat(draft=str(chatty)), model, tokenizer).tokenizers is None
    draft, other = load_model(chatty)
    other.add_tokens(["def "])
    draft.resize_token_embeddings(len(other))
    draft.save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    given = common.drafting(Chat(draft=str(tmp_path)), model, tokenizer).tokenizers
    assert given is not None and given[0] is tokenizer and len(given[1]) == len(other)
    assert common.drafting(Chat(), model, tokenizer).draft_model is None


def test_prompts_in_a_template_can_be_refused(chatty: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(chatty)
    tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    refuses("no users here", common.encode, tokenizer, PROMPT, model, raw=False)
    assert common.encode(tokenizer, PROMPT, model, raw=True)["input_ids"].shape[1] == len(PROMPT)


def test_of_several_templates_the_default_one_is_taken(chatty: Path, tmp_path: Path) -> None:
    """As transformers itself does; where none is, that is told."""
    model, tokenizer = load_model(chatty)
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "tools"}
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert set(AutoTokenizer.from_pretrained(tmp_path).chat_template) == {"default", "tool_use"}
    ran = run("generate", "--model", tmp_path, "--prompt", PROMPT, "--new-tokens", 12, "--json")
    assert json.loads(ran.out)["tokens"] == written(chatty, in_template(PROMPT), do_sample=False)
    tokenizer.chat_template = {"rag": "documents", "tool_use": "tools"}
    refuses(r"no default specified.*\['rag', 'tool_use'\]", common.encode, tokenizer, PROMPT, model, raw=False)


@pytest.mark.parametrize(("given", "prompt", "between"), [((), CHAT_PROMPTS[0], "\n"), (("--raw",), PROMPTS[0], "")])
def test_a_demo_shows_answers_below_and_continuations_behind(
    chatty: Path, given: tuple[str, ...], prompt: str, between: str
) -> None:
    ran = run("demo", "--model", chatty, "--prompts", 1, "--rounds", 1, "--new-tokens", 4, *given)
    tokenizer = AutoTokenizer.from_pretrained(chatty)
    tokens = written(chatty, prompt if given else in_template(prompt), 4, do_sample=False)
    assert f"{prompt}{between}{text_of(tokenizer, tokens)}"[: len(prompt) + 3] in ran.out
