"""Arguments of the commands that train, convert and calibrate heads: see :mod:`lookahead.cli.arguments`."""

import sysconfig
from collections.abc import Mapping
from dataclasses import fields, make_dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from typer import Argument, Option

from jacobi import LookaheadError
from lookahead._files import check_free
from lookahead.cli.options import (
    DtypeOption,
    JsonOption,
    ModelOptions,
    NewTokensOption,
    PromptOptions,
    SourceOptions,
    check_file,
)
from lookahead.model_folder import check_exists
from lookahead.training.items import Item, read_items, split
from lookahead.training.settings import EagleSettings, MedusaSettings, ReDrafterSettings, TrainingSettings

_HOLD_OUT = 20
_BUNDLED_HOLD_OUT = 50  # as the bundled model was trained: its held-out files are these
_CPU_MINUTES = 15.0
_MINUTES_HELP = f"Most minutes of training; 0 is no limit. Default: {_CPU_MINUTES:g} on a CPU, else none."
_DATA_HELP = (
    "What to learn from; may be given several times. A .jsonl file of texts, prompts with completions or "
    "conversations, a text, or a folder of these. Default for the bundled model: the Python standard library."
)
_LAYERS_HELP = "(eagle-3) States that it reads, as 2,12,21: what these layers read. Default: the published ones."
_CHECKED_HELP = "The heads' model: they are checked against it, and told the size of its vocabulary."
Paths = list[Path] | None
EagleFormat = Literal["safeailab", "speculators"]

option = partial(Option, rich_help_panel="Training")
# Settings that all trainings have as options, by their names in TrainingSettings.
SHARED = {
    "distil": option("--self-distill/--no-self-distill", help="Learn from the model's own answers to the prompts."),
    "answer_tokens": option(min=1, help="(self-distill) Most tokens of an answer."),
    "temperature": option(help="(self-distill) Sample. Default: greedy."),
    "epochs": option(help="Passes over the data, in each stage."),
    "min_steps": option(help="More passes where those would be fewer steps than this."),
    "batch_size": option(help="Examples in a step, on each device."),
    "accumulate": option(help="Batches in a step."),
    "block_size": option(help="Most tokens of an example."),
    "precision": option("--mixed-precision", help="Automatic mixed precision."),
    "seed": option(help="Of the order of the data, and of fresh weights."),
    "save_steps": option(help="Steps between two checkpoints."),
    "report_to": option(help="A logger, for example tensorboard or wandb."),
}


def as_options(settings: type[TrainingSettings], options: Mapping[str, Any]) -> Any:
    """A dataclass to inherit from, with those settings as options; types and defaults are the settings'."""
    known = {field.name: field for field in fields(settings)}
    shown = [(name, Annotated[known[name].type, given], known[name].default) for name, given in options.items()]
    return make_dataclass("_Settings", shown, frozen=True, kw_only=True)


class TrainingOptions(ModelOptions):
    dtype: DtypeOption = "float32"
    output: Annotated[Path, Option("--output", "-o", metavar="DIR", help="Folder to write; new or empty.")]
    data: Annotated[Paths, Option(metavar="PATH", help=_DATA_HELP)] = None
    eval_data: Annotated[Paths, Option(metavar="PATH", help="What to evaluate on. Default: a part of --data.")] = None
    hold_out: Annotated[int | None, Option(min=2, metavar="N", help=f"Hold out one in N. Default: {_HOLD_OUT}.")] = None
    max_items: Annotated[int | None, Option(min=2, help="Use so many items at most, chosen by hash.")] = None
    max_minutes: Annotated[float | None, option(help=_MINUTES_HELP)] = None
    resume: Annotated[bool, Option(help="Continue the training that was begun in --output.")] = False
    force: Annotated[bool, Option(help="Overwrite what is in --output.")] = False
    as_json: JsonOption = False

    kind: ClassVar[type[TrainingSettings]]

    def settings(self, device: str) -> Any:
        """The settings of a training on a device, by which the default of its limit of time goes."""
        names = [field.name for field in fields(self.kind) if hasattr(self, field.name)]
        return self.kind(**{name: getattr(self, name) for name in names} | {"max_minutes": self.minutes(device)})

    def minutes(self, device: str) -> float | None:
        """The limit of a training on a device; None is none."""
        default = _CPU_MINUTES if device in ("auto", "cpu") else 0.0
        return (default if self.max_minutes is None else self.max_minutes) or None

    def check(self) -> None:
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


_EAGLE = SHARED | {
    "version": option(help="eagle-3 with training-time test; or eagle-1, whose heads serve EAGLE-2, too."),
    "num_layers": option("--layers", help="Decoder layers of the head."),
    "feed_forward": option(help="Channels of its feed-forward network. Default: the model's."),
    "draft_vocab": option(help="(eagle-3) Score so many tokens, the most frequent. Default: all."),
    "own_output": option(help="(eagle-3) Give it an output layer of its own."),
    "unroll": option(help="(eagle-3) Steps of training-time test."),
    "decay": option(help="(eagle-3) Weight of a step's loss, relative to the step before it."),
    "noise": option(help="(eagle-1) Width of the noise on features."),
    "learning_rate": option("--lr", help="Default: 5e-5 for 4,096 channels, and in inverse proportion."),
}
_Eagle: Any = as_options(EagleSettings, _EAGLE)


