"""A pass as a picture, for documents and slides. Needs matplotlib."""

import json
from collections.abc import Sequence
from importlib.resources import files
from math import isnan
from pathlib import Path
from typing import Any

from jacobi import LookaheadError
from lookahead.generation.watch import Pass
from lookahead.pieces import Pieces

COLOURS = ("#2a7f62", "#3b6fb6", "#b5651d", "#8a4fa3", "#8a6508", "#5f6b7a")  # of sources, in the order of the legend
_GREY = "#9aa5b1"


def colours(sources: list[str]) -> dict[str, str]:
    """A colour for each source."""
    names = sorted({source for source in sources if source})
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}


def visible(text: str) -> str:
    """A token's text with its spaces and line breaks shown."""
    shown = text.replace(" ", "\N{MIDDLE DOT}").replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}")
    shown = "".join(letter if letter.isprintable() else "\N{WHITE SQUARE}" for letter in shown)
    return shown if len(shown) <= 14 else shown[:13] + "\N{HORIZONTAL ELLIPSIS}"


def draw(each: dict[str, Any], title: str, file: Path) -> None:
    """Save one pass of a :func:`.document_of`; the file's suffix says as what: png, svg, pdf."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    spots = places(each["parents"])
    deepest, lowest = max(depth for depth, _ in spots), max(height for _, height in spots)
    wide = max(1.45, 0.3 + 0.07 * (6 + max(len(visible(text)) for text in each["tokens"])))  # inches, with the share
    size = (max(5.0, wide * (deepest + 1)), max(1.6, min(200.0, 0.36 * (lowest + 1) + 0.9)))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    kept, known = set(each["accepted"]), colours(each["sources"])
    for node, parent in enumerate(each["parents"]):
        (across, down), text = spots[node], visible(each["tokens"][node])
        colour = known.get(each["sources"][node], "#1c1c1e" if node == 0 else _GREY)
        face, ink, edge = (colour, "white", 1.6) if node in kept else ("white", colour, 0.8)
        if parent >= 0:
            before, (line, width) = spots[parent], (colour, 2.4) if node in kept else ("0.82", 1.0)
            axes.plot([before[0], across], [-before[1], -down], color=line, linewidth=width, zorder=1)
        box = {"boxstyle": "round,pad=0.25", "edgecolor": colour, "linewidth": edge, "facecolor": face}
        chance = each["chances"][node]
        label = text if node == 0 or chance < 0 else f"{text}  {chance:.0f}%"
        style: dict[str, Any] = {"color": ink, "fontsize": 8, "parse_math": False}
        axes.annotate(label, (across, -down), ha="center", va="center", bbox=box, zorder=2, **style)
    handles = [Line2D([], [], color=colour, linewidth=4, label=name) for name, colour in known.items()]
    if handles:
        axes.legend(handles=handles, loc="lower right", frameon=False, fontsize=8)
    axes.set_title(title, fontsize=9)
    axes.set_xlim(-0.6, deepest + 0.6)
    axes.set_ylim(-lowest - 0.7, 0.7)
    axes.set_axis_off()
    try:
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lookahead"}):  # text stays text, and files repeat
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise LookaheadError(f"{file} cannot be written: {error}.") from error


def document_of(tokenizer: Any, prompt: str, passes: Sequence[Pass], title: str, told: str = "") -> dict[str, Any]:
    """The first sequence's passes for the page; every token with the text that it added. Chances are in percent, -1
    where nothing was estimated; ``told`` is the statistics' explanation."""
    pieces = Pieces(tokenizer, ())
    shown: list[dict[str, Any]] = []
    for each in passes:
        row = each.rows[0]
        tokens = (tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in row.tokens)
        shown.append(
            {
                "tokens": list(map(str, tokens)),
                "parents": list(row.parents),
                "sources": list(row.sources),
                "chances": [-1 if isnan(chance) else round(100 * chance, 1) for chance in row.chances],
                "accepted": list(row.accepted),
                "written": [pieces.add(token) for token in row.written],
                "ms": [round(ms, 3) for ms in (each.draft_ms, each.forward_ms, each.verify_ms, each.keep_ms)],
            }
        )
    if shown and (rest := pieces.close()):
        shown[-1]["written"][-1] += rest
    return {"title": title, "prompt": prompt, "told": told, "passes": shown}


def page_of(document: dict[str, Any]) -> str:
    """The self-contained page of a :func:`document_of`. Its script needs no network; texts are data, never markup."""
    placed = [each | {"places": places(each["parents"])} for each in document["passes"]]
    data = json.dumps(document | {"passes": placed}, ensure_ascii=True, separators=(",", ":"))
    safe = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    template = files("lookahead.pictures").joinpath("trace.html").read_text(encoding="utf-8")
    return template.replace("@@DATA@@", safe)


def places(parents: Sequence[int]) -> list[tuple[int, float]]:
    """Depth and height of every node: leaves lie one below the other, a parent in the middle of its children."""
    children: list[list[int]] = [[] for _ in parents]
    depths = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
            depths[node] = depths[parent] + 1
    heights, free, order, waiting = [0.0] * len(parents), 0, list[int](), [0][: len(parents)]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += reversed(children[node])
        if not children[node]:
            heights[node], free = float(free), free + 1
    for node in reversed(order):
        if children[node]:
            heights[node] = (heights[children[node][0]] + heights[children[node][-1]]) / 2
    return list(zip(depths, heights, strict=True))
