"""Write BENCHMARKS.md, and one page a question beside the results, from the JSON files that the benchmarks left.

    python -m benchmarks.report --results build/bench --out build/bench/BENCHMARKS.md

A file that was measured on a tree with uncommitted changes is refused, because nobody can repeat it; with
``--allow-dirty`` it is reported and marked "dirty".
"""

import json
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.gpu import told
from benchmarks.harness import RESULTS, ROOT, is_dirty
from benchmarks.pretrained import MODELS
from benchmarks.regret import shown
from benchmarks.rivals import COLUMNS as RIVALS
from benchmarks.serving import COLUMNS as LOADED
from benchmarks.tables import Rows, cells, grid, pivot, table

Document = dict[str, Any]
THEIRS = ("plain", "static", "lookup2", "assistant")  # the methods of a race that are not ours
RACE = "prompts, mode, dtype, batch, tokens"
LENGTHS = "prompt tokens, batch, mode, dtype, tokens"
INTRODUCTION = """
Speedups are medians of per-call ratios against plain `generate` in the same process on the same prompts; **bold is a
loss**. S is tokens a pass and sequence. The pages below have 95% bootstrap intervals, commands, commits and versions.
A run is "dirty" if its code had uncommitted changes, so that nobody can repeat it. Speedups here are of pretrained
models; the other pages are mostly of the bundled one, whose texts are easier to predict.
"""
SMALL = "The bundled model, by itself and embedded in larger ones"
# -- one question each: what a page says of a document --


def latency(shape: str, rows: Rows) -> str:
    """Latency curves, one a line: t(T)/t(1)."""
    sizes = [
        {**row, "single": row["pass_ms"]["1"], "size": size, "ratio": f"{taken / row['pass_ms']['1']:.2f}"}
        for row in rows
        for size, taken in row["pass_ms"].items()
        if size != "1"
    ]
    return pivot(f"{shape}, t(1) ms", "T={size}", "ratio", sizes)


def speedups(rows: Rows, index: str = RACE) -> str:
    """One line for every contest, one column for every method."""
    return pivot(index, "{label}", "speedup", [row for row in rows if row["method"] != "plain"])


def race(document: Document) -> str:
    """Speedups at a glance and in full, what was not run, and the machine's limits."""
    skipped = dict.fromkeys(f"- Not run: {row['method']}, {row['reason']}" for row in document["skipped"])
    columns = f"method, {RACE}, speedup, 95%, S, tokens/s, nodes, of ceiling, texts that differ"
    parts = [speedups(document["rows"]), table(columns, document["rows"]), "\n".join(skipped), theory_card(document)]
    return "\n\n".join(part for part in parts if part)


def theory_card(document: Document) -> str:
    """What memory allows, for each dtype and batch, and the latency curve."""
    rows = []
    for dtype, card in document["theory"].items():
        rate = max(value for kind in card["bandwidth_gb_per_s"].values() for value in kind.values())
        for batch, passes in card["pass_ms"].items():
            row = {"dtype": dtype, "batch": batch, "gb_per_s": rate, "pass_ms": passes}
            rows.append({**row, "read_mb": card["weight_bytes_per_pass"] / 1e6, "floor": card["floor_ms"][batch]})
    curves = latency("dtype, batch, read a pass, bandwidth, floor ms", rows)
    return f"Passes; T columns are t(T)/t(1):\n\n{curves}" if rows else ""


def real(document: Document) -> str:
    """All that is measured of a pretrained model, and what was not."""
    found, exact = document["acceptance"], [{**row, "new_tokens": row["tokens"]} for row in document["exact"]]
    raced = [
        {**row, **{key: f"{row[key]:.2f}x" if key in row else "" for key in ("drafts", "passes_gain")}}
        for row in document["rows"]
    ]
    few, whole = ([row for row in found if (row["category"] == "few") is few] for few in (True, False))
    few.sort(key=lambda row: (row["mode"], row["source"], row["nodes"]))
    single = [row for row in raced if row["batch"] == 1]
    places = f"method, {LENGTHS}, calls, speedup, 95%, drafts', passes', S, nodes, tokens/s, texts that differ"
    later = "method, prompt tokens, mode, first token ms, later token ms, later tokens, their 95%"
    first = "mode, call, plain ms, ours ms, speedup, 95%, CPU, texts that differ"
    late: dict[str, list[str]] = {}
    for row in document["skipped"]:
        case = " ".join(f"{key} {row[key]}" for key in row if key not in ("part", "reason"))
        late.setdefault(f"{row['part']}, {row['reason']}", []).append(case)
    parts = [
        ("Settings at random, in float32:", exact, table("mode, tokens, S, texts that differ", exact)),
        ("S by category and memory, 24 nodes:", whole, pivot("category, texts", "{mode}, {memory}", "S", whole)),
        (
            "S by source and nodes, cold, of a few of these texts:",
            few,
            pivot("mode, source", "{nodes} nodes", "S", few),
        ),
        ("Speedups:", raced, speedups(raced, LENGTHS)),
        ("In full; what drafts and what faster passes brought make up the whole:", raced, table(places, raced)),
        ("Of single prompts, without the prompt's own pass:", single, table(later, single)),
        ("Calls of fresh processes:", document["first"], table(first, document["first"])),
        ("Not run:", late, "\n".join(f"- {why}: {'; '.join(cases)}" for why, cases in late.items())),
    ]
    told = [part for title, rows, text in parts if rows for part in (title, text)]
    return "\n\n".join([*([f"License: {document['license']}."] if "license" in document else ()), *told])


