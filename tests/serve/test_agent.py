"""The coding agent of docs/agent.md, as it stands: with a real model where one has been built, else the bundled one."""

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.scripted import HERMES
from helpers.serving import NAME, bundled, client, served

from lookahead.loading import load_model
from lookahead.tuning import cache_folder

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent.py"
OLD = "def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return add(a, a)\n"
pytestmark = pytest.mark.usefixtures("augmented")


def test_the_page_shows_the_example() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "agent.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)\n```", page, re.DOTALL)
    assert block.startswith("def work(") and block in EXAMPLE.read_text()


@pytest.fixture(params=["bundled", pytest.param("qwen-coder-0.5b", marks=pytest.mark.slow)])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    folder = cache_folder() / "models" / request.param
    if request.param == "bundled":
        model, tokenizer = bundled()
        template = HERMES.replace("messages[-1].content[-1:]", "''")
    elif folder.is_dir():
        (model, tokenizer), template = load_model(folder), None
    else:
        pytest.skip("python -m benchmarks.pretrained qwen-coder-0.5b builds it")
    with served(model, tokenizer, template=template) as found:
        yield found


def test_it_reads_and_writes_a_file(address: str, tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="needs the extra grammar")
    (tmp_path / "calc.py").write_text(OLD)
    work: Any = runpy.run_path(str(EXAMPLE))["work"]
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 160}
    with client(address) as openai:
        answers = work(openai, NAME, [tmp_path / "calc.py"], "Rename the function add to plus.", **settings)
    calls = [answer.choices[0].message.tool_calls for answer in answers]
    assert [call[0].function.name for call in calls[:2]] == ["read_file", "write_file"] and not calls[2]
    assert json.loads(calls[0][0].function.arguments) == {"path": "calc.py"}
    written = json.loads(calls[1][0].function.arguments)
    assert (tmp_path / "calc.py").read_text() == written["content"]
    passes = [answer.usage.model_dump()["lookahead"]["tokens_per_pass"] for answer in answers]
    assert passes[0] > 3.0, "what is forced is drafted whole"
