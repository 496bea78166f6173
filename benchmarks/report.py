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
from benchmarks.regret import shown
from benchmarks.tables import Rows, cells, grid, pivot, table

Document = dict[str, Any]
THEIRS = ("plain", "static", "lookup2", "lookup3", "assistant")  # the methods of a race that are not ours
RACE = "prompts, mode, dtype, batch, tokens"
REAL_COST = f"shape, {RACE}"
INTRODUCTION = """
Speedups are medians of per-call ratios against plain `generate` in the same process on the same prompts; **bold is a
loss**. S is tokens a pass and sequence. The pages below have 95% bootstrap intervals, commands, commits and versions.
A run is "dirty" if its code had uncommitted changes, so that nobody can repeat it. Greedy texts of small models mostly
end in a loop, which flatters whatever copies: `no-loop` has prompts whose texts do not. `hot` is temperature 1.5, where
drafts gain nothing; `random` prompts are tokens drawn at random.
"""
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


def race(document: Document, index: str = RACE) -> str:
    """Speedups at a glance and in full, and what was not run."""
    skipped = dict.fromkeys(f"- Not run: {row['method']}, {row['reason']}" for row in document["skipped"])
    columns = f"method, {index}, speedup, 95%, S, tokens/s, nodes, of ceiling, texts that differ"
    parts = [speedups(document["rows"], index), table(columns, document["rows"]), "\n".join(skipped)]
    return "\n\n".join(parts).rstrip("\n")


def real_cost(document: Document) -> str:
    """The same by shape."""
    return race(document, REAL_COST)


def regret(document: Document) -> str:
    """Speeds of every size, and what the automatic mode loses against the best."""
    columns = "shape, set, mode, dtype, batch, best, best speed, automatic, regret, against plain"
    return table(columns, map(shown, document["rows"]))


def measured(document: Document) -> list[dict[str, Any]]:
    """A document's rows; first calls keep them by dtype and case."""
    return document.get("rows") or [
        {"new_tokens": document["new_tokens"], "dtype": dtype, "case": case, "speedup_median": row["speedup"], **row}
        for dtype, rows in document["results"].items()
        for case, row in rows.items()
    ]


def long_context(document: Document) -> str:
    """What the length of the prompt changes: speedups, with and without prefill, and passes."""
    columns = "context, mode, dtype, method, S, nodes, first token ms, later token ms, speedup, 95%, later tokens, "
    full = table(columns + "their 95%, texts that differ", document["rows"])
    return f"{full}\n\nPasses as transformers runs them:\n\n{latency('dtype, context', document['passes'])}"


def ablation(document: Document) -> str:
    """S by drafted nodes, and the cost of drafting."""
    rows = sorted(document["rows"], key=lambda row: (row["mode"], row["group"], row["nodes"]))
    found, taken = (pivot("prompts, mode, source", "{nodes}", value, rows) for value in ("S", "draft ms"))
    return f"{found}\n\nMilliseconds of drafting a pass:\n\n{taken}"


def medusa(document: Document) -> str:
    """Medusa's heads beside other drafts, in the race, and with lossy acceptance."""
    drafts = table("prompts, mode, draft, S, nodes a pass, draft ms", document["drafts"])
    curve = pivot("temperature", "{acceptance}", "S", document["curve"])
    return (
        f"S with {document['nodes']} nodes; the fixed tree has {document['tree_nodes']}:\n\n{drafts}\n\nSpeedups:\n\n"
        f"{race(document)}\n\nS by temperature; typical and nucleus acceptance are lossy:\n\n{curve}"
    )


def exactness(document: Document) -> str:
    """How many texts differ from plain ones."""
    rows = [
        {"mode": mode, "new_tokens": row["tokens"], "texts_that_differ": len(row["differ"]), **row}
        for mode, row in document["results"].items()
    ]
    settings = "sources, nodes and memory" if document.get("automatic") else "W, N and G"
    return f"{document['dtype']}; {settings} at random:\n\n{table('mode, tokens, S, texts that differ', rows)}"


def step_time(document: Document) -> str:
    """The latency curve of every shape."""
    return latency("preset, dtype, context, batch", document["rows"])


def raced(document: Document) -> Rows:
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
        table("model, race, method, speedup, 95%, S, tokens/s, nodes, texts that differ", raced(document)),
        "Passes; the floor is what reading weights and keys and values takes, eager what transformers' own pass does:",
        latency("shape, context, eager ms, floor ms", curves),
        "One layer's attention in microseconds, by history and nodes:",
        pivot("history, tree", "{way}", "us", attention),
    ]
    return "\n\n".join(parts)


