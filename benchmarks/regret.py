"""What choosing the size of every pass costs against knowing the best size: the automatic mode's regret.

    python -m benchmarks.regret --model DIR --dtypes bfloat16 --modes greedy,t0.8 --out build/bench/regret.json

Every class of calls (prompts, mode, dtype, batch) is decoded plainly, with 2, 4, ... 64 drafted nodes whatever
they cost, and in the automatic mode, all of them in turn. A method's speed is the median over calls of plain's time
over its own; regret is how much slower the automatic mode is than the best of the others::

    plain 1.00   4 nodes 1.31   16 nodes 1.52   64 nodes 1.20   automatic 1.50      regret 1.52 / 1.50 - 1 = 1.3 %
"""

from functools import partial
from typing import Annotated, Any

import typer

import lookahead
from benchmarks import contest, options
from benchmarks.contest import SETS, Method, ours, prompt_sets, units
from benchmarks.harness import Run, load, quiet_console, watched
from benchmarks.options import DTYPES, MODES, chosen, whole_numbers
from benchmarks.tables import show
from lookahead import Lookahead

SIZES = (2, 4, 8, 16, 32, 64)
COLUMNS = "shape, set, mode, dtype, batch, best, best speed, automatic, regret, against plain"


def contenders(**settings: Any) -> dict[str, Method]:
    """Plain ``generate``, fixed sizes and the automatic mode."""
    fixed = {str(size): ours(f"{size} nodes", Lookahead(nodes=size, **settings), True) for size in SIZES}
    return {"plain": Method("generate", "plain"), **fixed, "automatic": ours("automatic", Lookahead(**settings), True)}


def regret_of(speeds: dict[str, float]) -> dict[str, Any]:
    """The best of the others, and how much slower the automatic mode is than it and than plain decoding."""
    own = speeds["automatic"]
    best = max((name for name in speeds if name != "automatic"), key=speeds.__getitem__)
    return {"best": best, "regret": speeds[best] / own - 1.0, "against_plain": speeds["plain"] / own - 1.0}


def measure(
    console: Any, model: Any, tokenizer: Any, place: dict[str, Any], source: str, prompts: int, rounds: int, **how: Any
) -> dict[str, Any]:
    """One class of calls."""
    table = contenders(**how)
    texts = units(model, tokenizer, source, prompts, place["batch"], place["new_tokens"])
    watch = partial(watched, console, ", ".join(map(str, place.values())))
    results = contest.contest(model, table, texts, MODES[place["mode"]], place["new_tokens"], rounds, watch=watch)
    rows = {name: contest.row(results, name, place["new_tokens"], place["batch"]) for name in table}
    speeds = {name: row["speedup_median"] for name, row in rows.items()}
    return {
        **place,
        "rounds": rounds,
        "speeds": speeds,
        "S": {name: row["S"] for name, row in rows.items()},
        "nodes": rows["automatic"]["nodes"],
        "texts_that_differ": rows["automatic"]["texts_that_differ"],
        **regret_of(speeds),
    }


def shown(row: dict[str, Any]) -> dict[str, str]:
    """A row as the table prints it."""
    speeds = row["speeds"]
    return {
        **row,
        "best speed": f"{speeds[row['best']]:.2f}x",
        "automatic": f"{speeds['automatic']:.2f}x",
        "regret": f"{row['regret']:+.1%}",
        "against plain": f"{row['against_plain']:+.1%}",
    }


def main(
    model_dir: options.ModelDir = None,
    sets: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(SETS)}; or .jsonl files.")] = "no-loop",
    prompts: options.Prompts = 4,
    modes: options.Modes = "greedy,penalty,t0.7,t0.8,t1.0,t1.5",
    dtypes: options.Dtypes = "bfloat16,float32",
    batches: Annotated[str, typer.Option(help="Comma-separated sequences of a call.")] = "1",
    new_tokens: options.NewTokens = 96,
    rounds: options.Rounds = 1,
    traces: Annotated[bool, typer.Option(help="Passes may be traced.")] = True,
    pack: Annotated[bool, typer.Option(help="Weights may be packed.")] = True,
    threads: options.Threads = None,
    device: str = "cpu",
    out: options.Out = None,
) -> None:
    """Measure every class of calls."""
    console = quiet_console(threads)
    wanted_sets, sizes = prompt_sets(sets), whole_numbers(batches)
    wanted_modes, wanted_dtypes = chosen(modes, MODES, "mode"), chosen(dtypes, DTYPES, "dtype")
    lookahead.augment_all()
    settings = {"model": model_dir, "device": device, "new_tokens": new_tokens, "prompts": prompts, "rounds": rounds}
    run = Run("regret", out, **settings, traces=traces, pack=pack, rows=[])
    for dtype in wanted_dtypes:
        model, tokenizer = load(model_dir, dtype, device)
        for (name, kind), batch, mode in [
            (each, batch, mode) for each in wanted_sets.items() for batch in sizes for mode in wanted_modes
        ]:
            place = {"shape": "as-is", "set": name, "mode": mode, "dtype": dtype, "batch": batch}
            place |= {"new_tokens": new_tokens}
            how = {"traces": traces, "pack": pack}
            row = measure(console, model, tokenizer, place, kind.source, max(prompts, batch), rounds, **how)
            run.add("rows", [row])
            show(console, "regret", COLUMNS, [shown(row)])
        del model
    show(console, "regret", COLUMNS, map(shown, run.document["rows"]))
    run.finish()


if __name__ == "__main__":
    typer.run(main)
