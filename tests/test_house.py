"""The house's rules: floors, small modules in few rooms, plain functions, names used once, short documents.

``contracts.json`` holds what may only fall: figures, and the names of what breaks a rule still. Whoever mends one takes
it off; nobody puts one on.
"""

import ast
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

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
HELD: dict[str, Any] = json.loads((ROOT / "tests" / "contracts.json").read_text(encoding="utf-8"))
CODE = {
    "library": ("lookahead/*.py", "jacobi/*.py"),
    "c": ("lookahead/_c/*",),
    "tests": ("tests/*.py",),
    "benchmarks": ("benchmarks/*.py",),
}
FEATURES: dict[str, list[str]] = HELD["features"]  # what came later, tests too: each has a figure of its own
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


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of the library, by its class and name, which it keeps where its module moves."""
    for file in MODULES:
        for node in ast.walk(tree_of(file)):
            for part in ast.iter_child_nodes(node):
                if isinstance(part, FUNCTIONS):
                    yield f"{node.name}.{part.name}" if isinstance(node, ast.ClassDef) else part.name, part


def parts_of(node: ast.AST) -> Iterator[ast.AST]:
    """What a function itself consists of, without functions and classes inside it."""
    for part in ast.iter_child_nodes(node):
        if not isinstance(part, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            yield part
            yield from parts_of(part)


def branches(function: ast.AST) -> int:
    """Conditions, loops, handlers, cases, comprehensions and their filters, and further operands of ``and`` and ``or``.

    ``if a and b: ...`` has two, ``[x for x in y if x]`` has two.
    """
    single = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
    found = 0
    for part in parts_of(function):
        found += isinstance(part, single)
        found += 1 + len(part.ifs) if isinstance(part, ast.comprehension) else 0
        found += len(part.values) - 1 if isinstance(part, ast.BoolOp) else 0
    return found


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without ``self`` and ``cls``."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def splats(function: ast.AST) -> Iterator[str]:
    """Names of tuples that a function makes and hands on as positional arguments: ``f(*known)``."""
    made = set()
    for part in parts_of(function):
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Tuple):
            made |= {target.id for target in part.targets if isinstance(target, ast.Name)}
    for part in parts_of(function):
        if isinstance(part, ast.Call):
            given = [each.value for each in part.args if isinstance(each, ast.Starred)]
            yield from (each.id for each in given if isinstance(each, ast.Name) and each.id in made)


def named_types() -> dict[str, list[str]]:
    """Classes and aliases of types at the top of modules, by name."""
    found = defaultdict(list)
    for file in MODULES:
        for node in tree_of(file).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            name = node.name if isinstance(node, ast.ClassDef) else target.id if isinstance(target, ast.Name) else ""
            if name.lstrip("_")[:1].isupper() and not name.isupper():
                found[name].append(name_of(file))
    return found


def constants() -> Iterator[tuple[Path, str, bool]]:
    """Every module's constants of numbers: file, name, and whether a comment stands beside or above it."""
    plain = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop, ast.Load)
    for file in MODULES:
        lines = file.read_text(encoding="utf-8").splitlines()
        for node in tree_of(file).body:
            value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
            inside = [] if value is None else list(ast.walk(value))
            numbers = [part for part in inside if isinstance(part, ast.Constant) and type(part.value) in (int, float)]
            if numbers and all(isinstance(part, plain) for part in inside):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                beside = any("#" in line for line in lines[node.lineno - 1 : node.end_lineno])
                yield file, ast.unparse(target), beside or lines[node.lineno - 2].startswith("#")


def held(kind: str, found: Iterable[str]) -> None:
    """What breaks a rule is known, and what is known still breaks it."""
    given, known = set(found), set(HELD["exceptions"][kind])
    assert given <= known, f"{kind}: mend {sorted(given - known)}"
    assert known <= given, f"{kind}: take {sorted(known - given)} off tests/contracts.json"


def test_floors_and_circles() -> None:
    # In a process of its own: its setting up of logs disables every logger that other tests listen to.
    linter = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", linter, "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_function_has_at_most_fifteen_branches() -> None:
    held("branches", (name for name, function in functions() if branches(function) > 15))


def test_a_function_has_at_most_eight_parameters() -> None:
    held("parameters", (name for name, function in functions() if parameters(function) > 8))