class TrainEagle(TrainingOptions, _Eagle):
    """Train an EAGLE head for a model.

    On several GPUs: `torchrun --no-python lookahead train-eagle ...`.
    """

    kind = EagleSettings
    layers_read: Annotated[str | None, option("--feature-layers", metavar="N,N,...", help=_LAYERS_HELP)] = None

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The option's numbers."""
        try:
            return tuple(int(part) for part in (self.layers_read or "").split(",") if part)
        except ValueError as error:
            raise LookaheadError(f"--feature-layers {self.layers_read}: expected numbers, as 2,12,21.") from error


_MEDUSA = SHARED | {
    "method": option(help="Train the heads alone, or the model with them."),
    "num_heads": option("--heads", min=1, help="K; head k predicts k + 1 tokens ahead."),
    "num_layers": option("--layers", min=0, help="Residual blocks of each head."),
    "own_output": option(help="Give each head an output layer of its own."),
    "backbone": option(help="(medusa-2) What of the model is trained."),
    "schedule": option(help="(medusa-2) Heads alone first, then both; or both, the heads' weight rising from 0."),
    "learning_rate": option("--lr", help="Of the heads. Default: 1e-3; with medusa-2, 2e-3."),
    "backbone_learning_rate": option("--backbone-lr", help="(medusa-2) Of the model. Default: a quarter."),
    "lambda_0": option("--lambda-0", help="(medusa-2) Weight of the heads' loss. Default: 0.2; 0.01."),
    "lora_rank": option(help="(medusa-2) Rank of the adapter."),
    "lora_alpha": option(help="(medusa-2) Alpha of the adapter."),
    "lora_dropout": option(help="(medusa-2) Dropout of the adapter."),
}
_Medusa: Any = as_options(MedusaSettings, _MEDUSA)


class TrainMedusa(TrainingOptions, _Medusa):
    """Train Medusa heads for a model.

    On several GPUs: `torchrun --no-python lookahead train-medusa ...`.
    """

    kind = MedusaSettings


_REDRAFTER = SHARED | {
    "num_layers": option("--layers", help="Residual blocks of the head."),
    "exit_size": option(help="Channels of these. Default: twice the model's hidden size."),
    "rnn": option(help="A recurrent network's state, or a sum of embeddings."),
    "unroll": option(help="Tokens that it learns to draft one after the other."),
    "targets": option(help="Learn the tokens that came, or the model's own distribution there."),
    "learning_rate": option("--lr", help="Default: 1e-3 for 4,096 channels, more for smaller models."),
}
_ReDrafter: Any = as_options(ReDrafterSettings, _REDRAFTER)


class TrainRedrafter(TrainingOptions, _ReDrafter):
    """Train a ReDrafter head for a model.

    On several GPUs: `torchrun --no-python lookahead train-redrafter ...`.
    """

    kind = ReDrafterSettings


class ConvertOptions(SourceOptions):
    model: Annotated[str | None, Option(metavar="DIR", help=_CHECKED_HELP)] = None
    source: Annotated[str, Argument(metavar="SOURCE", help="Heads: a folder, a file, or a name on the hub.")]
    target: Annotated[Path, Argument(metavar="TARGET", help="Folder to write.")]
    force: Annotated[bool, Option("--force", help="Replace TARGET and all files in it.")] = False
    as_json: JsonOption = False

    def check(self) -> None:
        super().check()
        check_exists(self.source, "SOURCE", "heads: a folder or a file")
        place = self.target.expanduser().resolve()
        if place.exists() and Path(self.source).expanduser().resolve().is_relative_to(place):
            raise LookaheadError(f"{self.source} lies in {self.target}, which would be replaced. Name another target.")
        check_free(self.target, self.force)


class ConvertEagle(ConvertOptions):
    """Convert an EAGLE head between the published formats.

    TARGET is written completely, or not at all.
    """

    to: Annotated[EagleFormat, Option(help="As SafeAILab publishes heads, or as speculators does.")] = "safeailab"


class ConvertMedusa(ConvertOptions):
    """Convert Medusa heads of any published format to the one that was published with Medusa.

    TARGET is written completely, or not at all.
    """


class Tree(ModelOptions, PromptOptions):
    """Grow the best tree of Medusa's candidates, from the heads' accuracies on texts.

    The best tree is the one that is expected to write the most tokens per millisecond.
    """

    heads: Annotated[str | None, Option(metavar="DIR", help="Heads, in any published format. Default: bundled.")] = None
    nodes: Annotated[int | None, Option(min=1, max=4096, help="Default: best by the latency curve.")] = None
    output: Annotated[Path | None, Option("--output", "-o", help="Save the tree here, as JSON.")] = None
    new_tokens: NewTokensOption = 128
    ranks: Annotated[int, Option(min=1, help="Candidates of each head to look at.")] = 10
    temperature: Annotated[float | None, Option(help="Calibrate on sampled texts. Default: greedy texts.")] = None
    seed: Annotated[int, Option(help="Of sampled texts.")] = 0
    seconds: Annotated[float, Option(min=0.1, help="How long to measure passes, if no curve is saved.")] = 8.0
    as_json: JsonOption = False

    def check(self) -> None:
        if self.heads is None and self.model is not None:
            wanted = "expected the folder of heads that were trained for it."
            raise LookaheadError(f"--model {self.model} needs --heads: {wanted}")
        super().check()
        check_file("--output", self.output)
        check_exists(self.heads, "--heads", "Medusa heads: a folder or a file")
