"""From data to Medusa's heads on disk: train, save, evaluate."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lookahead._files import write_text
from lookahead.heads.medusa.accuracies import HeadAccuracies, expected_length
from lookahead.heads.medusa.calibration import OwnScores, score
from lookahead.heads.medusa.choices import ChoiceTree
from lookahead.heads.medusa.heads import MedusaHeads
from lookahead.heads.medusa.strategy import Medusa
from lookahead.heads.medusa.training import check_training, fresh_heads, train
from lookahead.training.evaluation import Measured, continued, measure
from lookahead.training.items import Item
from lookahead.training.recipe import Run
from lookahead.training.settings import MedusaSettings
from lookahead.training.stage import Trained
from lookahead.training.trainer import Report


@dataclass(frozen=True)
class Evaluation:
    """How a training ended, measured on the held-out data."""

    own: OwnScores  # with medusa-2, after the training
    before: OwnScores | None  # with medusa-2, before it
    accuracies: HeadAccuracies
    choices: ChoiceTree  # the tree of the next two
    expected: float  # tokens that a pass is expected to write, by the accuracies
    measured: Measured | None  # what decoding really gave; None if not asked for
    training: dict[str, Any]  # steps, seconds, tokens, versions and settings

    @property
    def ratio(self) -> float:
        """The first head's top-1 accuracy over the model's own; NaN if that is 0."""
        return self.accuracies.top(1)[0] / self.own.top1 if self.own.top1 else math.nan

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        heads = zip(self.accuracies.top(1), self.accuracies.top(5), self.accuracies.samples, strict=True)
        return {
            "own": asdict(self.own),
            "before": None if self.before is None else asdict(self.before),
            "heads": [{"top1": top1, "top5": top5, "tokens": tokens} for top1, top5, tokens in heads],
            "accuracies": [list(row) for row in self.accuracies.accuracies],
            "nodes": len(self.choices.paths),
            "expected_tokens_per_pass": self.expected,
            "measured": None if self.measured is None else asdict(self.measured) | {"speedup": self.measured.speedup},
            "training": self.training,
        }


def fit(
    model: PreTrainedModel,
    tokenizer: Any,
    items: Sequence[Item],
    held_out: Sequence[Item],
    output: str | Path,
    settings: MedusaSettings,
    *,
    name: str | None = None,
    resume: bool = False,
    force: bool = False,
    evaluation_tokens: int = 32768,
    evaluation_prompts: int = 8,
    new_tokens: int = 96,
    report: Report | None = None,
) -> Evaluation | None:
    """Train heads for a model in evaluation mode, save and evaluate them.

    ``output``, a new or empty folder, then holds the heads with their card (``config.json``, ``model.safetensors``,
    ``README.md``), ``evaluation.json``, ``checkpoints/``, and with medusa-2 ``adapter/`` or ``model/``. ``name`` is the
    model's in config and card; None is where it was loaded from. ``resume`` continues the training in ``output``, with
    the same data and settings; ``force`` drops it. About ``evaluation_tokens`` held-out tokens are scored, and
    ``evaluation_prompts`` held-out texts continued by ``new_tokens``, with plain decoding and with the heads.
    ``report`` gets the stage (``"encoding"``, ``"answering"``, ``"heads"``, ``"both"``, ``"evaluating"``), the share of
    it that is done, and now and then losses and rates. Of several processes, all but the first return None.

    Raises:
        LookaheadError: the data, the model, the settings or the folder will not do (nothing is written then), or the
            loss is not finite.
    """
    check_training(model, settings)
    fresh_heads(model, settings)  # tells what the model cannot give, before the folder is made
    run = Run(model, tokenizer, settings, Path(output).expanduser(), report or (lambda stage, done, logs: None))
    learnt, seen = run.prepare(items, held_out, evaluation_tokens, resume=resume, force=force)
    before = score(model, None, seen, pad=run.pad)[0] if settings.method == "medusa-2" else None
    trained = train(model, learnt, settings, run.checkpoints, pad=run.pad, resume=resume, report=report)
    if not run.writes:
        return None
    heads = _save(run, trained, name)
    own, accuracies = score(model, heads, seen, pad=run.pad, report=run.progress("evaluating"))
    assert accuracies is not None  # heads were given
    choices = Medusa(heads).tree(heads.vocab_size or 1)
    expected = 1.0 + expected_length(accuracies, choices)  # the accepted tokens, and the model's own
    starts = continued(seen, evaluation_prompts)
    measured = measure(model, Medusa(heads, choices, seed=0), starts, new_tokens) if starts else None
    facts = run.facts(trained, learnt) | {"items": len(items), "held_out_items": len(held_out)}
    evaluation = Evaluation(own, before, accuracies, choices, expected, measured, facts)
    write_text(run.output / "evaluation.json", json.dumps(evaluation.to_dict(), indent=1) + "\n")
    card = run.output / "README.md"
    write_text(card, card.read_text(encoding="utf-8").rstrip() + "\n\n" + _card(evaluation, settings))
    return evaluation


def _save(run: Run, trained: Trained, name: str | None) -> MedusaHeads:
    """Write heads, and the model's part; returns the heads as they were rounded, in the model's dtype."""
    model, heads = run.model, trained.heads
    if name is not None:
        heads.base_model = name
    heads.to(torch.bfloat16 if model.dtype is torch.bfloat16 else torch.float16)
    heads.check_finite()
    heads.save_pretrained(run.output)
    if trained.model is not model:
        trained.model.save_pretrained(run.output / "adapter", save_embedding_layers=False)
    elif trained.changed:
        model.save_pretrained(run.output / "model")
        run.tokenizer.save_pretrained(run.output / "model")
    return heads.to(model.dtype)


def _card(evaluation: Evaluation, settings: MedusaSettings) -> str:
    own, facts, measured, before = evaluation.own, evaluation.training, evaluation.measured, evaluation.before
    tops = zip(evaluation.accuracies.top(1), evaluation.accuracies.top(5), strict=True)
    rows = [f"| head {head} | +{head + 2} | {one:.3f} | {five:.3f} |\n" for head, (one, five) in enumerate(tops)]
    source = " They are the model's own answers (self-distillation)." if settings.distil else ""
    timed = "" if measured is None else f", {measured.tokens_per_pass:.2f} measured"
    card = f"""## Training

{settings.method}, {facts["steps"]} of {facts["planned_steps"]} planned steps of \
{settings.batch_size * settings.accumulate} examples of up to {settings.block_size} tokens, \
{facts["seconds"] / 60:.1f} minutes on {facts["device"]}; {facts["tokens"]:,} tokens in {facts["items"]:,} items.\
{source}

## Accuracy

On {own.tokens:,} tokens of {facts["held_out_items"]} items that were held out:

| | predicts the token | top-1 | top-5 |
|---|---|---|---|
| the model itself | next | {own.top1:.3f} | {own.top5:.3f} |
{"".join(rows)}
Tokens a pass over a tree of {len(evaluation.choices.paths)} nodes: {evaluation.expected:.2f} expected{timed}.
"""
    if before is not None:
        card += f"\nThe model's own loss: {before.loss:.4f} before, {own.loss:.4f} after (nats a token).\n"
    return card