PAGES = {  # by the kind of the documents: title, what a reader has to know, and a document's columns or its writer
    "real cost": (
        "At a large model's cost",
        "A small model embedded exactly in a larger one: its text, by passes that cost what that shape costs.",
        real_cost,
    ),
    "regret": (
        "What choosing sizes costs",
        "Regret: how much slower the automatic mode is than the best fixed number of nodes, or plain decoding.",
        regret,
    ),
    "race": ("Every way to decode, raced", "The ceiling is S t(1)/t(T), if nothing but passes took time.", race),
    "first call": (
        "First call of a process",
        "Medians of fresh processes in turn.",
        "dtype, case, tokens, plain ms, ours ms, speedup",
    ),
    "long context": ("Long prompts", "The first token's time is that of prefill.", long_context),
    "architectures": (
        "Other architectures",
        "Small models with random weights and prompts: at temperature 1.5 there is nothing to gain.",
        "family, route, mode, plain ms a token, speedup, 95%, S, texts that differ",
    ),
    "ablation": ("Sources of drafts", "S by drafted nodes; every text starts cold if not told.", ablation),
    "medusa": ("Medusa's heads", "Every text starts cold.", medusa),
    "step time": ("The latency curve", "t(T)/t(1), with random weights.", step_time),
    "exactness": ("Texts that differ", "Every text is compared token by token.", exactness),
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
            if "--out" in argv:
                del argv[argv.index("--out") : argv.index("--out") + 2]
            rows.append((document["file"], home(document), software, run["commit"], f"`python {shlex.join(argv)}`"))
    return grid(("file", "where", "versions", "commit", "command"), rows)


def theory_card(documents: Iterable[Document]) -> str:
    """The machines' limits for each dtype and batch, each from the first file that has them."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for document in documents:
        for dtype, card in document["theory"].items():
            rate = max(value for kind in card["bandwidth_gb_per_s"].values() for value in kind.values())
            for batch, passes in card["pass_ms"].items():
                row = {"machine": home(document), "dtype": dtype, "batch": batch, "gb_per_s": rate, "pass_ms": passes}
                row |= {"read_mb": card["weight_bytes_per_pass"] / 1e6, "floor": card["floor_ms"][batch]}
                rows.setdefault((home(document), dtype, batch), row)
    return latency("machine, dtype, batch, read a pass, bandwidth, floor ms", rows.values())


def losses(kind: str, documents: list[Document]) -> list[str]:
    """Every median of our methods below 1.00x, the worst first; dirty runs by themselves."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for document in documents:
        rows = [row for row in measured(document) if row.get("method") not in THEIRS]
        groups.setdefault(document["mark"], []).extend(rows)
    lines = []
    for mark, rows in groups.items():
        lost = []
        for row in sorted(rows, key=lambda row: row["speedup_median"]):
            words = [row.get(key) for key in ("shape", "case", "family", "label", "set", "group", "mode", "dtype")]
            words += [f"batch {row['batch']}" if row.get("batch", 1) > 1 else None, *cells("speedup", row)]
            lost += [" ".join(word for word in words if word not in (None, "all"))] if words[-1][0] == "*" else []
        lines.append(f"- {PAGES[kind][0]}{mark}: {'; '.join([f'{len(lost)} of {len(rows)} medians', *lost])}.")
    return lines


def summary(found: dict[str, list[Document]], links: dict[str, str], flag: str) -> str:
    """BENCHMARKS.md: speedups at large models' costs, the theory card, losses, the latency curve, and how to repeat
    them."""
    parts = ["# Benchmarks", f"Written by `python -m benchmarks.report{flag}` from `benchmarks/results/*.json`."]
    parts += [INTRODUCTION.strip("\n"), "\n".join(f"- [{PAGES[kind][0]}]({link})" for kind, link in links.items())]
    if found["gpu"]:
        parts += [f"## {PAGES['gpu'][0]}", PAGES["gpu"][1]]
    for document in found["gpu"]:
        parts += [f"{home(document)}:", speedups(raced(document), "model, race")]
    if found["real cost"]:
        parts += [f"## {PAGES['real cost'][0]}", PAGES["real cost"][1]]
    for document in found["real cost"]:
        parts += [f"{home(document)}:", speedups([row for row in document["rows"] if row["group"] == "all"], REAL_COST)]
    if found["race"]:
        parts += ["## Theory card", "Passes with 256 tokens in the KV cache; T columns are t(T)/t(1)."]
        parts.append(theory_card(found["race"]))
    timed = ("real cost", "race", "first call", "long context", "architectures", "medusa")
    parts += ["## Where it loses", "\n".join(line for kind in timed for line in losses(kind, found[kind]))]
    if found["step time"]:
        rows = [{**row, "machine": home(document)} for document in found["step time"] for row in document["rows"]]
        curves = latency("preset, machine, dtype, context", rows)
        parts += ["## Latency curve", "t(T)/t(1), with random weights.", curves]
    scripts = [file.read_text() for file in sorted(Path(__file__).parent.glob("*.py"))]
    commands = [match[0] for script in scripts if (match := re.search("^    python .*$", script, re.M))]
    return "\n\n".join([*parts, "## Commands", "\n".join(commands)]) + "\n"


def build(results: Path, out: Path, allow_dirty: bool = False) -> str:
    """Write a page beside the results for every question that has some, and return the summary with its links."""
    found = read(results, allow_dirty)
    links = {}
    for kind, (title, note, write) in PAGES.items():
        parts = [f"# {title}", note]
        for document in found[kind]:
            text = table(write, measured(document)) if isinstance(write, str) else write(document)
            parts += [f"## {document['file']}, {home(document)}", text]
        if found[kind]:
            file = results / f"{kind.replace(' ', '_')}.md"
            file.write_text("\n\n".join([*parts, "## Runs", runs(found[kind])]) + "\n")
            links[kind] = Path(os.path.relpath(file, out.parent)).as_posix()
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
