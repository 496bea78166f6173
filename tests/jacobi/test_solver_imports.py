"""The arrow: lookahead -> jacobi -> torch, and never back."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOLVER = sorted((ROOT / "jacobi").rglob("*.py"))

WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
{body}
assert not {blocked} & {{name.split(".")[0] for name in sys.modules}}
"""

DECODE = """
import torch
from jacobi import GreedyVerifier, JacobiDrafter, Scores, solve

class Counting:
    def prefill(self):
        return Scores(torch.zeros(1, 1, 9), [[1]])
    def forward(self, trees):
        return Scores(torch.zeros(1, len(trees[0]), 9), [[(token + 1) % 9 for token in trees[0].tokens]])
    def keep(self, paths):
        pass

verifier = GreedyVerifier(1, 6)
steps = list(solve(Counting(), [JacobiDrafter("sliding", 3, lambda n: [0] * n)], verifier))
assert verifier.tokens == [[1, 2, 3, 4, 5, 6]], verifier.tokens
"""

# Names that mean nothing else are looked for anywhere; short ones only as words (of snake_case names too).
FAMILIES = re.compile(
    "llama|gpt|qwen|mistral|mixtral|gemma|falcon|deepseek|cohere|olmo|granite|vicuna|pythia|stablelm|starcoder|baichuan"
    "|internlm|nemotron|smollm|mamba|rwkv|jamba|(?<![a-z])(?:neox|phi|opt|t5|bert|bart|bloom|yi|glm|mpt)(?![a-z])",
    re.IGNORECASE,
)


def isolated(body: str, blocked: set[str]) -> subprocess.CompletedProcess[str]:
    """Run ``body`` in a fresh interpreter that cannot import ``blocked``."""
    code = WITHOUT.format(blocked=blocked, body=body)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level package of every import anywhere in a module, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "jacobi" if node.level else str(node.module).split(".")[0]


def test_solver_works_without_transformers() -> None:
    run = isolated(DECODE, {"transformers", "tokenizers", "huggingface_hub", "lookahead"})
    assert run.returncode == 0, run.stderr


def test_blocker_blocks() -> None:
    """Otherwise the test above says nothing."""
    run = isolated("import lookahead.patch", {"transformers"})
    assert run.returncode != 0
    assert "transformers is blocked" in run.stderr


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
