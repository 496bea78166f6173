"""The documents hold: their Python runs, their links lead somewhere, and they print what was measured."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

import lookahead
from lookahead import Jacobi, Lookahead
from lookahead.medusa import Medusa
from lookahead.runtime.quantised_layers import adds_exactly

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS, CHAT = ROOT / "benchmarks" / "results", "smollm2-135m"
WITH_CODE = ["README.md", "CONTRIBUTING.md", "docs/guide.md", "docs/medusa.md"]


def python_blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """The anchors that a document's headings have on a forge: lower case, dashes, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", WITH_CODE)
def test_the_python_of_a_document_runs_from_top_to_bottom(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))  # what it saves is no other test's
    blocks = python_blocks((ROOT / name).read_text())
    assert blocks
    names: dict[str, object] = {"__name__": "__main__"}
    try:
        for block in blocks:
            if "lookahead.quantize(" in block and not adds_exactly():
                continue  # there is no kernel for it here
            exec(compile(block, name, "exec"), names)
    finally:
        lookahead.restore_all()


def test_what_contributing_quotes_stands_in_the_examples() -> None:
    example = "".join((ROOT / name).read_text() for name in ("examples/own_family.py", "tests/bigram_head/head.py"))
    quotes = re.findall(r"^```py\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(quotes) == 3
    assert all(quote in example for quote in quotes)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.relative_to(ROOT).as_posix())
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        found = (document.parent / file).resolve() if file else document
        assert found.exists(), f"{document.name} links to {target}"
        assert not anchor or anchor in anchors(found), f"{document.name} links to {target}"


@pytest.mark.parametrize(
    ("strategy", "names"),
    [(Lookahead, ["docs/guide.md"]), (Jacobi, ["docs/guide.md"]), (Medusa, ["docs/medusa.md", "docs/guide.md"])],
)
def test_every_setting_is_documented(strategy: type, names: list[str]) -> None:
    text = "".join((ROOT / name).read_text() for name in names)
    fields = {field.name for field in dataclasses.fields(strategy)} - {"heads"}
    assert fields == {name for name in fields if re.search(rf"`{name}`|\b{name}=", text)}


def test_the_readme_counts_the_routes_on_record() -> None:
    families = json.loads((ROOT / "lookahead" / "assets" / "routes.json").read_text())["families"]
    counts = {route: sum(found["route"] == route for found in families) for route in ("tree", "chain", "plain")}
    text = (ROOT / "README.md").read_text()
    for route, count in counts.items():
        line = next(line for line in text.splitlines() if line.startswith(f"| `{route}` |"))
        assert re.search(rf"\b{count}\b", line), line
    assert f"of the {len(families)} model classes" in text


def test_the_readme_prints_what_was_measured() -> None:
    def measured(name: str, mode: str | None = "greedy") -> list[float]:
        document = json.loads((RESULTS / f"real-{name}.json").read_text())
        if mode is None:
            return [row["speedup_median"] for row in document["first"] if row["mode"] == "greedy"]
        rows = {(row["method"], row["mode"], row["batch"]): row["speedup_median"] for row in document["rows"]}
        return [rows[way, mode, 1] for way in ("lookup2", "w7", "auto")]

    expected = [*measured(CHAT), *measured(CHAT, "t0.7"), *measured("qwen-coder-0.5b"), *measured(CHAT, None)[:3]]
    expected += [*measured(f"{CHAT}-avx2"), *measured(f"{CHAT}-avx2", None)[:1]]
    printed = [line for line in (ROOT / "README.md").read_text().splitlines() if re.match(r"\| .*x\*\*.* \|$", line)]
    assert re.findall(r"[\d.]+x", "".join(printed)) == [f"{each:.2f}x" for each in expected]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == lookahead.__version__
    assert citation["authors"] and citation["references"][0]["identifiers"][0]["value"] == "arXiv:2402.02057"
