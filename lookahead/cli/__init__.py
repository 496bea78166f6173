"""The command line: one module a command, imported when the command is run. A command is a function of one frozen
dataclass, whose fields are its options. ``lookahead --help`` and ``--version`` answer from this module alone, without
torch and transformers. May import: everything."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from lookahead._version import versions

# The first paragraph of each command's docstring, so that the list of commands needs none of their modules.
COMMANDS = {
    "batch": "Answer a file of requests in OpenAI's batch format; a run that was killed goes on where it ended.",
    "bench": "Race plain decoding, prompt lookup and lookahead on your model and prompts, in less than two minutes.",
    "chat": "Chat with a model in the terminal; tokens that came for free are green.",
    "convert-eagle": "Convert an EAGLE head between the published formats.",
    "convert-medusa": "Convert Medusa heads between the published formats.",
    "demo": "Write a few texts with and without lookahead, and compare texts and times.",
    "generate": "Continue a prompt; the text appears as it is written.",
    "serve": "Serve a model to OpenAI's clients, with lookahead decoding; a chat page is at /.",
    "support": "Say whether lookahead can decode a model, by which route, and why; exit status 1 if it cannot.",
    "trace": "Write a page that shows every pass of a decode: its tree, what was accepted, and the time it took.",
    "train-eagle": "Train an EAGLE head for a model.",
    "train-medusa": "Train Medusa heads for a model.",
    "train-redrafter": "Train a ReDrafter head for a model.",
    "tree": "Grow the best tree of Medusa's candidates, from the heads' accuracies on texts.",
    "tune": "Measure the latency curve of a model on this machine, save it, and recommend a budget and W, N, G.",
    "verify": "Compare plain decoding with lookahead: exit status 0 if texts are identical or tied, 1 on a bug.",
}


def load_command(name: str) -> Any:
    """Import a command's module, and make typer's command of the function that has the module's name."""
    word = name.replace("-", "_")
    alone = typer.Typer(add_completion=False)
    alone.command(name)(_spread(getattr(import_module(f"lookahead.cli.{word}"), word)))
    return typer.main.get_command(alone)


def _spread(function: Callable[[Any], None]) -> Callable[..., None]:
    """``function(options)``, where ``options`` is a dataclass, with a parameter for each of the dataclass's fields."""
    options = function.__annotations__["options"]

    def spread(**given: Any) -> None:
        function(options(**given))

    spread.__doc__ = function.__doc__
    spread.__signature__ = inspect.signature(options)  # type: ignore[attr-defined]
    return spread


class LazyCommand(TyperCommand):
    """A command of which only name and help are known; the command itself is imported to read its arguments."""

    def make_context(self, *args: Any, **settings: Any) -> Any:
        return load_command(str(self.name)).make_context(*args, **settings)


class Commands(TyperGroup):
    """The commands; a ``LookaheadError`` of one, or one of a file, is one line on stderr and exit status 2."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: LazyCommand(name, help=text) for name, text in COMMANDS.items()}

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ValueError as error:  # jacobi, which defines LookaheadError, imports torch: only a command may load it
            if not isinstance(error, import_module("jacobi.errors").LookaheadError):
                raise
            self._end(error)
        except BrokenPipeError:  # whoever read has gone: nothing is wrong
            raise
        except OSError as error:
            self._end(error)

    def _end(self, error: Exception) -> NoReturn:
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
