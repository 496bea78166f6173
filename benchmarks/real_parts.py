"""What ``benchmarks.real`` measures: one function a part, which yields each row as soon as it is known."""

import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import contest
from benchmarks.compare import METHODS, Side
from benchmarks.contest import Method, Texts, Unit, tokens_of, unit_of
from benchmarks.harness import ROOT, bootstrap, in_turn, prompts_in, texts_of, watched
from benchmarks.options import MODES
from lookahead import DecodingStats, Lookahead

Row = dict[str, Any]
TEMPERATURES = ("greedy", "t0.7", "t1.0")
ALL = ("suffix", "recycling", "pool")
NODES, USUAL = (4, 8, 16, 24, 64), 24
FILLERS = {"chat": "prose", "functions": "code"}  # what stands before a prompt that is to be long
SHORT = 100  # tokens of prompts that count as short
CALLS = 5  # of a fresh process


@dataclass(frozen=True)
class Bench:
    """A model, what it is asked (a file of ``prompts/``), the models that draft for it by their names, each with its
    tokenizer, and the sizes of a run: tokens to write and lengths of prompts."""

    model: Any
    tokenizer: Any
    source: str
    folder: Path | None  # None: the bundled one
    dtype: str
    new_tokens: int
    lengths: tuple[int, ...] = (50, 500, 4000)
    drafts: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    console: Console = field(default_factory=partial(Console, quiet=True))

    @cached_property
    def prompts(self) -> list[tuple[str, str]]:
        return prompts_in(self.source)

    def tokens(self, index: int, length: int = 0) -> list[int]:
        """A prompt; with others before its own text, as many as fit into ``length`` tokens."""
        texts = [text for _, text in self.prompts]
        own, before = texts[index], list[str]()
        room = length - self._size(own)
        for text in (*texts[index + 1 :], *texts[:index], *texts_of(FILLERS[self.source])):
            if (size := self._size(text)) <= room:
                before.append(text)
                room -= size
        return tokens_of(self.tokenizer, ["\n\n".join([*before, own])], self.source == "chat")[0]

    def _size(self, text: str) -> int:
        return len(self.tokenizer(text)["input_ids"])

    def units(self, first: int, last: int) -> list[Unit]:
        """Prompts as they are, each a call of its own."""
        found = range(first, min(last, len(self.prompts)))
        return [unit_of(index, [self.tokens(index)], self.model.device) for index in found]

    def texts(self, length: int, batch: int, calls: int) -> Texts:
        """Short prompts in batches, filled up to ``length``, and a short one to warm up with."""
        short = [index for index, (_, text) in enumerate(self.prompts) if self._size(text) <= SHORT]
        rows = [self.tokens(short[index % (len(short) - 1)], length) for index in range(calls * batch)]
        unit = partial(unit_of, device=self.model.device, pad=self.model.generation_config.pad_token_id)
        given = [unit(index, rows[index * batch : (index + 1) * batch]) for index in range(calls)]
        return given, [unit(1_000_000, [self.tokens(short[-1])] * batch)]


class Budget:
    """The seconds of a part. Its first case is always measured; those that would end too late, if they took as long as
    the longest before, are noted in ``skipped``."""

    def __init__(self, seconds: float, skipped: list[Row]) -> None:
        self._end, self._skipped = time.monotonic() + seconds, skipped
        self._last, self._longest = math.inf, 0.0

    def over(self, **case: Any) -> bool:
        """Whether there is no time left for a case."""
        now, begun = time.monotonic(), self._last < math.inf
        self._longest, self._last = max(self._longest, now - self._last), now
        late = begun and now + self._longest > self._end
        if late:
            self.skip("no time was left", **case)
        return late

    def skip(self, reason: str, **case: Any) -> None:
        """Note a case that cannot be measured."""
        self._skipped.append({**case, "reason": reason})


def published(rng: random.Random) -> Lookahead:
    """W, N, G and flags at random."""
    sizes = {"window_size": rng.randint(1, 16), "ngram_size": rng.randint(2, 7)}
    sizes |= {"verification_set_size": rng.randint(0, 16)}
    names = ("pool_from_prompt", "pool_from_output", "always_forward_one")
    return Lookahead(**sizes, **{name: rng.random() < 0.5 for name in names}, seed=rng.randint(0, 99))


def automatic(rng: random.Random) -> Lookahead:
    """Random sources, often all of them, sized by the latency curve or at random, with or without a memory."""
    few = tuple(rng.sample(ALL, rng.randint(1, len(ALL))))
    sources, nodes = (ALL if rng.random() < 0.5 else few), (rng.randint(1, 64) if rng.random() < 0.5 else None)
    return Lookahead(sources=sources, nodes=nodes, seed=0 if rng.random() < 0.25 else None)  # a seed: no memory


