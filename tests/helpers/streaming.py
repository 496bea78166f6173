"""Streamers that tests look into."""

from torch import Tensor
from transformers.generation.streamers import BaseStreamer


class Puts(BaseStreamer):
    """Remembers what it was given."""

    def __init__(self) -> None:
        self.puts: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert not self.ends, "nothing comes after the end"
        self.puts.append(value)

    def end(self) -> None:
        self.ends += 1
