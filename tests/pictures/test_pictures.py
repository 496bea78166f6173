"""Pictures of passes, for which matplotlib is needed."""

import re
from pathlib import Path

import pytest
from helpers.cli import run

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("augmented")]
pytest.importorskip("matplotlib")
TREE = Path(__file__).parents[2] / "docs" / "tree.svg"
PROMPT = 'def parse_args(argv=None):\n    """Parse the command line and return its options."""'


def words(file: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", file.read_text())


def test_the_readmes_picture_is_a_traced_pass(tmp_path: Path) -> None:
    file = tmp_path / "tree.svg"
    ran = run("trace", "--prompt", PROMPT, "--nodes", 14, "--pass", 12, "-o", tmp_path / "page.html", "--png", file)
    assert ran.status == 0, ran.err
    assert words(file) == words(TREE) and "recycling" in words(TREE) and len(words(TREE)) > 15
