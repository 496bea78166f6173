"""What training gave: scores on held-out texts, and tokens a pass in decoding."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from lookahead.stats import DecodingStats
from lookahead.strategies.automatic import DEFAULT_SOURCES
from lookahead.strategies.lookahead import Lookahead
from lookahead.training.data import Example
from lookahead.training.distillation import TEMPERATURE, padded

_T = TypeVar("_T")
PROMPT = 64  # tokens of a beginning that is continued, at most
NODES = 24  # of the trees that are compared
_MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0},
}


@dataclass(frozen=True)
class Evaluation:
    """How a training ended, measured on the held-out data."""

    tokens: int  # scored
    parts: dict[str, float]  # losses in nats a token, and shares of tokens, as the recipe names them
    nodes: int  # drafted in a pass, for the next
    tokens_per_pass: dict[str, dict[str, float]]  # by mode and by sources, cold; empty if no texts were asked for
    training: dict[str, Any]  # steps, seconds, tokens, versions and settings

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(self)

    def tables(self) -> Iterator[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        """What a card and the command line say of it: titles, headers and rows."""
        rows: list[tuple[str, ...]] = [(name, f"{value:.3f}") for name, value in self.parts.items()]
        yield f"On {self.tokens:,} held-out tokens", ("", "mean"), rows
        if rates := self.tokens_per_pass:
            lines = [(name, *(f"{rates[mode][name]:.2f}" for mode in rates)) for name in rates["greedy"]]
            yield f"Tokens a pass, {self.nodes} nodes", ("", *rates), lines


def compare(
    model: PreTrainedModel, drafter: Any, prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, dict[str, float]]:
    """Tokens that a pass writes on average, with trees of :data:`NODES` nodes from the free sources, from a trained
    ``drafter``, and from both: greedy, and sampled at a temperature of 0.8. Nothing is remembered from text to text."""
    cold: dict[str, Any] = {"nodes": NODES, "remember": False, "seed": 0}
    source = drafter.source
    strategies = {
        "free sources": Lookahead(**cold),
        source: drafter.strategy(drafter.head, sources=(source,), **cold),
        f"{source} and free sources": drafter.strategy(drafter.head, sources=(source, *DEFAULT_SOURCES), **cold),
    }
    found: dict[str, dict[str, float]] = {}
    for mode, settings in _MODES.items():
        found[mode] = {}
        for name, strategy in strategies.items():
            stats = DecodingStats()
            for number, prompt in enumerate(prompts):
                with torch.random.fork_rng(range(torch.cuda.device_count())):
                    torch.manual_seed(number)
                    given = padded(model, [prompt]) | settings | {"custom_generate": strategy}
                    stats += model.generate(**given, max_new_tokens=new_tokens, return_dict_in_generate=True).stats
            found[mode][name] = stats.mean_acceptance_length
    return found


def continued(examples: Sequence[Example], count: int) -> list[list[int]]:
    """Prompts cut from examples: all that comes before an answer, or the beginning of a plain text."""
    ends = [int(example.loss.int().argmax()) or min(PROMPT, len(example.ids) // 2) for example in examples]
    return spread([example.ids[:end].tolist() for example, end in zip(examples, ends, strict=True) if end], count)


def spread(items: Sequence[_T], count: int) -> list[_T]:
    """At most ``count`` of the items, at even distances."""
    return [items[len(items) * index // count] for index in range(count)] if len(items) > count else list(items)
