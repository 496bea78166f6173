"""Write BENCHMARKS.md and its plots from the JSON files that the benchmarks left.

    python -m benchmarks.report

It reads what the scripts beside it wrote to benchmarks/results; plots need matplotlib
(``pip install lookahead-decoding[bench]``) and are left out without it.
"""

import importlib.util
import json
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parents[1]
KINDS = ("race", "first call", "long context", "architectures", "questions", "ablation", "medusa", "step time")
OURS = ("auto", "cold")  # the automatic mode, whose losses are listed by themselves


def loses(speedup: float) -> bool:
    """Whether a speedup is below 1.00x as it is printed."""
    return round(speedup, 2) < 1


def cell(speedup: float) -> str:
    """A speedup for a table: a loss is bold."""
    return f"**{speedup:.2f}x**" if loses(speedup) else f"{speedup:.2f}x"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(item).replace("|", "\\|") for item in line) + " |" for line in lines) + "\n"


def read(results: Path) -> dict[str, list[dict[str, Any]]]:
    """The documents in a folder by what made them, in the order of their names; others are left alone."""
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for file in sorted(results.glob("*.json")):
        document = json.loads(file.read_text())
        if document.get("benchmark") in found:
            found[document["benchmark"]].append({**document, "file": file.name})
    return found


def runs(documents: Iterable[dict[str, Any]]) -> str:
    """What each file was made by, and where."""
    rows = []
    for document in documents:
        machine, versions = document["machine"], document["versions"]
        on_gpu = "cuda" in document.get("device", "")
        where = machine["gpu"] if on_gpu else f"{machine['cpu']} ({machine['cpu_capability']})"
        software = f"torch {versions['torch']}, transformers {versions['transformers']}, Python {versions['python']}"
        for run in (*document.get("earlier", ()), document):
            command = f"`python {shlex.join(run['argv'])}`"
            rows.append((document["file"], where, machine["cores"], software, run["commit"], command))
    return table(("file", "machine", "threads", "versions", "commit", "command"), rows)


def home(document: dict[str, Any]) -> str:
    """Which files may share a section: the same model on the same machine and device."""
    machine = document["machine"]
    on_gpu = "cuda" in document["device"]
    where = machine["gpu"] if on_gpu else f"{machine['cpu']}, {machine['cores']} threads"
    return f"Model {document['model']} on {where}"


def theory_card(documents: list[dict[str, Any]]) -> str:
    """The machine's limits for each dtype, from the first file that has them."""
    cards: dict[tuple[str, str], tuple[dict[str, Any], dict[str, float]]] = {}
    for document in documents:
        for dtype, card in document["theory"].items():
            for batch, passes in card["pass_ms"].items():
                cards.setdefault((dtype, batch), (card, passes))
    if not cards:
        return ""
    sizes = sorted({int(size) for _, passes in cards.values() for size in passes})
    rows = []
    for (dtype, batch), (card, passes) in cards.items():
        rate = max(value for kind in card["bandwidth_gb_per_s"].values() for value in kind.values())
        single = passes["1"]
        rows.append(
            (
                dtype,
                batch,
                f"{card['parameters'] / 1e6:.1f}M",
                f"{card['weight_bytes_per_pass'] / 1e6:.1f} MB",
                f"{rate:.1f} GB/s",
                f"{card['floor_ms'][batch]:.2f} ms",
                f"{single:.2f} ms",
                *(f"{passes[str(size)] / single:.2f}" if str(size) in passes else "" for size in sizes[1:]),
            )
        )
    context = next(iter(cards.values()))[0]["context"]
    head = ("dtype", "batch", "parameters", "read a pass", "bandwidth", "floor", "t(1)")
    return f"Passes at {context} tokens of history; T columns are t(T)/t(1).\n\n" + table(
        (*head, *(f"T={size}" for size in sizes[1:])), rows
    )


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["set"], row["mode"], row["dtype"], row["batch"], row["new_tokens"], row["group"]


