"""A race in one process: every method writes every text in turn, within a limit of time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from lookahead.cli import common
from lookahead.cli.verify import first_divergence
from lookahead.stats import DecodingStats
from lookahead.strategies.lookahead import Lookahead

Verdict = Literal["same", "tie", "differs", "bug", "other draws"]
Inputs = dict[str, torch.Tensor]

LABELS = {"plain": "plain", "lookup2": "prompt lookup, 2", "lookup3": "prompt lookup, 3", "lookahead": "lookahead"}
_LOOKUPS = {"lookup2": 2, "lookup3": 3}  # longest n-gram that is looked up
_PROBE = 8  # tokens by which the time is judged
_LEAST_TOKENS = 16  # of a text, that say anything
_WARM = 24  # tokens that warm up


@dataclass(frozen=True)
class Run:
    """One text by one method; ``verdict`` says how it compares with the plain one."""

    kind: str
    mode: str
    prompt: int
    method: str
    tokens: int
    seconds: float
    ratio: float  # of plain decoding's seconds a token to this method's
    verdict: Verdict
    stats: dict[str, Any] | None


@dataclass(frozen=True)
class Row:
    """A method's runs of one kind and mode; ``speedup`` is of the whole time a token, the others of single texts."""

    kind: str
    mode: str
    method: str
    speedup: float
    median: float
    least: float
    most: float
    tokens_per_second: float
    tokens_per_pass: float | None
    texts: str
    explained: str


class Race:
    """All runs of a race, and ``told``: what was left out so that it ends in time."""

    def __init__(
        self,
        model: PreTrainedModel,
        given: Sequence[tuple[str, Inputs]],
        temperatures: Sequence[float | None],
        new_tokens: int,
        seconds: float,
    ) -> None:
        self._model, self._given, self._temperatures = model, list(given), temperatures
        self.new_tokens, self._seconds = new_tokens, seconds
        self.told: list[str] = []
        self._strategy = Lookahead()
        self._end = 0.0

    def run(self, moved: Callable[[float], None]) -> list[Run]:
        """Run the race; ``moved`` is told how far it has got, from 0 to 1."""
        self._end = perf_counter() + self._seconds
        self._fit(self._seconds_a_token())
        for method in LABELS:
            for temperature in self._temperatures:
                self._write(self._given[0][1], method, temperature, 0, min(_WARM, self.new_tokens))
        runs, units = list[Run](), len(self._given) * len(self._temperatures)
        for place, (kind, inputs) in enumerate(self._given):
            for turn, temperature in enumerate(self._temperatures):
                runs += self._unit(kind, inputs, temperature, place)
                moved((place * len(self._temperatures) + turn + 1) / units)
            if perf_counter() > self._end and place + 1 < len(self._given):
                self.told.append(f"Time is up after {place + 1} of {len(self._given)} prompts: --minutes gives more.")
                break
        return runs

    def _seconds_a_token(self) -> float:
        inputs = self._given[0][1]
        self._write(inputs, "plain", None, 0, 2)
        begin = perf_counter()
        self._write(inputs, "plain", None, 0, _PROBE)
        return (perf_counter() - begin) / _PROBE

    def _fit(self, each: float) -> None:
        """Ask for as much as the time allows, as if every method were as fast as plain decoding."""
        ways = len(LABELS) * len(self._temperatures)
        possible = int((self._end - perf_counter()) / (each * ways)) - min(_WARM, self.new_tokens)  # tokens of texts
        asked = len(self._given), self.new_tokens
        if possible >= asked[0] * asked[1]:
            return
        prompts = max(1, min(asked[0], possible // min(self.new_tokens, 48)))
        self.new_tokens = max(min(_LEAST_TOKENS, asked[1]), min(asked[1], possible // prompts))
        step = len(self._given) / prompts  # every kind of question has its share
        self._given = [self._given[int(place * step)] for place in range(prompts)]
        took = f"plain decoding takes {1e3 * each:.0f} ms a token"
        self.told.append(
            f"{prompts} of {asked[0]} prompts and {self.new_tokens} of {asked[1]} tokens, as {took} here: "
            "--minutes gives more."
        )

    def _write(
        self, inputs: Inputs, method: str, temperature: float | None, seed: int, new_tokens: int
    ) -> common.Decoded:
        settings: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": temperature is not None}
        if temperature is not None:
            settings["temperature"] = temperature
        if method in _LOOKUPS:
            settings |= {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": _LOOKUPS[method]}
        torch.manual_seed(seed)
        strategy = self._strategy if method == "lookahead" else None
        decoded = common.decode(self._model, inputs, strategy, **settings)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        return decoded

    def _unit(self, kind: str, inputs: Inputs, temperature: float | None, place: int) -> list[Run]:
        names = list(LABELS)
        turned = names[place % len(names) :] + names[: place % len(names)]  # nobody always goes first
        done = {name: self._write(inputs, name, temperature, place, self.new_tokens) for name in turned}
        plain = done["plain"]
        each = plain.seconds / max(1, len(plain.tokens))
        mode = "greedy" if temperature is None else f"t{temperature:g}"
        runs = []
        for name in names:
            found = done[name]
            ratio = each / (found.seconds / max(1, len(found.tokens)))
            verdict = self._verdict(inputs, name, plain.tokens, found.tokens, temperature)
            stats = None if found.stats is None else found.stats.to_dict()
            runs.append(Run(kind, mode, place, name, len(found.tokens), found.seconds, ratio, verdict, stats))
        return runs

    def _verdict(
        self, inputs: Inputs, method: str, plain: list[int], tokens: list[int], temperature: float | None
    ) -> Verdict:
        if plain == tokens:
            return "same"
        if temperature is not None:
            return "other draws" if method in _LOOKUPS else "differs"
        found = first_divergence(self._model, inputs, plain, tokens)
        return "tie" if found is not None and found.verdict == "tie" else "bug" if method == "lookahead" else "differs"


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """A row for each kind, mode and method, and for all kinds together where there are several."""
    kinds = list(dict.fromkeys(run.kind for run in runs))
    groups = [(kind, [run for run in runs if run.kind == kind]) for kind in kinds]
    if len(kinds) > 1:
        groups.append(("all", list(runs)))
    rows = []
    for kind, some in groups:
        for mode in dict.fromkeys(run.mode for run in some):
            for method in LABELS:
                own = [run for run in some if (run.mode, run.method) == (mode, method)]
                plain = [run for run in some if (run.mode, run.method) == (mode, "plain")]
                rows.append(_row(kind, mode, method, own, plain))
    return rows


def _row(kind: str, mode: str, method: str, own: Sequence[Run], plain: Sequence[Run]) -> Row:
    tokens, seconds = sum(run.tokens for run in own), sum(run.seconds for run in own)
    before = sum(run.seconds for run in plain) / max(1, sum(run.tokens for run in plain))
    ratios = [run.ratio for run in own]
    stats = sum((DecodingStats.from_dict(run.stats) for run in own if run.stats), DecodingStats())
    counts = {verdict: sum(run.verdict == verdict for run in own) for verdict in dict.fromkeys(r.verdict for r in own)}
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    speed = tokens / seconds
    return Row(
        kind,
        mode,
        method,
        before * speed,
        median(ratios),
        min(ratios),
        max(ratios),
        speed,
        stats.mean_acceptance_length if stats.steps else 1.0 if method == "plain" else None,
        "" if method == "plain" else told,
        stats.explain() if method == "lookahead" else "",
    )
