"""One stage of a training by transformers' ``Trainer``, whatever learns: clock, learning rates and checkpoints."""

import importlib.util
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import ExportableState, PrinterCallback

from jacobi import LookaheadError
from lookahead.models.output_layer import output_layer, placement
from lookahead.models.trainer import OwnCheckpoints, check_trainer, use_one_gpu
from lookahead.training.data import Example, collate
from lookahead.training.settings import TrainingSettings

Report = Callable[[str, float, dict[str, float]], None]  # the stage, the share of it that is done, losses and rates
_STATE = "trainer_state.json"  # as transformers calls it
_FINISHED = "finished.safetensors"


class Clock(TrainerCallback, ExportableState):
    """Counts the time of a stage over restarts, stops it after ``limit_s`` seconds (None is no limit), and reports."""

    def __init__(self, limit_s: float | None = None, stage: str = "", report: Report | None = None) -> None:
        self.limit_s = limit_s
        self.spent_s = 0.0  # from the end of the first step on; the same in all processes
        self._last: float | None = None
        self._stage = stage
        self._report = report

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"spent_s": self.spent_s}}

    def done(self, step: int, max_steps: int) -> float:
        """The share of the training that is over after ``step`` steps: of steps or of time, whichever is more."""
        by_time = 0.0 if self.limit_s is None else self.spent_s / self.limit_s
        return min(1.0, max(step / max_steps, by_time))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.spent_s = state.stateful_callbacks[type(self).__name__]["attributes"]["spent_s"]
        self._last = None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the clock before the next learning rates are made; all processes take the first one's."""
        now = time.monotonic()
        if self._last is not None:
            self.spent_s += now - self._last
        self._last = now
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            spent = torch.tensor(self.spent_s, dtype=torch.float64, device=args.device)
            torch.distributed.broadcast(spent, src=0)
            self.spent_s = spent.item()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell(state, {})
        if self.limit_s is not None and self.spent_s >= self.limit_s:
            control.should_training_stop = control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            self._tell(state, logs | {"step": state.global_step})

    def _tell(self, state: Any, logs: dict[str, float]) -> None:
        if self._report is not None and state.is_world_process_zero:
            self._report(self._stage, self.done(state.global_step, state.max_steps), logs)


class Learner(nn.Module):
    """What is trained, with the model beside it, as the trainer sees it: tokens in, loss out.

    Attributes:
        backbone: the model, in an adapter or as it is.
        trains_backbone: whether that is trained, too; else it stays in evaluation mode.
        parts: what the last batch's loss was made of, by the names that logs take; no gradients.
    """

    def __init__(self, backbone: Any, trains_backbone: bool = False) -> None:
        super().__init__()
        self.backbone = backbone
        self.trains_backbone = trains_backbone
        self.parts: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.backbone.train(mode and self.trains_backbone)
        return self

    @abstractmethod
    def rates(self) -> Iterable[tuple[nn.Module, float]]:
        """What may hold weights to train, and their peak learning rates."""

    def advance(self, done: float) -> None:
        """A share of the stage is over, as every batch begins."""

    @abstractmethod
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The ``"loss"`` of a batch; all ``[batch, token]``, padded on the right."""


class DrafterTrainer(OwnCheckpoints):
    """transformers' trainer with a learning rate for each part, our schedules and checkpoints."""

    def __init__(self, model: Learner, settings: TrainingSettings, clock: Clock, **kwargs: Any) -> None:
        self.clock = clock
        self._settings = settings
        self._parts: list[dict[str, Tensor]] = []
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        super().__init__(model, **kwargs)
        self.add_callback(clock)
        self.remove_callback(PrinterCallback)

    def run(self, resume: bool) -> Any:
        """Train, or continue with ``resume`` until steps or time are over; returns the trainer's state."""
        folder = Path(self.args.output_dir)
        finished = folder / _FINISHED
        whole = [path.parent for path in folder.glob(f"checkpoint-*/{_STATE}") if resume]  # the state is written last
        found = max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)
        if found is not None and finished.exists():
            state = TrainerState.load_from_json(str(found / _STATE))
            self.clock.on_train_begin(self.args, state, self.control)
            if self.clock.done(state.global_step, state.max_steps) >= 1.0:
                self.read_weights(finished)
                return state
        self.train(resume_from_checkpoint=None if found is None else str(found))
        if self.args.should_save:
            self.write_weights(finished)
        return self.state

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Every part has its learning rate; weights do not decay."""
        if self.optimizer is None:
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            groups = []
            for part, rate in self.model.rates():
                if weights := [weight for weight in part.parameters() if weight.requires_grad]:
                    groups.append({"params": weights, "lr": rate, "weight_decay": 0.0})
            self.optimizer = kind(groups, **settings)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """A short rise, then half a cosine down to 0, over the steps or the time there is."""

        def factor(step: int) -> float:
            done, warmup = self.clock.done(step, num_training_steps), self._settings.warmup
            rise = min(1.0, (done + 1 / num_training_steps) / warmup) if warmup else 1.0
            return rise * (1.0 + math.cos(math.pi * done)) / 2

        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
        return self.lr_scheduler

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.model.advance(self.clock.done(self.state.global_step, self.state.max_steps))
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self._parts.append(self.model.parts)
        return loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """One batch; a LookaheadError if its loss is not finite."""
        loss: Tensor = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):
            raise LookaheadError(
                f"The loss is {loss.item()} at step {self.state.global_step + 1}, so training stops here: expected a "
                "finite number. Begin anew with a lower learning rate, or without float16."
            )
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the parts of the loss: the first process's means since the last time."""
        if self._parts and "loss" in logs:
            logs |= {name: torch.stack([parts[name] for parts in self._parts]).mean().item() for name in self._parts[0]}
            self._parts.clear()
        super().log(logs, *args, **kwargs)


