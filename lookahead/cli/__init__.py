"""The command line: one module a command, a function of one frozen dataclass, whose fields are its options. A module is
imported when its command's arguments were read and checked: help, ``--version`` and what is wrong with arguments are
told without torch and transformers. May import: everything."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

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


def spread(name: str, options: type) -> Callable[..., None]:
    """The function that typer makes a command of: with a parameter for each of the dataclass's fields, it calls the one
    that has the command's name, in the module of that name, which is imported last."""

    def called(**given: Any) -> None:
        checked = options(**given)
        getattr(import_module(f"lookahead.cli.{name}"), name)(checked)

    called.__doc__ = options.__doc__
    called.__signature__ = inspect.signature(options)  # type: ignore[attr-defined]
    return called


class Commands(TyperGroup):
    """The commands; a ``LookaheadError`` of one, or one of a file, is one line on stderr and exit status 2."""

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
for _name, _options in COMMANDS.items():
    app.command(_name)(spread(_name, _options))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(", ".join(f"{name} {number}" for name, number in versions().items()))
        raise typer.Exit


VersionOption = typer.Option("--version", callback=_version, is_eager=True, help="Print the versions and stop.")


@app.callback()
def main(version: Annotated[bool, VersionOption] = False) -> None:
    """Where ``--version`` lives; the commands do the work."""
