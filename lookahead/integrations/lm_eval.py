"""lm-evaluation-harness: the model type ``hf-lookahead``, which is its ``hf`` with lookahead decoding.

Importing this module registers it. From a shell, ``python -m lookahead.integrations.lm_eval`` takes the arguments of
``lm_eval``::

    python -m lookahead.integrations.lm_eval run --model hf-lookahead --model_args pretrained=DIR --tasks gsm8k

There, ``--model hf --gen_kwargs use_lookahead=True`` works as well.
"""

import logging
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from lookahead.patch import augment_all
from lookahead.registry import strategy_from
from lookahead.stats import DecodingStats

log = logging.getLogger(__name__)

augment_all()


@register_model("hf-lookahead")
class LookaheadLM(HFLM):
    """``hf`` whose texts come from lookahead decoding; likelihoods are computed as ever.

    Args:
        lookahead: settings of the strategy, as in ``lookahead_strategy``; None is the automatic mode. What a
            generation says itself, ``use_lookahead`` or ``lookahead_strategy``, comes first.
        others: the arguments of ``hf``.

    Attributes:
        stats: the counts of all texts so far.
    """

    def __init__(self, *args: Any, lookahead: Any = None, **others: Any) -> None:
        self._strategy = strategy_from(lookahead)  # a bad setting is told before a model is loaded
        self.stats = DecodingStats()
        super().__init__(*args, **others)

    def _model_generate(self, context: Tensor, *args: Any, **settings: Any) -> Tensor:
        settings = {"use_lookahead": True, "lookahead_strategy": self._strategy} | settings
        if not settings["use_lookahead"]:
            settings["lookahead_strategy"] = None
        output = super()._model_generate(context, *args, return_dict_in_generate=True, **settings)
        if (stats := getattr(output, "stats", None)) is not None:
            self.stats += stats
        return output.sequences

    def generate_until(self, *args: Any, **settings: Any) -> list[str]:
        texts: list[str] = super().generate_until(*args, **settings)
        log.info("lookahead: %s", self.stats.explain())
        return texts


def main() -> None:
    """``lm_eval`` with lookahead decoding registered."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
