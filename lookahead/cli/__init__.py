"""The command line: one module a command."""

from typing import Annotated

import typer

from lookahead.cli.common import Commands, versions
from lookahead.cli.convert_medusa import convert_medusa
from lookahead.cli.demo import demo
from lookahead.cli.generate import generate
from lookahead.cli.support import support
from lookahead.cli.train_medusa import train_medusa
from lookahead.cli.tree import tree
from lookahead.cli.tune import tune
from lookahead.cli.verify import verify

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Exact lookahead decoding: the text of plain generate, in fewer forward passes.",
)
app.command()(convert_medusa)
app.command()(demo)
app.command()(generate)
app.command()(support)
app.command()(train_medusa)
app.command()(tree)
app.command()(tune)
app.command()(verify)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(", ".join(f"{name} {number}" for name, number in versions().items()))
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the versions and stop.")
    ] = False,
) -> None:
    """Where ``--version`` lives; the commands do the work."""
