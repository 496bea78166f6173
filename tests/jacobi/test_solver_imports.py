"""The arrow: lookahead -> jacobi -> torch, and never back."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOLVER = sorted((ROOT / "jacobi").rglob("*.py"))

# Names that mean nothing else are looked for anywhere; short ones only as words (of snake_case names too).
FAMILIES = re.compile(
    "llama|gpt|qwen|mistral|mixtral|gemma|falcon|deepseek|cohere|olmo|granite|vicuna|pythia|stablelm|starcoder|baichuan"
    "|internlm|nemotron|smollm|mamba|rwkv|jamba|(?<![a-z])(?:neox|phi|opt|t5|bert|bart|bloom|yi|glm|mpt)(?![a-z])",
    re.IGNORECASE,
)


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level package of every import anywhere in a module, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "jacobi" if node.level else str(node.module).split(".")[0]


@pytest.mark.parametrize("file", SOLVER, ids=lambda file: file.name)
def test_solver_imports_torch_and_itself_only(file: Path) -> None:
    """numpy is what torch itself works with; everything else is the standard library."""
    allowed = set(sys.stdlib_module_names) | {"jacobi", "torch", "numpy"}
    assert set(imported(ast.parse(file.read_text()))) <= allowed


@pytest.mark.parametrize("file", SOLVER, ids=lambda file: file.name)
def test_solver_names_no_model_family(file: Path) -> None:
    assert not FAMILIES.findall(file.read_text())


@pytest.mark.parametrize("text", ["LlamaConfig", "gpt_neox", "T5 has an encoder", "is_qwen2", "phi-3"])
def test_family_names_are_found(text: str) -> None:
    assert FAMILIES.search(text)
