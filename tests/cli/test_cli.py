"""The command line on a tiny random Llama: every command, every exit status, every message."""

import dataclasses
import importlib
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.encoder_decoders import seq2seq_model
from helpers.hybrids import hybrid
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    WhisperConfig,
)
from typer.testing import CliRunner

from lookahead import DecodingStats, Lookahead, StepTimes, bundled
from lookahead.cli import app, common
from lookahead.cli.demo import FREE, coloured
from lookahead.models.conformance import recorded_version

PROMPT = "def add(a, b):"


def save_tiny_model(folder: Path, *, twins: bool = False) -> Path:
    """Save a random Llama whose tokens are bytes; with ``twins``, tokens 2k and 2k+1 always score the same."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=letters | {"<end>": 256, "<pad>": 257}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<pad>")
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    if twins:
        with torch.no_grad():
            model.lm_head.weight[1::2] = model.lm_head.weight[0::2]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("twins"), twins=True)


@dataclasses.dataclass
class Ran:
    """What a command left: exit status, stdout and stderr without colours."""

    status: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """Stdout with every run of blanks as one, so that line breaks do not matter."""
        return " ".join(self.out.split())


def run(*args: Any, stdin: str | bytes | None = None) -> Ran:
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin, env={"COLUMNS": "160"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", text) for text in (result.stdout, result.stderr)]
    return Ran(result.exit_code, *plain)


def expected(folder: Path, new_tokens: int, **settings: Any) -> list[int]:
    """Plain ``generate``'s tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=new_tokens, pad_token_id=257, **{"do_sample": False} | settings)
    tokens: list[int] = output[0, ids["input_ids"].shape[1] :].tolist()
    return tokens


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[common.Decoded], common.Decoded]) -> None:
    """Let ``change`` have the last word on what lookahead wrote."""
    decode = common.decode

    def spoilt(model: Any, inputs: Any, strategy: Any, *args: Any, **settings: Any) -> common.Decoded:
        decoded = decode(model, inputs, strategy, *args, **settings)
        return decoded if strategy is None else change(decoded)

    monkeypatch.setattr(common, "decode", spoilt)


def other_token(place: int, change: Callable[[int], int]) -> Callable[[common.Decoded], common.Decoded]:
    """Change the token at ``place``."""

    def changed(decoded: common.Decoded) -> common.Decoded:
        tokens = list(decoded.tokens)
        tokens[place] = change(tokens[place])
        return dataclasses.replace(decoded, tokens=tokens)

    return changed


# --- the app ----------------------------------------------------------------------------------------------------


