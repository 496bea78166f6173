"""What the benchmarks share: loading, methods, modes, prompt sets, one interleaved contest, and its statistics."""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
import typer
from rich.console import Console
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

import lookahead
from benchmarks.machine import describe
from lookahead import DecodingStats, Jacobi, Lookahead

PROMPTS = Path(__file__).parent / "prompts"
DTYPES = ("float32", "bfloat16", "float16")
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "penalty": {"do_sample": False, "repetition_penalty": 1.1},
    **{f"t{t}": {"do_sample": True, "temperature": t, "top_k": 0} for t in (0.7, 0.8, 1.0, 1.5)},
}


@dataclass(frozen=True)
class Method:
    """One contender.

    Attributes:
        label: how tables call it.
        kind: plain passes write one token each; an assisted method's passes are counted by a hook; ours count them.
        settings: further arguments of ``generate``.
        remembers: it carries over from call to call what it learnt, so that it may see every prompt only once; at most
            one method of a contest does.
        one_row: it decodes single prompts only.
        same_draws: sampled texts equal plain ones for the same seed.
    """

    label: str
    kind: Literal["plain", "assisted", "ours"]
    settings: dict[str, Any] = field(default_factory=dict)
    remembers: bool = False
    one_row: bool = False
    same_draws: bool = True


def fixed(window: int, ngram: int, guesses: int) -> Lookahead:
    """The paper's strategy: W, N and G as given."""
    return Lookahead(window_size=window, ngram_size=ngram, verification_set_size=guesses, seed=0)


def _lookup(ngram: int) -> Method:
    settings = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": ngram}
    return Method(f"prompt lookup 10, n-gram {ngram}", "assisted", settings, one_row=True, same_draws=False)


def _ours(label: str, strategy: Any, remembers: bool = False) -> Method:
    return Method(label, "ours", {"lookahead_strategy": strategy}, remembers)


METHODS: dict[str, Callable[[], Method]] = {
    "plain": lambda: Method("generate", "plain"),
    "static": lambda: Method("generate, static cache, compiled", "plain", {"cache_implementation": "static"}),
    "lookup2": lambda: _lookup(2),
    "lookup3": lambda: _lookup(3),
    "assistant": lambda: Method("assistant model", "assisted", one_row=True, same_draws=False),
    "auto": lambda: _ours("lookahead", Lookahead(remember=True), remembers=True),  # a seed would switch memory off
    "cold": lambda: _ours("lookahead, every call cold", Lookahead(remember=False)),
    "w7": lambda: _ours("lookahead 7/5/7", fixed(7, 5, 7)),
    "w15": lambda: _ours("lookahead 15/5/15", fixed(15, 5, 15)),
    "window": lambda: _ours("window only, 15/5/0", fixed(15, 5, 0)),
    "recycling": lambda: _ours("recycling only", Lookahead(sources=("recycling",), remember=False, seed=0)),
    "jacobi": lambda: _ours("jacobi sliding 16", Jacobi(seed=0)),
}


def methods(names: Sequence[str], device: str, assistant: Any = None) -> tuple[dict[str, Method], dict[str, str]]:
    """Make the contenders, the baseline first; what this machine or call has no use for comes back with the reason.

    A strategy that cannot be constructed raises here, before anything is measured.
    """
    table: dict[str, Method] = {}
    skipped: dict[str, str] = {}
    for name in dict.fromkeys(("plain", *names)):
        if name == "static" and not device.startswith("cuda"):
            skipped[name] = f"generate compiles a static cache's step on CUDA only; this run is on {device}"
        elif name == "assistant" and assistant is None:
            skipped[name] = "no --assistant was given"
        else:
            table[name] = METHODS[name]()
    if "assistant" in table:
        table["assistant"].settings["assistant_model"] = assistant
    return table, skipped


