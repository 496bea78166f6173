"""A race in one process: every method writes every text in turn, within a limit of time."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from time import perf_counter
from typing import Any, Literal, TypeVar

import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedModel

from lookahead.cli import common
from lookahead.cli.evidence import evidence
from lookahead.cli.verify import Divergence, judged
from lookahead.stats import DecodingStats, counted
from lookahead.strategies.lookahead import Lookahead

Comparison = Literal["same", "tie", "differs", "bug", "other draws"]
Encoded = dict[str, torch.Tensor]
_Written = TypeVar("_Written")

_FIGURES = ("speed", "95 %", "tokens/s", "S", "texts")
_BAR = 40  # cells of the longest bar
_PROBE = 8  # tokens by which the time is judged
_LEAST_TOKENS = 8  # of a text
_WARM = 24  # tokens that warm up, at most


@dataclass(frozen=True)
class Method:
    """One contender; ``label`` is its name in tables, ``settings`` are further arguments of ``generate``."""

    label: str
    kind: Literal["plain", "assisted", "ours"]  # passes: one token each, counted by a hook, counted by our statistics
    settings: dict[str, Any] = field(default_factory=dict)
    remembers: bool = False  # learns from call to call, so it may see every prompt only once
    one_row: bool = False  # decodes single prompts only
    same_draws: bool = True  # sampled texts equal plain ones for the same seed


def prompt_lookup(ngram: int) -> Method:
    """transformers' prompt lookup of n-grams up to ``ngram`` tokens."""
    settings = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": ngram}
    return Method(f"prompt lookup 10, n-gram {ngram}", "assisted", settings, one_row=True, same_draws=False)


METHODS = {
    "plain": Method("plain", "plain"),
    "lookup2": replace(prompt_lookup(2), label="prompt lookup, 2"),
    "lookup3": replace(prompt_lookup(3), label="prompt lookup, 3"),
    "lookahead": Method("lookahead", "ours"),
}


def in_turns(names: Iterable[str], turn: int, write: Callable[[str], _Written]) -> dict[str, _Written]:
    """What each method writes; from turn to turn another one begins, so that none always follows the same one."""
    names = list(names)
    first = turn % len(names)
    done = {name: write(name) for name in names[first:] + names[:first]}
    return {name: done[name] for name in names}


@dataclass(frozen=True)
class RacedText:
    """One text by one method; ``verdict`` says how it compares with the plain one."""

    kind: str
    mode: str
    prompt: int
    method: str
    tokens: int
    seconds: float
    ratio: float  # of plain decoding's seconds a token to this method's
    verdict: Comparison
    stats: dict[str, Any] | None


@dataclass(frozen=True)
class RaceRow:
    """A method's runs of one kind and mode, against plain decoding's of the same texts."""

    kind: str
    mode: str
    method: str
    speedup: float  # geometric mean of single texts'
    interval: tuple[float, float] | None  # of 95 %; None = there was one text
    least: float  # of single texts
    most: float
    drafts: float | None  # the part of the speedup that drafts bring; faster passes bring the rest
    passes: float | None
    verdict: str
    tokens_per_second: float
    tokens_per_pass: float | None
    texts: str
    explained: str


