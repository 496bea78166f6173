"""The bundled model as benchmarks load it."""

from typing import Any

import pytest

from benchmarks import harness
from lookahead import bundled


@pytest.fixture(scope="session")
def loaded() -> tuple[Any, Any]:
    """The bundled model and its tokenizer, with the end-of-text token off."""
    if not (bundled.BUNDLED / "config.json").exists():
        pytest.skip("needs the bundled model")
    return harness.load(None, "float32")