def test_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m lookahead`` where there is no script on the path."""
    monkeypatch.setattr(sys, "argv", ["lookahead", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("lookahead", run_name="__main__")
    assert ended.value.code == 0
    assert torch.__version__ in capsys.readouterr().out


def test_version_names_what_decides_about_a_text() -> None:
    ran = run("--version")
    assert ran.status == 0
    assert re.fullmatch(r"lookahead \S+, transformers 5\.\S+, torch \S+, python 3\.\S+\n", ran.out)


def test_help_lists_the_commands() -> None:
    ran = run("--help")
    assert ran.status == 0
    assert all(command in ran.out for command in ("demo", "generate", "verify"))


# --- generate ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["lookahead", "jacobi", "plain"])
def test_generate_streams_plain_decodings_text(folder: Path, strategy: str) -> None:
    ran = run("generate", "--model", folder, "--prompt", PROMPT, "--strategy", strategy, "--max-new-tokens", 24)
    text = AutoTokenizer.from_pretrained(folder).decode(expected(folder, 24), skip_special_tokens=True)
    assert (ran.status, ran.out, ran.err) == (0, text + "\n", "")


@pytest.mark.parametrize("strategy", ["lookahead", "jacobi", "plain"])
def test_generate_json_is_one_document(folder: Path, strategy: str) -> None:
    ran = run("generate", "--model", folder, "--prompt", PROMPT, "--strategy", strategy, "--new-tokens", 24, "--json")
    document = json.loads(ran.out)
    assert document.keys() == {"prompt", "text", "tokens", "seconds", "stats", "settings", "versions"}
    assert document["prompt"] == PROMPT
    assert document["tokens"] == expected(folder, 24)
    assert document["settings"]["strategy"]["strategy"] == strategy
    assert document["settings"]["max_new_tokens"] == 24
    assert document["versions"]["torch"] == torch.__version__
    if strategy == "plain":
        assert document["stats"] is None
    else:
        assert DecodingStats.from_dict(document["stats"]).emitted == 24


def test_generate_takes_w_n_g(folder: Path) -> None:
    sizes = ("--window-size", 4, "--ngram-size", 3, "--verification-set-size", 2)
    ran = run("generate", "--model", folder, "--prompt", PROMPT, *sizes, "--max-new-tokens", 8, "--json")
    strategy = json.loads(ran.out)["settings"]["strategy"]
    assert [strategy[name] for name in ("window_size", "ngram_size", "verification_set_size")] == [4, 3, 2]


def test_generate_samples_the_text_of_its_seed(folder: Path) -> None:
    options = ("--sample", "--temperature", 0.7, "--top-p", 0.9, "--top-k", 40, "--seed", 5)
    ran = run("generate", "--model", folder, "--prompt", PROMPT, *options, "--max-new-tokens", 24, "--json")
    torch.manual_seed(5)
    tokens = expected(folder, 24, do_sample=True, temperature=0.7, top_p=0.9, top_k=40)
    assert json.loads(ran.out)["tokens"] == tokens
    assert json.loads(ran.out)["settings"]["temperature"] == 0.7


@pytest.mark.parametrize("option", [(), ("--prompt", "-")])
@pytest.mark.parametrize("end", ["", "\n"])
def test_generate_reads_stdin_less_its_last_line_break(folder: Path, option: tuple[str, ...], end: str) -> None:
    ran = run("generate", "--model", folder, *option, "--max-new-tokens", 8, "--json", stdin=PROMPT + end)
    document = json.loads(ran.out)
    assert (document["prompt"], document["tokens"]) == (PROMPT, expected(folder, 8))


def test_generate_stats_are_on_stderr(folder: Path) -> None:
    ran = run("generate", "--model", folder, "--prompt", PROMPT, "--max-new-tokens", 24, "--stats")
    assert re.search(r"24 tokens in \d+ passes \(\d\.\d\d a pass\), .* tokens/s\ndrafted \d+ tokens", ran.err)
    ran = run(
        "generate", "--model", folder, "--prompt", PROMPT, "--max-new-tokens", 24, "--stats", "--strategy", "plain"
    )
    assert "24 tokens in 24 passes (1.00 a pass)" in ran.err


def test_the_default_model_is_the_bundled_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "BUNDLED", folder)
    document = json.loads(run("generate", "--prompt", PROMPT, "--max-new-tokens", 8, "--json").out)
    assert (document["tokens"], document["settings"]["model"]) == (expected(folder, 8), "bundled")


# --- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--prompt", ""), "The prompt is empty: give --prompt TEXT, or text on stdin."),
        (("--prompt", "x", "--window-size", 0), "Lookahead(window_size=) must be at least 1: got 0."),
        (("--prompt", "x", "--ngram-size", 1), "Lookahead(ngram_size=1) is plain decoding and needs window_size=1"),
        (("--prompt", "x", "--top-p", 0.9), "--top-p needs --sample"),
        (("--prompt", "x", "--sample", "--temperature", 0), "--temperature must be above 0: got 0.0."),
        (("--prompt", "x", "--sample", "--top-p", 1.5), "--top-p must be at most 1: got 1.5."),
        (("--prompt", "x", "--sample", "--top-k", -1), "--top-k must be above 0: got -1."),
        (
            ("--prompt", "x", "--strategy", "jacobi", "--window-size", 3),
            "--window-size belongs to --strategy lookahead",
        ),
        (("--prompt", "x", "--device", "abacus"), "--device abacus cannot be used here"),
    ],
)
def test_generate_refuses_in_one_line(folder: Path, args: tuple[Any, ...], message: str) -> None:
    ran = run("generate", "--model", folder, *args)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("Error: ")
    assert ran.err.count("\n") == 1
    assert message in ran.err


def test_stdin_must_be_text(folder: Path) -> None:
    ran = run("generate", "--model", folder, stdin=b"\xff\xfe")
    assert ran.status == 2
    assert "The prompt on stdin is not text" in ran.err


@pytest.mark.parametrize("command", ["demo", "generate", "verify"])
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("gone", "does not exist: expected a folder with config.json and weights"),
        ("config.json", "holds no config.json"),
        ("model.safetensors", "holds no weights"),
        ("cut", "could not be loaded"),
    ],
)
def test_a_broken_model_folder_is_one_line(folder: Path, tmp_path: Path, command: str, harm: str, message: str) -> None:
    broken = tmp_path / "broken"
    if harm != "gone":
        broken.mkdir()
        for file in folder.iterdir():
            if file.name != harm:
                (broken / file.name).write_bytes(file.read_bytes())
    if harm == "cut":
        (broken / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:500])
    ran = run(command, "--model", broken, *(["--prompt", PROMPT] if command != "demo" else []))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("Error: ")
    assert ran.err.count("\n") == 1
    assert message in ran.err


@pytest.mark.parametrize(
    "args", [("--max-new-tokens", 0), ("--dtype", "int8"), ("--strategy", "magic"), ("--window-size", "many")]
)
def test_options_out_of_range_are_usage_errors(args: tuple[Any, ...]) -> None:
    ran = run("generate", "--prompt", "x", *args)
    assert (ran.status, ran.out) == (2, "")
    assert args[0] in ran.err


# --- verify -----------------------------------------------------------------------------------------------------


def test_verify_finds_identical_texts(folder: Path) -> None:
    ran = run("verify", "--model", folder, "--prompt", PROMPT, "--prompt", "import os", "--max-new-tokens", 16)
    assert ran.status == 0
    assert "2 identical, 0 tied, 0 with a bug; 2 prompts, greedy, float32" in ran.words


def test_verify_json(folder: Path) -> None:
    ran = run("verify", "--model", folder, "--prompt", PROMPT, "--window-size", 3, "--max-new-tokens", 16, "--json")
    document = json.loads(ran.out)
    assert ran.status == 0
    assert document["verdict"] == "identical"
    assert document["settings"]["strategy"]["window_size"] == 3
    (result,) = document["results"]
    assert (result["prompt"], result["tokens"], result["divergence"]) == (PROMPT, 16, None)
    assert result["tokens_per_pass"] >= 1


def test_verify_has_prompts_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "BUNDLED", folder)
    ran = run("verify", "--max-new-tokens", 4)
    assert ran.status == 0
    assert f"{len(common.PROMPTS)} identical" in ran.words


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("prompts.jsonl", '{"id": "a", "prompt": "x = 1", "source": "s"}\n\n{"prompt": "y\\nz"}\n'),
        ("prompts.txt", "x = 1\n\ny\n"),
    ],
)
def test_verify_reads_prompt_files(folder: Path, tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    ran = run("verify", "--model", folder, "--prompts", tmp_path / name, "--max-new-tokens", 4, "--json")
    texts = [result["prompt"] for result in json.loads(ran.out)["results"]]
    assert texts == ["x = 1", "y\nz" if name.endswith("jsonl") else "y"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "cannot be read: No such file or directory."),
        ("empty.txt", "\n\n", "holds no prompt"),
        ("broken.jsonl", '{"prompt": "x"}\n{"prompt"', "line 2, is not JSON"),
        ("other.jsonl", '{"text": "x"}', 'line 1: expected an object with a "prompt"'),
        ("number.jsonl", '{"prompt": 3}', 'line 1: expected an object with a "prompt"'),
        ("binary.txt", b"\xff\xfe", "is not text"),
    ],
)
def test_verify_refuses_bad_prompt_files(tmp_path: Path, name: str, content: str | bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    ran = run("verify", "--prompts", tmp_path / name)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert message in ran.err


def test_verify_refuses_an_empty_prompt(folder: Path) -> None:
    ran = run("verify", "--model", folder, "--prompt", "")
    assert (ran.status, ran.err) == (2, "Error: The prompt is empty: expected text of at least one token.\n")


def test_verify_calls_a_wide_gap_a_bug(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, other_token(5, lambda token: (token + 1) % 258))
    ran = run("verify", "--model", folder, "--prompt", PROMPT, "--max-new-tokens", 16)
    assert ran.status == 1
    assert "1: bug at token 6: plain" in ran.words
    assert "0 identical, 0 tied, 1 with a bug" in ran.words
    ran = run("verify", "--model", folder, "--prompt", PROMPT, "--max-new-tokens", 16, "--json")
    assert ran.status == 1
    found = json.loads(ran.out)["results"][0]["divergence"]
    assert found["at"] == 5
    assert found["plain_token"] == expected(folder, 16)[5]
    assert found["lookahead_token"] == (found["plain_token"] + 1) % 258
    assert found["gap"] >= found["margin"] > 100 * found["rounding_error"] > 0


def test_verify_calls_equal_scores_a_tie(twins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, other_token(5, lambda token: token ^ 1))
    ran = run("verify", "--model", twins, "--prompt", PROMPT, "--max-new-tokens", 16)
    assert ran.status == 0
    assert "1: tie at token 6: plain" in ran.words
    assert "0 identical, 1 tied, 0 with a bug" in ran.words


def test_a_tie_beside_a_third_token_is_still_a_bug(twins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, other_token(5, lambda token: (token + 2) % 256))
    ran = run("verify", "--model", twins, "--prompt", PROMPT, "--max-new-tokens", 16, "--json")
    found = json.loads(ran.out)["results"][0]["divergence"]
    assert (ran.status, found["verdict"]) == (1, "bug")
    assert found["margin"] <= 2 * found["rounding_error"] < found["gap"]


def test_a_text_that_ends_early_is_a_bug(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda decoded: dataclasses.replace(decoded, tokens=decoded.tokens[:-1]))
    ran = run("verify", "--model", folder, "--prompt", PROMPT, "--max-new-tokens", 16)
    assert ran.status == 1
    assert "bug at token 16: plain" in ran.words
    assert "lookahead the end" in ran.words


# --- demo -------------------------------------------------------------------------------------------------------

QUICK = ("--new-tokens", 12, "--prompts", 2, "--rounds", 1)


def test_demo_says_identical_and_the_speedup(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "BUNDLED", folder)
    ran = run("demo", *QUICK, "--window-size", 3)
    assert ran.status == 0
    assert "Texts: identical, all 24 tokens of 2 texts." in ran.words
    assert re.search(r"Tokens per pass: \d\.\d\d \(24 tokens in \d+ passes; plain decoding: 1\)", ran.words)
    assert re.search(r"Milliseconds per pass: \d+\.\d\d plainly \(1 token\), \d+\.\d\d with lookahead \(", ran.words)
    assert re.search(r"Speedup: \d+\.\d\dx, (a win|a loss|no difference) \(median of 2 ratios from", ran.words)
    assert common.PROMPTS[0] in ran.out


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (2.0, "Speedup: 2.00x, a win"),
        (1.0, "Speedup: 1.00x, no difference"),
        (0.5, "Speedup: 0.50x, a loss"),
    ],
)
def test_demo_says_win_or_loss_plainly(folder: Path, monkeypatch: pytest.MonkeyPatch, factor: float, said: str) -> None:
    decode = common.decode

    def timed(model: Any, inputs: Any, strategy: Any, **settings: Any) -> common.Decoded:
        decoded = decode(model, inputs, strategy, **settings)
        return dataclasses.replace(decoded, seconds=factor if strategy is None else 1.0)

    monkeypatch.setattr(common, "decode", timed)
    ran = run("demo", "--model", folder, *QUICK)
    assert ran.status == 0
    assert said in ran.words
    assert " passes (S = " in ran.words


def test_demo_shows_a_bug_and_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, other_token(5, lambda token: (token + 1) % 258))
    ran = run("demo", "--model", folder, *QUICK)
    assert ran.status == 1
    assert "Text 1 differs (bug) at token 6: plain" in ran.words
    assert "identical" not in ran.words


def test_demo_shows_a_tie_and_succeeds(twins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, other_token(5, lambda token: token ^ 1))
    ran = run("demo", "--model", twins, *QUICK)
    assert ran.status == 0
    assert "Text 1 differs (tie) at token 6" in ran.words


def test_free_tokens_are_all_of_a_pass_but_the_last(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("ab cdé")["input_ids"]  # the last letter has two tokens
    passes = [{"tokens": [1]}, {"tokens": [3]}, {"tokens": [1]}, {"tokens": [2]}]
    text = coloured(tokenizer, common.Decoded(tokens, 1.0, DecodingStats(passes=passes)))
    assert text.plain == "ab cdé"
    assert [text.plain[span.start : span.end] for span in text.spans if span.style == FREE] == ["b", " "]


# --- tune -------------------------------------------------------------------------------------------------------

SHORT = ["--seconds", 0.2, "--new-tokens", 8]


@pytest.fixture
def curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder."""
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path / "curves"))
    return tmp_path / "curves"


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text(json.dumps({"prompt": PROMPT, "other": 3}) + "\n\ndef sub(a, b):\n")
    return file


