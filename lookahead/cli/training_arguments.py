"""Arguments of the commands that train, convert and calibrate heads: see :mod:`lookahead.cli.arguments`."""

import sysconfig
from dataclasses import fields, make_dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_origin

from typer import Argument, Option

from jacobi import LookaheadError
from lookahead._files import check_free
from lookahead.cli.options import (
    DtypeOption,
    JsonOptions,
    ModelOptions,
    NewTokensOption,
    PromptOptions,
    SourceOptions,
    check_file,
)
from lookahead.model_folder import check_exists
from lookahead.registry import KINDS
from lookahead.training.items import Item, read_items, split
from lookahead.training.settings import TrainingSettings

_HOLD_OUT = 20
_BUNDLED_HOLD_OUT = 50  # as the bundled model was trained: its held-out files are these
_CPU_MINUTES = 15.0
_MINUTES_HELP = f"Most minutes of training; 0 is no limit. Default: {_CPU_MINUTES:g} on a CPU, else none."
_DATA_HELP = (
    "What to learn from; may be given several times. A .jsonl file of texts, prompts with completions or "
    "conversations, a text, or a folder of these. Default for the bundled model: the Python standard library."
)
_FORMAT_HELP = "Where a kind has several: safeailab or speculators. Default: the first."
_CHECKED_HELP = "The heads' model: they are checked against it, and told the size of its vocabulary."
Paths = list[Path] | None

TRAINED: dict[str, type[TrainingSettings]] = {
    name: kind.part("settings") for name, kind in KINDS.items() if kind.settings is not None
}
CONVERTED = tuple(name for name, kind in KINDS.items() if kind.head is not None)


def _kinds(setting: str) -> dict[str, Any]:
    """The kinds of trainings that have a setting, with its field."""
    found = {kind: settings.__dataclass_fields__.get(setting) for kind, settings in TRAINED.items()}
    return {kind: field for kind, field in found.items() if field is not None}


def _settings() -> Any:
    """A dataclass to inherit from, whose options are the settings of all kinds of trainings. Those that a kind adds are
    None where they are not given."""
    shared = {field.name: field for field in fields(TrainingSettings)}
    names = dict.fromkeys(
        field.name for settings in TRAINED.values() for field in fields(settings) if field.metadata.get("help")
    )
    shown: list[tuple[str, Any, Any]] = []
    for name in names:
        kinds = _kinds(name)
        field, panel = next(iter(kinds.values())), "Training"
        type_, default, help = field.type, field.default, field.metadata["help"]
        if name not in shared:
            type_, default = (str if get_origin(type_) is tuple else type_) | None, None
            panel = f"Training {' or '.join(kinds)}"
            if len(kinds) > 1:
                help = " ".join(f"{kind}: {each.metadata['help']}" for kind, each in kinds.items())
        option = Option(*field.metadata["names"], help=help, rich_help_panel=panel)
        shown.append((name, Annotated[type_, option], default))
    return make_dataclass("_Settings", shown, frozen=True, kw_only=True)


_Settings: Any = _settings()