def _label(place: tuple[Any, ...]) -> tuple[str, ...]:
    name, mode, dtype, batch, new_tokens, group = place
    return (name if group == "all" else f"{name}, {group}", mode, dtype, str(batch), str(new_tokens))


PLACE = ("prompts", "mode", "dtype", "batch", "tokens")


def overview(rows: list[dict[str, Any]]) -> str:
    """One line for every contest, one column for every method."""
    labels = {row["method"]: row["label"] for row in rows if row["method"] != "plain"}
    places: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        places.setdefault(_place(row), {})[row["method"]] = row["speedup_median"]
    lines = [
        (*_label(place), *(cell(found[name]) if name in found else "" for name in labels))
        for place, found in places.items()
    ]
    return table((*PLACE, *labels.values()), lines)


def losses(rows: list[dict[str, Any]]) -> str:
    """Every place where the automatic mode is slower than plain decoding, the worst first."""
    measured = [row for row in rows if row["method"] in OURS]
    lost = sorted((r for r in measured if loses(r["speedup_median"])), key=lambda r: r["speedup_median"])
    if not lost:
        return f"{len(measured)} medians of the automatic mode were measured; none of them is below 1.00x.\n"
    lines = (
        (*_label(_place(row)), row["label"], cell(row["speedup_median"]), _interval(row), f"{row['S']:.2f}")
        for row in lost
    )
    share = f"{len(lost)} of {len(measured)} medians of the automatic mode are below 1.00x:\n\n"
    return share + table((*PLACE, "method", "speedup", "95%", "S"), lines)


def _interval(row: dict[str, Any]) -> str:
    return "{:.2f}-{:.2f}".format(*row["speedup_interval"])


def details(rows: list[dict[str, Any]]) -> str:
    """Every contest in full."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(_place(row), []).append(row)
    head = (
        "method",
        "speedup",
        "95%",
        "quartiles",
        "tokens/s",
        "S",
        "passes",
        "nodes",
        "of ceiling",
        "texts that differ",
    )
    parts = []
    for place, members in groups.items():
        name, mode, dtype, batch, tokens = _label(place)
        parts.append(f"#### {name}, {mode}, {dtype}, batch {batch}, {tokens} tokens\n")
        lines = []
        for row in members:
            differ = f"{row['texts_that_differ']} of {row['texts']}"
            lines.append(
                (
                    row["label"],
                    cell(row["speedup_median"]),
                    _interval(row),
                    "{:.2f}-{:.2f}".format(*row["speedup_quartiles"]),
                    f"{row['tokens_per_s_median']:.0f}",
                    f"{row['S']:.2f}",
                    row["passes"],
                    f"{row['nodes']:.1f}",
                    f"{row['share_of_ceiling']:.0%}",
                    differ if row["same_draws"] else f"{differ} (other draws)",
                )
            )
        parts.append(table(head, lines))
    return "\n".join(parts)


def first_calls(documents: list[dict[str, Any]]) -> str:
    """First calls of a process."""
    lines = [
        (
            dtype,
            case,
            document["new_tokens"],
            f"{row['plain_median_ms']:.0f}",
            f"{row['ours_median_ms']:.0f}",
            cell(row["speedup"]),
        )
        for document in documents
        for dtype, cases in document["results"].items()
        for case, row in cases.items()
    ]
    return table(("dtype", "call", "tokens", "plain, ms", "ours, ms", "speedup"), lines)


def long_contexts(document: dict[str, Any]) -> str:
    """What the length of the history changes: speedups, with and without reading the prompt, and passes."""
    lines = [
        (
            row["context"],
            row["mode"],
            row["dtype"],
            row["label"],
            f"{row['S']:.2f}",
            f"{row['nodes']:.1f}",
            f"{row['first_token_ms']:.0f}",
            f"{row['token_ms']:.2f}",
            cell(row["speedup_median"]),
            cell(row["after_median"]),
            "{:.2f}-{:.2f}".format(*row["after_interval"]),
            f"{row['texts_that_differ']} of {row['texts']}",
        )
        for row in document["rows"]
    ]
    head = ("context", "mode", "dtype", "method", "S", "nodes", "first token, ms", "ms a later token")
    head += ("speedup", "of later tokens", "95%", "texts that differ")
    shapes = [{"preset": document["model"], "batch": 1, **row} for row in document["passes"]]
    return (
        f"{document['new_tokens']} new tokens after prompts of so many. The first token's time is that of reading the "
        "prompt; the second speedup is that of the tokens after it.\n\n"
        + table(head, lines)
        + "\nTheir passes, as transformers runs them:\n\n"
        + step_times([{"rows": shapes}])
    )


def architectures(document: dict[str, Any]) -> str:
    """Other architectures, with random weights."""
    lines = [
        (
            row["family"],
            row["route"],
            row["mode"],
            f"{row['plain_token_ms']:.1f}",
            cell(row["speedup_median"]),
            _interval(row),
            f"{row['S']:.2f}",
            f"{row['texts_that_differ']} of {row['texts']}",
        )
        for row in document["rows"]
    ]
    head = ("family", "route", "mode", "plain, ms a token", "speedup", "95%", "S", "texts that differ")
    return (
        "Small models with random weights, prompts of random tokens: at temperature 1.5 there is nothing to gain, and "
        "a speedup is that of passes; greedy texts soon repeat themselves.\n\n" + table(head, lines)
    )


def questions(document: dict[str, Any]) -> str:
    """Spec-Bench's summary by category."""
    results = document["results"]
    plain = results.get("plain", {})
    lines = []
    for name, categories in results.items():
        for category, row in categories.items():
            base = plain.get(category)
            ratio = cell(row["tokens_per_s_mean"] / base["tokens_per_s_mean"]) if base else ""
            differ = "" if row["answers_that_differ"] is None else row["answers_that_differ"]
            rate = f"{row['tokens_per_s_mean']:.1f}"
            lines.append((name, category, row["questions"], f"{row['S']:.2f}", rate, ratio, differ))
    head = ("method", "category", "questions", "S", "tokens/s", "speedup", "answers that differ")
    return f"{document['model']}, {document['dtype']}, {document['mode']}:\n\n{table(head, lines)}"


