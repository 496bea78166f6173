"""Streamers that tests look into."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer


class Puts(BaseStreamer):
    """Remembers what it was given; ``told`` hears after each put how many there were."""

    def __init__(self, told: Callable[[int], Any] = lambda count: None) -> None:
        self.puts: list[Tensor] = []
        self.ends = 0
        self._told = told

    def put(self, value: Tensor) -> None:
        assert not self.ends, "nothing comes after the end"
        self.puts.append(value)
        self._told(len(self.puts))

    def end(self) -> None:
        self.ends += 1


class Harmless(Puts):
    """Lets rows get apart."""

    lookahead_draws_nothing = True
