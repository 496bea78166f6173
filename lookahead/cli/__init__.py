"""The command line: one module a command, a function of one frozen dataclass, whose fields are its options. A module is
imported when its command's arguments were read and checked: help, ``--version`` and what is wrong with arguments are
told without torch and transformers. May import: everything."""

import inspect
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from jacobi import LookaheadError
from lookahead._version import versions
from lookahead.cli import arguments, training_arguments

COMMANDS: dict[str, type] = {
    "batch": arguments.Batch,
    "bench": arguments.Bench,
    "chat": arguments.Chat,
    "convert": training_arguments.Convert,
    "demo": arguments.Demo,
    "generate": arguments.Generate,
    "learn": arguments.Learn,
    "serve": arguments.Serve,
    "support": arguments.Support,
    "trace": arguments.TraceOptions,
    "train": training_arguments.Train,
    "tree": training_arguments.Tree,
    "tune": arguments.Tune,
    "verify": arguments.Verify,
}


def load_command(name: str) -> Any:
    """Make typer's command of the function that has the command's name, in the module of that name, with a parameter
    for each of the dataclass's fields; the module is imported last."""
    alone, options = typer.Typer(add_completion=False), COMMANDS[name]

    def spread(**given: Any) -> None:
        checked = options(**given)
        getattr(import_module(f"lookahead.cli.{name}"), name)(checked)

    spread.__doc__ = options.__doc__
    spread.__signature__ = inspect.signature(options)  # type: ignore[attr-defined]
    alone.command(name)(spread)
    return typer.main.get_command(alone)


class LazyCommand(TyperCommand):
    """A command of which only name and help are known, until its arguments are read."""

    def make_context(self, *args: Any, **settings: Any) -> Any:
        return load_command(str(self.name)).make_context(*args, **settings)


class Commands(TyperGroup):
    """The commands; a ``LookaheadError`` of one, or one of a file, is one line on stderr and exit status 2."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        helps = {name: str(inspect.getdoc(options)).partition("\n\n")[0] for name, options in COMMANDS.items()}
        self.commands = {name: LazyCommand(name, help=text) for name, text in helps.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of a name; ``train-eagle``, as it once was, is ``train --kind eagle``."""
        name, dash, kind = args[0].partition("-")
        given = [name, "--kind", kind, *args[1:]] if dash and name in ("convert", "train") else args
        return super().resolve_command(ctx, given)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever read has gone: nothing is wrong
            raise
        except (LookaheadError, OSError) as error:
            typer.echo("Error: " + " ".join(str(error).split()), err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Exact lookahead decoding: the text of plain generate, in fewer forward passes.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(", ".join(f"{name} {number}" for name, number in versions().items()))
        raise typer.Exit


VersionOption = typer.Option("--version", callback=_version, is_eager=True, help="Print the versions and stop.")


@app.callback()
def main(version: Annotated[bool, VersionOption] = False) -> None:
    """Where ``--version`` lives; the commands do the work."""