def test_no_tuple_of_a_function_s_own_is_handed_on_as_arguments() -> None:
    held("splats", (f"{name} {tuple_}" for name, function in functions() for tuple_ in splats(function)))


def test_a_type_s_name_stands_for_one_thing() -> None:
    held("twins", (name for name, files in named_types().items() if len(files) > 1))


def test_constants_that_weigh_drafts_say_where_they_come_from() -> None:
    rooms = tuple((ROOT / "lookahead" / room).as_posix() for room in ("draft", "sources"))
    bare = (name for file, name, said in constants() if not said and file.as_posix().startswith(rooms))
    held("constants without a comment", bare)


def measured() -> dict[str, int]:
    """The figures of ``contracts.json`` as they are."""
    files = {part: {file for each in globs for file in files_of(each)} for part, globs in (CODE | FEATURES).items()}
    later = {file for part in FEATURES for file in files[part]}
    lines = {part: sum(map(lines_of, each - later if part in CODE else each)) for part, each in files.items()}
    numbers = [file for file, _, _ in constants() if file not in later]
    draft = ROOT / "lookahead" / "draft"
    return lines | {"constants": len(numbers), "draft constants": sum(draft in file.parents for file in numbers)}


def files_of(pattern: str) -> Iterable[Path]:
    """Files by a pattern of git's, where ``*`` also stands for folders."""
    folder, _, ending = pattern.rpartition("/")
    return (ROOT / folder).rglob(ending)


def git(*words: str) -> str:
    """What git says, or nothing where it knows nothing of this folder."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return ""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False).stdout


def test_what_is_counted_only_falls() -> None:
    """Neither above the figures held nor above the last tag's, which are counted in its files."""
    found = measured()
    assert not {part: count for part, count in found.items() if count > HELD["figures"][part]}
    tag = git("describe", "--tags", "--abbrev=0").strip()
    for part, globs in CODE.items() if tag else ():
        counted = git("grep", "-c", "", tag, "--", *globs).splitlines()
        assert found[part] <= sum(int(line.rpartition(":")[2]) for line in counted)


def test_what_is_held_was_never_less() -> None:
    """No commit has raised a figure, or let one more break a rule."""
    for commit in git("log", "--format=%H", "--", "tests/contracts.json").split():
        before = json.loads(git("show", f"{commit}:tests/contracts.json") or "{}")
        figures = before.get("figures", {})
        assert not {part: count for part, count in figures.items() if count < HELD["figures"][part]}, commit
        lists = before.get("exceptions", {})
        assert not [kind for kind, names in lists.items() if len(names) < len(HELD["exceptions"][kind])], commit


def test_what_is_built_in_c_is_small() -> None:
    sources = list((ROOT / "lookahead" / "_c").iterdir())
    sizes = {name_of(file): lines_of(file) for file in sources}
    assert not {name: size for name, size in sizes.items() if size > 350}
    assert max(len(line) for file in sources for line in file.read_text(encoding="utf-8").splitlines()) <= 120


def test_the_rooms_are_known_and_at_most_twenty_modules_stand_beside_them() -> None:
    """Each room says in a few lines what it holds."""
    library = ROOT / "lookahead"
    assert sorted(folder.parent.name for folder in library.glob("*/__init__.py")) == list(ROOMS)
    assert len(list(library.glob("*.py"))) <= 20
    told = {room: ast.get_docstring(tree_of(library / room / "__init__.py")) or "" for room in ROOMS}
    assert not {room: text for room, text in told.items() if len(text.splitlines()) < 3}


def test_documents_are_short() -> None:
    assert lines_of(ROOT / "README.md") <= 140
    assert lines_of(ROOT / "BENCHMARKS.md") <= 180
    assert lines_of(ROOT / "docs" / "design.md") <= 250


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


def test_no_module_but_a_calls_session_brings_its_rooms_together() -> None:
    rooms = {f"lookahead.{room}" for room in ("draft", "runtime", "support", "verify")}
    together = []
    for file in MODULES:
        nodes = [node for node in ast.walk(tree_of(file)) if isinstance(node, ast.ImportFrom)]
        found = {".".join((node.module or "").split(".")[:2]) for node in nodes}
        together += [name_of(file)] if rooms <= found else []
    assert set(together) <= {"lookahead/generation/session.py"}