def test_tune_measures_saves_and_recommends(folder: Path, curves: Path, prompt_file: Path) -> None:
    ran = run("tune", "--model", folder, "--prompts", prompt_file, *SHORT)
    assert (ran.status, ran.err) == (0, "")
    for heading in ("Step time at about", "Best-first trees on the prompts, greedy", "Lookahead decoding as published"):
        assert heading in ran.words
    assert re.search(r"128 \d+\.\d\d \d+\.\d\d █+", ran.words)
    assert re.search(r"7/5/7 \d+\.\d \d+\.\d\d \d+\.\d\dx", ran.words)
    assert re.search(r"Budget: (\d+ drafted nodes a pass, expected \d+\.\d\dx|none; no draft pays)", ran.words)
    assert re.search(r"W, N, G as published: \d+/\d+/\d+, expected \d+\.\d\dx\.", ran.words)
    files = list(curves.iterdir())
    assert all(StepTimes.load(file).ms(8, 20) > 0.0 for file in files)
    assert sorted(StepTimes.load(file).about.get("traced", False) for file in files) == [False, True]
    assert str(curves) in "".join(ran.out.split())
    assert "These passes are traced" in ran.words


def test_tune_as_json_and_into_a_file(folder: Path, curves: Path, prompt_file: Path, tmp_path: Path) -> None:
    """Calls of ``generate`` read the file that it writes."""
    output = tmp_path / "new" / "curve.json"
    ran = run("tune", "--model", folder, "--prompts", prompt_file, "--json", "--output", output, "--batch", 2, *SHORT)
    assert (ran.status, ran.err) == (0, "")
    document = json.loads(ran.out)
    own, traced = map(Path, document["saved"][:2])
    assert set(curves.iterdir()) == {own, traced}
    assert document["saved"][2:] == [str(output)]
    assert json.loads(output.read_text()) == json.loads(traced.read_text()) == document["curve"]
    assert document["plain_ms"] > 0.0
    assert document["curve"]["about"]["batch"] == 2
    assert [entry["nodes"] for entry in document["budgets"]] == [4, 8, 16, 24, 32, 48, 64, 96, 128]
    for entry in [*document["budgets"], *document["published"]]:
        assert entry["S"] >= 1.0 and entry["drafted"] >= 0.0 and entry["speedup"] > 0.0
    best = max(document["budgets"], key=lambda entry: entry["speedup"])
    recommended = document["recommended"]
    assert recommended["nodes"] == (best["nodes"] if best["speedup"] > 1 else 0)
    best = max(document["published"], key=lambda entry: entry["speedup"])
    sizes = ("window_size", "ngram_size", "verification_set_size")
    assert [recommended[size] for size in sizes] == [best[size] for size in sizes]
    assert Lookahead(tuning=output).step_times() is not None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe\x00", "is not text"),
        (b"", "holds no prompt: expected at least one line."),
        (b" \n\n", "holds no prompt"),
        (b'def\n{"text": "a"}\n', 'line 2: expected an object with a "prompt" that is text; got {"text": "a"}'),
        (
            b'{"prompt": \n',
            'line 1, is not JSON (Expecting value): expected an object with a "prompt".',
        ),
        (b'{"prompt": 3}\n', 'line 1: expected an object with a "prompt" that is text; got {"prompt": 3}'),
        (b'{"prompt": ""}\n', 'line 1: expected an object with a "prompt" that is text; got {"prompt": ""}'),
    ],
)
def test_tune_refuses_a_file_of_other_things(
    folder: Path, curves: Path, tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "prompts"
    if content is not None:
        file.write_bytes(content)
    ran = run("tune", "--model", folder, "--prompts", file, *SHORT)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"Error: --prompts {file}") and message in ran.err
    assert ran.err.count("\n") == 1
    assert not curves.exists()


