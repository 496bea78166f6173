"""The bundled model and its tokenizer."""

from typing import Any

import pytest

import lookahead


@pytest.fixture(scope="session")
def loaded() -> tuple[Any, Any]:
    return lookahead.load_bundled()
