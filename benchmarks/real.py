"""Everything that is said of speed, on real pretrained models: exactness, tokens a pass, races, first calls.

    python -m benchmarks.real --models smollm2-135m --parts exact,s,race,first --out build/real

The models are built once (``benchmarks.pretrained``); a folder of your own is measured as well. ``exact``: texts
against plain ``generate``'s in float32. ``s``: tokens a pass, by source, nodes, category and memory. ``race``: every
way to decode, interleaved, by length, batch and temperature, each gain split into that of drafts and that of faster
passes. ``first``: the calls of fresh processes. A part takes its share of ``--minutes``, from the most telling case to
the least; what there was no time for is listed. Memory is of other prompts, never of the same.
"""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

import lookahead
from benchmarks import options
from benchmarks.harness import Run, load, quiet_console
from benchmarks.pretrained import MODELS, folder_of, home_of
from benchmarks.real_parts import PARTS, Bench, Budget


def numbered(given: str) -> dict[str, int]:
    """Read ``race:8,first``: parts, each with its number of texts, which is its usual one where none is given."""
    found = dict(part.strip().partition(":")[::2] for part in given.split(","))
    options.chosen(",".join(found), PARTS, "part")
    if wrong := [count for count in found.values() if count and not (count.isdecimal() and int(count))]:
        raise typer.BadParameter(f"--parts {given}: expected a number of texts behind the colon, got {wrong[0]!r}")
    return {name: int(count or PARTS[name][1]) for name, count in found.items()}


def place_of(name: str, home: Path) -> tuple[Path | None, str, tuple[str, ...]]:
    """A model's folder, which is built if it has to be; what it is asked; and the models that draft for it."""
    if name == "bundled":
        return None, "functions", ()
    if name in MODELS:
        return folder_of(name, home), MODELS[name].prompts, MODELS[name].drafts
    if not (Path(name) / "config.json").exists():
        raise typer.BadParameter(f"{name} is no model: expected bundled, {', '.join(MODELS)}, or a model's folder")
    return Path(name), "chat", ()


def main(
    models: Annotated[str, typer.Option(help=f"Comma-separated, or all: {', '.join(MODELS)}; folders; bundled.")] = (
        "smollm2-135m,gemma3-270m"
    ),
    parts: Annotated[
        str, typer.Option(help=f"Comma-separated: {', '.join(PARTS)}; with a number of texts: race:8.")
    ] = ",".join(PARTS),
    home: Annotated[
        Path | None, typer.Option("--folder", help="Where models are built; default: the user's cache.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="About, of all models together, once they are built.")] = 17.0,
    new_tokens: options.NewTokens = 48,
    dtype: options.Dtype = "float32",
    device: str = "cpu",
    threads: options.Threads = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few tokens of everything, to test the parts.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for real-MODEL.json.")] = Path("build/real"),
) -> None:
    """Measure every model; each leaves a document of its own."""
    console, counts = quiet_console(threads), numbered(parts)
    lookahead.augment_all()
    names = list(MODELS) if models == "all" else [name.strip() for name in models.split(",")]
    lengths, new_tokens = ((16,), 8) if quick else ((50, 500, 4000), new_tokens)
    counts = {name: min(count, 2) if quick else count for name, count in counts.items()}
    seconds = 60 * minutes / len(names) / sum(PARTS[part][2] for part in counts)  # of a whole share
    for name, (folder, source, drafts) in [(name, place_of(name, home_of(home))) for name in names]:
        about = {"license": MODELS[name].license, "packages": MODELS[name].packages} if name in MODELS else {}
        settings = {"dtype": dtype, "device": device, "new_tokens": new_tokens, "texts": counts, "minutes": minutes}
        held: dict[str, list[Any]] = {key: [] for key, *_ in PARTS.values()}
        title = Path(name).name
        run = Run("real", out / f"real-{title}.json", model=title, **about, **settings, **held, skipped=[])
        helpers = {draft: load(folder_of(draft, home_of(home)), dtype, device) for draft in drafts if "race" in counts}
        begun, end = time.monotonic(), 0.0
        for part, count in counts.items():
            key, _, share, measure = PARTS[part]
            kind = "float32" if part == "exact" else dtype
            loaded = load(folder, kind, device, full_length=part != "exact")
            bench = Bench(*loaded, source, folder, kind, new_tokens, lengths, helpers, console)
            end += share * seconds
            console.print(f"{title}, {part}")
            for row in measure(bench, count, Budget(end - (time.monotonic() - begun), run.document["skipped"])):
                run.add(key, [row])
            del bench, loaded  # before the next is loaded
        run.finish()


if __name__ == "__main__":
    typer.run(main)
