"""What a model's calls take: reading prompts, and passes after them."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from lookahead._per_model import PerModel

_FADE = 0.9  # of what is known, from one call to the next
_LEAST_SHARE = 2 / 3  # of calls, that passes have to take


@dataclass
class CallTimes:
    """Milliseconds of prompts and of passes, in which older calls count less and less.

    What makes passes faster takes memory, tens of megabytes for the smallest models. It is not made for calls that it
    would hardly shorten, as most of their time goes into long prompts::

        prompt 410 ms, passes 270 ms     neither traces nor packed weights
        prompt  20 ms, passes 300 ms     both, once they have paid
    """

    prompts_ms: float = 0.0
    passes_ms: float = 0.0

    def see(self, nodes: int, ms: float) -> None:
        """Take in a pass over ``nodes`` nodes, 0 for a prompt's, with which a call begins."""
        if nodes:
            self.passes_ms += ms
        else:
            self.prompts_ms, self.passes_ms = _FADE * self.prompts_ms + ms, _FADE * self.passes_ms

    @property
    def passes_count(self) -> bool:
        """Whether calls are shorter for faster passes."""
        return self.passes_ms >= _LEAST_SHARE * (self.prompts_ms + self.passes_ms)


_times: PerModel[CallTimes] = PerModel(CallTimes)


def call_times(model: PreTrainedModel) -> CallTimes:
    return _times.of(model)
