"""The house's rules: small modules in few rooms, private names of transformers in few places, short documents."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from lookahead.models.compat import PRIVATES

ROOT = Path(__file__).parents[1]
ROOMS = (
    "cli",
    "draft",
    "generation",
    "heads",
    "integrations",
    "models",
    "parallel",
    "pictures",
    "ray",
    "runtime",
    "scheduling",
    "serve",
    "sources",
    "strategies",
    "support",
    "training",
    "verify",
)
MODULES = sorted(file for home in ("jacobi", "lookahead") for file in (ROOT / home).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Where transformers' own names that are not documented may stand: rooms and modules of lookahead.
PRIVATE_HOMES = ("models", "runtime", "generation/transformers_loop.py", "patch.py")


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def lines_of(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def size_of(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_no_module_is_longer_than_350_lines() -> None:
    assert not {name_of(file): lines_of(file) for file in MODULES if lines_of(file) > 350}


def test_no_test_file_is_longer_than_450_lines() -> None:
    assert not {name_of(file): lines_of(file) for file in TESTS if lines_of(file) > 450}


def test_no_class_is_larger_than_250_lines_or_20_methods() -> None:
    large = {}
    for file in MODULES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(part, FUNCTIONS) for part in node.body)
                if size_of(node) > 250 or methods > 20:
                    large[f"{name_of(file)}:{node.name}"] = (size_of(node), methods)
    assert not large


def test_no_function_is_longer_than_60_lines() -> None:
    """Not counting its head: the options of a command are a table."""
    long = {}
    for file in MODULES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, FUNCTIONS) and (size := (node.end_lineno or 0) - node.body[0].lineno + 1) > 60:
                long[f"{name_of(file)}:{node.name}"] = size
    assert not long


def test_what_is_built_in_c_is_small() -> None:
    sources = list((ROOT / "lookahead" / "_c").iterdir())
    sizes = {name_of(file): lines_of(file) for file in sources}
    assert not {name: size for name, size in sizes.items() if size > 350}
    assert sum(sizes.values()) <= 1_670
    assert max(len(line) for file in sources for line in file.read_text(encoding="utf-8").splitlines()) <= 120


def test_the_library_has_at_most_31330_lines() -> None:
    assert sum(map(lines_of, MODULES)) <= 31_330


def test_the_rooms_are_known_and_at_most_twenty_modules_stand_beside_them() -> None:
    """Each room says in a few lines what it holds."""
    library = ROOT / "lookahead"
    assert sorted(folder.parent.name for folder in library.glob("*/__init__.py")) == list(ROOMS)
    assert len(list(library.glob("*.py"))) <= 20
    told = {room: ast.get_docstring(tree_of(library / room / "__init__.py")) or "" for room in ROOMS}
    assert not {room: text for room, text in told.items() if len(text.splitlines()) < 3}


def test_documents_and_benchmarks_are_short() -> None:
    assert lines_of(ROOT / "README.md") <= 140
    assert lines_of(ROOT / "BENCHMARKS.md") <= 180
    assert sum(map(lines_of, (ROOT / "benchmarks").glob("*.py"))) <= 3_335


def imports_of_ours(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = ["lookahead." if node.level else node.module or ""]
        yield from (name for name in names if name.partition(".")[0] in ("jacobi", "lookahead"))


def test_nothing_of_ours_is_imported_inside_a_function() -> None:
    late = {}
    for file in MODULES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, FUNCTIONS) and (names := list(imports_of_ours(node))):
                late[f"{name_of(file)}:{node.name}"] = names
    assert not late


def test_no_test_imports_another() -> None:
    """What several tests share is in ``helpers``."""
    shared = {}
    for file in TESTS:
        modules = [node.module or "" for node in ast.walk(tree_of(file)) if isinstance(node, ast.ImportFrom)]
        if found := [module for module in modules if module.rpartition(".")[2].startswith("test_")]:
            shared[name_of(file)] = found
    assert not shared


def private_names() -> set[str]:
    """What ``models.compat`` lists of transformers, and begins with an underscore: whoever reads it relies on it."""
    listed = {
        name
        for private in PRIVATES
        if not private.home.startswith("torch")
        for name in (private.path.rpartition(".")[2], *private.sets)
    }
    return {name for name in listed if name.startswith("_")}


def names_read(tree: ast.Module) -> set[str]:
    """Attributes of anything but ``self``, imported names, and strings."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_private_names_stand_where_they_may() -> None:
    library, private = ROOT / "lookahead", private_names()
    assert len(private) > 10
    homes = tuple((library / home).as_posix() for home in PRIVATE_HOMES)
    spread = {}
    for file in MODULES:
        if not file.as_posix().startswith(homes) and (found := names_read(tree_of(file)) & private):
            spread[name_of(file)] = sorted(found)
    assert not spread


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_tests(room: str) -> None:
    assert list((ROOT / "tests" / room).glob("test_*.py"))
