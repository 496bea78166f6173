"""What a watched decode is as plain data (texts of tokens, trees, times), and the page that shows it."""

import json
from collections.abc import Sequence
from importlib.resources import files
from math import isnan
from typing import Any

from lookahead.generation.watch import Pass, RowPass
from lookahead.pieces import Pieces


def document_of(tokenizer: Any, prompt: str, passes: Sequence[Pass], title: str, told: str = "") -> dict[str, Any]:
    """The first sequence's passes for the page; every token with the text that it added. ``told`` is the statistics'
    explanation."""
    pieces = Pieces(tokenizer, ())
    shown = []
    for each in passes:
        row = each.rows[0]
        shown.append(_pass(tokenizer, each, row, [pieces.add(token) for token in row.written]))
    if shown and (rest := pieces.close()):
        shown[-1]["written"][-1] += rest
    return {"title": title, "prompt": prompt, "told": told, "passes": shown}


def page_of(document: dict[str, Any]) -> str:
    """The self-contained page of a :func:`document_of`. Its script needs no network; texts are data, never markup."""
    data = json.dumps(document, ensure_ascii=True, separators=(",", ":"))
    safe = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    template = files("lookahead.pictures").joinpath("trace.html").read_text(encoding="utf-8")
    return template.replace("@@DATA@@", safe)


def _pass(tokenizer: Any, each: Pass, row: RowPass, shown: list[str]) -> dict[str, Any]:
    """One pass; chances in percent, -1 where nothing was estimated."""
    return {
        "tokens": [str(tokenizer.decode([token], clean_up_tokenization_spaces=False)) for token in row.tokens],
        "parents": list(row.parents),
        "sources": list(row.sources),
        "chances": [-1 if isnan(chance) else round(100 * chance, 1) for chance in row.chances],
        "accepted": list(row.accepted),
        "written": shown,
        "ms": [round(ms, 3) for ms in (each.draft_ms, each.forward_ms, each.verify_ms, each.keep_ms)],
    }


def places(parents: Sequence[int]) -> list[tuple[int, float]]:
    """Depth and height of every node: leaves lie one below the other, a parent in the middle of its children."""
    children: list[list[int]] = [[] for _ in parents]
    depths = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
            depths[node] = depths[parent] + 1
    heights, free, order, waiting = [0.0] * len(parents), 0, list[int](), [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += reversed(children[node])
    for node in order:
        if not children[node]:
            heights[node], free = float(free), free + 1
    for node in reversed(order):
        if children[node]:
            heights[node] = (heights[children[node][0]] + heights[children[node][-1]]) / 2
    return list(zip(depths, heights, strict=True))
