"""Latency curves made by hand."""

from pathlib import Path
from typing import Any

from lookahead import tuning
from lookahead.draft.latency import StepTimes


def measured(cells: dict[int, float], context: int = 64, passes: int = 4, **settings: Any) -> StepTimes:
    times = StepTimes(**settings)
    for _ in range(passes):
        for nodes, ms in cells.items():
            times.add(nodes, context, ms)
    return times


def key_of(model: Any, batch: int = 1) -> Path:
    return tuning.cache_file(tuning.describe(model, batch))
