"""From data to heads on disk: encode, train, save, evaluate."""

import hashlib
import json
import math
import platform
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, TrainerCallback

from jacobi import LookaheadError
from lookahead._files import write_text
from lookahead.sources.medusa.accuracies import HeadAccuracies
from lookahead.sources.medusa.choices import ChoiceTree
from lookahead.sources.medusa.heads import MedusaHeads
from lookahead.strategies.medusa import Medusa
from lookahead.training.data import Example, encode, prompts
from lookahead.training.distillation import own_answers
from lookahead.training.evaluation import Measured, OwnScores, continued, expected_tokens, measure, score, spread
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
    """How a training ended, measured on the held-out data.

    Attributes:
        own: the model's own next tokens; with medusa-2 after the training.
        before: (medusa-2) the same before it.
        accuracies: how often each rank of each head is right.
        choices: the tree of the two lines below.
        expected: tokens that a pass is expected to write, from the accuracies.
        measured: what decoding really gave; None where it was not asked for.
        training: steps, planned steps, seconds, tokens and settings.
    """

    own: OwnScores
    before: OwnScores | None
    accuracies: HeadAccuracies
    choices: ChoiceTree
    expected: float
    measured: Measured | None
    training: dict[str, Any]

    @property
    def ratio(self) -> float:
        """The first head's top-1 accuracy over that of the model's own next token; NaN if that is 0."""
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
    callbacks: Sequence[TrainerCallback] = (),
) -> Evaluation | None:
    """Train heads for a model, save and evaluate them.

    ``output`` then holds the heads with their card (``config.json``, ``model.safetensors``, ``README.md``),
    ``evaluation.json``, with medusa-2 ``adapter/`` or ``model/``, and ``checkpoints/``.

    Args:
        model: a causal model, in evaluation mode.
        tokenizer: its tokenizer.
        items: what to learn from.
        held_out: what to evaluate on.
        output: a folder that is new or empty, unless ``resume`` or ``force`` is given.
        settings: how to train.
        name: what to call the model in the heads' config and card; None is where it was loaded from.
        resume: continue the training that was begun in ``output``, with the same data and settings.
        force: drop what an earlier training left in ``output``.
        evaluation_tokens: about how many held-out tokens to score.
        evaluation_prompts: how many held-out texts to continue plainly and with the heads; 0 is none.
        new_tokens: tokens to write for each of them.
        report: told what is done (``"encoding"``, ``"answering"``, ``"heads"``, ``"both"``, ``"evaluating"``), the
            share of it, and from time to time losses and rates.
        callbacks: of transformers' trainer, besides.

    Returns:
        The evaluation; None in all but the first of several processes.

    Raises:
        LookaheadError: before anything is written: the data, the model, the settings or the folder do not do; or
            during training, the loss is not finite.
    """
    check_training(model, settings)
    from accelerate import PartialState  # an optional package, which check_training has looked for

    output = Path(output).expanduser()
    _check_folder(output, resume=resume, force=force)
    told = report or (lambda stage, done, logs: None)
    pad = tokenizer.pad_token_id or 0
    least = settings.num_heads + 2
    if settings.distil:
        sources = [prompts(part, tokenizer, block_size=settings.block_size) for part in (items, held_out)]
        data = _fingerprint([Example.of(ids) for part in sources for ids in part])
    else:
        size = settings.block_size
        learnt = encode(items, tokenizer, block_size=size, least=least, report=lambda done: told("encoding", done, {}))
        seen = encode(held_out, tokenizer, block_size=size, least=least)
        data = _fingerprint(learnt)
    process = PartialState(cpu=model.device.type == "cpu")
    if process.is_main_process:
        _open_folder(output, _record(model, settings, data), resume=resume, force=force)
    process.wait_for_everyone()
    folder = output / _CHECKPOINTS
    if settings.distil:
        learnt, seen = (_answers(model, part, folder, settings, least, told) for part in sources)
    seen = spread(seen, max(1, evaluation_tokens // settings.block_size))
    before = score(model, None, seen, pad=pad)[0] if settings.method == "medusa-2" else None
    trained = train(model, learnt, settings, folder, pad=pad, resume=resume, report=report, callbacks=callbacks)
    if not process.is_main_process:
        return None
    heads = _save(trained, tokenizer, model, output, name)
    own, accuracies = score(model, heads, seen, pad=pad, report=lambda done: told("evaluating", done, {}))
    assert accuracies is not None  # heads were given
    choices = Medusa(heads).tree(heads.vocab_size or 1)
    starts = continued(seen, evaluation_prompts)
    evaluation = Evaluation(
        own=own,
        before=before,
        accuracies=accuracies,
        choices=choices,
        expected=expected_tokens(accuracies, choices),
        measured=measure(model, heads, starts, choices, new_tokens) if starts else None,
        training={
            "steps": trained.steps,
            "planned_steps": trained.planned_steps,
            "seconds": round(trained.seconds, 1),
            "tokens": sum(len(example.ids) for example in learnt),
            "items": len(items),
            "held_out_items": len(held_out),
            "threads": torch.get_num_threads(),
            "device": str(model.device),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__}
            | {"python": platform.python_version()},
            "settings": asdict(settings),
        },
    )
    write_text(output / "evaluation.json", json.dumps(evaluation.to_dict(), indent=1) + "\n")
    card = (output / "README.md").read_text(encoding="utf-8")
    write_text(output / "README.md", card.rstrip() + "\n\n" + _card(evaluation, settings))
    return evaluation


def _answers(
    model: PreTrainedModel,
    starts: list[list[int]],
    folder: Path,
    settings: TrainingSettings,
    least: int,
    told: Report,
) -> list[Example]:
    """The model's own answers to train or evaluate on."""
    found = own_answers(
        model,
        starts,
        folder / "answers",
        answer_tokens=settings.answer_tokens,
        temperature=settings.temperature,
        seed=settings.seed,
        report=lambda done: told("answering", done, {}),
    )
    size = settings.block_size
    found = [Example(example.ids[:size], example.loss[:size]) for example in found if len(example.ids) >= least]
    if not found:
        raise LookaheadError(
            f"The model's own answers are too short: expected at least one of {least} tokens with its prompt. Give "
            "other prompts."
        )
    return found


def _fingerprint(examples: Sequence[Example]) -> str:
    """Stands for the data in a resumed run."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(example.ids.numpy().tobytes() + example.loss.numpy().tobytes())
    return digest.hexdigest()[:16]


def _record(model: PreTrainedModel, settings: TrainingSettings, data: str) -> dict[str, Any]:
    """What a run must have in common with the one that it resumes."""
    kept = {name: value for name, value in asdict(settings).items() if name not in _PASSING}
    weights = sum(weight.numel() for weight in model.parameters())
    return kept | {"data": data, "model": f"{type(model).__name__}, {weights} parameters"}


def _check_folder(output: Path, *, resume: bool, force: bool) -> None:
    """Refuse a folder that holds something else."""
    if resume and force:
        raise LookaheadError("resume and force cannot be combined: one keeps what is there, the other drops it.")
    if output.exists() and not output.is_dir():
        raise LookaheadError(f"The output {output} is a file: expected a folder, or a name for one.")
    ours = (output / _CHECKPOINTS / _SETTINGS).exists()
    if resume and not ours:
        raise LookaheadError(f"There is no training to resume in {output}: expected {_CHECKPOINTS}/{_SETTINGS} there.")
    if not resume and not force and output.exists() and any(output.iterdir()):
        held = "a training; continue it with --resume" if ours else "something else"
        raise LookaheadError(f"The output folder {output} holds {held}. Choose a new one, or overwrite with --force.")


def _open_folder(output: Path, record: dict[str, Any], *, resume: bool, force: bool) -> None:
    """Make the folder, or compare it with the run that is to be resumed."""
    file = output / _CHECKPOINTS / _SETTINGS
    if resume:
        known = json.loads(file.read_text(encoding="utf-8"))
        for name, value in record.items():
            if known.get(name) != value:
                raise LookaheadError(
                    f"The training in {output} cannot be resumed with {name}={value!r}: it was begun with "
                    f"{known.get(name)!r}. Use the same data and settings, or begin anew with --force."
                )
        return
    if force and file.exists():
        for name in _RESULTS:
            shutil.rmtree(output / name, ignore_errors=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(record, indent=1) + "\n")


def _save(trained: Trained, tokenizer: Any, model: PreTrainedModel, output: Path, name: str | None) -> MedusaHeads:
    """Write heads, and the model's part; returns the heads as they were rounded, in the model's dtype."""
    heads = trained.heads
    if name is not None:
        heads.base_model = name
    heads.to(torch.bfloat16 if model.dtype is torch.bfloat16 else torch.float16)
    heads.check_finite()
    heads.save_pretrained(output)
    if trained.model is not model:
        trained.model.save_pretrained(output / "adapter", save_embedding_layers=False)
    elif trained.changed:
        model.save_pretrained(output / "model")
        tokenizer.save_pretrained(output / "model")
    return heads.to(model.dtype)


def _card(evaluation: Evaluation, settings: TrainingSettings) -> str:
    """What the card says of training and accuracy."""
    own, training = evaluation.own, evaluation.training
    lines = [
        "## Training",
        "",
        f"{settings.method}, {training['steps']} of {training['planned_steps']} planned steps of "
        f"{settings.batch_size * settings.accumulate} examples of up to {settings.block_size} tokens, "
        f"{training['seconds'] / 60:.1f} minutes on {training['device']}; {training['tokens']:,} tokens in "
        f"{training['items']:,} items."
        + (" They are the model's own answers (self-distillation)." if settings.distil else ""),
        "",
        "## Accuracy",
        "",
        f"On {own.tokens:,} tokens of {training['held_out_items']} items that were held out:",
        "",
        "| | predicts the token | top-1 | top-5 |",
        "|---|---|---|---|",
        f"| the model itself | next | {own.top1:.3f} | {own.top5:.3f} |",
    ]
    pairs = zip(evaluation.accuracies.top(1), evaluation.accuracies.top(5), strict=True)
    lines += [f"| head {head} | +{head + 2} | {one:.3f} | {five:.3f} |" for head, (one, five) in enumerate(pairs)]
    lines += [
        "",
        f"Tokens a pass over a tree of {len(evaluation.choices.paths)} nodes: {evaluation.expected:.2f} expected"
        + ("" if evaluation.measured is None else f", {evaluation.measured.tokens_per_pass:.2f} measured")
        + ".",
    ]
    if evaluation.before is not None:
        lines += [
            "",
            f"The model's own loss: {evaluation.before.loss:.4f} before, {own.loss:.4f} after (nats a token).",
        ]
    return "\n".join(lines) + "\n"
