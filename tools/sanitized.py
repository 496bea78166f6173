"""A plugin of pytest, for ``make sanitize``: the library gets the C part that was built with sanitizers."""

import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

NAME = "lookahead._speedups"
(built,) = (Path(__file__).parents[1] / "build" / "sanitized" / "lookahead").glob("_speedups*")
assert b"__asan_init" in built.read_bytes(), f"{built} has no address sanitizer"
loader = ExtensionFileLoader(NAME, str(built))
spec = spec_from_loader(NAME, loader)
assert spec is not None
sys.modules[NAME] = module_from_spec(spec)
loader.exec_module(sys.modules[NAME])