@dataclass
class Race:
    """All runs of a race.

    Attributes:
        given: kinds and prompts.
        told: what was left out so that it ends in ``seconds``, and that the machine was loaded.
        written: what each of the runs wrote.
        differing: prompt and method of greedy texts that are not plain decoding's, and where they part.
    """

    model: PreTrainedModel
    given: Sequence[tuple[str, Encoded]]
    temperatures: Sequence[float | None]
    new_tokens: int
    seconds: float = inf
    methods: Sequence[str] = tuple(METHODS)
    strategy: Lookahead = field(default_factory=Lookahead)
    rounds: int = 1
    told: list[str] = field(default_factory=list)
    written: list[common.Decoded] = field(default_factory=list)
    differing: dict[tuple[int, str], Divergence] = field(default_factory=dict)

    def run(self, moved: Callable[[float], None]) -> list[RacedText]:
        """Run the race; ``moved`` is told how far it has got, from 0 to 1."""
        self._end, self._warm = perf_counter() + self.seconds, min(_WARM, self.new_tokens)
        inputs = self.given[0][1]
        self._write(inputs, "plain", None, 0, 2)
        begin = perf_counter()
        self._write(inputs, "plain", None, 0, _PROBE)
        self._fit((perf_counter() - begin) / _PROBE)
        for method in self.methods:
            for temperature in self.temperatures:
                self._write(self.given[0][1], method, temperature, 0, self._warm)
        runs, turns = list[RacedText](), [(turn, each) for turn in range(self.rounds) for each in self.temperatures]
        for place, (kind, inputs) in enumerate(self.given):
            for number, (turn, temperature) in enumerate(turns, start=1):
                runs += self._unit(kind, inputs, temperature, place, turn)
                moved((place + number / len(turns)) / len(self.given))
            if perf_counter() > self._end and place + 1 < len(self.given):
                self.told.append(
                    f"Time is up after {place + 1} of {counted(len(self.given), 'prompt')}: --minutes gives more."
                )
                break
        self.told += common.load_told(self.written, self.model.device)
        return runs

    def _fit(self, each: float) -> None:
        """Ask for as much as the time allows, as if every method were as fast as plain decoding."""
        ways, asked = len(self.methods) * len(self.temperatures), (len(self.given), self.new_tokens)
        possible = (self._end - perf_counter()) / (each * ways)  # tokens
        if possible - self._warm >= asked[0] * asked[1] * self.rounds:
            return
        self._warm = max(1, min(self._warm, int(possible) // 4))
        possible = int(possible) - self._warm
        prompts = max(1, min(asked[0], possible // min(self.new_tokens, 48)))
        self.new_tokens = max(min(_LEAST_TOKENS, asked[1]), min(asked[1], possible // prompts))
        step = len(self.given) / prompts  # every kind of question has its share
        self.given = [self.given[int(place * step)] for place in range(prompts)]
        took = f"plain decoding takes {1e3 * each:.0f} ms a token"
        told = f"{prompts} of {counted(asked[0], 'prompt')} and {self.new_tokens} of {asked[1]} tokens"
        self.told.append(f"{told}, as {took} here: --minutes gives more.")

    def _write(
        self, inputs: Encoded, method: str, temperature: float | None, seed: int, new_tokens: int
    ) -> common.Decoded:
        settings = {"max_new_tokens": new_tokens} | common.sampling(temperature) | METHODS[method].settings
        torch.manual_seed(seed)
        strategy = self.strategy if method == "lookahead" else None
        return common.decode(self.model, inputs, strategy, **settings)

    def _unit(self, kind: str, inputs: Encoded, temperature: float | None, place: int, turn: int) -> list[RacedText]:
        def write(method: str) -> common.Decoded:
            return self._write(inputs, method, temperature, place, self.new_tokens)

        done = in_turns(self.methods, place + turn, write)
        self.written += done.values()
        plain = done["plain"]
        each = plain.seconds / max(1, len(plain.tokens))
        mode = "greedy" if temperature is None else f"t{temperature:g}"
        runs = []
        for name, found in done.items():
            ratio = each / (found.seconds / max(1, len(found.tokens)))
            verdict = self._verdict(inputs, name, plain.tokens, found.tokens, temperature, place)
            stats = None if found.stats is None else found.stats.to_dict()
            runs.append(RacedText(kind, mode, place, name, len(found.tokens), found.seconds, ratio, verdict, stats))
        return runs

    def _verdict(
        self, inputs: Encoded, method: str, plain: list[int], tokens: list[int], temperature: float | None, place: int
    ) -> Comparison:
        if plain == tokens:
            return "same"
        if temperature is not None:
            return "differs" if METHODS[method].same_draws else "other draws"
        found = self.differing[place, method] = judged(self.model, inputs, plain, tokens)
        return "tie" if found.verdict == "tie" else "bug" if method == "lookahead" else "differs"


def rows_of(runs: Sequence[RacedText]) -> list[RaceRow]:
    """A row for each kind, mode and method, and for all kinds together where there are several."""
    kinds = list(dict.fromkeys(run.kind for run in runs))
    groups: dict[tuple[str, str, str], list[RacedText]] = {}
    for kind in [*kinds, "all"] if len(kinds) > 1 else kinds:
        for run in runs:
            if kind in (run.kind, "all"):
                groups.setdefault((kind, run.mode, run.method), []).append(run)
    return [_row(*key, own) for key, own in groups.items()]


def _row(kind: str, mode: str, method: str, own: Sequence[RacedText]) -> RaceRow:
    texts: dict[int, list[RacedText]] = {}
    for run in own:
        texts.setdefault(run.prompt, []).append(run)
    ratios = [median(run.ratio for run in runs) for runs in texts.values()]
    speedup, interval, verdict = evidence(ratios, sum(runs[0].tokens for runs in texts.values()))
    stats = sum((DecodingStats.from_dict(run.stats) for run in own if run.stats), DecodingStats())
    drafts, passes = stats.split(speedup) or (None, None)
    counts = Counter(run.verdict for run in own)
    told = ", ".join(f"{count} {compared}" for compared, count in counts.items())
    return RaceRow(
        kind,
        mode,
        method,
        speedup,
        interval,
        min(ratios),
        max(ratios),
        drafts,
        passes,
        verdict,
        sum(run.tokens for run in own) / sum(run.seconds for run in own),
        stats.mean_acceptance_length if stats.steps else 1.0 if method == "plain" else None,
        "" if method == "plain" else told,
        stats.explain(speedup) if method == "lookahead" else "",
    )


def show_rows(console: Console, rows: Sequence[RaceRow]) -> None:
    """A table and bars for each kind; kinds of one text each share a table of what lookahead brings."""
    kinds = dict.fromkeys(row.kind for row in rows)
    if few := [row for row in rows if _is_single(row, rows) and row.method == "lookahead"]:
        cells = [(row.kind, row.mode, *_figures(row)) for row in few]
        console.print(common.columns(("category", "mode", *_FIGURES), cells, "Lookahead, by category"))
        console.print()
    for kind in kinds:
        whole = [row for row in rows if row.kind == kind and not _is_single(row, rows)]
        if whole:
            _show_kind(console, whole, kind if len(kinds) > 1 else None)


def _is_single(row: RaceRow, rows: Sequence[RaceRow]) -> bool:
    """True if a kind beside others has one text, which says little."""
    return row.interval is None and any(other.kind != row.kind for other in rows)


def _figures(row: RaceRow) -> tuple[str, ...]:
    interval = "" if row.method == "plain" or row.interval is None else "{:.2f}-{:.2f}".format(*row.interval)
    length = "" if row.tokens_per_pass is None else f"{row.tokens_per_pass:.2f}"
    return f"{row.speedup:.2f}x", interval, f"{row.tokens_per_second:.1f}", length, row.texts


def _show_kind(console: Console, rows: list[RaceRow], title: str | None) -> None:
    cells = [(row.mode, METHODS[row.method].label, *_figures(row)) for row in rows]
    console.print(common.columns(("mode", "method", *_FIGURES), cells, title))
    console.print()
    most = max(row.speedup for row in rows)
    for row in rows:
        bar = "█" * max(1, round(_BAR * row.speedup / most))
        style = "dim" if row.method == "plain" else "green" if row.speedup >= 1.0 else "red"
        label = f"{row.mode} {METHODS[row.method].label}"
        console.print(Text(f"{label:<24} ").append(bar, style=style).append(f" {row.speedup:.2f}x"))
    console.print()


def show_verdicts(console: Console, race: Race, rows: Sequence[RaceRow]) -> None:
    """Print the verdicts on lookahead, and their reasons."""
    legend = ""
    for line in race.told:
        console.print(line)
    for row in rows:
        if row.method == "lookahead" and not _is_single(row, rows):
            said = f"{row.kind}, {row.mode}: lookahead {row.speedup:.2f}x, {row.verdict}."
            told, _, legend = row.explained.partition("\n")
            console.print(Text(said, style="bold"), Text(told), sep="\n")
    if legend:
        console.print(Text(legend, style="dim"))
