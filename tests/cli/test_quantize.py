"""``--quantize``: weights of fewer bits for any command that loads a model, and what that costs the model."""

import json
import re
from pathlib import Path

import pytest
from helpers.cli import PROMPT, run

from lookahead import load_model
from lookahead.cli import common
from lookahead.cli.arguments import Generate
from lookahead.runtime.quantised_layers import Int8Linear, adds_exactly

pytestmark = pytest.mark.skipif(not adds_exactly(), reason="no exact kernel for products of bytes here")
COST = r"Perplexity of the built-in prompts \(\d+ tokens\): [\d.]+ in int8, [\d.]+ in bfloat16\."


def test_a_command_quantises_and_says_what_it_costs(half: Path) -> None:
    written = {}
    for strategy in ("plain", "lookahead"):
        ran = run(
            "generate", "--model", half, "--quantize", "int8", "--prompt", PROMPT, "--strategy", strategy, "--json"
        )
        assert ran.status == 0 and re.search(COST, ran.err)
        document = json.loads(ran.out)
        assert document["settings"]["quantize"] == "int8" and document["settings"]["dtype"] == "bfloat16"
        written[strategy] = document["tokens"]
    assert len(written["plain"]) == len(written["lookahead"])


def test_weights_in_float32_are_taken_in_bfloat16(folder: Path) -> None:
    model, _ = common.load_for(Generate(model=str(folder), quantize="int8"))
    assert type(model.lm_head) is Int8Linear and common.dtype_name(model) == "bfloat16"


def test_support_tells_of_the_quantised_model(half: Path, tmp_path: Path) -> None:
    ran = run("support", "--model", half, "--quantize", "int8")
    assert ran.status == 0 and "route tree" in ran.words
    load_model(half)[0].config.save_pretrained(tmp_path)
    ran = run("support", "--model", tmp_path, "--quantize", "int8")
    assert (ran.status, ran.out) == (2, "") and "--quantize needs weights" in ran.err
