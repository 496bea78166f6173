"""From data to a head on disk, of the kind that its settings name: train, save, evaluate."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback

from jacobi import LookaheadError
from lookahead._files import write_text
from lookahead.heads.eagle.fresh import fresh_head as fresh_eagle
from lookahead.heads.eagle.training import TrainedEagle
from lookahead.heads.redrafter.training import TrainedRecurrent
from lookahead.heads.redrafter.training import fresh_head as fresh_recurrent
from lookahead.models.output_layer import output_sizes
from lookahead.training.data import Example
from lookahead.training.drafter import BesideModel, TrainedHead
from lookahead.training.evaluation import NODES, DrafterEvaluation, card, compare, continued, score_drafter
from lookahead.training.items import Item
from lookahead.training.recipe import Run
from lookahead.training.settings import EagleSettings, ReDrafterSettings
from lookahead.training.stage import Trained, check_stage, kept_flags, train_stage
from lookahead.training.trainer import Report

HeadSettings = EagleSettings | ReDrafterSettings

_STAGE = "drafter"


def train(
    model: PreTrainedModel,
    examples: Sequence[Example],
    settings: HeadSettings,
    folder: str | Path,
    *,
    pad: int = 0,
    resume: bool = False,
    report: Report | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> Any:
    """Train a fresh head for a model, which stays as it is, and return it in float32: an ``EagleHead`` or a
    ``RecurrentHead``.

    ``pad`` fills up shorter examples. ``folder`` gets checkpoints; with ``resume``, training continues from the last
    one in it. ``report`` is called with the stage (``"drafter"``), the share of it that is done, and now and then
    losses and rates. A LookaheadError says that nothing can be trained with these settings, or that the loss is not
    finite.
    """
    check_stage(model, settings)
    more: dict[str, Any] = {"pad": pad, "resume": resume, "report": report, "callbacks": callbacks}
    return _trained(model, _fresh(model, settings, examples), examples, settings, folder, **more).heads.head


def fit(
    model: PreTrainedModel,
    tokenizer: Any,
    items: Sequence[Item],
    held_out: Sequence[Item],
    output: str | Path,
    settings: HeadSettings,
    *,
    name: str | None = None,
    resume: bool = False,
    force: bool = False,
    evaluation_tokens: int = 32768,
    evaluation_prompts: int = 8,
    new_tokens: int = 96,
    report: Report | None = None,
) -> DrafterEvaluation | None:
    """Train a head for a model in evaluation mode, save and evaluate it.

    ``output``, a new or empty folder, then holds the head's files, its card ``README.md``, ``evaluation.json`` and
    ``checkpoints/``. ``name`` is the model's in the head's files; None is where it was loaded from. ``resume``
    continues the training in ``output``, with the same data and settings; ``force`` drops it. About
    ``evaluation_tokens`` held-out tokens are scored, and ``evaluation_prompts`` held-out texts continued by
    ``new_tokens``, with the free sources, with the head, and with both. ``report`` gets the stage (``"encoding"``,
    ``"answering"``, ``"drafter"``, ``"evaluating"``), the share of it that is done, and now and then losses and rates.
    Of several processes, all but the first return None.

    Raises:
        LookaheadError: the data, the model, the settings or the folder will not do (nothing is written then), or the
            loss is not finite.
    """
    check_stage(model, settings)
    _fresh(model, settings, (), name)  # tells what the model cannot give, before the folder is made
    run = Run(model, tokenizer, settings, Path(output).expanduser(), report or (lambda stage, done, logs: None))
    learnt, seen = run.prepare(items, held_out, evaluation_tokens, resume=resume, force=force)
    drafter, more = _fresh(model, settings, learnt, name), {"pad": run.pad, "resume": resume, "report": report}
    trained = _trained(model, drafter, learnt, settings, run.checkpoints, **more)
    if not run.writes:
        return None
    drafter.to(torch.bfloat16 if model.dtype is torch.bfloat16 else torch.float16)
    drafter.head.save_pretrained(run.output)
    drafter.to(model.dtype)  # as rounded
    facts = run.facts(trained, learnt) | {"items": len(items), "held_out_items": len(held_out)}
    parts, count = score_drafter(model, drafter, seen, run.pad, run.progress("evaluating"))
    starts = continued(seen, evaluation_prompts)
    rates = compare(model, drafter, starts, new_tokens) if starts else {}
    evaluation = DrafterEvaluation(count, parts, NODES, rates, facts)
    write_text(run.output / "evaluation.json", json.dumps(evaluation.to_dict(), indent=1) + "\n")
    write_text(run.output / "README.md", card(drafter, name, evaluation, settings))
    return evaluation


def _fresh(
    model: PreTrainedModel, settings: HeadSettings, examples: Sequence[Example], name: str | None = None
) -> TrainedHead:
    if isinstance(settings, EagleSettings):
        return TrainedEagle(fresh_eagle(model, settings, examples, name), settings)
    if isinstance(settings, ReDrafterSettings):
        return TrainedRecurrent(fresh_recurrent(model, settings), settings)
    raise LookaheadError(f"settings must be EagleSettings or ReDrafterSettings: got {settings!r}.")


def _trained(
    model: PreTrainedModel,
    drafter: TrainedHead,
    examples: Sequence[Example],
    settings: HeadSettings,
    folder: str | Path,
    **more: Any,
) -> Trained:
    """Train a head beside its model, by the settings of :func:`train` in ``more``."""
    learner = BesideModel(model, drafter, settings.rate(output_sizes(model)[0]))
    with kept_flags(model):
        model.requires_grad_(False)
        taken = train_stage(learner, examples, settings, _STAGE, Path(folder) / _STAGE, **more)
    return Trained(drafter.eval(), model, False, *taken)