def exact(bench: Bench, count: int, budget: Budget) -> Iterator[Row]:
    """Texts that differ from plain ``generate``'s, with settings at random; they end where the model ends them."""
    for mode in TEMPERATURES:
        if budget.over(part="exact", mode=mode):
            continue
        rng, differ, tokens, stats = random.Random(0), list[Row](), 0, DecodingStats()
        for unit in watched(bench.console, f"exact, {mode}", bench.units(0, count)):
            strategy = (published if unit.index % 2 else automatic)(rng)
            asked = {**unit.inputs, **MODES[mode], "max_new_tokens": bench.new_tokens}
            torch.manual_seed(unit.index)
            plain = bench.model.generate(**asked)
            torch.manual_seed(unit.index)
            ours = bench.model.generate(**asked, lookahead_strategy=strategy, return_dict_in_generate=True)
            tokens += plain.shape[1] - unit.inputs["input_ids"].shape[1]
            stats += ours.stats
            if not torch.equal(plain, ours.sequences):
                differ.append({"prompt": unit.index, "strategy": strategy.to_dict()})
        figures = {"texts": unit.index + 1, "tokens": tokens, "S": stats.mean_acceptance_length}
        yield {"mode": mode, **figures, "texts_that_differ": len(differ), "differ": differ}


