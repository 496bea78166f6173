"""Who takes part in a contest, and what is decoded: methods, sets of prompts, and the calls made of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.harness import random_prompt, texts_of
from benchmarks.options import chosen
from lookahead import Jacobi, Lookahead
from lookahead.eagle import Eagle, EagleHead

Settings = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """One contender; ``label`` is its name in tables, ``settings`` are further arguments of ``generate``."""

    label: str
    kind: Literal["plain", "assisted", "ours"]  # passes: one token each, counted by a hook, counted by our statistics
    settings: Settings = field(default_factory=dict)
    remembers: bool = False  # learns from call to call, so it may see every prompt only once
    one_row: bool = False  # decodes single prompts only
    same_draws: bool = True  # sampled texts equal plain ones for the same seed


def ours(label: str, strategy: Any, remembers: bool = False) -> Method:
    """A method that decodes with a strategy."""
    return Method(label, "ours", {"lookahead_strategy": strategy}, remembers)


def _fixed(label: str, window: int, ngram: int, guesses: int) -> Method:
    """The paper's strategy: W, N and G as given."""
    return ours(label, Lookahead(window_size=window, ngram_size=ngram, verification_set_size=guesses, seed=0))


def _lookup(ngram: int) -> Method:
    settings = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": ngram}
    return Method(f"prompt lookup 10, n-gram {ngram}", "assisted", settings, one_row=True, same_draws=False)


METHODS: dict[str, Callable[[], Method]] = {
    "plain": lambda: Method("generate", "plain"),
    "static": lambda: Method("generate, static cache, compiled", "plain", {"cache_implementation": "static"}),
    "lookup2": lambda: _lookup(2),
    "lookup3": lambda: _lookup(3),
    "auto": lambda: ours("lookahead", Lookahead(remember=True), remembers=True),  # a seed would switch memory off
    "untraced": lambda: ours("lookahead, no traces", Lookahead(traces=False), remembers=True),
    "cold": lambda: ours("lookahead, every call cold", Lookahead(remember=False)),
    "w7": lambda: _fixed("lookahead 7/5/7", 7, 5, 7),
    "w15": lambda: _fixed("lookahead 15/5/15", 15, 5, 15),
    "jacobi": lambda: ours("jacobi sliding 16", Jacobi(seed=0)),
}
# Those that have a model beside them.
ASSISTED: dict[str, Callable[[Any], Method]] = {
    "assistant": lambda model: Method(
        "assistant model", "assisted", {"assistant_model": model}, one_row=True, same_draws=False
    ),
    "draft": lambda model: ours("draft model", Lookahead(draft_model=model, sources=("draft",)), remembers=True),
    "draft+free": lambda model: ours("draft model and free sources", Lookahead(draft_model=model), remembers=True),
}
# Those that have an EAGLE head.
HEADED: dict[str, Callable[[EagleHead], Method]] = {
    "eagle": lambda head: ours("EAGLE head", Eagle(head, sources=("eagle",)), remembers=True),
    "eagle+free": lambda head: ours("EAGLE head and free sources", Eagle(head), remembers=True),
}
NAMES = (*METHODS, *ASSISTED, *HEADED)


def methods(
    names: Sequence[str], device: str, assistant: Any = None, head: EagleHead | None = None
) -> tuple[dict[str, Method], dict[str, str]]:
    """Make the contenders, the baseline first; what cannot run here comes back with the reason.

    A strategy that cannot be constructed raises here, before anything is measured.
    """
    table: dict[str, Method] = {}
    skipped: dict[str, str] = {}
    for name in dict.fromkeys(("plain", *names)):
        if name == "static" and not device.startswith("cuda"):
            skipped[name] = f"generate compiles a static cache's step on CUDA only; this run is on {device}"
        elif name in METHODS:
            table[name] = METHODS[name]()
        elif name in ASSISTED and assistant is not None:
            table[name] = ASSISTED[name](assistant)
        elif name in HEADED and head is not None:
            table[name] = HEADED[name](head)
        else:
            skipped[name] = f"no {'head' if name in HEADED else 'model'} was given that drafts"
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
