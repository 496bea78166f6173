"""``lookahead demo``: the same texts written with and without lookahead, side by side in one process."""

from dataclasses import dataclass, field
from statistics import mean, median
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Exit, Option

from lookahead.cli import common
from lookahead.cli.options import ModelOptions, NewTokensOption, SizeOptions
from lookahead.cli.prompts import PROMPTS
from lookahead.cli.verify import Divergence, first_divergence, tell
from lookahead.stats import DecodingStats

FREE = "bold green"
_WARM_UP = 16  # tokens


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions, SizeOptions):
    new_tokens: NewTokensOption = 96
    prompts: Annotated[int, Option(min=1, max=len(PROMPTS), help="How many prompts.")] = 4
    rounds: Annotated[int, Option(min=1, help="How often each text is written both ways.")] = 3


@dataclass
class _Story:
    prompt: str
    plain: list[common.Decoded] = field(default_factory=list)
    ours: list[common.Decoded] = field(default_factory=list)
    found: Divergence | None = None

    @property
    def ratios(self) -> list[float]:
        return [plain.seconds / ours.seconds for plain, ours in zip(self.plain, self.ours, strict=True)]

    @property
    def stats(self) -> DecodingStats:
        return self.ours[0].stats or DecodingStats()

    @property
    def plain_ms(self) -> float:
        """Milliseconds for each of plain decoding's passes, everything included."""
        return 1e3 * median(run.seconds / len(run.tokens) for run in self.plain)

    @property
    def ours_ms(self) -> float:
        return 1e3 * median(run.seconds for run in self.ours) / self.stats.steps


def demo(options: Options) -> None:
    """Write a few texts with and without lookahead, and compare texts and times."""
    strategy = options.lookahead(seed=0, stats="detailed")
    model, tokenizer = options.load()
    stories = [_Story(prompt) for prompt in PROMPTS[: options.prompts]]
    inputs = [common.encode(tokenizer, story.prompt, model) for story in stories]
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": options.new_tokens}
    with common.progress(auto_refresh=False) as progress:
        bar = progress.add_task("Writing", total=2 * options.rounds * len(stories))
        for way in (None, strategy):
            common.decode(model, inputs[0], way, **settings | {"max_new_tokens": min(_WARM_UP, options.new_tokens)})
        for turn in range(options.rounds):
            for story, given in zip(stories, inputs, strict=True):
                # The two ways take turns at going first, so that neither always finds the machine warm.
                for way in (None, strategy) if turn % 2 == 0 else (strategy, None):
                    runs = story.plain if way is None else story.ours
                    runs.append(common.decode(model, given, way, **settings))
                    progress.update(bar, advance=1, refresh=True)
        for story, given in zip(stories, inputs, strict=True):
            for plain, ours in zip(story.plain, story.ours, strict=True):
                story.found = story.found or first_divergence(model, given, plain.tokens, ours.tokens)
    console = Console(highlight=False)
    _show_texts(console, stories, tokenizer)
    console.print(_table(stories))
    console.print()
    _conclude(console, stories, tokenizer)
    if any(story.found and story.found.verdict == "bug" for story in stories):
        raise Exit(1)


def coloured(tokenizer: Any, decoded: common.Decoded) -> Text:
    """A text with its free tokens, all of a pass but the last, in colour."""
    assert decoded.stats is not None
    written = [count for record in decoded.stats.passes for count in record["tokens"]]
    free = [place < count - 1 for count in written for place in range(count)]
    text, shown = Text(), ""
    for end in range(1, len(decoded.tokens) + 1):
        so_far = common.text_of(tokenizer, decoded.tokens[:end])
        if so_far.endswith("�") and end < len(decoded.tokens):
            continue  # a letter that goes on in the next token
        text.append(so_far[len(shown) :], style=FREE if free[end - 1] else "")
        shown = so_far
    return text


def _show_texts(console: Console, stories: list[_Story], tokenizer: Any) -> None:
    legend = Text("The prompt is dim. ").append("Green tokens came for free", style=FREE)
    console.print(legend.append(": a pass writes one token anyway, and these, drafted, were accepted on top."))
    if console.color_system is None:
        console.print("There are no colours here: run this in a terminal to see which tokens were free.")
    for number, story in enumerate(stories, start=1):
        console.rule(str(number), style="dim")
        console.print(Text(story.prompt, style="dim"), coloured(tokenizer, story.ours[0]), sep="", soft_wrap=True)
    console.rule(style="dim")


def _table(stories: list[_Story]) -> Table:
    rows = []
    for number, story in enumerate(stories, start=1):
        count, steps = len(story.ours[0].tokens), story.stats.steps
        ms = (f"{story.plain_ms:.2f}", f"{story.ours_ms:.2f}")
        rows.append((str(number), str(count), str(steps), f"{count / steps:.2f}", *ms, f"{median(story.ratios):.2f}x"))
    headers = ("text", "tokens", "passes", "tokens/pass", "plain ms/pass", "lookahead ms/pass", "speedup")
    return common.columns(headers, rows)


def _conclude(console: Console, stories: list[_Story], tokenizer: Any) -> None:
    tokens = sum(len(story.ours[0].tokens) for story in stories)
    steps = sum(story.stats.steps for story in stories)
    if not any(story.found for story in stories):
        console.print(f"Texts: identical, all {tokens} tokens of {len(stories)} texts.", style="bold")
    for number, story in enumerate(stories, start=1):
        if found := story.found:
            console.print(Text(f"Text {number} differs ({found.verdict}) at {tell(found, tokenizer)}", style="bold"))
    console.print(f"Tokens per pass: {tokens / steps:.2f} ({tokens} tokens in {steps} passes; plain decoding: 1).")
    plain_ms, ours_ms = median(s.plain_ms for s in stories), median(s.ours_ms for s in stories)
    nodes = mean([record["nodes"][0] for story in stories for record in story.stats.passes[1:]] or [1])
    ours = f"{ours_ms:.2f} with lookahead ({nodes:.1f} tokens on average)."
    console.print(f"Milliseconds per pass: {plain_ms:.2f} in plain decoding (1 token), {ours}")
    ratios = [ratio for story in stories for ratio in story.ratios]
    speedup = median(ratios)
    verdict = "a win" if speedup > 1.02 else "a loss" if speedup < 0.98 else "no difference"
    spread = f"median of {len(ratios)} ratios from {min(ratios):.2f} to {max(ratios):.2f}"
    console.print(f"Speedup: {speedup:.2f}x, {verdict} ({spread}).", style="bold")
    everything = sum((run.stats for story in stories for run in story.ours if run.stats), DecodingStats())
    console.print(everything.explain())
