"""The clock of a training: how much of it is over, by steps or by time."""

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

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
