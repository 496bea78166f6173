"""A text on its way to a streamer, which finds the generator where plain decoding would have left it."""

import torch
from transformers.generation import streamers
from transformers.generation.streamers import BaseStreamer

from lookahead.verify.noise import Noise
from lookahead.verify.sequences import Sequences


class Stream:
    """Puts every index that all sequences have written, one 1-D tensor each, as ``generate`` does.

    What ``streamer`` draws in between shifts what is drawn later. transformers' own streamers draw nothing, nor do
    those whose class says so by ``lookahead_draws_nothing = True``: they are told of a pass when nothing else waits.
    Any other one is told token by token, while the tokens of a pass are decided::

        drawn before the pass    e_4  e_5  e_6
        put 4                    nothing is drawn: 5 is chosen by the e_5 that drafts have seen
        put 5                    a number is drawn: e_6 is drawn again, behind it
    """

    def __init__(self, streamer: BaseStreamer, sequences: Sequences) -> None:
        kind = type(streamer)
        harmless = kind.__module__ == streamers.__name__ or getattr(kind, "lookahead_draws_nothing", False)
        self.may_draw = not harmless
        self._streamer, self._sequences = streamer, sequences
        self._noise: Noise | None = None
        self._put = 0

    def attach(self, noise: Noise | None, *, watch: bool) -> None:
        """Say what the sequences draw from. Without ``watch`` tokens are put when their pass is over."""
        self._noise = noise
        if noise is not None and not watch:
            noise.keeps_states = True

    def flush(self) -> None:
        """Put what passes have written. Where the streamer breaks off, the generator stands behind that token."""
        for index in range(self._put, self._complete()):
            try:
                self._tell(index)
            except BaseException:
                if self._noise is not None:
                    self._noise.stand(index)
                raise

    def step(self) -> bool:
        """Put a token that has just been written; whether lines drawn ahead are void, as the streamer has drawn."""
        if self._noise is not None:
            self._noise.settle()
        for index in range(self._put, self._complete()):
            self._tell(index)
        return self._noise is not None and self._noise.renew()

    def close(self) -> None:
        self._streamer.end()

    def _complete(self) -> int:
        """Number of tokens that all sequences have."""
        return self._sequences.slowest(self._sequences.longest)

    def _tell(self, index: int) -> None:
        sequences = self._sequences
        tokens = [row[index] if index < len(row) else sequences.pad for row in sequences.written]
        self._put = index + 1
        self._streamer.put(torch.tensor(tokens))
