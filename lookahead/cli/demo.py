"""``lookahead demo``: the same texts written with and without lookahead, side by side in one process."""

from typing import Any

from rich.console import Console
from rich.text import Text
from typer import Exit

from lookahead.cli import common
from lookahead.cli.arguments import Demo
from lookahead.cli.racing import Race, rows_of, show_rows, show_verdicts
from lookahead.cli.verify import tell
from lookahead.pieces import Pieces
from lookahead.stats import counted

FREE = "bold green"
_METHODS = ("plain", "lookahead")


def demo(options: Demo) -> None:
    strategy = common.forgetful(options, seed=0, stats="detailed")
    model, tokenizer = common.load_for(options)
    prompts = common.built_in(tokenizer, options.raw)[: options.prompts]
    given = [("texts", common.encode(tokenizer, prompt, model, options.raw)) for prompt in prompts]
    race = Race(model, given, [None], options.new_tokens, methods=_METHODS, strategy=strategy, rounds=options.rounds)
    with common.progress() as progress:
        runs = race.run(common.bar(progress, "Writing"))
    console = Console(highlight=False)
    between = "\n" if tokenizer.chat_template and not options.raw else ""  # answers are no continuations
    legend = Text("The prompt is dim. ").append("Green tokens came for free", style=FREE)
    console.print(legend.append(": a pass writes one token anyway, and these, drafted, were accepted on top."))
    if console.color_system is None:
        console.print("There are no colours here: run this in a terminal to see which tokens were free.")
    ours = {run.prompt: text for run, text in zip(runs, race.written, strict=True) if run.method == "lookahead"}
    for place, prompt in enumerate(prompts):
        console.rule(str(place + 1), style="dim")
        console.print(Text(prompt + between, style="dim"), coloured(tokenizer, ours[place]), sep="", soft_wrap=True)
    console.rule(style="dim")
    rows = rows_of(runs)
    show_rows(console, rows)
    if not race.differing:
        tokens = sum(run.tokens for run in runs if run.method == "plain") // options.rounds
        told = f"Texts: identical, all {counted(tokens, 'token')} of {counted(len(prompts), 'text')}."
        console.print(told, style="bold")
    for (place, _), found in race.differing.items():
        console.print(Text(f"Text {place + 1} differs ({found.verdict}) at {tell(found, tokenizer)}", style="bold"))
    show_verdicts(console, race, rows)
    if any(found.verdict == "bug" for found in race.differing.values()):
        raise Exit(1)


def coloured(tokenizer: Any, decoded: common.Decoded) -> Text:
    """A text with its free tokens, all of a pass but the last, in colour."""
    assert decoded.stats is not None
    written = [count for record in decoded.stats.passes for count in record["tokens"]]
    free = [place < count - 1 for count in written for place in range(count)]
    text, pieces = Text(), Pieces(tokenizer, ())
    for token, came_for_free in zip(decoded.tokens, free, strict=False):
        text.append(pieces.add(token), style=FREE if came_for_free else "")
    return text.append(pieces.close())
