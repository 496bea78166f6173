"""Tables as all commands show them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text


def columns(
    headers: Sequence[str], rows: Iterable[Sequence[str | Text]], title: str | None = None, bold: str = ""
) -> Table:
    """Right-justified columns; the row whose first cell is ``bold`` stands out."""
    table = Table(title=title, box=None, header_style="bold")
    for header in headers:
        table.add_column(header, justify="right")
    for row in rows:
        cells = (Text(cell) if isinstance(cell, str) else cell for cell in row)  # what looks like markup stays text
        table.add_row(*cells, style="bold" if row[0] == bold else "")
    return table


def facts(known: Mapping[str, Any], title: str | None = None, unknown: str = "-") -> Table:
    """A line for each name and its value; None is shown as ``unknown``."""
    table = Table(title=title, box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in known.items():
        text = ", ".join(value) if isinstance(value, list) else unknown if value is None else str(value)
        table.add_row(name.replace("_", " "), text)
    return table
