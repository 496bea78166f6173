"""A server and OpenAI's client, for the tests of a module."""

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.serving import bundled, client, served
from openai import OpenAI


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    """What is served: a model and its tokenizer."""
    return bundled()


@pytest.fixture(scope="module")
def openai(loaded: tuple[Any, Any]) -> Iterator[OpenAI]:
    with served(*loaded) as address, client(address) as made:
        yield made