def ablation(document: dict[str, Any]) -> str:
    """S by drafted nodes, one table for each way to decode, and the cost of drafting."""
    sizes = sorted({row["nodes"] for row in document["rows"]})
    groups: dict[tuple[str, str], dict[str, dict[int, dict[str, Any]]]] = {}
    for row in document["rows"]:
        sources = groups.setdefault((row["mode"], row["group"]), {})
        sources.setdefault(row["source"], {})[row["nodes"]] = row
    parts = []
    for (mode, group), sources in groups.items():
        name = mode if group == "all" else f"{mode}, {group}"
        for key, form, what in (("S", "{:.2f}", "S"), ("draft_ms", "{:.3f}", "milliseconds of drafting a pass")):
            lines = [
                (source, *(form.format(found[size][key]) if size in found else "" for size in sizes))
                for source, found in sources.items()
            ]
            parts.append(f"{name}: {what} by drafted nodes\n\n" + table(("source", *sizes), lines))
    return "\n".join(parts)


def medusa(document: dict[str, Any]) -> str:
    """Medusa's heads beside other drafts, in the race, and with lossy acceptance."""
    tree = f"the fixed tree has {document['tree_nodes']} nodes"
    parts = []
    if document["drafts"]:
        lines = [
            (
                row["mode"] if row["group"] == "all" else f"{row['mode']}, {row['group']}",
                row["draft"],
                row["texts"],
                f"{row['S']:.2f}",
                f"{row['nodes_per_pass']:.1f}",
                f"{row['draft_ms']:.2f}",
            )
            for row in document["drafts"]
        ]
        head = ("mode", "draft", "texts", "S", "nodes a pass", "draft, ms")
        parts.append(
            f"Tokens a pass with {document['nodes']} nodes ({tree}), every text cold:\n\n" + table(head, lines)
        )
    if document["rows"]:
        parts += ["Speedups:\n", overview(document["rows"]), details(document["rows"])]
    if document["curve"]:
        kinds = list(dict.fromkeys(row["acceptance"] for row in document["curve"]))
        found = {(row["temperature"], row["acceptance"]): row["S"] for row in document["curve"]}
        degrees = list(dict.fromkeys(row["temperature"] for row in document["curve"]))
        lines = [(f"{degree:g}", *(f"{found[degree, kind]:.2f}" for kind in kinds)) for degree in degrees]
        parts.append("S by temperature; typical and nucleus acceptance are lossy:\n\n" + table(("T", *kinds), lines))
    return "\n".join(parts)


