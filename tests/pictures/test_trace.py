"""The page of a decode: complete, self-contained, and safe with any text."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.cli import run

from lookahead import bundled
from lookahead.pictures.figure import page_of, places, visible

TREE = Path(__file__).parents[2] / "docs" / "tree.svg"


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found[1])


def words(file: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", file.read_text())


@pytest.mark.parametrize("sampling", [(), ("--temperature", 0.8)], ids=["greedy", "sampled"])
def test_the_page_tells_the_text(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: Any) -> None:
    monkeypatch.setattr(bundled, "BUNDLED", folder)
    page = tmp_path / "page.html"
    ran = run("trace", "--prompt", "def add(a, b):", "--new-tokens", 30, "--nodes", 8, "-o", page, *sampling)
    assert ran.status == 0, ran.err
    document = data_of(page.read_text())
    assert sum(len(each["written"]) for each in document["passes"]) == 30
    for each in document["passes"]:
        assert len(each["tokens"]) == len(each["parents"]) == len(each["sources"]) == len(each["chances"])
    assert "http" not in page.read_text().replace("http://www.w3.org/2000/svg", "")


def test_no_text_becomes_markup() -> None:
    evil = "</script><img src=x onerror=alert(1)><!-- & \u2028 \ud83d"
    one = {"tokens": [evil], "parents": [-1], "sources": [""], "chances": [100], "accepted": [0], "written": [evil]}
    page = page_of({"title": evil, "prompt": evil, "passes": [one | {"ms": [0, 1, 0, 0]}]})
    assert "<img" not in page and page.count("</script>") == 2
    assert data_of(page)["prompt"] == evil


def test_places_and_visible_texts() -> None:
    assert places([-1]) == [(0, 0.0)]
    assert places([-1, 0, 0, 1, 1]) == [(0, 1.25), (1, 0.5), (1, 2.0), (2, 0.0), (2, 1.0)]
    assert visible(" a\n\x00") == "·a↵□"
    assert len(visible("x" * 40)) == 14


def test_a_picture(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bundled, "BUNDLED", folder)
    page, picture = tmp_path / "page.html", tmp_path / "pass.png"
    given = ("--new-tokens", 12, "--nodes", 4, "-o", page, "--png", picture)
    assert run("trace", *given).status == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    page.unlink()
    ran = run("trace", *given, "--new-tokens", 90, "--pass", 89)  # of a text that comes to repeat itself
    assert ran.status == 2 and "--pass 89 does not exist" in ran.err and not page.exists()


@pytest.mark.parametrize("drawn", [False, pytest.param(True, marks=pytest.mark.integrations)])
def test_the_readmes_picture_is_a_traced_pass(tmp_path: Path, drawn: bool) -> None:
    """Where this fails, docs/pictures.md has the command that draws it anew."""
    prompt = 'def parse_args(argv=None):\n    """Parse the command line and return its options."""'
    page, picture = tmp_path / "page.html", tmp_path / "tree.svg"
    given = ["--prompt", prompt, "--nodes", 14, "-o", page]
    if drawn:
        pytest.importorskip("matplotlib")
        given += ["--pass", 13, "--png", picture]
    ran = run("trace", *given)
    assert ran.status == 0, ran.err
    shown = data_of(page.read_text())["passes"][13]
    root, *drafted = map(visible, shown["tokens"])
    labels = [root, *(f"{token}  {chance:.0f}%" for token, chance in zip(drafted, shown["chances"][1:], strict=True))]
    assert words(TREE)[: len(labels)] == labels and len(labels) == 15
    assert "recycling" in words(TREE) and (not drawn or words(picture) == words(TREE))


def test_refusals(tmp_path: Path) -> None:
    ran = run("trace", "-o", tmp_path / "no" / "page.html")
    assert ran.status == 2 and "there is no folder" in " ".join(ran.err.split())
    ran = run("trace", "--new-tokens", 12, "--pass", 12)
    assert ran.status == 2 and "--pass 12 cannot exist" in ran.err