def acceptance(bench: Bench, count: int, budget: Budget) -> Iterator[Row]:
    """S, cold and with a memory of other prompts by category; and of a few prompts, cold, by sources and by nodes."""
    given, others = bench.units(0, count), bench.units(count, count + -(-count // 2))
    few = given[: -(-count // 3)]
    sweep = [*((name, USUAL) for name in ALL), *(("all", nodes) for nodes in NODES if nodes != USUAL)]
    whole = [("all", USUAL, "cold"), ("all", USUAL, "other texts")]
    plan = list(product(TEMPERATURES, [*whole, *((*each, "cold") for each in sweep)]))
    for mode, (source, nodes, known) in watched(bench.console, "S", plan):
        place = {"source": source, "nodes": nodes, "memory": known, "mode": mode}
        if budget.over(part="s", **place):
            continue
        remember, names = known != "cold", ALL if source == "all" else (source,)
        strategy = Lookahead(nodes=nodes, sources=names, remember=remember, seed=None if remember else 0)
        units = given if (source, nodes, known) in whole else few
        warm = others if remember else ()
        found = contest.decode(bench.model, strategy, units, MODES[mode], bench.new_tokens, warm)
        groups: dict[str, list[DecodingStats]] = {} if units is few else {"all": [stats for stats, _ in found]}
        if known == "cold":
            groups["few"] = [stats for stats, _ in found[: len(few)]]
        for unit, (stats, _) in zip(units, found, strict=True) if units is given else ():
            groups.setdefault(bench.prompts[unit.index][0], []).append(stats)
        for group, stats in groups.items():
            yield {**place, "category": group, **contest.acceptance(stats)}


def methods(bench: Bench) -> dict[str, Method]:
    """The contenders: plain, prompt lookup, W/N/G, automatic; and for each model that drafts, transformers' way to use
    it and ours."""
    table, _ = contest.methods(["lookup2", "w7", "auto"], bench.model.device.type)
    for name, (draft, tokenizer) in bench.drafts.items():
        same = tokenizer.get_vocab() == bench.tokenizer.get_vocab()
        pair = {} if same else {"tokenizer": bench.tokenizer, "assistant_tokenizer": tokenizer}
        settings, label = {"assistant_model": draft, **pair}, f"assistant {name}"
        table[label] = Method(label, "assisted", settings, one_row=True, same_draws=False)
        strategy = Lookahead(draft_model=draft, tokenizers=None if same else (bench.tokenizer, tokenizer))
        table[f"draft {name}"] = contest.ours(f"lookahead, draft {name}", strategy, remembers=True)
    return table


def races(bench: Bench, count: int, budget: Budget) -> Iterator[Row]:
    """Speeds against plain ``generate``, by length of the prompt, batch and mode: first what differs in nothing from
    one short greedy text, then in one of these, in two, in all. Long prompts and batches have fewer calls."""
    table, longest = methods(bench), getattr(bench.model.config, "max_position_embeddings", None)
    cases = list(product(bench.lengths, (1, 4), TEMPERATURES))
    base = cases[0]
    for length, batch, mode in sorted(cases, key=lambda case: sum(map(str.__ne__, map(str, case), map(str, base)))):
        place = {"length": length, "mode": mode, "dtype": bench.dtype, "batch": batch, "new_tokens": bench.new_tokens}
        if longest and length + bench.new_tokens > longest:
            budget.skip(f"the model has {longest} positions", part="race", **place)
        elif not budget.over(part="race", **place):
            calls = max(1, count >> ((batch > 1) + (length > 100) + (length > 1000)))
            able = {name: method for name, method in table.items() if batch == 1 or not method.one_row}
            texts = bench.texts(length, batch, calls)
            watch = partial(watched, bench.console, f"{length} tokens, batch {batch}, {mode}")
            results = contest.contest(
                bench.model, able, texts, MODES[mode], bench.new_tokens, 1, apart=batch == 1, watch=watch
            )
            for name, method in able.items():
                found = {"calls": calls, **contest.row(results, name, bench.new_tokens, batch)}
                if batch == 1:
                    found |= contest.later(results, name, bench.new_tokens)
                same = method.same_draws or mode == "greedy"
                yield {**place, "method": name, "label": method.label, "same_draws": same, **found, **_split(found)}


def _split(found: Row) -> Row:
    """What drafts and what faster passes brought, by the counts of a row; their product is its speedup."""
    split = DecodingStats.from_dict(found["stats"]).split(found["speedup_median"]) if "stats" in found else None
    return {"drafts": split[0], "passes_gain": split[1]} if split else {}


def first_calls(bench: Bench, count: int, budget: Budget) -> Iterator[Row]:
    """Calls of fresh processes in turn, no prompt twice in one. The first process ever finds nothing on disk."""
    load = {"model": str(bench.folder.resolve()) if bench.folder else None, "dtype": bench.dtype}
    load |= {"device": bench.model.device.type, "threads": torch.get_num_threads()}
    asked: list[list[int]] = [unit.inputs["input_ids"][0].tolist() for unit in bench.units(0, len(bench.prompts))]
    answers: dict[str, dict[str, list[list[Row]]]] = {mode: {"plain": [], "auto": []} for mode in TEMPERATURES[:2]}
    with tempfile.TemporaryDirectory() as cache:
        for turn, mode in watched(bench.console, "first calls", list(product(range(count), answers))):
            if budget.over(part="first", mode=mode, process=turn):
                continue
            for name in in_turn(answers[mode], turn):
                same = {"seed": turn, "arguments": {"max_new_tokens": bench.new_tokens, **MODES[mode], **METHODS[name]}}
                with Side(ROOT, f"{cache}/{mode}") as side:
                    side.ask(load)
                    places = [(turn * CALLS + place) % len(asked) for place in range(CALLS)]
                    answers[mode][name].append([side.ask({"prompt": asked[place], **same}) for place in places])
    for mode, found in answers.items():
        pairs = [list(zip(*both, strict=True)) for both in zip(found["plain"], found["auto"], strict=True)]
        kinds = {"first ever": (pairs[:1], [0]), "first": (pairs[1:], [0]), "second": (pairs[1:], [1])}
        for call, (processes, places) in {**kinds, "later": (pairs, range(2, CALLS))}.items():
            if held := [process[place] for process in processes for place in places]:
                yield {"mode": mode, "call": call, **_first(held), "processes": len(processes)}


def _first(held: list[tuple[Row, Row]]) -> Row:
    """Figures of pairs of answers: plain's and ours."""
    plain, ours = ([pair[side]["wall_ms"] for pair in held] for side in (0, 1))
    ratios = [before / after for before, after in zip(plain, ours, strict=True)]
    differ = sum(before["tokens"] != after["tokens"] for before, after in held)
    figures = {"plain_median_ms": statistics.median(plain), "ours_median_ms": statistics.median(ours)}
    figures |= {"speedup_median": statistics.median(ratios), "speedup_interval": list(bootstrap(ratios))}
    figures["cpu_ratio"] = statistics.median(before["cpu_ms"] / after["cpu_ms"] for before, after in held)
    return {**figures, "plain_ms": plain, "ours_ms": ours, "texts": len(held), "texts_that_differ": differ}


Part = Callable[[Bench, int, Budget], Iterator[Row]]
# By name: the list of the document, the number of texts (calls, processes), the share of the time, and what measures.
PARTS: dict[str, tuple[str, int, float, Part]] = {
    "exact": ("exact", 6, 0.1, exact),
    "s": ("acceptance", 13, 0.3, acceptance),
    "race": ("rows", 3, 0.45, races),
    "first": ("first", 3, 0.15, first_calls),
}
