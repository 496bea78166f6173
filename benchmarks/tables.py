"""Tables by the names of their columns: on the console while a benchmark runs, in Markdown for the report."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Rows = Iterable[Mapping[str, Any]]
FORMS = {  # how a column prints a row; a column that is missing here prints the row's own item of that name
    "prompts": "{texts_of}",
    "tokens": "{new_tokens}",
    "method": "{label}",
    "95%": "{speedup_interval[0]:.2f}-{speedup_interval[1]:.2f}",
    "S": "{S:.2f}",
    "tokens/s": "{tokens_per_s_median:.0f}",
    "with the prompt": "{whole_per_s_median:.1f}",
    "MB": "{memory_mb:.0f}",
    "nodes": "{nodes:.1f}",
    "of ceiling": "{share_of_ceiling:.0%}",
    "texts that differ": "{texts_that_differ} of {texts}{other_draws}",
    "plain ms": "{plain_median_ms:.0f}",
    "ours ms": "{ours_median_ms:.0f}",
    "prompt tokens": "{length}",
    "drafts'": "{drafts}",
    "passes'": "{passes_gain}",
    "first token ms": "{first_token_ms:.0f}",
    "later token ms": "{token_ms:.2f}",
    "later tokens": "{after_median:.2f}x",
    "their 95%": "{after_interval[0]:.2f}-{after_interval[1]:.2f}",
    "read a pass": "{read_mb:.1f} MB",
    "bandwidth": "{gb_per_s:.1f} GB/s",
    "floor ms": "{floor:.2f}",
    "eager ms": "{eager_ms:.2f}",
    "t(1) ms": "{single:.2f}",
    "CPU": "{cpu_ratio:.3f}",
    "CPU 95%": "{cpu_interval[0]:.3f}-{cpu_interval[1]:.3f}",
    "wall": "{wall_ratio:.3f}",
    "wall 95%": "{wall_interval[0]:.3f}-{wall_interval[1]:.3f}",
    "CPU a pass": "{pass_ratio:.3f}",
    "S of this": "{this_S:.2f}",
    "S of the other": "{other_S:.2f}",
}


def cells(columns: str, row: Mapping[str, Any]) -> list[str]:
    """A row in comma-separated columns; a speedup below 1.00x is bold."""
    group, speedup = row.get("group", "all"), f"{row.get('speedup_median') or 1:.2f}x"
    whole = {
        "texts_of": row.get("set", "texts") + (f", {group}" if group != "all" else ""),
        "label": row.get("method"),
        "other_draws": "" if row.get("same_draws", True) else " (other draws)",
        **row,
        "speedup": f"**{speedup}**" if speedup < "1" else speedup,
    }
    return [FORMS.get(name, f"{{{name}}}").format_map(whole) for name in columns.split(", ")]


def show(console: Console, title: str, columns: str, rows: Rows) -> None:
    """Print rows as a table."""
    printed = Table(*columns.split(", "), title=title)
    for row in rows:
        printed.add_row(*cells(columns, row))
    console.print(printed)


def grid(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    escaped = (" | ".join(item.replace("|", "\\|") for item in line) for line in (head, ["---"] * len(head), *lines))
    return "\n".join(f"| {line} |" for line in escaped)


def table(columns: str, rows: Rows) -> str:
    """Rows in full, in Markdown."""
    return grid(columns.split(", "), [cells(columns, row) for row in rows])


def pivot(index: str, column: str, value: str, rows: Rows) -> str:
    """In Markdown, a line for all rows that agree in the columns ``index``, and a column for each ``column``."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        lines.setdefault(tuple(cells(index, row)), {})[column.format_map(row)] = cells(value, row)[0]
    names = list(dict.fromkeys(name for found in lines.values() for name in found))
    grown = [(*place, *(found.get(name, "") for name in names)) for place, found in lines.items()]
    return grid((*index.split(", "), *names), grown)
