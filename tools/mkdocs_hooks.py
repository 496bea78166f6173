"""For the docs site: links that leave the docs folder lead to the repository."""

import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, config: Any, **others: Any) -> str:
    """Rewrite a page's links, as mkdocs asks for."""
    out = "../" * (1 + page.file.src_uri.count("/"))
    return re.sub(rf"\]\({out}([^)]+)\)", rf"]({config.repo_url}/blob/main/\1)", markdown)
