"""One interleaved contest: every method on every prompt in turn, against plain ``generate`` in the same process."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from benchmarks import theory
from benchmarks.harness import bootstrap, loops, random_prompt, texts_of, timed, typical, wait, watched
from benchmarks.options import MODES, chosen
from benchmarks.tables import show
from lookahead import DecodingStats, Jacobi, Lookahead, Medusa
from lookahead.cli.racing import Method, in_turns, prompt_lookup
from lookahead.draft import memory
from lookahead.eagle import Eagle

Settings = dict[str, Any]
FREE = ("recycling", "suffix")


def ours(label: str, strategy: Any, remembers: bool = False) -> Method:
    """A method that decodes with a strategy."""
    return Method(label, "ours", {"lookahead_strategy": strategy}, remembers)


warm = partial(ours, remembers=True)


METHODS: dict[str, Callable[[], Method]] = {
    "plain": lambda: Method("generate", "plain"),
    "static": lambda: Method("generate, static cache, compiled", "plain", {"cache_implementation": "static"}),
    "lookup2": lambda: prompt_lookup(2),
    "auto": lambda: warm("lookahead", Lookahead(remember=True)),  # a seed would switch memory off
    "untraced": lambda: warm("lookahead, no traces", Lookahead(traces=False)),
    "cold": lambda: ours("lookahead, every call cold", Lookahead(remember=False)),
    "w7": lambda: ours("lookahead 7/5/7", Lookahead(window_size=7, ngram_size=5, verification_set_size=7, seed=0)),
    "jacobi": lambda: ours("jacobi sliding 16", Jacobi(seed=0)),
}
# Those that need something beside them: what, and how they are made with it.
BESIDE: dict[str, tuple[str, Callable[[Any], Method]]] = {
    "assistant": (
        "assistant",
        lambda model: Method("assistant model", "assisted", {"assistant_model": model}, one_row=True, same_draws=False),
    ),
    "draft": ("assistant", lambda model: warm("draft model", Lookahead(draft_model=model, sources=("draft",)))),
    "draft+free": ("assistant", lambda model: warm("draft model and free sources", Lookahead(draft_model=model))),
    "eagle": ("head", lambda head: warm("EAGLE head", Eagle(head, sources=("eagle",)))),
    "eagle+free": ("head", lambda head: warm("EAGLE head and free sources", Eagle(head))),
    "medusa": ("heads", lambda heads: ours("medusa, fixed tree", Medusa(heads))),
    "medusa+free": ("heads", lambda heads: warm("medusa and lookahead", Medusa(heads, sources=("heads", *FREE)))),
}
NAMES = (*METHODS, *BESIDE)


def methods(names: Sequence[str], device: str, **beside: Any) -> tuple[dict[str, Method], dict[str, str]]:
    """Make the contenders, the baseline first; what cannot run here comes back with the reason.

    Of ``beside``, ``assistant`` is a model, ``head`` and ``heads`` are folders of an EAGLE head and of Medusa's. A
    strategy that cannot be constructed raises here, before anything is measured.
    """
    table: dict[str, Method] = {}
    skipped: dict[str, str] = {}
    for name in dict.fromkeys(("plain", *names)):
        needed, make = BESIDE.get(name, ("", None))
        if name == "static" and not device.startswith("cuda"):
            skipped[name] = f"generate compiles a static cache's step on CUDA only; this run is on {device}"
        elif make is None:
            table[name] = METHODS[name]()
        elif beside.get(needed) is not None:
            table[name] = make(beside[needed])
        else:
            skipped[name] = f"nothing was given by --{needed}"
    return table, skipped


@dataclass(frozen=True)
class PromptSet:
    """Where prompts come from and what is asked for; None is whatever the run asks for."""

    source: str  # a file of JSON lines, one in prompts/ without its suffix, or ``random`` for tokens drawn at random
    modes: tuple[str, ...] | None = None
    new_tokens: int | None = None  # at most
    rounds: int = 1  # times those of the run: one call so short says little


WARM = 2  # texts at the end of every set that are only warmed up with
SETS = {
    "code": PromptSet("code"),
    # Those of the code prompts whose greedy text of 128 tokens by the bundled model does not end in a loop.
    "no-loop": PromptSet("code-no-loop"),
    "prose": PromptSet("prose"),
    "random": PromptSet("random", ("greedy",)),
    "hot": PromptSet("code", ("t1.5",)),
    "short": PromptSet("code", ("greedy", "t0.8"), new_tokens=8, rounds=5),
    "single": PromptSet("code", ("greedy",), new_tokens=1, rounds=10),
}


def prompt_sets(given: str) -> dict[str, PromptSet]:
    """Read a comma-separated option of sets' names and files; ``all`` is every set."""
    found: dict[str, PromptSet] = {}
    for name in map(str.strip, given.split(",")):
        file = name.endswith(".jsonl")
        found |= {Path(name).stem: PromptSet(name)} if file else {key: SETS[key] for key in chosen(name, SETS, "set")}
    return found


