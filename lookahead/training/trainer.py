"""transformers' trainer for what learns to draft: the clock, learning rates, schedules, checkpoints."""

import math
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState, PrinterCallback

from jacobi import LookaheadError
from lookahead.models.trainer import OwnCheckpoints
from lookahead.training.settings import TrainingSettings

Report = Callable[[str, float, dict[str, float]], None]  # the stage, the share of it that is done, losses and rates


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


_STATE = "trainer_state.json"  # as transformers calls it
_FINISHED = "finished.safetensors"


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
    """transformers' trainer with a learning rate for each part, our schedules, and checkpoints of trained weights
    only."""

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

    def _trainable(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self.model.named_parameters() if weight.requires_grad}

    def write_weights(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        save_file({name: weight.contiguous() for name, weight in self._trainable().items()}, part)
        os.replace(part, file)

    def read_weights(self, file: Path) -> None:
        stored, ours = load_file(file), self._trainable()
        if {name: w.shape for name, w in stored.items()} != {name: w.shape for name, w in ours.items()}:
            raise LookaheadError(f"{file} holds other weights than are trained: expected those of the same settings.")
        for name, weight in ours.items():
            weight.copy_(stored[name])
