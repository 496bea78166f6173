"""Exact lookahead decoding for transformers: the text of plain ``generate``, in fewer forward passes.

A name is imported when it is first used (PEP 562): ``import lookahead`` alone loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lookahead._version import __version__ as __version__

if TYPE_CHECKING:
    from jacobi.errors import LookaheadError as LookaheadError
    from lookahead._per_model import release as release
    from lookahead.bundled import load_bundled as load_bundled
    from lookahead.draft.latency import StepTimes as StepTimes
    from lookahead.generation.memories import learning as learning
    from lookahead.generation.output import LookaheadOutput as LookaheadOutput
    from lookahead.generation.watch import watching as watching
    from lookahead.heads.medusa.strategy import Medusa as Medusa
    from lookahead.loading import load_model as load_model
    from lookahead.patch import augment_all as augment_all
    from lookahead.patch import restore_all as restore_all
    from lookahead.runtime.quantised_layers import quantize as quantize
    from lookahead.scheduling.scheduler import Scheduler as Scheduler
    from lookahead.stats import DecodingStats as DecodingStats
    from lookahead.strategies.grammar import Grammar as Grammar
    from lookahead.strategies.jacobi import Jacobi as Jacobi
    from lookahead.strategies.lookahead import Lookahead as Lookahead
    from lookahead.training.teaching import learn as learn
    from lookahead.tuning import tune as tune

_HOMES = {
    "DecodingStats": "lookahead.stats",
    "Grammar": "lookahead.strategies.grammar",
    "Jacobi": "lookahead.strategies.jacobi",
    "Lookahead": "lookahead.strategies.lookahead",
    "LookaheadError": "jacobi.errors",
    "LookaheadOutput": "lookahead.generation.output",
    "Medusa": "lookahead.heads.medusa.strategy",
    "Scheduler": "lookahead.scheduling.scheduler",
    "StepTimes": "lookahead.draft.latency",
    "augment_all": "lookahead.patch",
    "learn": "lookahead.training.teaching",
    "learning": "lookahead.generation.memories",
    "load_bundled": "lookahead.bundled",
    "load_model": "lookahead.loading",
    "quantize": "lookahead.runtime.quantised_layers",
    "release": "lookahead._per_model",
    "restore_all": "lookahead.patch",
    "tune": "lookahead.tuning",
    "watching": "lookahead.generation.watch",
}
# Documented as lookahead.<module>.
_MODULES = ("bundled", "eagle", "medusa", "mtp", "redrafter", "sources", "stats", "strategy", "tuning")

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = import_module(f"lookahead.{name}")
    else:
        raise AttributeError(f"module 'lookahead' has no attribute {name!r}")
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