def regret(document: Document) -> str:
    """Speeds of every size, and what the automatic mode loses against the best."""
    columns = "shape, set, mode, dtype, batch, best, best speed, automatic, regret, against plain"
    return table(columns, map(shown, document["rows"]))


def step_time(document: Document) -> str:
    """The latency curve of every shape."""
    return latency("preset, dtype, context, batch", document["rows"])


def races(document: Document) -> Rows:
    """The races of a run on a GPU."""
    parts = document["parts"].items()
    return [row for name, part in parts if name.startswith("races") for row in part["rows"]]


def gpu(document: Document) -> str:
    """What held, races, latency curves and attention."""
    rows = {name: part["rows"] for name, part in document["parts"].items()}
    curves = [{**row, "floor": row["floor_ms"]} for row in rows.get("curves", ()) if row["what"] == "curve"]
    attention = [
        {**row, "us": f"{1e3 * row['ms']:.0f}", "tree": row["nodes"]}
        for row in rows.get("attention", ())
        if "chunks" not in row["way"]
    ]
    parts = [
        grid(("claim", "worst", "held"), [told(claim, "**no**") for claim in document["claims"]]),
        "Speedups:",
        table("model, race, method, speedup, 95%, S, tokens/s, nodes, texts that differ", races(document)),
        "Passes; the floor is what reading weights and keys and values takes, eager what transformers' own pass does:",
        latency("shape, context, eager ms, floor ms", curves),
        "One layer's attention in microseconds, by history and nodes:",
        pivot("history, tree", "{way}", "us", attention),
    ]
    return "\n\n".join(parts)


def rivals(document: Document) -> str:
    """Every way in every mode, and what was not run."""
    missing = [f"- Not run: {row['way']}, {row['reason']}" for row in document["skipped"]]
    return "\n\n".join([table(RIVALS, document["rows"]), *missing])


PAGES = {  # by the kind of the documents: title, what a reader has to know, and a document's columns or its writer
    "real": (
        "Pretrained models",
        "What `make real` measured: texts of pretrained models, by prompts of this project. Few texts, wide intervals.",
        real,
    ),
    "rivals": ("Against llama.cpp and OpenVINO", "One process a way, the same weights and prompts.", rivals),
    "regret": ("What choosing sizes costs", "The automatic mode against the best fixed number of nodes.", regret),
    "serving": ("Servers under load", "One at a time, by one driver.", lambda each: table(LOADED, each["rows"])),
    "race": ("Every way to decode, raced", "The ceiling is S t(1)/t(T), if nothing but passes took time.", race),
    "step time": ("The latency curve", "t(T)/t(1), with random weights.", step_time),
    "gpu": (
        "On a GPU",
        "What `make gpu` measured. Races: bfloat16, a small model embedded exactly in larger ones; plain is eager.",
        gpu,
    ),
}

# -- the whole --


def read(results: Path, allow_dirty: bool) -> dict[str, list[Document]]:
    """The documents in a folder by their kind, in the order of their names; dirty ones are refused if not allowed."""
    found: dict[str, list[Document]] = {kind: [] for kind in PAGES}
    dirty = []
    for file in sorted(results.glob("*.json")):
        document = json.loads(file.read_text())
        if document.get("benchmark") not in found:
            continue
        commits = [run["commit"] for run in (*document.get("earlier", ()), document)]
        dirty += [f"{file.name} ({commit})" for commit in commits if is_dirty(commit)]
        document |= {"file": file.name, "mark": " (dirty)" if any(map(is_dirty, commits)) else ""}
        found[document["benchmark"]].append(document)
    if dirty and not allow_dirty:
        raise typer.BadParameter(
            f"{len(dirty)} of the results in {results} were measured on a tree with uncommitted changes: expected a "
            f"commit, got {', '.join(dirty)}. Measure them again, remove them, or mark them by --allow-dirty."
        )
    return found


