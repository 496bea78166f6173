"""From data to heads on disk: encode, train, save, evaluate."""

import hashlib
import json
import math
import platform
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead._files import write_text
from lookahead.sources.medusa.accuracies import HeadAccuracies, expected_length
from lookahead.sources.medusa.choices import ChoiceTree
from lookahead.sources.medusa.heads import MedusaHeads
from lookahead.strategies.medusa import Medusa
from lookahead.training.data import Example, Progress, encode, prompts
from lookahead.training.distillation import own_answers
from lookahead.training.evaluation import Measured, OwnScores, continued, measure, score, spread
from lookahead.training.items import Item
from lookahead.training.settings import TrainingSettings
from lookahead.training.trainer import Report
from lookahead.training.training import Trained, check_training, train

_CHECKPOINTS = "checkpoints"
_SETTINGS = "settings.json"
_RESULTS = ("adapter", "model", _CHECKPOINTS)  # folders that a run leaves, beside the heads' files
_PASSING = ("max_minutes", "save_steps", "report_to")  # settings that may change when a run is resumed


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
    settings: TrainingSettings,
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
    from accelerate import PartialState  # an optional package, which check_training has looked for

    run = _Run(model, tokenizer, settings, Path(output).expanduser(), report or (lambda stage, done, logs: None))
    run.check_folder(resume, force)
    parts = [run.tokens(items, run.progress("encoding")), run.tokens(held_out)]
    process = PartialState(cpu=model.device.type == "cpu")
    if process.is_main_process:
        run.open_folder(parts, resume, force)
    process.wait_for_everyone()
    learnt, seen = (run.answers(part) for part in parts) if settings.distil else parts
    seen = spread(seen, max(1, evaluation_tokens // settings.block_size))
    before = score(model, None, seen, pad=run.pad)[0] if settings.method == "medusa-2" else None
    folder = run.output / _CHECKPOINTS
    trained = train(model, learnt, settings, folder, pad=run.pad, resume=resume, report=report)
    if not process.is_main_process:
        return None
    heads = run.save(trained, name)
    facts = run.facts(trained, learnt) | {"items": len(items), "held_out_items": len(held_out)}
    return run.evaluate(heads, seen, before, facts, continued(seen, evaluation_prompts), new_tokens)


@dataclass(frozen=True)
class _Run:
    model: PreTrainedModel
    tokenizer: Any
    settings: TrainingSettings
    output: Path
    report: Report

    @property
    def pad(self) -> int:
        return int(self.tokenizer.pad_token_id or 0)

    def progress(self, stage: str) -> Progress:
        return lambda done: self.report(stage, done, {})

    def check_folder(self, resume: bool, force: bool) -> None:
        output = self.output
        if resume and force:
            raise LookaheadError("resume and force cannot be combined: one keeps what is there, the other drops it.")
        if output.exists() and not output.is_dir():
            raise LookaheadError(f"The output {output} is a file: expected a folder, or a name for one.")
        ours = (output / _CHECKPOINTS / _SETTINGS).exists()
        if resume and not ours:
            expected = f"{_CHECKPOINTS}/{_SETTINGS}"
            raise LookaheadError(f"There is no training to resume in {output}: expected {expected} there.")
        if not resume and not force and output.exists() and any(output.iterdir()):
            held = "a training; continue it with --resume" if ours else "something else"
            raise LookaheadError(
                f"The output folder {output} holds {held}. Choose a new one, or overwrite with --force."
            )

    def tokens(self, items: Sequence[Item], report: Progress | None = None) -> list[Example]:
        """The items as examples; with ``distil`` as prompts to be answered."""
        size = self.settings.block_size
        if self.settings.distil:
            return [Example.of(ids) for ids in prompts(items, self.tokenizer, block_size=size)]
        return encode(items, self.tokenizer, block_size=size, least=self.settings.least, report=report)

    def open_folder(self, parts: Sequence[list[Example]], resume: bool, force: bool) -> None:
        """Make the folder, or see that the run to be resumed had the same data, model and settings."""
        kept = {name: value for name, value in asdict(self.settings).items() if name not in _PASSING}
        weights = sum(weight.numel() for weight in self.model.parameters())
        digest = hashlib.sha256()
        for example in chain(*parts) if self.settings.distil else parts[0]:
            digest.update(example.ids.numpy().tobytes() + example.loss.numpy().tobytes())
        record = kept | {"data": digest.hexdigest()[:16], "model": f"{type(self.model).__name__}, {weights} parameters"}
        file = self.output / _CHECKPOINTS / _SETTINGS
        if resume:
            known = json.loads(file.read_text(encoding="utf-8"))
            for name, value in record.items():
                if known.get(name) != value:
                    raise LookaheadError(
                        f"The training in {self.output} cannot be resumed with {name}={value!r}: it was begun with "
                        f"{known.get(name)!r}. Use the same data and settings, or begin anew with --force."
                    )
            return
        if force and file.exists():
            for name in _RESULTS:
                shutil.rmtree(self.output / name, ignore_errors=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(record, indent=1) + "\n")

    def answers(self, starts: Sequence[Example]) -> list[Example]:
        texts, folder = [start.ids.tolist() for start in starts], self.output / _CHECKPOINTS / "answers"
        found = own_answers(self.model, texts, folder, self.settings, self.progress("answering"))
        size, least = self.settings.block_size, self.settings.least
        found = [Example(example.ids[:size], example.loss[:size]) for example in found if len(example.ids) >= least]
        if not found:
            raise LookaheadError(
                f"The model's own answers are too short: expected at least one of {least} tokens with its prompt. Give "
                "other prompts."
            )
        return found

    def save(self, trained: Trained, name: str | None) -> MedusaHeads:
        """Write heads, and the model's part; returns the heads as they were rounded, in the model's dtype."""
        model, heads = self.model, trained.heads
        if name is not None:
            heads.base_model = name
        heads.to(torch.bfloat16 if model.dtype is torch.bfloat16 else torch.float16)
        heads.check_finite()
        heads.save_pretrained(self.output)
        if trained.model is not model:
            trained.model.save_pretrained(self.output / "adapter", save_embedding_layers=False)
        elif trained.changed:
            model.save_pretrained(self.output / "model")
            self.tokenizer.save_pretrained(self.output / "model")
        return heads.to(model.dtype)

    def facts(self, trained: Trained, learnt: Sequence[Example]) -> dict[str, Any]:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        return {
            "steps": trained.steps,
            "planned_steps": trained.planned_steps,
            "seconds": round(trained.seconds, 1),
            "tokens": sum(len(example.ids) for example in learnt),
            "threads": torch.get_num_threads(),
            "device": str(self.model.device),
            "versions": versions | {"python": platform.python_version()},
            "settings": asdict(self.settings),
        }

    def evaluate(
        self,
        heads: MedusaHeads,
        seen: Sequence[Example],
        before: OwnScores | None,
        facts: dict[str, Any],
        starts: list[list[int]],
        new_tokens: int,
    ) -> Evaluation:
        """Score and time the heads; write the result beside them and into their card."""
        own, accuracies = score(self.model, heads, seen, pad=self.pad, report=self.progress("evaluating"))
        assert accuracies is not None  # heads were given
        choices = Medusa(heads).tree(heads.vocab_size or 1)
        expected = 1.0 + expected_length(accuracies, choices)  # the accepted tokens, and the model's own
        measured = measure(self.model, heads, starts, choices, new_tokens) if starts else None
        evaluation = Evaluation(own, before, accuracies, choices, expected, measured, facts)
        write_text(self.output / "evaluation.json", json.dumps(evaluation.to_dict(), indent=1) + "\n")
        card = self.output / "README.md"
        write_text(card, card.read_text(encoding="utf-8").rstrip() + "\n\n" + _card(evaluation, self.settings))
        return evaluation


def _card(evaluation: Evaluation, settings: TrainingSettings) -> str:
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