@dataclass(frozen=True)
class Unit:
    """What one call of ``generate`` gets: one prompt, or a batch of consecutive ones; ``index`` is its seed, too."""

    index: int
    inputs: dict[str, Tensor]


Texts = tuple[Sequence[Unit], Sequence[Unit]]  # to be decoded, and to warm up with


def unit_of(index: int, rows: Sequence[list[int]], device: Any, pad: int = 0) -> Unit:
    """One call's prompts, padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return Unit(index, {"input_ids": ids, "attention_mask": mask})


def tokens_of(tokenizer: Any, texts: Sequence[str], questions: bool) -> list[list[int]]:
    """Texts as tokens; ``questions`` by the chat template, where there is one, which has the special tokens."""
    if not (questions and tokenizer.chat_template):
        return [tokenizer(text)["input_ids"] for text in texts]
    chats = [[{"role": "user", "content": text}] for text in texts]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def units(model: Any, tokenizer: Any, source: str, prompts: int, batch: int, new_tokens: int) -> Texts:
    """The calls of a contest, and others of the same kind to warm up with. A batch of more sequences
    than its set has prompts repeats them."""
    wanted = max(prompts, batch)
    if source == "random":
        vocab = model.get_input_embeddings().weight.shape[0]
        rows = [random_prompt(index, vocab) for index in range(wanted + WARM)]
    else:
        texts = texts_of(source)
        own = texts[:-WARM]
        count = min(wanted, max(len(own), batch))
        texts = [own[index % len(own)] for index in range(count)] + texts[-WARM:]
        rows = tokens_of(tokenizer, texts, questions=source.endswith(".jsonl") or source == "chat")
    table = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if table:
        rows = [row[-max(1, table - new_tokens) :] for row in rows]
    unit = partial(unit_of, device=model.device, pad=model.generation_config.pad_token_id)
    groups = [rows[start : start + batch] for start in range(0, len(rows) - WARM - batch + 1, batch)]
    # Seeds of their own: with a unit's noise a similar prompt may be sampled on to the very same text.
    warm = [unit(1_000_000 + index, [rows[index - WARM]] * batch) for index in range(WARM)]
    return [unit(index, group) for index, group in enumerate(groups)], warm


Methods = dict[str, Method]
Watch = Callable[[Sequence[Unit]], Iterable[Unit]]
COLUMNS = "prompts, method, speedup, 95%, tokens/s, S, nodes, of ceiling, texts that differ"


@dataclass
class Calls:
    """One method's calls on one unit: the text and counts of the first, and the times of the others."""

    ids: Tensor
    passes: int  # prefill included
    drafted: int = 0  # nodes, over all passes
    rows: int = 0  # passes after prefill, summed over the sequences that were still written
    stats: DecodingStats | None = None  # ours only
    seconds: list[float] = field(default_factory=list)  # of every timed round
    after: list[float] = field(default_factory=list)  # of it, what came after the first new token, if asked for
    differ: set[int] = field(default_factory=set)  # sequences whose text is not plain ``generate``'s, in any round

    def compare(self, ids: Tensor, plain: Tensor) -> None:
        """Note the sequences that differ from plain ones; they are as long, the end-of-text token being off."""
        self.differ.update((ids != plain).any(dim=1).nonzero()[:, 0].tolist())


Results = dict[str, list[Calls]]  # by method


class FirstToken(BaseStreamer):
    """Knows when a call has written its first token: it is told the prompt, and then tokens as they are written."""

    lookahead_draws_nothing = True

    def __init__(self, device: Any) -> None:
        self._device = device
        self._heard, self.at = 0, math.nan

    def put(self, value: Tensor) -> None:
        self._heard += 1
        if self._heard == 2:
            wait(self._device)
            self.at = time.perf_counter()

    def end(self) -> None:
        self._heard = 0


