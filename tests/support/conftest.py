"""What holds for tests of refused calls."""

from collections.abc import Iterator

import pytest
from helpers.models import prompts, same_as_plain, tiny_model


@pytest.fixture
def works_afterwards() -> Iterator[None]:
    """After the test, the tiny Llama and GPT-2 decode as ever."""
    yield
    for name in ("llama", "gpt2"):
        same_as_plain(tiny_model(name), prompts(2), max_new_tokens=8)
