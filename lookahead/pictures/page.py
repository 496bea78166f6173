"""One self-contained page of a decode: trees, text, time line."""

import json
from importlib.resources import files
from typing import Any


def page_of(document: dict[str, Any]) -> str:
    """The page of a :func:`.document_of`. Its script needs no network; texts are data, and never markup."""
    data = json.dumps(document, ensure_ascii=True, separators=(",", ":"))
    safe = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    template = files("lookahead.pictures").joinpath("trace.html").read_text(encoding="utf-8")
    return template.replace("@@DATA@@", safe)
