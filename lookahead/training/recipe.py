"""From data to a folder on disk: checks, examples, the model's own answers, what is known of a run."""

import hashlib
import json
import platform
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, starmap
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import transformers
from transformers import PreTrainedModel, TrainerCallback

from jacobi import LookaheadError
from lookahead._files import write_text
from lookahead.training.data import Example, Examples, Progress, Scored, encode, prompts
from lookahead.training.distillation import own_answers, processes_of
from lookahead.training.evaluation import NODES, Evaluation, compare, continued, spread
from lookahead.training.items import Item
from lookahead.training.settings import TrainingSettings
from lookahead.training.stage import Report, Trained, check_stage

_CHECKPOINTS = "checkpoints"
_SETTINGS = "settings.json"
_RESULTS = ("adapter", "model", _CHECKPOINTS)  # folders that a run leaves, beside the drafter's files
_PASSING = ("max_minutes", "save_steps", "report_to")  # settings that may change when a run is resumed


@dataclass(frozen=True)
class Run:
    """One training from data to a folder on disk: what is the same whatever learns to draft."""

    model: PreTrainedModel
    tokenizer: Any
    settings: TrainingSettings
    output: Path
    report: Report

    @property
    def pad(self) -> int:
        return int(self.tokenizer.pad_token_id or 0)

    @property
    def rounded(self) -> torch.dtype:
        """What trained weights are stored in."""
        return torch.bfloat16 if self.model.dtype is torch.bfloat16 else torch.float16

    @property
    def checkpoints(self) -> Path:
        return self.output / _CHECKPOINTS

    @property
    def writes(self) -> bool:
        """Whether this process is the one that saves and evaluates."""
        return bool(processes_of(self.model).is_main_process)

    def prepare(
        self, items: Sequence[Item], held_out: Sequence[Item], tokens: int, *, resume: bool = False, force: bool = False
    ) -> tuple[list[Example], list[Example]]:
        """Check and open the folder; what to learn from, and about so many ``tokens`` of what was held out."""
        self.check_folder(resume, force)
        parts = [self.tokens(items, self.progress("encoding")), self.tokens(held_out)]
        if self.writes:
            self.open_folder(parts, resume, force)
        processes_of(self.model).wait_for_everyone()
        learnt, seen = (self.answers(part) for part in parts) if self.settings.distil else parts
        return learnt, spread(seen, max(1, tokens // self.settings.block_size))

    def progress(self, stage: str) -> Progress:
        return lambda done: self.report(stage, done, {})

    def check_folder(self, resume: bool, force: bool) -> None:
        output = self.output
        if resume and force:
            raise LookaheadError("resume and force cannot be combined: one keeps what is there, the other drops it.")
        if output.exists() and not output.is_dir():
            raise LookaheadError(f"The output {output} is a file: expected a folder, or a name for one.")
        ours = (self.checkpoints / _SETTINGS).exists()
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
        record = json.loads(json.dumps(record))  # as the file gives it back
        file = self.checkpoints / _SETTINGS
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
        texts, folder = [start.ids.tolist() for start in starts], self.checkpoints / "answers"
        found = own_answers(self.model, texts, folder, self.settings, self.progress("answering"))
        size, least = self.settings.block_size, self.settings.least
        found = [Example(example.ids[:size], example.loss[:size]) for example in found if len(example.ids) >= least]
        if not found:
            told = f"The model's own answers are too short: expected at least one of {least} tokens with its prompt."
            raise LookaheadError(f"{told} Give other prompts.")
        return found

    def summary(self, facts: dict[str, Any]) -> str:
        """What was done, for the card."""
        settings = self.settings
        answers = " They are the model's own answers (self-distillation)." if settings.distil else ""
        return f"""## Training

{facts["steps"]} of {facts["planned_steps"]} planned steps of {settings.batch_size * settings.accumulate} examples of up
to {settings.block_size} tokens, {facts["seconds"] / 60:.1f} minutes on {facts["device"]}; {facts["tokens"]:,} tokens in
{facts["items"]:,} items.{answers} {facts["held_out_items"]} items were held out."""

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


class Recipe(ABC):
    """One training of a kind of heads, which :meth:`fit` takes from data to a folder on disk, and :meth:`trained` to a
    head. A kind says what a fresh head is, and how it learns, is stored and is scored.

    Attributes:
        settings: their class.
        source: what the head is called among the sources of drafts.
        strategy: makes the strategy that drafts with a head, of the settings of the automatic mode.
        head: what is trained, and what decoding takes.
    """

    settings: ClassVar[type[TrainingSettings]]
    source: ClassVar[str]
    strategy: ClassVar[Callable[..., Any]]
    head: Any

    @classmethod
    @abstractmethod
    def fresh(cls, model: PreTrainedModel, settings: Any, examples: Examples = (), name: str | None = None) -> Self:
        """With a head that has learnt nothing, for the model of this ``name``. ``examples`` tell which tokens are
        frequent. A LookaheadError says what the model cannot give."""

    @abstractmethod
    def learn(self, model: PreTrainedModel, examples: Sequence[Example], folder: Path, **more: Any) -> Trained:
        """Train in stages, with what :func:`lookahead.training.stage.train_stage` takes besides."""

    @abstractmethod
    def save(self, run: Run, trained: Trained) -> None:
        """Write the head's files; it then holds the numbers that were stored."""

    @abstractmethod
    def score(self, model: PreTrainedModel, examples: Examples, pad: int = 0, report: Progress | None = None) -> Scored:
        """How well it predicts examples, and how many tokens these have."""

    def look(self, model: PreTrainedModel, examples: Sequence[Example], pad: int) -> None:
        """Score a model that is to be trained, before it is."""
        return

    @abstractmethod
    def introduction(self, run: Run, name: str | None) -> str:
        """The beginning of the card, in Markdown."""

    @classmethod
    def check(cls, model: PreTrainedModel, settings: Any, packages: Sequence[str] = ()) -> None:
        """Raise a LookaheadError if one of the ``packages`` is missing, or these settings cannot train anything."""
        if not isinstance(settings, cls.settings):
            raise LookaheadError(f"settings must be {cls.settings.__name__}: got {settings!r}.")
        check_stage(model, settings, packages)

    @classmethod
    def trained(
        cls,
        model: PreTrainedModel,
        examples: Sequence[Example],
        settings: Any,
        folder: str | Path,
        *,
        pad: int = 0,
        resume: bool = False,
        report: Report | None = None,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> Trained:
        """Train a fresh head for a model in evaluation mode; it ends in float32.

        ``pad`` fills up shorter examples. ``folder`` gets checkpoints, one folder a stage; with ``resume``, training
        continues from the last one in it. ``report`` is called with the stage, the share of it that is done, and now
        and then losses and rates. A LookaheadError: these settings train nothing, or the loss is not finite.
        """
        cls.check(model, settings)
        more: dict[str, Any] = {"pad": pad, "resume": resume, "report": report, "callbacks": callbacks}
        return cls.fresh(model, settings, examples).learn(model, examples, Path(folder), **more)

    @classmethod
    def fit(
        cls,
        model: PreTrainedModel,
        tokenizer: Any,
        items: Sequence[Item],
        held_out: Sequence[Item],
        output: str | Path,
        settings: Any,
        *,
        name: str | None = None,
        resume: bool = False,
        force: bool = False,
        evaluation_tokens: int = 32768,
        evaluation_prompts: int = 8,
        new_tokens: int = 96,
        report: Report | None = None,
    ) -> Evaluation | None:
        """Train a head for a model in evaluation mode, save and evaluate it.

        ``output``, a new or empty folder, then holds the head's files, its card ``README.md``, ``evaluation.json`` and
        ``checkpoints/``; where the model is trained too, ``adapter/`` or ``model/``. ``name`` is the model's in the
        head's files; None is where it was loaded from. ``resume`` continues the training in ``output``, with the same
        data and settings; ``force`` drops it. About ``evaluation_tokens`` held-out tokens are scored, and
        ``evaluation_prompts`` held-out texts continued by ``new_tokens``. ``report`` gets the stage (``"encoding"``,
        ``"answering"``, those of the training, ``"evaluating"``), the share of it that is done, and now and then losses
        and rates. Of several processes, all but the first return None.

        Raises:
            LookaheadError: data, model, settings or folder will not do (nothing is written), or the loss is not finite.
        """
        cls.check(model, settings)
        cls.fresh(model, settings, (), name)  # tells what the model cannot give, before the folder is made
        run = Run(model, tokenizer, settings, Path(output).expanduser(), report or (lambda stage, done, logs: None))
        learnt, seen = run.prepare(items, held_out, evaluation_tokens, resume=resume, force=force)
        recipe = cls.fresh(model, settings, learnt, name)
        recipe.look(model, seen, run.pad)
        trained = recipe.learn(model, learnt, run.checkpoints, pad=run.pad, resume=resume, report=report)
        if not run.writes:
            return None
        recipe.save(run, trained)
        facts = run.facts(trained, learnt) | {"items": len(items), "held_out_items": len(held_out)}
        parts, count = recipe.score(model, seen, run.pad, run.progress("evaluating"))
        starts = continued(seen, evaluation_prompts)
        rates = compare(model, recipe, starts, new_tokens) if starts else {}
        evaluation = Evaluation(count, parts, NODES, rates, facts)
        write_text(run.output / "evaluation.json", json.dumps(evaluation.to_dict(), indent=1) + "\n")
        card = [recipe.introduction(run, name).rstrip(), run.summary(facts), *starmap(markdown, evaluation.tables())]
        write_text(run.output / "README.md", "\n\n".join(card) + "\n")
        return evaluation


def markdown(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with its title."""
    lines = (headers, ["---"] * len(headers), *rows)
    return f"{title}:\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)
