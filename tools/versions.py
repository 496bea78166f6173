"""Test the versions that are promised, each in an environment and a copy of the tree of its own.

python tools/versions.py                 all cells, and the table in docs/versions.md
python tools/versions.py CELL ...        these cells; the others' rows stay as they are
python tools/versions.py --check CELL    write nothing, and run only what CI has time for

Environments lie in build/versions and are used again. Large versions of torch are downloaded: several GB.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOM = ROOT / "build" / "versions"
RESULTS, PAGE = Path(__file__).with_suffix(".json"), ROOT / "docs" / "versions.md"
_EXACT = ("tests/models", "tests/exactness", "tests/support/test_replaced_steps.py")
_BRIEF = (
    *("tests/models", "tests/scheduling/test_scheduler.py", "tests/support/test_replaced_steps.py"),
    *(f"tests/exactness/test_{name}.py" for name in ("greedy", "sampling", "caches", "linear")),
)
_NOISE = (
    *("tests/verify/test_noise.py", "tests/verify/test_exponential.py", "tests/test_native.py"),
    *("tests/test_native_twins.py", "tests/models/test_compat.py", "tests/exactness/test_greedy.py"),
)
_TORCH = (*_NOISE, "tests/runtime/test_tracing.py", "tests/runtime/test_packing.py", "tests/runtime/test_attention.py")
_WITHOUT_C = (
    "tests/test_native.py",
    "tests/draft",
    "tests/exactness/test_greedy.py",
    "tests/exactness/test_sampling.py",
)


@dataclass(frozen=True)
class Cell:
    """One set of versions.

    Attributes:
        python: its minor version.
        torch, transformers: what pip is asked for.
        tests: paths that are run; none = the whole suite.
        why: what could differ, for readers.
        brief: those that CI runs; none = the same.
        compiler: whether the C part is built.
    """

    python: str
    torch: str
    transformers: str
    tests: tuple[str, ...]
    why: str
    brief: tuple[str, ...] = ()
    compiler: bool = True


CELLS = {
    "newest": Cell("3.11", "torch==2.13.0", "transformers==5.24.0", (), "all tests"),
    "5.23": Cell("3.11", "torch==2.13.0", "transformers==5.23.0", _EXACT, "other names of the KV cache"),
    "oldest": Cell("3.11", "torch==2.13.0", "transformers==5.20.0", (), "what newer versions have added", _BRIEF),
    "python3.13": Cell("3.13", "torch==2.8.0", "transformers==5.20.0", _NOISE, "the oldest torch, noise bit by bit"),
    "torch": Cell("3.11", "torch==2.15.0", "transformers==5.24.0", _TORCH, "the newest torch: noise, traces, packing"),
    "no-compiler": Cell("3.11", "torch==2.13.0", "transformers==5.24.0", _WITHOUT_C, "twins in Python", compiler=False),
}
_INTRODUCTION = """# Versions

What `make versions` found: each row is an environment of its own, with the tests that matter for it. The text that is
compared everywhere is plain `generate`'s of the same versions. Each time CI runs the first row whole, a part of that of
the oldest transformers, and the one without a compiler; the others are run by hand.

| cell | Python | torch | transformers | C part | looks at | passed | skipped | failed | day |
|---|---|---|---|---|---|---|---|---|---|
"""


def interpreter(minor: str) -> str | None:
    """A Python of a minor version: this one, one on the path, or one of pyenv's; None = there is none."""
    if sys.version.startswith(f"{minor}."):
        return sys.executable
    homes = sorted(Path.home().glob(f".pyenv/versions/{minor}.*/bin"))
    return shutil.which(f"python{minor}", path=os.pathsep.join([os.environ["PATH"], *map(str, homes)]))


def environment(name: str, cell: Cell, python: str) -> tuple[Path, Path]:
    """The Python of a cell's environment and its copy of the tree, both up to date."""
    folder = ROOM / name
    copy, ours = folder / "tree", folder / "venv" / "bin" / "python"
    shutil.rmtree(copy, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for file in filter(None, listed.split("\0")):
        if (ROOT / file).is_file():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, copy / file)
    if not ours.exists():
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    pip = [ours, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, cell.torch], check=True)
    compiler = {} if cell.compiler else {"CC": "false"}
    asked = ["--editable", f"{copy}[dev,train]", cell.torch, cell.transformers]
    subprocess.run([*pip, *asked], check=True, env=os.environ | compiler)
    return ours, copy


def tried(name: str, cell: Cell, brief: bool) -> dict[str, str]:
    """Run a cell, whole or in ``brief``; its row of the table."""
    row = {"python": cell.python, "torch": cell.torch, "transformers": cell.transformers, "why": cell.why}
    row |= {"c": "built" if cell.compiler else "not built", "day": date.today().isoformat()}
    python = interpreter(cell.python)
    if python is None:
        return row | {"passed": f"not run: no Python {cell.python} here", "skipped": "", "failed": ""}
    ours, copy = environment(name, cell, python)
    told = "import torch, transformers, platform, lookahead._native as n; print(platform.python_version(), "
    told += "torch.__version__, transformers.__version__, 'built' if n.speedups else 'not built')"
    found = subprocess.run([ours, "-c", told], cwd=copy, capture_output=True, check=True, text=True).stdout.split(
        " ", 3
    )
    row |= dict(zip(("python", "torch", "transformers", "c"), map(str.strip, found), strict=True))
    if row["c"] != ("built" if cell.compiler else "not built"):
        raise SystemExit(f"{name}: the C part is {row['c']}.")
    demo = [ours.with_name("lookahead"), "demo", "--prompts", "1", "--rounds", "1"]
    subprocess.run(demo, cwd=copy, check=True, stdout=subprocess.DEVNULL)
    run = [ours, "-m", "pytest", "-n", "auto", *((brief and cell.brief) or cell.tests)]
    output = subprocess.run(run, cwd=copy, stdout=subprocess.PIPE, text=True).stdout
    print(output[-4000:], flush=True)
    counts = dict.fromkeys(("passed", "skipped", "failed"), "0")
    for number, what in re.findall(r"(\d+) (passed|skipped|failed|errors?)", output.strip().rpartition("\n")[2]):
        counts["failed" if what.startswith("error") else what] = number
    return row | counts


def page(rows: dict[str, dict[str, str]]) -> str:
    """The text of docs/versions.md."""
    cells = ("python", "torch", "transformers", "c", "why", "passed", "skipped", "failed", "day")
    lines = [" | ".join([name, *(rows[name][cell] for cell in cells)]) for name in CELLS if name in rows]
    return _INTRODUCTION + "".join(f"| {line} |\n" for line in lines)


def main() -> None:
    """Run cells, and say what passed; exit status 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"{', '.join(CELLS)}; none = all")
    parser.add_argument("--check", action="store_true", help="write nothing, and run only what CI has time for")
    given = parser.parse_args()
    if unknown := set(given.cells) - set(CELLS):
        parser.error(f"no cell {', '.join(sorted(unknown))}: expected some of {', '.join(CELLS)}")
    rows: dict[str, dict[str, str]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = []
    for name in given.cells or CELLS:
        rows[name] = tried(name, CELLS[name], given.check)
        print(name, rows[name], flush=True)
        if rows[name]["failed"] not in ("", "0") or rows[name]["passed"] == "0":
            failed.append(name)
        if not given.check:
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
            PAGE.write_text(page(rows))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
