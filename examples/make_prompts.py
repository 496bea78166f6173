"""Write benchmarks/prompts/code.jsonl: function heads with their docstrings, from files the bundled model never saw.

    python examples/make_prompts.py --work build/tiny-coder

``--work`` is the folder that examples/train_tiny_coder.py filled. Held-out files were chosen by hash, and no prompt's
file was trained on. Each line is ``{"id", "prompt", "source"}``.
"""

import ast
import hashlib
import json
import textwrap
from pathlib import Path
from typing import Annotated

import typer

CODE = Path(__file__).parents[1] / "benchmarks" / "prompts" / "code.jsonl"


def heads(text: str) -> list[str]:
    """Every function head with its docstring in a source file, dedented; none if it is no Python.

    The tokenizer joins a line break with the indentation behind it, so no prompt ends in one.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    lines = text.splitlines()
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None or len(node.body) < 2:
            continue
        docstring = node.body[0]
        head = textwrap.dedent("\n".join(lines[node.lineno - 1 : docstring.end_lineno]))
        if 120 <= len(head) <= 900:
            found.append(head)
    return found


def main(
    work: Annotated[Path, typer.Option(help="Folder of the training script.")] = Path("build/tiny-coder"),
    out: Annotated[Path, typer.Option(help="File to write.")] = CODE,
    count: Annotated[int, typer.Option(help="Number of prompts; at most one from each file.")] = 100,
) -> None:
    """Choose the prompts by hash, so that the same held-out files always give the same ones."""
    held_out: dict[str, str] = json.loads((work / "held_out.json").read_text())
    rows = []
    for name, text in held_out.items():
        package, _, file = name.partition("/")
        found = heads(text)
        if found:
            prompt = min(found, key=lambda head: hashlib.sha256(head.encode()).hexdigest())
            digest = hashlib.sha256(prompt.encode()).hexdigest()
            rows.append({"id": digest[:12], "prompt": prompt, "source": f"{package}, {file.partition(':')[0]}"})
    rows = sorted(rows, key=lambda row: row["id"])[:count]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} prompts in {out}")


if __name__ == "__main__":
    typer.run(main)