def home(document: Document) -> str:
    """Where a document comes from: machine and device, and the model."""
    machine = document["machine"]
    on_gpu = "cuda" in document.get("device", "")
    where = machine["gpu"] if on_gpu else f"{machine['cpu']}, {machine['cores']} threads"
    return where + (f", model {document['model']}" if "model" in document else "") + document["mark"]


def runs(documents: Iterable[Document]) -> str:
    """What each file was made by, and where; the file that a run wrote at first says nothing."""
    rows = []
    for document in documents:
        versions = document["versions"]
        software = f"torch {versions['torch']}, transformers {versions['transformers']}, Python {versions['python']}"
        for run in (*document.get("earlier", ()), document):
            argv = list(run["argv"])
            for local in {"--out", "--folder"}.intersection(argv):  # folders of the machine that it ran on
                del argv[argv.index(local) : argv.index(local) + 2]
            rows.append((document["file"], home(document), software, run["commit"], f"`python {shlex.join(argv)}`"))
    return grid(("file", "where", "versions", "commit", "command"), rows)


def losses(kind: str, documents: list[Document]) -> list[str]:
    """Every median of our methods below 1.00x, the worst first; dirty runs by themselves."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for document in documents:
        rows = [row for row in document["rows"] if not row["method"].startswith(THEIRS)]
        groups.setdefault(document["mark"], []).extend(rows)
    lines = []
    for mark, rows in groups.items():
        lost = []
        for row in sorted(rows, key=lambda row: row["speedup_median"]):
            words = [row.get(key) for key in ("label", "set", "length", "group", "mode", "dtype")]
            words += [f"batch {row['batch']}" if row.get("batch", 1) > 1 else None, *cells("speedup", row)]
            lost += [" ".join(str(word) for word in words if word not in (None, "all"))] if words[-1][0] == "*" else []
        lines.append(f"- {PAGES[kind][0]}{mark}: {'; '.join([f'{len(lost)} of {len(rows)} medians', *lost])}.")
    return lines


def summary(found: dict[str, list[Document]], links: dict[str, str], flag: str) -> str:
    """BENCHMARKS.md: pretrained models' speedups and losses, and how to repeat them."""
    parts = ["# Benchmarks", f"Written by `python -m benchmarks.report{flag}` from `benchmarks/results/*.json`."]
    parts += [INTRODUCTION.strip("\n"), "\n".join(f"- [{title}]({link})" for title, link in links.items())]
    parts += ["## Pretrained models"] if (raced := [each for each in found["real"] if each["rows"]]) else []
    for document in raced:
        parts += [f"{home(document)}:", speedups(document["rows"], LENGTHS)]
    for document in found["gpu"]:
        if rows := [row for row in races(document) if row["model"] in MODELS]:
            parts += [f"{document['machine']['gpu']}:", speedups(rows, "model, race")]
    if raced:
        parts += ["## Where it loses", "\n".join(losses("real", raced))]
    scripts = [file.read_text() for file in sorted(Path(__file__).parent.glob("*.py"))]
    commands = [match[0] for script in scripts if (match := re.search("^    python .*$", script, re.M))]
    return "\n\n".join([*parts, "## Commands", "\n".join(commands)]) + "\n"


def build(results: Path, out: Path, allow_dirty: bool = False) -> str:
    """Write a page beside the results for every question that has some, and return the summary with its links."""
    found = read(results, allow_dirty)
    links = {SMALL: Path(os.path.relpath(ROOT / "docs" / "embedded.md", out.parent)).as_posix()}
    for kind, (title, note, write) in PAGES.items():
        parts = [f"# {title}", note]
        for document in found[kind]:
            parts += [f"## {document['file']}, {home(document)}", write(document)]
        if found[kind]:
            file = results / f"{kind.replace(' ', '_')}.md"
            file.write_text("\n\n".join([*parts, "## Runs", runs(found[kind])]) + "\n")
            links[title] = Path(os.path.relpath(file, out.parent)).as_posix()
    return summary(found, links, " --allow-dirty" if allow_dirty else "")


def main(
    results: Annotated[Path, typer.Option(help="Folder of JSON files.")] = RESULTS,
    out: Annotated[Path, typer.Option(help="The file to write.")] = ROOT / "BENCHMARKS.md",
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty", help="Report runs of a dirty tree, marked.")] = False,
) -> None:
    """Write the report."""
    out.write_text(build(results, out, allow_dirty))
    print(f"{out} written")


if __name__ == "__main__":
    typer.run(main)