def chosen(given: str, known: Iterable[str], what: str) -> list[str]:
    """Read a comma-separated option; ``all`` is everything known."""
    known = list(known)
    names = known if given == "all" else [name.strip() for name in given.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise typer.BadParameter(f"{', '.join(unknown) or 'nothing'} is no {what}: expected some of {', '.join(known)}")
    return names


def whole_numbers(given: str) -> list[int]:
    """Read a comma-separated option of whole numbers."""
    return [int(part) for part in given.split(",")]


def quiet_console(threads: int | None) -> Console:
    """Where a benchmark shows its tables, wide enough for them; sets torch's threads, silences transformers."""
    if threads:
        torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console = Console(stderr=True)
    console.width = max(console.width, 140)
    return console


def load(model_dir: Path | None, dtype: str, device: str, full_length: bool = True) -> tuple[Any, Any]:
    """A model (None: the bundled one) and its tokenizer; ``full_length`` switches its end-of-text token off."""
    kind = getattr(torch, dtype)
    if model_dir is None:
        model, tokenizer = lookahead.load_bundled(dtype=kind, device=device)
    else:
        model, tokenizer = lookahead.load_model(model_dir, dtype=kind, device=device)
    config = model.generation_config
    if config.pad_token_id is None:
        pad = tokenizer.pad_token_id
        config.pad_token_id = pad if pad is not None else (tokenizer.eos_token_id or 0)
    if full_length:
        config.eos_token_id = None
    return model, tokenizer


def texts_of(file: Path) -> list[str]:
    """The prompts of a file of JSON lines."""
    return [json.loads(line)["prompt"] for line in file.read_text().splitlines()]


def save(document: dict[str, Any], out: Path | None) -> str:
    """Write a benchmark's JSON, with what it ran on, and return it."""
    text = json.dumps({**document, **describe()})
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    return text


def wait(device: Any) -> None:
    """Wait for what was started on a device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def counted(model: Any, call: Callable[[], Any], widths: list[int] | None = None) -> tuple[Any, int]:
    """Run ``call`` and count the model's forward passes; ``widths`` takes in the tokens a row of each of them."""
    passes = 0

    def hook(_: Any, args: Any, kwargs: Any, __: Any) -> None:
        nonlocal passes
        passes += 1
        ids = kwargs.get("input_ids", args[0] if args else None)
        if widths is not None and ids is not None:
            widths.append(ids.shape[1])

    handle = model.register_forward_hook(hook, with_kwargs=True)
    try:
        return call(), passes
    finally:
        handle.remove()


def forget(model: Any) -> None:
    """Drop what earlier calls learnt on a model."""
    from lookahead.draft import memory  # not at the top: only methods that remember need it

    memory.forget(model)


def loops(tokens: Sequence[int], tail: int = 64, longest: int = 32) -> bool:
    """Whether a text ends in a loop: its last ``tail`` tokens repeat with a period of at most ``longest``.

    With p the period, token i equals token i - p wherever both are among the last ``tail``. A text of fewer tokens than
    that does not loop.
    """
    if len(tokens) < tail:
        return False
    end = list(tokens[len(tokens) - tail :])
    return any(end[period:] == end[:-period] for period in range(1, min(longest, tail - 1) + 1))


def bootstrap(values: Sequence[float], seed: int = 0, draws: int = 10_000) -> tuple[float, float]:
    """The 2.5th and 97.5th percentile of the median over samples drawn with replacement."""
    given = np.asarray(values, dtype=float)
    picks = np.random.default_rng(seed).integers(0, len(given), (draws, len(given)))
    low, high = np.percentile(np.median(given[picks], axis=1), [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class PromptSet:
    """Where prompts come from and what is asked for.

    Attributes:
        source: a file in prompts/ without its suffix, or ``random`` for tokens drawn at random.
        modes: what it is decoded in; None is whatever the run asks for.
        new_tokens: most tokens to write; None is whatever the run asks for.
        rounds: so many times the rounds of the run, for calls so short that one says little.
    """

    source: str
    modes: tuple[str, ...] | None = None
    new_tokens: int | None = None
    rounds: int = 1


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
WARM = 2  # texts at the end of every set that are only warmed up with


@dataclass(frozen=True)
class Unit:
    """What one call of ``generate`` gets: one prompt, or a batch of consecutive ones; ``index`` is its seed, too."""

    index: int
    inputs: dict[str, Tensor]


def unit_of(index: int, rows: Sequence[list[int]], device: Any, pad: int = 0) -> Unit:
    """One call's prompts, padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return Unit(index, {"input_ids": ids, "attention_mask": mask})


def random_prompt(index: int, vocab: int, length: int = 64) -> list[int]:
    """A prompt of tokens drawn at random."""
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(index)).tolist()


def units(
    model: Any, tokenizer: Any, source: str, prompts: int, batch: int, new_tokens: int
) -> tuple[list[Unit], list[Unit]]:
    """The calls of a contest, and others of the same kind to warm up with: batches are padded on the left."""
    vocab = model.get_input_embeddings().weight.shape[0]
    wanted = max(prompts, batch)
    if source == "random":
        rows = [random_prompt(index, vocab) for index in range(wanted + WARM)]
    else:
        texts = texts_of(PROMPTS / f"{source}.jsonl")
        texts = texts[: min(wanted, len(texts) - WARM)] + texts[-WARM:]
        rows = [tokenizer(text)["input_ids"] for text in texts]
    table = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if table:
        rows = [row[-max(1, table - new_tokens) :] for row in rows]
    unit = partial(unit_of, device=model.device, pad=model.generation_config.pad_token_id)
    groups = [rows[start : start + batch] for start in range(0, len(rows) - WARM - batch + 1, batch)]
    if not groups:
        raise typer.BadParameter(f"a batch of {batch} needs as many prompts, and {source} has {len(rows) - WARM}")
    # Seeds of their own: with a unit's noise a similar prompt may be sampled on to the very same text.
    warm = [unit(1_000_000 + index, [rows[index - WARM]] * batch) for index in range(WARM)]
    return [unit(index, group) for index, group in enumerate(groups)], warm


@dataclass
class Result:
    """What one method did in a contest; every list has an item a unit.

    Attributes:
        seconds: the time of every round.
        after: of every round, the time after the first new token, where it was asked for.
        passes: forward passes, the prompt's included.
        drafted: drafted nodes a row, over all passes; rows: passes over all rows that could have had some.
        stats: ours only.
        differ: rows whose text is not plain ``generate``'s.
        looping: whether the row of a single prompt ends in a loop.
    """

    seconds: list[list[float]]
    passes: list[int]
    drafted: list[int]
    rows: list[int]
    stats: list[DecodingStats | None]
    differ: list[set[int]]
    looping: list[bool]
    after: list[list[float]] = field(default_factory=list)


class FirstToken(BaseStreamer):
    """Knows when a call has written its first token."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._heard = 0
        self.at = math.nan

    def put(self, value: Tensor) -> None:
        """Take in the prompt, and then tokens as they are written."""
        self._heard += 1
        if self._heard == 2:
            wait(self._device)
            self.at = time.perf_counter()

    def end(self) -> None:
        """Be ready for the next call."""
        self._heard = 0


def _count(model: Any, method: Method, call: Callable[..., Any], new_tokens: int, batch: int) -> dict[str, Any]:
    """One call that is not timed: its text, passes, drafted nodes and statistics."""
    if method.kind == "ours":
        output = call(return_dict_in_generate=True)
        stats: DecodingStats = output.stats
        later = max(0, stats.row_steps - batch)
        return {
            "ids": output.sequences,
            "passes": stats.steps,
            "drafted": stats.drafted,
            "rows": later,
            "stats": stats,
        }
    if method.kind == "plain":  # no hook: it would be compiled along
        return {"ids": call(), "passes": new_tokens, "drafted": 0, "rows": 0, "stats": None}
    widths: list[int] = []
    ids, passes = counted(model, call, widths)
    return {"ids": ids, "passes": passes, "drafted": sum(widths[1:]) - passes + 1, "rows": passes - 1, "stats": None}


def contest(
    model: Any,
    table: dict[str, Method],
    given: Sequence[Unit],
    warm: Sequence[Unit],
    mode: dict[str, Any],
    new_tokens: int,
    rounds: int,
    tick: Callable[[], None] = lambda: None,
    *,
    apart: bool = False,
) -> dict[str, Result]:
    """Decode every unit with every method in turn: one round that counts, then ``rounds`` that are timed.

    ``apart`` times what comes after the first token for itself as well; of single prompts only.

    A method that remembers starts each round with a blank memory and meets each unit once in it, so that it never
    writes a text that it has seen; warm-up texts belong to no unit. The order of methods turns round from one unit to
    the next.
    """
    results = {name: Result([], [], [], [], [], [], []) for name in table}
    texts: dict[str, list[Tensor]] = {name: [] for name in table}
    longest = max(given, key=lambda unit: unit.inputs["input_ids"].shape[1])
    batch = len(given[0].inputs["input_ids"])
    heard = FirstToken(model.device)
    streamed = {"streamer": heard} if apart else {}

    def call(method: Method, unit: Unit, **more: Any) -> Any:
        torch.manual_seed(unit.index)
        return model.generate(**unit.inputs, max_new_tokens=new_tokens, **mode, **method.settings, **more)

    for turn in range(rounds + 1):
        for method in table.values():
            if method.remembers:
                forget(model)
            if method.remembers or turn == 0:
                for unit in warm if method.remembers else [longest, *warm]:
                    call(method, unit)
        for place, unit in enumerate(given):
            order = list(table) if (place + turn) % 2 == 0 else list(table)[::-1]
            for name in order:
                method, result = table[name], results[name]
                bound = partial(call, method, unit)
                if turn == 0:
                    counts = _count(model, method, bound, new_tokens, batch)
                    texts[name].append(counts.pop("ids"))
                    for key, value in counts.items():
                        getattr(result, key).append(value)
                    result.seconds.append([])
                    result.after.append([])
                    result.differ.append(set())
                else:
                    wait(model.device)
                    start = time.perf_counter()
                    ids = bound(**streamed)
                    wait(model.device)
                    end = time.perf_counter()
                    result.seconds[place].append(end - start)
                    if apart:
                        result.after[place].append(end - heard.at)
                    _compare(ids, texts["plain"][place], result.differ[place])
            if turn == 0:
                start_of_text = unit.inputs["input_ids"].shape[1]
                looping = batch == 1 and loops(texts["plain"][place][0, start_of_text:].tolist())
                for name in table:
                    results[name].looping.append(looping)
                    _compare(texts[name][place], texts["plain"][place], results[name].differ[place])
            tick()
    return results


def _compare(ids: Tensor, plain: Tensor, differ: set[int]) -> None:
    if ids.shape != plain.shape:
        raise RuntimeError(f"A text has shape {tuple(ids.shape)}: expected {tuple(plain.shape)}, the end being off.")
    differ.update((ids != plain).any(dim=1).nonzero()[:, 0].tolist())


def typical(seconds: Sequence[float]) -> float:
    """One time from several rounds: the fastest of up to three, the median of more."""
    return min(seconds) if len(seconds) <= 3 else statistics.median(seconds)


def row(results: dict[str, Result], name: str, keep: Sequence[int], new_tokens: int, batch: int) -> dict[str, Any]:
    """One method's figures over the units in ``keep``."""
    mine, plain = results[name], results["plain"]
    times = [typical(mine.seconds[i]) for i in keep]
    ratios = [typical(plain.seconds[i]) / taken for i, taken in zip(keep, times, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    passes, later = sum(mine.passes[i] for i in keep), sum(mine.rows[i] for i in keep)
    stats = sum((s for i in keep if (s := mine.stats[i]) is not None), DecodingStats())
    found: dict[str, Any] = {
        "units": len(keep),
        "speedup_median": statistics.median(ratios),
        "speedup_interval": list(bootstrap(ratios)),
        "speedup_quartiles": [quartiles[0], quartiles[2]],
        "tokens_per_s_median": statistics.median(batch * new_tokens / taken for taken in times),
        "S": stats.mean_acceptance_length or new_tokens * len(keep) / passes,
        "passes": passes,
        "nodes": sum(mine.drafted[i] for i in keep) / later if later else 0.0,
        "texts": len(keep) * batch,
        "texts_that_differ": sum(len(mine.differ[i]) for i in keep),
    }
    if stats.steps:
        found["stats"] = {key: value for key, value in stats.to_dict().items() if key != "passes"}
    return found