class Train(JsonOptions, ModelOptions, _Settings):
    """Train heads for a model: Medusa's, EAGLE's or ReDrafter's.

    On several GPUs: `torchrun --no-python lookahead train --kind KIND ...`.
    """

    kind: Annotated[str, Option(metavar="KIND", help=f"One of {', '.join(TRAINED)}.")]
    dtype: DtypeOption = "float32"
    output: Annotated[Path, Option("--output", "-o", metavar="DIR", help="Folder to write; new or empty.")]
    data: Annotated[Paths, Option(metavar="PATH", help=_DATA_HELP)] = None
    eval_data: Annotated[Paths, Option(metavar="PATH", help="What to evaluate on. Default: a part of --data.")] = None
    hold_out: Annotated[int | None, Option(min=2, metavar="N", help=f"Hold out one in N. Default: {_HOLD_OUT}.")] = None
    max_items: Annotated[int | None, Option(min=2, help="Use so many items at most, chosen by hash.")] = None
    max_minutes: Annotated[float | None, Option(rich_help_panel="Training", help=_MINUTES_HELP)] = None
    resume: Annotated[bool, Option(help="Continue the training that was begun in --output.")] = False
    force: Annotated[bool, Option(help="Overwrite what is in --output.")] = False

    def settings(self, device: str) -> TrainingSettings:
        """The settings of a training on a device, by which the default of its limit of time goes."""
        if self.kind not in TRAINED:
            raise LookaheadError(f"--kind {self.kind}: expected one of {', '.join(TRAINED)}.")
        given: dict[str, Any] = {"max_minutes": self.minutes(device)}
        for name in (field.name for field in fields(_Settings)):
            kinds, value = _kinds(name), getattr(self, name)
            if value is not None and self.kind not in kinds:
                names: tuple[str, ...] = next(iter(kinds.values())).metadata["names"]
                option = (*names, "--" + name.replace("_", "-"))[0]
                raise LookaheadError(f"{option} belongs to --kind {' or '.join(kinds)}: got {self.kind}. Drop it.")
            if value is not None:
                given[name] = _numbers(name, value) if get_origin(kinds[self.kind].type) is tuple else value
        return TRAINED[self.kind](**given)

    def minutes(self, device: str) -> float | None:
        """The limit of a training on a device; None is none."""
        default = _CPU_MINUTES if device in ("auto", "cpu") else 0.0
        return (default if self.max_minutes is None else self.max_minutes) or None

    def check(self) -> None:
        if self.quantize is not None:
            raise LookaheadError("--quantize is not for training: heads learn from the model as it is. Drop it.")
        super().check()
        self.settings(self.device)
        if self.hold_out is not None and self.eval_data:
            raise LookaheadError("--hold-out and --eval-data both say what to evaluate on: expected one of them.")
        if not self.data and self.model is not None:
            raise LookaheadError("--data is missing: expected what the heads are to learn from.")
        if self.data:
            _ = self.items

    @cached_property
    def items(self) -> tuple[list[Item], list[Item]]:
        """Texts to train on, and those held out."""
        hold_out = self.hold_out
        if self.data:
            items = [item for path in self.data for item in read_items(path)]
        else:
            library = sysconfig.get_paths()["stdlib"]
            items = [item for item in read_items(library) if "site-packages" not in Path(item.source).parts]
            hold_out = hold_out or _BUNDLED_HOLD_OUT
        if self.max_items is not None:
            items = sorted(items, key=lambda item: item.number)[: self.max_items]
        if self.eval_data:
            return items, [item for path in self.eval_data for item in read_items(path)]
        return split(items, hold_out or _HOLD_OUT)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError as error:
        raise LookaheadError(f"--{name.replace('_', '-')} {text}: expected numbers, as 2,12,21.") from error


class Convert(JsonOptions, SourceOptions):
    """Convert heads between the published formats of their kind: read any, write one.

    TARGET is written completely, or not at all.
    """

    kind: Annotated[str, Option(metavar="KIND", help=f"One of {', '.join(CONVERTED)}.")]
    to: Annotated[str | None, Option(metavar="FORMAT", help=_FORMAT_HELP)] = None
    model: Annotated[str | None, Option(metavar="DIR", help=_CHECKED_HELP)] = None
    source: Annotated[str, Argument(metavar="SOURCE", help="Heads: a folder, a file, or a name on the hub.")]
    target: Annotated[Path, Argument(metavar="TARGET", help="Folder to write.")]
    force: Annotated[bool, Option("--force", help="Replace TARGET and all files in it.")] = False

    def check(self) -> None:
        super().check()
        if self.kind not in CONVERTED:
            raise LookaheadError(f"--kind {self.kind}: expected one of {', '.join(CONVERTED)}.")
        check_exists(self.source, "SOURCE", "heads: a folder or a file")
        place = self.target.expanduser().resolve()
        if place.exists() and Path(self.source).expanduser().resolve().is_relative_to(place):
            raise LookaheadError(f"{self.source} lies in {self.target}, which would be replaced. Name another target.")
        check_free(self.target, self.force)


class Tree(JsonOptions, ModelOptions, PromptOptions):
    """Grow the best tree of Medusa's candidates, from the heads' accuracies on texts."""

    heads: Annotated[str | None, Option(metavar="DIR", help="Heads, in any published format. Default: bundled.")] = None
    nodes: Annotated[int, Option(min=1, max=4096, help="Of the tree at most; published ones have 63.")] = 63
    output: Annotated[Path | None, Option("--output", "-o", help="Save the tree here, as JSON.")] = None
    new_tokens: NewTokensOption = 128
    ranks: Annotated[int, Option(min=1, help="Candidates of each head to look at.")] = 10
    temperature: Annotated[float | None, Option(help="Calibrate on sampled texts. Default: greedy texts.")] = None
    seed: Annotated[int, Option(help="Of sampled texts.")] = 0

    def check(self) -> None:
        if self.heads is None and self.model is not None:
            wanted = "expected the folder of heads that were trained for it."
            raise LookaheadError(f"--model {self.model} needs --heads: {wanted}")
        super().check()
        check_file("--output", self.output)
        check_exists(self.heads, "--heads", "Medusa heads: a folder or a file")
