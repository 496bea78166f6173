"""What a trained head is worth: its losses on held-out texts, tokens a pass in decoding, and the card that says so."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.stats import DecodingStats
from lookahead.strategies.lookahead import Lookahead
from lookahead.training.data import Example, Progress, collate
from lookahead.training.drafter import BesideModel, TrainedHead
from lookahead.training.evaluation import continuation
from lookahead.training.settings import TrainingSettings

NODES = 24  # of the trees that are compared
_BATCH = 8  # texts scored at once
_MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 0},
}


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
    for start in range(0, len(examples), _BATCH):
        batch = {name: value.to(model.device) for name, value in collate(examples[start : start + _BATCH], pad).items()}
        learner(**batch)
        found.append({name: value.item() for name, value in learner.parts.items()})
        if report is not None:
            report(min(1.0, (start + _BATCH) / len(examples)))
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
