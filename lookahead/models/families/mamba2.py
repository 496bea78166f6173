"""Mamba-2 layers: time steps in passes over several tokens, bounded as they are in passes over one.

transformers hands ``time_step_limit`` to the scan that reads a prompt, and not to the update that decodes token by
token (Nemotron-H and Zamba-2 have a lower bound of 0.001). So the scans of linear drafts are told of no bound.
"""

from typing import Any

from torch import nn

from lookahead.models.families.overrides import Override, file_of, in_passes

CONTINUING = object()  # the positions of a pass that continues a text with several tokens
_FREE = (0.0, float("inf"))
_SCAN = "mamba2_chunk_scan"


def unbounded_scans(model: nn.Module) -> list[Override]:
    """Overrides of the scans in ``model`` that bound time steps, heeding ``CONTINUING``."""
    homes = {id(home): home for home in map(file_of, filter(_bounded, model.modules()))}
    return [Override(home, _SCAN, _unbounded_scan) for home in homes.values() if hasattr(home, _SCAN)]


def bound_error(model: nn.Module) -> str | None:
    """Which bound a pass over several tokens keeps and a pass over one does not, if it cannot be lifted."""
    for module in filter(_bounded, model.modules()):
        if not hasattr(file_of(module), _SCAN):
            low, high = module.time_step_limit  # type: ignore[misc]
            return (
                f"its {type(module).__name__} keeps time steps between {low:g} and {high:g} in passes over several "
                "tokens, and not one by one"
            )
    return None


def _bounded(module: nn.Module) -> bool:
    limit = vars(module).get("time_step_limit")
    return limit is not None and tuple(limit) != _FREE


@in_passes
def _unbounded_scan(_: Any, original: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
    if positions is CONTINUING:
        kwargs["dt_limit"] = _FREE
    return original(*args, **kwargs)
