"""The solver under `lookahead`: token trees, verification and the decoding loop. Torch and numpy only.

A name is imported when it is first used (PEP 562), so that the error family costs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jacobi.drafter import Drafter, PlainDrafter, Successors, Wants
    from jacobi.errors import LookaheadError
    from jacobi.fixed_point import JacobiDrafter, JacobiMode, guesser
    from jacobi.loop import AsynchronousModel, GreedyVerifier, Model, Scores, Step, Verifier, solve
    from jacobi.tree import TokenTree, ancestor_bits, branch_mask
    from jacobi.verify import Path, chances_of, longest, reject, walk

_HOMES = ("errors", "tree", "verify", "drafter", "fixed_point", "loop")  # none imports a later one
__all__ = ["AsynchronousModel", "Drafter", "GreedyVerifier", "JacobiDrafter", "JacobiMode", "LookaheadError", "Model"]
__all__ += ["Path", "PlainDrafter", "Scores", "Step", "Successors", "TokenTree", "Verifier", "Wants", "ancestor_bits"]
__all__ += ["branch_mask", "chances_of", "guesser", "longest", "reject", "solve", "walk"]


def __getattr__(name: str) -> Any:
    for module in map(import_module, (f"jacobi.{home}" for home in _HOMES if name in __all__)):
        if name in vars(module):
            return globals().setdefault(name, vars(module)[name])
    raise AttributeError(f"module 'jacobi' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