def _count(model: Any, method: Method, call: Callable[..., Any], new_tokens: int, batch: int) -> Calls:
    """One call that is not timed."""
    if method.kind == "ours":
        output = call(return_dict_in_generate=True)
        stats: DecodingStats = output.stats
        return Calls(output.sequences, stats.steps, stats.drafted, max(0, stats.row_steps - batch), stats)
    if method.kind == "plain":  # no hook: it would be compiled along
        return Calls(call(), new_tokens)
    widths: list[int] = []

    def hook(_: Any, args: Any, kwargs: Any, __: Any) -> None:
        widths.append(kwargs.get("input_ids", args[0] if args else None).shape[1])

    handle = model.register_forward_hook(hook, with_kwargs=True)
    try:
        return Calls(call(), len(widths), sum(widths[1:]) - len(widths) + 1, len(widths) - 1)
    finally:
        handle.remove()


def contest(
    model: Any,
    table: Methods,
    texts: Texts,
    mode: Settings,
    new_tokens: int,
    rounds: int,
    *,
    apart: bool = False,
    watch: Watch = iter,
) -> Results:
    """Decode every unit with every method in turn: one round that counts, then ``rounds`` that are timed.

    A method that remembers starts each round with a blank memory and meets each unit once in it, so it never writes a
    text that it has seen; warm-up texts belong to no unit. The order of methods turns round from unit to unit.
    ``apart`` also times what comes after the first token, of single prompts; ``watch`` shows how far a round is.
    """
    given, warm = texts
    results: Results = {name: [] for name in table}
    longest = max(given, key=lambda unit: unit.inputs["input_ids"].shape[1])
    batch = len(given[0].inputs["input_ids"])
    heard = FirstToken(model.device)
    streamed = {"streamer": heard} if apart else {}

    memories: dict[str, memory.Memory | None] = {}  # by method: one must not learn from what another has written

    def call(method: Method, unit: Unit, **more: Any) -> Any:
        torch.manual_seed(unit.index)
        memory.exchange(model, memories.get(method.label))
        output = model.generate(**unit.inputs, max_new_tokens=new_tokens, **mode, **method.settings, **more)
        memories[method.label] = memory.exchange(model)
        return output

    def counted(unit: Unit, name: str) -> Calls:
        return _count(model, table[name], partial(call, table[name], unit), new_tokens, batch)

    def raced(unit: Unit, name: str) -> tuple[Tensor, float, float]:
        ids, seconds = timed(model.device, partial(call, table[name], unit, **streamed))
        return ids, seconds, time.perf_counter() - heard.at

    for turn in range(rounds + 1):
        for method in table.values():
            memories.pop(method.label, None)
            if method.remembers or turn == 0:
                for unit in warm if method.remembers else [longest, *warm]:
                    call(method, unit)
        if turn == 0:
            for place, unit in enumerate(watch(given)):
                for name, calls in in_turns(table, place, partial(counted, unit)).items():
                    results[name].append(calls)
            continue
        for place, unit in enumerate(watch(given)):
            for name, (ids, seconds, after) in in_turns(table, turn + place, partial(raced, unit)).items():
                calls = results[name][place]
                calls.after.append(after)
                calls.seconds.append(seconds)
                calls.compare(ids, results["plain"][place].ids)
    for found in results.values():
        for calls, plain in zip(found, results["plain"], strict=True):
            calls.compare(calls.ids, plain.ids)
    return results


