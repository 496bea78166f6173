"""The version of this package, and of everything else that decides what a model writes."""

import platform
from importlib import metadata

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """The versions of this package, transformers, torch and Python, read without importing any of them."""
    others = {name: metadata.version(name) for name in ("transformers", "torch")}
    return {"lookahead": __version__, **others, "python": platform.python_version()}
