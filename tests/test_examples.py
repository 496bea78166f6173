"""Every example runs as it stands and stays short; notebooks keep what they print, and nothing of the machine."""

import json
import random
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli import save_tiny_model
from helpers.models import VOCAB, tiny_model

from lookahead import bundled, restore_all

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "quickstart": ["identical: True", "lookahead: ", "tokens per pass: ", "with W=3, N=3, G=3"],
    "streaming": ["-- printed as it comes", "-- read from a thread", " ms  "],
    "sampling": [f"-- temperature {t}: same text as plain sampling: True" for t in (0.2, 0.6, 1.0)],
    "batch": [
        *(f"-- sequence {number}: identical: True" for number in range(3)),
        "passes of the whole batch",
        " at once: ",
    ],
    "own_source": ["tokens in ", "The same text both times: True"],
    "translate": ["identical: True", " tokens per pass", "right: "],
    "own_family": ["before: chain, ", "after: tree, ", "identical: True"],
    "stop_strings": ["-- without a stop string: ", "-- stop at '\\n': ", "-- stop at '\\n\\n': ", "identical: True"],
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model; a tiny random one where it is not there."""
    if (bundled.BUNDLED / "config.json").exists():
        return bundled.BUNDLED
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("name", SAYS)
def test_example_runs(
    name: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bundled, "BUNDLED", model_folder)
    monkeypatch.setattr("sys.argv", [name, "20"])  # steps of training, where there is any
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(text in printed for text in SAYS[name]), printed
    assert ": False" not in printed


@pytest.mark.parametrize("name", SAYS)
def test_example_is_under_80_lines(name: str) -> None:
    most = 125 if name == "own_family" else 80  # it defines a model
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < most


@pytest.fixture
def consistency(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What examples/train_tiny_consistency.py defines."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return runpy.run_path(str(EXAMPLES / "train_tiny_consistency.py"))


@pytest.mark.slow
def test_training_for_consistency(
    consistency: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few steps on one file: the model is written and measured."""
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "one.py").write_text((EXAMPLES / "own_family.py").read_text())
    sizes = {"steps": 3, "size": 4, "blocks": 3, "new": 16, "batch": 2, "age": 2, "prompts": 1, "tokens": 8}
    try:
        consistency["main"](corpus=tmp_path / "corpus", out=tmp_path / "model", **sizes)
    finally:
        restore_all()
    printed = capsys.readouterr().out
    for name in consistency["settings"](4):
        told = rf"^{name}: untrained T 0.0 \d\.\d\d \(\d+ nodes\), .*, trained T 0.8 \d"
        assert re.search(told, printed, re.M), printed
    assert (tmp_path / "model" / "model.safetensors").exists()


def consistency_text(script: dict[str, Any], tokens: list[int], at: list[int], drafts: list[list[int]]) -> Any:
    none = torch.zeros(len(tokens), VOCAB)
    return script["Text"](torch.tensor(tokens), none, none, torch.tensor(at), torch.tensor(drafts))


def test_packed_blocks_see_what_they_would_see_alone(consistency: dict[str, Any]) -> None:
    """Every block of every text behind the text before it, in a pass of its own."""
    model = tiny_model("llama")
    rows = [
        consistency_text(consistency, [5, 6, 7, 8, 9, 10], [1, 3], [[3, 3], [4, 11]]),
        consistency_text(consistency, [9, 8, 7, 6, 5, 4], [3, 2], [[1, 2], [7, 7]]),
    ]
    ids, positions, mask = consistency["packed"](rows)
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions, attention_mask=mask.double()).logits
        for row, text in enumerate(rows):
            torch.testing.assert_close(logits[row, :6], model(input_ids=text.tokens[None]).logits[0])
            for block in range(2):
                alone = torch.cat([text.tokens[: int(text.at[block]) + 1], text.drafts[block]])[None]
                mine = logits[row, 6 + 3 * block : 9 + 3 * block]
                torch.testing.assert_close(mine, model(input_ids=alone).logits[0, -3:])


def test_a_block_moves_as_in_decoding(consistency: dict[str, Any]) -> None:
    """Behind the drafts that were right and the token after them; the rest of the state stays, and pads are new."""
    text = consistency_text(consistency, list(range(80)), [66, 70, 76], [[1, 1, 1]] * 3)
    states = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])
    consistency["advance"](text, states, [1, 3, 0], 0, random.Random(0))
    assert text.at[:2].tolist() == [68, 74]
    assert text.drafts.tolist() == [[12, 13, 0], [0, 0, 0], [0, 0, 0]]
    assert 63 <= text.at[2] < 76, "at the text's end a block starts anew"
    assert text.age == 1


def test_a_family_of_ones_own_is_given_its_cache() -> None:
    """By the name that this version of transformers has for it: the text is the one without a cache."""
    example = runpy.run_path(str(EXAMPLES / "own_family.py"))
    torch.manual_seed(0)
    model = example["TinyForCausalLM"](example["TinyConfig"](attn_implementation="eager")).double().eval()
    for weights in model.parameters():
        torch.nn.init.normal_(weights, std=0.4)
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    texts = [model.generate(torch.tensor([[3, 4, 5]]), use_cache=use, **settings).tolist() for use in (True, False)]
    assert texts[0] == texts[1]


NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_outputs_are_stored_and_small(file: Path) -> None:
    text = file.read_text()
    book = json.loads(text)
    printing = [
        cell for cell in book["cells"] if "print(" in "".join(cell["source"]) and "def " not in cell["source"][0]
    ]
    outputs = [output for cell in book["cells"] for output in cell.get("outputs", ())]
    assert printing and all(cell["outputs"] for cell in printing if "def show" not in "".join(cell["source"]))
    assert len(text) < 40_000
    assert {output["output_type"] for output in outputs} == {"stream"}
    assert {output["name"] for output in outputs} == {"stdout"}
    assert all(len(cell.get("outputs", ())) <= 1 for cell in book["cells"])
    assert not any(cell.get("execution_count") for cell in book["cells"])
    assert set(book["metadata"]) == {"kernelspec", "language_info"} and book["metadata"]["language_info"] == {
        "name": "python"
    }
    assert not re.search(r"/(home|root|tmp|work|usr)/", text)


@pytest.mark.parametrize("file", [file for file in NOTEBOOKS if file.stem != "medusa"], ids=lambda file: file.stem)
def test_a_chat_model_is_named_once_and_was_run(file: Path) -> None:
    """At the top; what is stored was not written by the bundled model, which takes its place where there is none."""
    cells = json.loads(file.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert re.match(r'MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"', sources[0])
    assert sum(source.count("MODEL =") for source in sources) == 1
    told = ["".join(output["text"]) for cell in cells for output in cell.get("outputs", ())]
    assert told[0] == "LlamaForCausalLM, 134,515,008 parameters\n"