def row(results: Results, name: str, new_tokens: int, batch: int = 1, keep: Iterable[int] | None = None) -> Settings:
    """One method's figures over the units in ``keep``; None is all."""
    keep = range(len(results[name])) if keep is None else list(keep)
    mine, plain = [results[name][i] for i in keep], [results["plain"][i] for i in keep]
    times = [typical(calls.seconds) for calls in mine]
    ratios = [typical(calls.seconds) / taken for calls, taken in zip(plain, times, strict=True)]
    passes, later = sum(calls.passes for calls in mine), sum(calls.rows for calls in mine)
    stats = sum((calls.stats for calls in mine if calls.stats is not None), DecodingStats())
    found: dict[str, Any] = {
        "speedup_median": statistics.median(ratios),
        "speedup_interval": list(bootstrap(ratios)),
        "tokens_per_s_median": statistics.median(batch * new_tokens / taken for taken in times),
        "S": stats.mean_acceptance_length or new_tokens * len(mine) / passes,
        "passes": passes,
        "nodes": sum(calls.drafted for calls in mine) / later if later else 0.0,
        "texts": len(mine) * batch,
        "texts_that_differ": sum(len(calls.differ) for calls in mine),
    }
    if stats.steps:
        found["stats"] = {key: value for key, value in stats.to_dict().items() if key != "passes"}
    return found


def later(results: Results, name: str, new_tokens: int) -> Settings:
    """One method's figures by what came before and after the first token, of a contest with ``apart``."""
    after = [typical(calls.after) for calls in results[name]]
    ratios = [typical(plain.after) / mine for plain, mine in zip(results["plain"], after, strict=True)]
    first = [whole - rest for calls in results[name] for whole, rest in zip(calls.seconds, calls.after, strict=True)]
    return {
        "first_token_ms": 1e3 * statistics.median(first),
        "token_ms": 1e3 * statistics.median(after) / (new_tokens - 1),
        "after_median": statistics.median(ratios),
        "after_interval": list(bootstrap(ratios)),
    }


def decode(
    model: Any, strategy: Any, given: Iterable[Unit], mode: Settings, new_tokens: int, others: Sequence[Unit] = ()
) -> list[tuple[DecodingStats, list[int]]]:
    """Every text decoded once: its counts, and the tokens written. A strategy that remembers knows ``others``, which
    come first, and the texts before."""
    memory.exchange(model)
    found = []
    settings = {"max_new_tokens": new_tokens, "lookahead_strategy": strategy, "return_dict_in_generate": True, **mode}
    for unit in (*others, *given):
        torch.manual_seed(unit.index)
        output = model.generate(**unit.inputs, **settings)
        found.append((output.stats, output.sequences[0, unit.inputs["input_ids"].shape[1] :].tolist()))
    return found[len(others) :]


def acceptance(per_text: Sequence[DecodingStats]) -> Settings:
    """S, and the nodes and milliseconds of drafting a pass, over all texts."""
    total = sum(per_text, DecodingStats())
    drafts = max(1, total.steps - len(per_text))
    figures = {"nodes_per_pass": total.drafted / drafts, "draft_ms": total.draft_ms / drafts}
    return {"texts": len(per_text), "S": total.mean_acceptance_length, **figures}


def race(
    console: Console, model: Any, table: Methods, texts: Texts, place: Settings, rounds: int, card: Settings
) -> list[Settings]:
    """Hold a contest on ``texts`` (as of ``units``), show its table, and return every method's row.

    Greedy texts of single prompts are also given apart by whether plain ``generate``'s ends in a loop. ``place`` is
    set, mode, dtype, batch and new_tokens, which go into every row; the theory card gives the ceilings.
    """
    mode, batch, new_tokens = MODES[place["mode"]], place["batch"], place["new_tokens"]
    title = ", ".join(f"{key} {value}" if isinstance(value, int) else value for key, value in place.items())
    watch = partial(watched, console, title)
    results = contest(model, table, texts, mode, new_tokens, rounds, watch=watch)
    groups = {"all": list(range(len(texts[0])))}
    if batch == 1 and place["mode"] == "greedy":
        looping = [loops(calls.ids[0, -new_tokens:].tolist()) for calls in results["plain"]]
        if any(looping):
            groups["looping"] = [i for i, found in enumerate(looping) if found]
            groups["not looping"] = [i for i, found in enumerate(looping) if not found]
    rows = []
    for group, members in groups.items():
        for name, method in table.items() if members else ():
            found = row(results, name, new_tokens, batch, members)
            ceiling = theory.ceiling(card, batch, found["S"], found["nodes"])
            found |= {"ceiling": ceiling, "share_of_ceiling": found["speedup_median"] / ceiling}
            found["same_draws"] = method.same_draws or not mode["do_sample"]
            rows.append({**place, "rounds": rounds, "method": name, "label": method.label, "group": group, **found})
    show(console, title, COLUMNS, rows)
    return rows
