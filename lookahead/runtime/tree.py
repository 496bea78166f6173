"""A transformers model as the decoding loop sees it: prefill, tree forward, keep."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import ModelOutput

from jacobi import Path, Scores, TokenTree
from lookahead._per_model import hand_back
from lookahead.models.hidden_states import Outputs, watched
from lookahead.models.names import CACHE
from lookahead.runtime.cache.buffers import Extent
from lookahead.runtime.cache.tree import TreeCache
from lookahead.runtime.executor import Executor
from lookahead.runtime.forward import TreeForward
from lookahead.runtime.registry import During
from lookahead.runtime.scores import Look, on_host, prompt_scores, scores_of_all, spread, started


class Writing(Protocol):
    """What the model may know of the text that is being written."""

    def idle(self, row: int) -> bool:
        """Whether a sequence has nothing more to write, and is only fed along with the others."""

    def leaves(self, row: int) -> bool:
        """Whether it need not even be fed any more."""

    def padded(self) -> Tensor:
        """Prompt and text so far, ``[batch, token]``."""


class PlainPasses:
    """transformers' own decoding passes, from some token of the text on, of which so many are ``written``. All but the
    last are in ``cache``, all sequences equally long; ``model_kwargs`` are those prepared for the prompt."""

    def __init__(self, model: PreTrainedModel, cache: Cache, model_kwargs: dict[str, Any], written: int) -> None:
        self._model = model
        kwargs = {"use_cache": True} | model_kwargs | {CACHE: cache}
        self._seq2seq = bool(model.config.is_encoder_decoder)
        self._kwargs = model._update_model_kwargs_for_generation(
            ModelOutput(), kwargs, is_encoder_decoder=self._seq2seq, num_new_tokens=written
        )

    @property
    def cache(self) -> Cache:
        """The KV cache; another one where the model has recomputed the text."""
        return self._kwargs[CACHE]

    def forward(self, input_ids: Tensor) -> ModelOutput:
        """The pass of the last token of ``[batch, token]``; its ``logits`` are ``[batch, token, vocab]``."""
        inputs = self._model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **self._kwargs)
        with During(width=1):
            outputs: ModelOutput = self._model(**inputs, return_dict=True)
        self._kwargs = self._model._update_model_kwargs_for_generation(
            outputs, self._kwargs, is_encoder_decoder=self._seq2seq
        )
        return outputs


class TreeModel:
    """One call's view of a model that follows trees (implements :class:`jacobi.Model`).

    A text may reach a boundary behind which the model is another one (RoPE that changes with the length). From there
    on passes are transformers' own, one token each, and ``room`` is 0.

    Args:
        forward: the call's tree forwards.
        executor: how they are run.
        writing: the text; None = passes outside of ``generate``, which never fall back.
        top_k: top-k candidates gathered at those of the prompt's tokens whose logits are kept.
    """

    again = replayed = 0  # tokens are never fed twice,
    replays = False
    repeated: int | None = None  # and nobody counts how much of the text would have been drafted rightly
    in_a_row = 0

    def __init__(self, forward: TreeForward, executor: Executor, writing: Writing | None, top_k: int = 0) -> None:
        self.forward_pass, self.executor = forward, executor
        self.hidden, self._layout = forward.hidden, forward.layout
        self._writing, self._prompt_top_k = writing, top_k
        self._past = 0  # slots of the prompt
        self._plain: PlainPasses | None = None

    @property
    def route(self) -> str:
        return self.executor.route

    @property
    def plain_ms(self) -> float | None:
        return self.executor.plain_ms

    @property
    def typical(self) -> bool:
        """Whether the last pass took what passes of its size take."""
        return self._plain is not None or self.executor.typical

    @property
    def context(self) -> int:
        """Tokens in the KV cache, of the longest sequence."""
        return self._layout.cache.base if self._plain is None else int(self._plain.cache.get_seq_length())

    def prefill(self) -> Scores:
        return prompt_scores(self.read(), self._prompt_top_k)

    def read(self, *, prompt: bool = True) -> Tensor:
        """Read the prompts, or only what comes before them; logits ``[batch, token, vocab]`` of their last tokens."""
        forward, logits = self.forward_pass, torch.empty(0)
        self.executor.reserve(Extent(forward.prompt_slots(), forward.prompt.new_tokens))
        forward.load()
        if prompt:
            logits = forward.prefill()
        else:
            self._layout.start(self._layout.cache.get_seq_length(), forward.batch, None, None)
        self._past = self._layout.cache.get_seq_length()
        self.executor.open()
        return logits

    def forward(self, trees: Sequence[TokenTree]) -> Scores:
        return self.launch(trees)()

    def launch(self, trees: Sequence[TokenTree], look: Look | None = None) -> Callable[[], Scores]:
        """Like :meth:`forward`, but what is returned waits for the device (:class:`jacobi.AsynchronousModel`)."""
        here, batch = self._layout.rows, len(trees)
        waits, best = on_host(self._layout.device), max(tree.top_k for tree in trees)
        if len(here) == batch:
            return started(lambda: self._logits(trees), waits, best, look)
        fed, places = [trees[row] for row in here], tuple(here)
        seen = look and (lambda logits: look(spread(logits, places, batch)))
        wait = started(lambda: self._logits(fed), waits, best, seen)
        return lambda: scores_of_all(wait(), places, batch)

    def _logits(self, trees: Sequence[TokenTree]) -> Tensor:
        if self._plain is not None or self._layout.at_boundary(len(trees)):
            return self._plain_logits()
        outputs: Outputs = self.executor.run(self.forward_pass.widened(trees))
        if self.hidden is not None:
            self.hidden.put(outputs.hidden)
        return outputs.logits

    def _plain_logits(self) -> Tensor:
        assert self._writing is not None  # without a text there is no boundary
        if self._plain is None:
            forward = self.forward_pass
            cache = DynamicCache(config=forward.model.config.get_text_config(decoder=True))
            self._layout.cache.store(cache, move=True)
            self.executor.close()
            written = self._layout.cache.base + 1 - self._past
            self._plain = PlainPasses(forward.model, forward.plain_cache(cache), forward.prompt.kwargs, written)
        plain, text = self._plain, self._writing.padded()
        outputs = watched(self.hidden, lambda: plain.forward(text), last=1)
        logits: Tensor = outputs.logits
        return logits[:, -1:]

    def keep(self, paths: Sequence[Path]) -> None:
        """Move each sequence's visited nodes to the end of its part of the KV cache."""
        if self._plain is not None:
            return  # its passes keep what they are fed
        starts = list(self._layout.cache.lengths)
        chosen = [paths[row].nodes for row in self._layout.rows]
        self.executor.keep(chosen)
        self._layout.keep([len(nodes) for nodes in chosen], starts)
        forward, writing = self.forward_pass, self._writing
        # Of one size are static buffers, what heads note of passes, and what the model's own passes go on with.
        fixed = self.executor.keeps_buffers or self.hidden is not None or self._layout.boundary is not None
        if not (fixed or writing is None) and forward.is_plain and self._layout.let_go(writing.leaves):
            forward.follow(len(self._layout.rows))

    def join(self, other: "TreeModel", most: int) -> None:
        """Take over the sequences of another view that has read their prompts, behind those that are here; there are
        ``most`` at most::

            rows    a  b  c         join(d)    a  b  c  d        drop(1)    a  d  c
        """
        self._layout.join(other._layout, most)
        other.close()
        self.forward_pass.follow(self._layout.count)

    def drop(self, row: int) -> None:
        """Leave a sequence out for good; the last one takes its place, and its number."""
        self._layout.drop(row, renumber=True)
        self.forward_pass.follow(self._layout.count)

    def store(self, cache: Cache, row: int | None = None) -> None:
        """Leave the KV cache, or that of one ``row``, in ``cache`` as plain decoding would have."""
        if row is not None:
            self._layout.cache.store(cache, row=row)
            return
        if self._plain is None:
            self.executor.flush()
        else:
            held, count = self._plain.cache, len(self._layout.cache.layers)
            ours = self._layout.cache = TreeCache([None] * count, count)
            ours.reserve(Extent(int(held.get_seq_length()), 0))
            ours.load(held, take=True)
            ours.consolidate()
            ours.keep_prompts([0] * len(ours.lengths))
        self.forward_pass.store(cache, move=not self.executor.keeps_buffers)

    def bucket(self, nodes: int) -> int:
        return self.executor.bucket(nodes)

    def holds(self, row: int) -> bool:
        """Whether a sequence waits for the others at the boundary."""
        return self._plain is None and self._layout.holds(row)

    def room(self) -> list[int] | None:
        """How deep each sequence's tree may be; None = no limit."""
        if self._plain is not None:
            return [0] * self.forward_pass.batch
        limits, rows = self._layout.room(), self._layout.rows
        known = dict(zip(rows, limits or (), strict=False))
        return limits and [known.get(row, 0) for row in range(self._layout.count)]

    def close(self) -> None:
        """No pass is run any more: what the next one cannot use is freed."""
        held = sum(buffer.nbytes for buffer in self._layout.cache.buffers if buffer.device.type == "cpu")
        self.executor.close()
        self._layout.cache.close()
        hand_back(held)
