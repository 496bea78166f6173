"""From data to a folder on disk: checks, examples, the model's own answers, what is known of a run."""

import hashlib
import json
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
from lookahead.training.data import Example, Progress, encode, prompts
from lookahead.training.distillation import own_answers, processes_of
from lookahead.training.evaluation import spread
from lookahead.training.items import Item
from lookahead.training.settings import TrainingSettings
from lookahead.training.stage import Trained
from lookahead.training.trainer import Report

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
            raise LookaheadError(
                f"The model's own answers are too short: expected at least one of {least} tokens with its prompt. Give "
                "other prompts."
            )
        return found

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