@dataclass(frozen=True)
class Trained:
    """What a training left."""

    heads: Any  # what was trained, float32
    model: Any  # with an adapter, inside it
    changed: bool  # whether the model was trained too, or its adapter
    steps: int  # taken in all stages
    planned_steps: int  # what the epochs would have taken
    seconds: float  # that the steps took


def check_stage(model: PreTrainedModel, settings: TrainingSettings, packages: Sequence[str] = ()) -> None:
    """Raise a LookaheadError if accelerate or one of the ``packages`` is missing, or settings and model do not fit."""
    packages = ("accelerate", *packages)
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise LookaheadError(
            f"Training needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed. Run "
            "`pip install lookahead-decoding[train]`."
        )
    check_trainer()
    if settings.report_to != "none":
        try:
            for logger in get_reporting_integration_callbacks(settings.report_to):
                logger()
        except (ValueError, RuntimeError, ImportError) as error:
            raise LookaheadError(f"report_to={settings.report_to!r} cannot be used here: {error}") from error
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and settings.block_size > longest:
        told = f"{type(model).__name__} has positions for {longest} tokens. Use a smaller one."
        raise LookaheadError(f"block_size={settings.block_size}: {told}")
    if settings.precision == "fp16" and model.device.type == "cpu":
        raise LookaheadError("precision='fp16' does not train on a CPU: expected 'bf16' or 'none'.")


def train_stage(
    learner: Learner,
    examples: Sequence[Example],
    settings: TrainingSettings,
    stage: str,
    folder: Path,
    *,
    stages: int = 1,
    pad: int = 0,
    resume: bool = False,
    report: Report | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> tuple[int, int, float]:
    """Train what of ``learner`` requires gradients; steps taken, steps planned, and the seconds that they took.

    ``folder`` gets checkpoints; with ``resume``, training continues from the last one in it. Of the
    settings' time it has as much as each of so many ``stages``. A LookaheadError says that the loss is not finite.
    """
    args = _arguments(learner, len(examples), settings, folder)
    clock = Clock(None if settings.max_minutes is None else 60.0 * settings.max_minutes / stages, stage, report)
    data: dict[str, Any] = {"train_dataset": examples, "data_collator": partial(collate, pad=pad)}
    trainer = DrafterTrainer(learner, settings, clock, args=args, callbacks=list(callbacks), **data)
    state = trainer.run(resume)
    return state.global_step, state.max_steps, clock.spent_s


@contextmanager
def kept_flags(model: PreTrainedModel) -> Iterator[None]:
    """Weights require gradients afterwards as they did before."""
    flags = [(weight, weight.requires_grad) for weight in model.parameters()]
    try:
        yield
    finally:
        for weight, flag in flags:
            weight.requires_grad_(flag)


def check_gradient(model: PreTrainedModel, hidden_size: int) -> None:
    """Refuse an output layer that passes no gradient on to the heads below it."""
    layer = output_layer(model)
    device, dtype = placement(model)
    states = torch.zeros(1, hidden_size, device=device, dtype=dtype, requires_grad=True)
    try:
        with torch.enable_grad():
            torch.autograd.grad(layer(states).sum(), states)
    except RuntimeError as error:
        raise LookaheadError(
            f"The output layer of {type(model).__name__}, a {type(layer).__name__}, passes no gradient on to the heads "
            "before it: expected one that does. Load the model without quantising that layer."
        ) from error


def _arguments(learner: Learner, examples: int, settings: TrainingSettings, folder: Path) -> TrainingArguments:
    device = learner.backbone.device
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.accumulate,
        num_train_epochs=settings.epochs,
        learning_rate=max(rate for _, rate in learner.rates()),
        bf16=settings.precision == "bf16",
        fp16=settings.precision == "fp16",
        seed=settings.seed,
        logging_steps=10,
        logging_nan_inf_filter=False,
        save_steps=settings.save_steps,
        save_total_limit=2,
        report_to=settings.report_to,
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=device.type == "cuda",
        ddp_find_unused_parameters=False,
    )
    use_one_gpu(args)
    if (args.device.type, args.device.index or 0) != (device.type, device.index or 0):
        told = f"The model is on {device}, and training runs on {args.device}"
        raise LookaheadError(f"{told}: move it there, or choose the GPU with CUDA_VISIBLE_DEVICES.")
    each = math.ceil(examples / (args.train_batch_size * args.world_size * settings.accumulate))
    args.num_train_epochs = max(settings.epochs, settings.min_steps / each)
    return args
