"""From data to a drafter on disk, whatever kind it is: train, save, evaluate."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead._files import write_text
from lookahead.stats import DecodingStats
from lookahead.strategies.lookahead import Lookahead
from lookahead.training.clock import Report
from lookahead.training.data import Example, Progress, collate
from lookahead.training.drafter import BesideModel, train_drafter
from lookahead.training.evaluation import continued
from lookahead.training.items import Item
from lookahead.training.recipe import Run
from lookahead.training.settings import TrainingSettings
from lookahead.training.stage import check_stage

NODES = 24  # of the trees that are compared
_BATCH = 8  # texts scored at once
_MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 0},
}


@dataclass(frozen=True)
class Kind:
    """What has to be known of a kind of drafter.

    Attributes:
        title: its name in cards, ``source`` its name among the sources of drafts.
        fresh: makes one for the examples that it will learn from, a :class:`lookahead.training.drafter.Drafter`; for
            none, to see whether it can be made.
        rate: the peak learning rate for it.
        strategy: makes the strategy that drafts with it, of the settings of the automatic mode.
        use: how it is used, as code, in its card.
    """

    title: str
    source: str
    fresh: Callable[[Sequence[Example]], Any]
    rate: float
    strategy: Callable[..., Any]
    use: str


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


def fit_drafter(
    model: PreTrainedModel,
    tokenizer: Any,
    items: Sequence[Item],
    held_out: Sequence[Item],
    output: str | Path,
    settings: TrainingSettings,
    kind: Kind,
    *,
    resume: bool = False,
    force: bool = False,
    evaluation_tokens: int = 32768,
    evaluation_prompts: int = 8,
    new_tokens: int = 96,
    report: Report | None = None,
) -> DrafterEvaluation | None:
    """Train a drafter for a model in evaluation mode, save and evaluate it.

    ``output``, a new or empty folder, then holds the drafter's files, its card ``README.md``, ``evaluation.json`` and
    ``checkpoints/``. ``resume`` continues the training in ``output``, with the same data and settings; ``force`` drops
    it. About ``evaluation_tokens`` held-out tokens are scored, and ``evaluation_prompts`` held-out texts continued by
    ``new_tokens``, with the free sources, with the drafter, and with both. ``report`` gets the stage (``"encoding"``,
    ``"answering"``, ``"drafter"``, ``"evaluating"``), the share of it that is done, and now and then losses and rates.
    Of several processes, all but the first return None.

    Raises:
        LookaheadError: the data, the model, the settings or the folder will not do (nothing is written then), or the
            loss is not finite.
    """
    check_stage(model, settings)
    kind.fresh(())  # tells what the model cannot give, before the folder is made
    run = Run(model, tokenizer, settings, Path(output).expanduser(), report or (lambda stage, done, logs: None))
    learnt, seen = run.prepare(items, held_out, evaluation_tokens, resume=resume, force=force)
    more: dict[str, Any] = {"rate": kind.rate, "pad": run.pad, "resume": resume, "report": report}
    trained = train_drafter(model, kind.fresh(learnt), learnt, settings, run.checkpoints, **more)
    if not run.writes:
        return None
    drafter: nn.Module = trained.heads
    drafter.to(torch.bfloat16 if model.dtype is torch.bfloat16 else torch.float16)
    trained.heads.save_pretrained(run.output)
    drafter.to(model.dtype)  # as rounded
    facts = run.facts(trained, learnt) | {"items": len(items), "held_out_items": len(held_out)}
    parts, count = score_drafter(model, drafter, seen, run.pad, run.progress("evaluating"))
    starts = continued(seen, evaluation_prompts)
    rates = compare(model, kind, drafter, starts, new_tokens) if starts else {}
    evaluation = DrafterEvaluation(count, parts, NODES, rates, facts)
    write_text(run.output / "evaluation.json", json.dumps(evaluation.to_dict(), indent=1) + "\n")
    write_text(run.output / "README.md", card(kind, evaluation, settings))
    return evaluation


@torch.no_grad()
def score_drafter(
    model: PreTrainedModel, drafter: Any, examples: Sequence[Example], pad: int = 0, report: Progress | None = None
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
    model: PreTrainedModel, kind: Kind, drafter: Any, prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, dict[str, float]]:
    """Tokens that a pass writes on average, with trees of :data:`NODES` nodes from the free sources, from the drafter,
    and from both: greedy, and sampled at a temperature of 0.8. Nothing is remembered from text to text."""
    cold: dict[str, Any] = {"nodes": NODES, "remember": False, "seed": 0}
    strategies = {
        "free sources": Lookahead(**cold),
        kind.source: kind.strategy(drafter, sources=(kind.source,), **cold),
        f"{kind.source} and free sources": kind.strategy(drafter, **cold),
    }
    found: dict[str, dict[str, float]] = {}
    for mode, settings in _MODES.items():
        found[mode] = {}
        for name, strategy in strategies.items():
            stats = DecodingStats()
            for number, prompt in enumerate(prompts):
                ids = torch.tensor([prompt], device=model.device)
                with torch.random.fork_rng(range(torch.cuda.device_count())):
                    torch.manual_seed(number)
                    stats += model.generate(
                        input_ids=ids,
                        attention_mask=torch.ones_like(ids),
                        max_new_tokens=new_tokens,
                        return_dict_in_generate=True,
                        pad_token_id=model.generation_config.pad_token_id or 0,
                        custom_generate=strategy,
                        **settings,
                    ).stats
            found[mode][name] = stats.mean_acceptance_length
    return found


def card(kind: Kind, evaluation: DrafterEvaluation, settings: TrainingSettings) -> str:
    """The drafter's README.md."""
    facts, rates = evaluation.training, evaluation.tokens_per_pass
    source = " They are the model's own answers (self-distillation)." if settings.distil else ""
    parts = "".join(f"| {name} | {value:.3f} |\n" for name, value in evaluation.parts.items())
    text = f"""---
library_name: lookahead
tags:
- speculative-decoding
---

# {kind.title}

It is of use only beside the model that it was trained for, whose text it does not change.

```python
{kind.use}
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
