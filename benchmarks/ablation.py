"""Tokens a pass over drafted nodes, for each source of drafts alone and for all together.

    python -m benchmarks.ablation --prompts 20 --modes greedy --merge

Every text starts cold, except with ``all, remembering``, which keeps what it learnt from the texts before. Greedy
figures are also given for the texts that do not end in a loop. With ``--merge``, rows of an earlier run with other
sources, sizes or modes stay; everything else has to be the same. The last line on stdout is one JSON document.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

import lookahead
from benchmarks.racing import MODES, Unit, chosen, forget, load, loops, quiet_console, save, units, whole_numbers
from lookahead import DecodingStats, Lookahead

OUT = Path(__file__).parent / "results" / "ablation.json"
REMEMBERING = "all, remembering"
ALL = ("suffix", "recycling", "pool", "window")


def _alone(name: str) -> Callable[[int], Any]:
    return lambda nodes: Lookahead(nodes=nodes, sources=(name,), remember=False, seed=0)


SOURCES: dict[str, Callable[[int], Any]] = {
    **{name: _alone(name) for name in ALL},
    "all": lambda nodes: Lookahead(nodes=nodes, sources=ALL, remember=False, seed=0),
    REMEMBERING: lambda nodes: Lookahead(nodes=nodes, sources=ALL, remember=True),  # a seed would switch memory off
    "default": lambda nodes: Lookahead(nodes=nodes, remember=False, seed=0),
}


def measure(
    model: Any,
    strategy: Any,
    given: Sequence[Unit],
    warm: Unit,
    mode: dict[str, Any],
    new_tokens: int,
    remembers: bool = False,
) -> dict[str, dict[str, Any]]:
    """S, nodes and draft milliseconds a pass, over all texts and over those without a loop at their end."""
    if remembers:
        forget(model)
    per_text: list[DecodingStats] = []
    free: list[DecodingStats] = []
    for unit in (warm, *given):
        torch.manual_seed(unit.index)
        output = model.generate(
            **unit.inputs,
            **mode,
            max_new_tokens=new_tokens,
            lookahead_strategy=strategy,
            return_dict_in_generate=True,
        )
        if unit is warm:
            continue
        per_text.append(output.stats)
        if not loops(output.sequences[0, unit.inputs["input_ids"].shape[1] :].tolist()):
            free.append(output.stats)
    return {name: _figures(texts) for name, texts in (("all", per_text), ("not looping", free)) if texts}


def _figures(texts: list[DecodingStats]) -> dict[str, Any]:
    total = sum(texts, DecodingStats())
    drafts = max(1, total.steps - len(texts))
    return {
        "texts": len(texts),
        "S": total.mean_acceptance_length,
        "nodes_per_pass": total.drafted / drafts,
        "draft_ms": total.draft_ms / drafts,
    }


def main(
    model_dir: Annotated[Path | None, typer.Option("--model", help="A model folder; default: the bundled one.")] = None,
    prompts: Annotated[int, typer.Option(help="Code prompts.")] = 20,
    sources: Annotated[str, typer.Option(help="Semicolon-separated, or all.")] = "all",
    nodes: Annotated[str, typer.Option(help="Comma-separated drafted nodes of a pass.")] = "4,8,16,24,32,48,64,96,128",
    modes: Annotated[str, typer.Option(help="Comma-separated.")] = "greedy,t0.8",
    new_tokens: int = 128,
    dtype: str = "float32",
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: torch's choice.")] = None,
    device: str = "cpu",
    merge: Annotated[bool, typer.Option(help="Keep an earlier run's other rows.")] = False,
    out: Annotated[Path, typer.Option(help="The JSON file.")] = OUT,
) -> None:
    """Measure every source at every size."""
    console = quiet_console(threads)
    names = list(SOURCES) if sources == "all" else [name.strip() for name in sources.split(";")]
    sizes = whole_numbers(nodes)
    plan = [(mode, name, size) for mode in chosen(modes, MODES, "mode") for name in names for size in sizes]
    strategies = {(name, size): SOURCES[name](size) for _, name, size in plan}  # what cannot be made raises here
    lookahead.augment_all()
    model, tokenizer = load(model_dir, dtype, device)
    given, warm = units(model, tokenizer, "code", prompts, 1, new_tokens)
    document: dict[str, Any] = {
        "benchmark": "ablation",
        "model": str(model_dir or "bundled"),
        "device": device,
        "dtype": dtype,
        "prompts": len(given),
        "new_tokens": new_tokens,
    }
    rows: list[dict[str, Any]] = []
    if merge and out.exists():
        earlier = json.loads(out.read_text())
        different = [key for key, value in document.items() if earlier.get(key) != value]
        if different:
            raise typer.BadParameter(f"{out} was made with other settings ({', '.join(different)}): drop --merge")
        rows = earlier["rows"]
        document["earlier"] = [*earlier.get("earlier", []), {key: earlier[key] for key in ("argv", "commit")}]
    for mode, name, size in track(plan, description="sizes", transient=True, console=console):
        found = measure(model, strategies[name, size], given, warm[0], MODES[mode], new_tokens, name == REMEMBERING)
        place = {"source": name, "nodes": size, "mode": mode}
        rows = [kept for kept in rows if any(kept[key] != value for key, value in place.items())]
        for group, figures in found.items():
            if mode == "greedy" or group == "all":
                rows.append({**place, "group": group, **figures})
        save({**document, "rows": rows}, out)
    print(save({**document, "rows": rows}, out))


if __name__ == "__main__":
    typer.run(main)
