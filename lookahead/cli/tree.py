"""``lookahead tree``: measure how often Medusa's heads are right, and grow the tree that follows from it."""

from typing import Any

from rich.console import Console

from lookahead.bundled import BUNDLED_HEADS
from lookahead.cli import common
from lookahead.cli.training_arguments import Tree
from lookahead.heads.medusa.accuracies import CalibratedTree, grow_tree
from lookahead.heads.medusa.calibration import calibrate
from lookahead.heads.medusa.heads import MedusaHeads
from lookahead.stats import counted

_SHOWN = (1, 2, 5, 10)  # best candidates in the table of accuracies


def tree(options: Tree) -> None:
    folder = options.heads or str(BUNDLED_HEADS)
    model, tokenizer = common.load_for(options)
    heads = MedusaHeads.from_pretrained(folder, model=model)
    texts = options.texts or common.built_in(tokenizer, options.raw)
    prompts = [common.encode(tokenizer, text, model, options.raw)["input_ids"][0] for text in texts]
    sampling: dict[str, Any] = {"temperature": options.temperature, "seed": options.seed}
    with common.progress() as progress:
        report = common.bar(progress, "Calibrating")
        table = calibrate(model, heads, prompts, options.new_tokens, options.ranks, **sampling, report=report)
    choices = grow_tree(table, options.nodes)
    grown = CalibratedTree(choices=choices, accuracies=table, model=options.model_name, heads=folder)
    if options.output is not None:
        grown.save(options.output)
    document = {"tree": grown.to_dict(), "widths": list(choices.widths), "prompts": len(prompts)}
    common.report(document, options.as_json, lambda console: _show(console, grown, len(prompts), options))


def _show(console: Console, grown: CalibratedTree, prompts: int, options: Tree) -> None:
    table, temperature = grown.accuracies, options.temperature
    shown = [count for count in _SHOWN if count <= len(table.accuracies[0])]
    tops = [table.top(count) for count in shown]
    rows = [
        (str(head), f"+{head + 2}", str(samples), *(f"{top[head]:.3f}" for top in tops))
        for head, samples in enumerate(table.samples)
    ]
    texts = "greedy texts" if temperature is None else f"texts sampled at temperature {temperature:g}"
    headers = ("head", "predicts", "samples", *(f"top-{count}" for count in shown))
    console.print(common.columns(headers, rows, f"Heads on {texts} of {counted(prompts, 'prompt')}"))
    if (count := len(grown.paths)) < options.nodes:
        console.print(f"{options.nodes} nodes were asked for: no more than {count} are worth anything on these texts.")
    widths = ", ".join(map(str, grown.choices.widths))
    told = f"{count} nodes, {widths} by depth: {grown.expected_length + 1:.2f} tokens a pass expected"
    console.print(f"{told}, the model's own included.", style="bold")
    if options.output is not None:
        console.print(f"Saved in {options.output}.")
