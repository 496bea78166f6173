"""What a trained head is worth: its losses on held-out texts, tokens a pass in decoding, and the card that says so."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.stats import DecodingStats
from lookahead.strategies.lookahead import Lookahead
from lookahead.training.data import Example, Progress, batches
from lookahead.training.drafter import BesideModel, TrainedHead
from lookahead.training.settings import TrainingSettings

_T = TypeVar("_T")
_WARM_UP = 8  # tokens
_PROMPT = 64  # tokens of a text that are continued
NODES = 24  # of the trees that are compared
_MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 0},
}


@dataclass(frozen=True)
class Measured:
    """Greedy decoding, plain and with drafts, of the same texts in turns in one process."""

    prompts: int  # how many texts
    tokens: int  # written in each of the two ways
    tokens_per_pass: float  # mean acceptance length with drafts, the model's own token included
    plain_tokens_per_s: float
    tokens_per_s: float  # with drafts

    @property
    def speedup(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s


def measure(model: PreTrainedModel, strategy: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> Measured:
    """Continue every prompt (token ids) by at most ``new_tokens``, with plain decoding and with a strategy in turns."""
    seconds, tokens = {False: 0.0, True: 0.0}, {False: 0, True: 0}
    stats = DecodingStats()
    for number, prompt in enumerate([prompts[0], *prompts]):
        for ours in (False, True) if number % 2 else (True, False):
            begin = time.perf_counter()
            count = new_tokens if number else min(new_tokens, _WARM_UP)
            output = continuation(model, prompt, count, strategy if ours else None, do_sample=False)
            if not number:
                continue  # the first text warms up
            seconds[ours] += time.perf_counter() - begin
            tokens[ours] += output.sequences.shape[1] - len(prompt)
            if ours:
                stats += output.stats
    speeds = {ours: tokens[ours] / seconds[ours] for ours in seconds}
    return Measured(len(prompts), tokens[True], stats.mean_acceptance_length, speeds[False], speeds[True])


def continuation(model: PreTrainedModel, prompt: Sequence[int], new_tokens: int, strategy: Any, **settings: Any) -> Any:
    """What ``generate`` returns for a prompt of token ids; without a strategy by plain decoding."""
    ids = torch.tensor([prompt], device=model.device)
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        return_dict_in_generate=True,
        pad_token_id=model.generation_config.pad_token_id or 0,
        custom_generate=strategy,
        **settings,
    )


def continued(examples: Sequence[Example], count: int) -> list[list[int]]:
    """Prompts cut from examples: all that comes before an answer, or the beginning of a plain text."""
    ends = [int(example.loss.int().argmax()) or min(_PROMPT, len(example.ids) // 2) for example in examples]
    return spread([example.ids[:end].tolist() for example, end in zip(examples, ends, strict=True) if end], count)


def spread(items: Sequence[_T], count: int) -> list[_T]:
    """At most ``count`` of the items, at even distances."""
    return [items[len(items) * index // count] for index in range(count)] if len(items) > count else list(items)


@dataclass(frozen=True)
class DrafterEvaluation:
    """How a training ended, measured on the held-out data."""

    tokens: int  # scored
    parts: dict[str, float]  # of the loss, as the drafter names them: means of batches
    nodes: int  # drafted in a pass, for the next
    tokens_per_pass: dict[str, dict[str, float]]  # by mode and by sources, cold; empty if no texts were asked for
    training: dict[str, Any]  # steps, seconds, tokens, versions and settings

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(self)


@torch.no_grad()
def score_drafter(
    model: PreTrainedModel,
    drafter: TrainedHead,
    examples: Sequence[Example],
    pad: int = 0,
    report: Progress | None = None,
) -> tuple[dict[str, float], int]:
    """The parts of the loss on examples, as means of batches, and how many tokens these have."""
    learner = BesideModel(model, drafter, 0.0).eval()
    found: list[dict[str, float]] = []
    for batch in batches(examples, pad, model.device, report):
        learner(**batch)
        found.append({name: value.item() for name, value in learner.parts.items()})
    if not found:
        raise LookaheadError("The held-out data is empty: expected at least one example. Give more of it.")
    parts = {name: sum(each[name] for each in found) / len(found) for name in found[0]}
    return parts, sum(len(example.ids) for example in examples)


def compare(
    model: PreTrainedModel, drafter: TrainedHead, prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, dict[str, float]]:
    """Tokens that a pass writes on average, with trees of :data:`NODES` nodes from the free sources, from the drafter,
    and from both: greedy, and sampled at a temperature of 0.8. Nothing is remembered from text to text."""
    cold: dict[str, Any] = {"nodes": NODES, "remember": False, "seed": 0}
    source = drafter.source
    strategies = {
        "free sources": Lookahead(**cold),
        source: drafter.strategy(drafter.head, sources=(source,), **cold),
        f"{source} and free sources": drafter.strategy(drafter.head, **cold),
    }
    found: dict[str, dict[str, float]] = {}
    for mode, settings in _MODES.items():
        found[mode] = {}
        for name, strategy in strategies.items():
            stats = DecodingStats()
            for number, prompt in enumerate(prompts):
                with torch.random.fork_rng(range(torch.cuda.device_count())):
                    torch.manual_seed(number)
                    stats += continuation(model, prompt, new_tokens, strategy, **settings).stats
            found[mode][name] = stats.mean_acceptance_length
    return found


def card(drafter: TrainedHead, name: str | None, evaluation: DrafterEvaluation, settings: TrainingSettings) -> str:
    """The head's README.md; ``name`` is its model's."""
    facts, rates = evaluation.training, evaluation.tokens_per_pass
    source = " They are the model's own answers (self-distillation)." if settings.distil else ""
    parts = "".join(f"| {name} | {value:.3f} |\n" for name, value in evaluation.parts.items())
    text = f"""---
library_name: lookahead
tags:
- speculative-decoding
---

# {drafter.title}{f" for {name}" if name else ""}

It is of use only beside the model that it was trained for, whose text it does not change.

```python
{drafter.use}
```

## Training

{facts["steps"]} of {facts["planned_steps"]} planned steps of {settings.batch_size * settings.accumulate} examples of up
to {settings.block_size} tokens, {facts["seconds"] / 60:.1f} minutes on {facts["device"]}; {facts["tokens"]:,} tokens in
{facts["items"]:,} items.{source}

On {evaluation.tokens:,} tokens of {facts["held_out_items"]} items that were held out:

| | mean |
|---|---|
{parts}"""
    if rates:
        text += f"\nTokens a pass, with {evaluation.nodes} nodes:\n\n| | greedy | temperature 0.8 |\n|---|---|---|\n"
        for name in rates["greedy"]:
            text += f"| {name} | {rates['greedy'][name]:.2f} | {rates['sampled'][name]:.2f} |\n"
    return text
