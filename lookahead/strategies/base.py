"""Strategies as users write them: settings that are callable as ``custom_generate``."""

from dataclasses import dataclass
from typing import Any

from lookahead.draft.strategy import DraftStrategy
from lookahead.draft.strategy import Stats as Stats
from lookahead.generation.decode import generate


@dataclass(frozen=True, kw_only=True)
class Strategy(DraftStrategy):
    """What all strategies have in common.

    Attributes:
        verification: ``"exact"`` takes one draw (or the argmax) at each visited node, so that a seed gives plain
            ``generate``'s text. ``"rejection"``, the papers' scheme, has the same distribution but other draws.
        seed: seeds the tokens that drafts are started from, so that step counts repeat. It never touches the text.
        stats: how much is counted; see :class:`lookahead.stats.DecodingStats`.
        static: run passes with static shapes, on CUDA as captured graphs: None where it is possible and on CUDA, True
            always (an error where it is not possible), False never.
        traces: on a CPU, run passes as traces of the model's operations once that pays (`runtime.tracing`).
        pack: on a CPU, run passes of large models on packed copies of their weights once that pays, where there is
            memory for them (`runtime.packing`).
        repeatable: whether the same call with the same seed has to write the same text, in bfloat16, too, whatever the
            clock says and earlier calls have left: None where that costs next to nothing, True always (an error where
            it is not possible), False never. Float32 texts are plain ``generate``'s in any case.
        attention: the attention implementation that the call uses, for a model whose own takes no masks (flash
            attention): ``"sdpa"``, ``"eager"`` or ``"flex_attention"``; restored afterwards. None = the model's own.
    """

    def __call__(
        self,
        model: Any,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        lookahead_streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decode with this strategy: ``model.generate(**inputs, custom_generate=strategy)``, with nothing patched.

        transformers hands no ``streamer`` to a ``custom_generate`` function, so on this path pass it as
        ``lookahead_streamer=`` (the prompt is put first, as usual). ``stop_strings`` needs :func:`augment_all`.
        """
        if lookahead_streamer is not None:
            lookahead_streamer.put(input_ids.cpu())
        return generate(
            self,
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            streamer=lookahead_streamer,
            model_kwargs=model_kwargs,
        )
