"""A tiny model in a folder, and commands run in this process."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from helpers.models import SIZES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from lookahead.cli import app, common

PROMPT = "def add(a, b):"
MADE: Any = typer.main.get_command(app)  # the commands as typer has made them

# Runs commands in a Python of their own, and says how each ended and what of the heavy packages was loaded by then.
RUN = """
import sys
from lookahead.cli import app
for args in {commands!r}:
    try:
        app(args, prog_name="lookahead")
    except SystemExit as ended:
        print("status", ended.code)
    print("loaded", sorted({{"torch", "transformers", "numpy"}} & sys.modules.keys()))
    print("ended", file=sys.stderr)
"""


def save_tiny_model(folder: Path, *, twins: bool = False) -> Path:
    """Save a random Llama whose tokens are bytes; with ``twins``, tokens 2k and 2k+1 always score the same."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=letters | {"<end>": 256, "<pad>": 257}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<pad>")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 258}))
    if twins:
        with torch.no_grad():
            model.lm_head.weight[1::2] = model.lm_head.weight[0::2]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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


def invoked(main: Callable[..., None], *args: Any) -> Result:
    """A function as a command of its own."""
    command = typer.Typer()
    command.command()(main)
    return CliRunner().invoke(command, [str(arg) for arg in args])


def run(*args: Any, stdin: str | bytes | None = None) -> Ran:
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin, env={"COLUMNS": "160"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", text) for text in (result.stdout, result.stderr)]
    return Ran(result.exit_code, *plain)


def refused(message: str, *args: Any) -> None:
    """Assert that a command is refused in one line."""
    ran = run(*args)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("Error: ") and ran.err.count("\n") == 1
    assert message in ran.err


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