@pytest.mark.parametrize("options", [["--seconds", 0], ["--batch", 0], ["--new-tokens", 0], ["--dtype", "int8"]])
def test_tune_refuses_impossible_options(folder: Path, curves: Path, options: list[Any]) -> None:
    assert run("tune", "--model", folder, *options).status == 2
    assert not curves.exists()


# --- support -------------------------------------------------------------------------------------------------------


def test_support(folder: Path, tmp_path: Path) -> None:
    """A model with weights is tested; a config alone tells what it can; a refusal has exit status 1 and its reason."""
    result = CliRunner().invoke(app, ["support", "--model", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert (facts["model"], facts["route"], facts["reason"]) == ("LlamaForCausalLM", "tree", None)
    assert (facts["attention"], facts["cache_layers"]) == ("sdpa", "DynamicLayer")
    assert "self-test" in facts["checked"]
    result = CliRunner().invoke(app, ["support", "--model", str(folder / "config.json")])
    assert result.exit_code == 0, result.output
    assert "no weights" in result.stdout
    config = MambaConfig(vocab_size=48, hidden_size=32, num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["support", "--model", str(tmp_path), "--json"])
    assert result.exit_code == 1
    assert "a recurrent state cannot follow a tree" in json.loads(result.stdout)["reason"]
    GPT2Config(n_positions=77).save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["support", "--model", str(tmp_path), "--json"])
    assert json.loads(result.stdout)["limits"] == "77 positions (a learned table)"
    for source in ("nowhere", str(tmp_path / "nowhere")):
        result = CliRunner().invoke(app, ["support", "--model", source])
        assert result.exit_code == 2
        assert "does not exist" in result.stderr
    (tmp_path / "config.json").write_text('{"model_type": "no such model"}')
    result = CliRunner().invoke(app, ["support", "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert "cannot be read as a model that writes text" in result.stderr


def _supported(config: Any, tmp_path: Path) -> tuple[int, dict[str, Any]]:
    config.save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["support", "--model", str(tmp_path), "--json"])
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize(
    ("name", "route", "architecture"),
    [("qwen3_next", "chain", "Qwen3NextForCausalLM"), ("jamba", "plain", "JambaForCausalLM")],
)
def test_support_of_a_recurrent_config(name: str, route: str, architecture: str, tmp_path: Path) -> None:
    """No state can be continued without weights: what was found for the class has the say."""
    status, facts = _supported(hybrid(name).config, tmp_path)
    assert (status, facts["route"], facts["kind"]) == (int(route == "plain"), route, "causal")
    assert "a recurrent state cannot follow a tree" in facts["reason"]
    assert "meta" not in facts["reason"]
    assert f"the conformance record of transformers {recorded_version()} for {architecture}" in facts["checked"]


def test_support_of_a_config_that_is_not_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is claimed where nothing is known."""
    monkeypatch.setattr(importlib.import_module("lookahead.cli.support"), "recorded", lambda _: [])
    status, facts = _supported(hybrid("lfm2").config, tmp_path)
    assert (status, facts["route"]) == (0, "unknown")
    assert "does not have this class, and there are no weights for the self-test" in facts["checked"]


def test_support_of_a_config_that_names_no_class(tmp_path: Path) -> None:
    """As a config made by hand is saved; it may be that of a model for images or speech."""
    assert _supported(Qwen2VLConfig(), tmp_path)[1]["model"] == "Qwen2VLForConditionalGeneration"
    assert _supported(WhisperConfig(), tmp_path)[1]["route"] == "tree"
    CLIPConfig().save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["support", "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert "no model of type 'clip'" in " ".join(result.stderr.split())


def test_support_of_an_encoder_decoder(tmp_path: Path) -> None:
    """With weights and without."""
    model = seq2seq_model("bart")
    status, facts = _supported(model.config, tmp_path)
    assert (status, facts["model"], facts["kind"]) == (0, "BartForConditionalGeneration", "encoder-decoder")
    assert (facts["route"], facts["limits"]) == ("tree", "64 positions of the decoder (a learned table)")
    assert "conformance record" in facts["checked"]
    model.save_pretrained(tmp_path)
    status, facts = _supported(model.config, tmp_path)
    assert (status, facts["route"], facts["checked"]) == (0, "tree", "class, config and self-test")
