"""The solver under `lookahead`: token trees, verification and the decoding loop. Torch and numpy only.

A name is imported when it is first used (PEP 562), so that the error family costs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jacobi.drafter import Drafter as Drafter
    from jacobi.drafter import PlainDrafter as PlainDrafter
    from jacobi.drafter import Successors as Successors
    from jacobi.drafter import Wants as Wants
    from jacobi.errors import LookaheadError as LookaheadError
    from jacobi.fixed_point import JacobiDrafter as JacobiDrafter
    from jacobi.fixed_point import JacobiMode as JacobiMode
    from jacobi.fixed_point import guesser as guesser
    from jacobi.loop import AsynchronousModel as AsynchronousModel
    from jacobi.loop import GreedyVerifier as GreedyVerifier
    from jacobi.loop import Model as Model
    from jacobi.loop import Scores as Scores
    from jacobi.loop import Step as Step
    from jacobi.loop import Verifier as Verifier
    from jacobi.loop import solve as solve
    from jacobi.tree import TokenTree as TokenTree
    from jacobi.tree import ancestor_bits as ancestor_bits
    from jacobi.tree import branch_mask as branch_mask
    from jacobi.verify import Path as Path
    from jacobi.verify import chances_of as chances_of
    from jacobi.verify import longest as longest
    from jacobi.verify import reject as reject
    from jacobi.verify import walk as walk

_HOMES = {
    "drafter": ("Drafter", "PlainDrafter", "Successors", "Wants"),
    "errors": ("LookaheadError",),
    "fixed_point": ("JacobiDrafter", "JacobiMode", "guesser"),
    "loop": ("AsynchronousModel", "GreedyVerifier", "Model", "Scores", "Step", "Verifier", "solve"),
    "tree": ("TokenTree", "ancestor_bits", "branch_mask"),
    "verify": ("Path", "chances_of", "longest", "reject", "walk"),
}
__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'jacobi' has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module(f"jacobi.{home}"), name))


def __dir__() -> list[str]:
    return sorted(__all__)