def step_times(documents: list[dict[str, Any]]) -> str:
    """t(T)/t(1) of every shape."""
    rows = [row for document in documents for row in document["rows"]]
    sizes = sorted({int(size) for row in rows for size in row["pass_ms"]})
    lines = []
    for row in rows:
        single = row["pass_ms"]["1"]
        ratios = (
            f"{row['pass_ms'][str(size)] / single:.2f}" if str(size) in row["pass_ms"] else "" for size in sizes[1:]
        )
        lines.append((row["preset"], row["dtype"], row["context"], row["batch"], f"{single:.2f}", *ratios))
    head = ("shape", "dtype", "context", "batch", "t(1), ms")
    return table((*head, *(f"T={size}" for size in sizes[1:])), lines)


def plots(found: dict[str, list[dict[str, Any]]], folder: Path) -> list[Path]:
    """Draw what there is to draw; nothing without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    drawn: list[Path] = []

    def finish(name: str, figure: Any) -> None:
        figure.savefig(folder / f"{name}.png", dpi=120, bbox_inches="tight")
        pyplot.close(figure)
        drawn.append(folder / f"{name}.png")

    for number, document in enumerate(found["ablation"]):
        panels = list(dict.fromkeys((row["mode"], row["group"]) for row in document["rows"]))
        figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4), squeeze=False, sharey=True)
        for axis, (mode, group) in zip(axes[0], panels, strict=True):
            rows = [row for row in document["rows"] if (row["mode"], row["group"]) == (mode, group)]
            for source in dict.fromkeys(row["source"] for row in rows):
                line = sorted((row["nodes"], row["S"]) for row in rows if row["source"] == source)
                axis.plot(*zip(*line, strict=True), marker="o", label=source)
            axis.set(title=mode if group == "all" else f"{mode}, {group}", xlabel="drafted nodes a pass", xscale="log")
            sizes = sorted({row["nodes"] for row in rows})
            axis.set_xticks(sizes, list(map(str, sizes)), fontsize="small")
            axis.minorticks_off()
        axes[0][0].set_ylabel("S, tokens a pass")
        axes[0][-1].legend()
        finish(f"nodes{number or ''}", figure)

    curves = [
        (f"{r['preset']}, {r['dtype']}, {r['context']}", r["pass_ms"]) for d in found["step time"] for r in d["rows"]
    ]
    if curves:
        figure, axis = pyplot.subplots(figsize=(8, 5))
        for name, passes in curves:
            line = sorted((int(size), taken / passes["1"]) for size, taken in passes.items())
            axis.plot(*zip(*line, strict=True), marker="o", label=name)
        axis.set(xlabel="nodes of a pass, T", ylabel="t(T)/t(1)", title="Cost of a pass: shape, dtype, context")
        axis.legend(fontsize="small", ncols=2)
        finish("step_time", figure)

    for number, documents in enumerate(sections(found["race"]).values()):
        rows = [row for document in documents for row in document["rows"] if row["group"] == "all"]
        for dtype in dict.fromkeys(row["dtype"] for row in rows):
            bars(
                pyplot, finish, [row for row in rows if row["dtype"] == dtype], f"speedup-{dtype}{number or ''}", dtype
            )
    return drawn


def bars(pyplot: Any, finish: Any, rows: list[dict[str, Any]], name: str, title: str) -> None:
    """Speedups of all methods in all contests of a dtype, with their intervals."""
    places = list(dict.fromkeys(map(_place, rows)))
    labels = {row["method"]: row["label"] for row in rows if row["method"] != "plain"}
    if not labels:
        return
    figure, axis = pyplot.subplots(figsize=(max(6, 2.2 * len(places)), 4.5))
    width = 0.8 / len(labels)
    for offset, (method, label) in enumerate(labels.items()):
        chosen = {_place(row): row for row in rows if row["method"] == method}
        at = [index + offset * width for index, place in enumerate(places) if place in chosen]
        members = [chosen[place] for place in places if place in chosen]
        heights = [row["speedup_median"] for row in members]
        low = [max(0.0, row["speedup_median"] - row["speedup_interval"][0]) for row in members]
        high = [max(0.0, row["speedup_interval"][1] - row["speedup_median"]) for row in members]
        axis.bar(at, heights, width, label=label, yerr=(low, high), error_kw={"linewidth": 0.7})
    axis.axhline(1.0, color="black", linewidth=0.8)
    ticks = [f"{place[0]}, {place[1]}\nbatch {place[3]}" for place in places]
    axis.set_xticks([index + 0.4 - width / 2 for index in range(len(places))], ticks, fontsize="small")
    axis.set(ylabel="speedup against generate", title=title)
    axis.legend(fontsize="small", ncols=2)
    finish(name, figure)


def sections(documents: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Races by model and machine."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for document in documents:
        grouped.setdefault(home(document), []).append(document)
    return grouped


def build(results: Path, out: Path) -> str:
    """The whole report; plots go to the results' folder ``plots``."""
    found = read(results)
    drawn = plots(found, results / "plots")
    races = sections(found["race"])
    parts = [
        "# Benchmarks",
        "Generated by `python -m benchmarks.report` from `benchmarks/results/*.json`; edit neither by hand.",
        "Speedups are medians of per-call ratios against plain `generate` in the same process on the same prompts, "
        "with 95% bootstrap intervals; **bold is a loss**. S is tokens a pass and row. The ceiling is S t(1)/t(T), "
        "the speedup if nothing but passes took time.",
    ]
    if races:
        parts.append("## Where it loses")
        for where, documents in races.items():
            parts += [f"{where}:", losses([row for document in documents for row in document["rows"]])]
    for where, documents in races.items():
        rows = [row for document in documents for row in document["rows"]]
        parts += [f"## {where}", "### Theory card", theory_card(documents), "### Speedups", overview(rows)]
        skipped = dict.fromkeys(
            f"- {row['method']}" + (f", batch {row['batch']}" if "batch" in row else "") + f": {row['reason']}"
            for document in documents
            for row in document["skipped"]
        )
        if skipped:
            parts += ["Not run:", "\n".join(skipped)]
        parts += ["### In full", details(rows)]
    for kind, title, write in (
        ("first call", "First call of a process", first_calls),
        ("long context", "Long contexts", lambda documents: "\n".join(map(long_contexts, documents))),
        ("architectures", "Other architectures", lambda documents: "\n".join(map(architectures, documents))),
        ("questions", "Spec-Bench questions", lambda documents: "\n".join(map(questions, documents))),
        ("ablation", "Sources of drafts", lambda documents: "\n".join(map(ablation, documents))),
        ("medusa", "Medusa", lambda documents: "\n".join(map(medusa, documents))),
        ("step time", "Cost of a pass", step_times),
    ):
        if found[kind]:
            parts += [f"## {title}", write(found[kind])]
    if drawn:
        parts.append("## Plots")
        parts += [f"![{file.stem}]({Path(os.path.relpath(file, out.parent)).as_posix()})" for file in drawn]
    parts += ["## Runs", runs(document for documents in found.values() for document in documents)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def main(
    results: Annotated[Path, typer.Option(help="Folder of JSON files.")] = ROOT / "benchmarks" / "results",
    out: Annotated[Path, typer.Option(help="The file to write.")] = ROOT / "BENCHMARKS.md",
) -> None:
    """Write the report."""
    out.write_text(build(results, out))
    print(f"{out} written")


if __name__ == "__main__":
    typer.run(main)
