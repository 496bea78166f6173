"""The notebooks are kept with what they print, and with nothing of the machine they ran on."""

import json
import re
from pathlib import Path

import pytest

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
