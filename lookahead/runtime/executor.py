"""How is a forward run? One protocol with three answers: eagerly (here), by traces, or by CUDA graphs."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jacobi import TokenTree
from lookahead.models.code_safety import holds_inference, inference_tensors, is_safe
from lookahead.models.hidden_states import Outputs
from lookahead.runtime.cache.buffers import Extent
from lookahead.runtime.forward import TreeForward, masks_given

_T = TypeVar("_T")


class Executor(Protocol):
    """Runs one call's tree forwards, and keeps what was accepted in the KV cache.

    Attributes:
        route: how passes are run: ``"dynamic"``, ``"traced"``, ``"static"`` or ``"cuda graphs"``.
        reason: why not by a faster route; None = there is none.
        keeps_buffers: those of the KV cache serve the model's next call, too.
        plain_ms: milliseconds that the model's own pass over one node takes, where passes here are faster; else None.
        typical: the last pass took what passes of its size take; nothing was warmed up, captured, compared or moved.
    """

    @property
    def typical(self) -> bool: ...
    @property
    def route(self) -> str: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def keeps_buffers(self) -> bool: ...
    @property
    def plain_ms(self) -> float | None: ...

    def reserve(self, extent: Extent) -> None:
        """The prompt is about to be read: say where its keys and values go."""

    def open(self) -> None:
        """The prompt has been read: get ready for trees."""

    def run(self, trees: Sequence[TokenTree]) -> Outputs:
        """Score every node of every tree in one pass."""

    def keep(self, chosen: Sequence[Sequence[int]]) -> None:
        """Make each sequence's ``chosen`` nodes of the last pass, root first, the end of its KV cache."""

    def flush(self) -> None:
        """Afterwards the KV cache holds all that was kept, in its place."""

    def bucket(self, nodes: int) -> int:
        """The number of nodes that a pass over ``nodes`` nodes computes."""

    def close(self) -> None:
        """The call is over: give back what the model's next call can use."""


class EagerExecutor:
    """Runs the model's own Python, in inference mode if ``is_safe``; None = look before the first pass."""

    keeps_buffers = False

    def __init__(self, forward: TreeForward, reason: str | None = None, is_safe: bool | None = None) -> None:
        self._reason = reason
        self._forward = forward
        self._inference = InferenceMode(forward.model, is_safe)
        self.typical = True

    @property
    def route(self) -> str:
        return "dynamic"

    @property
    def reason(self) -> str | None:
        return self._reason

    @property
    def plain_ms(self) -> float | None:
        return self._forward.unpacked_ms

    def reserve(self, extent: Extent) -> None:
        self._forward.layout.cache.reserve(replace(extent, window=self._forward.holds))

    def open(self) -> None:
        self._forward.layout.cache.consolidate()

    def run(self, trees: Sequence[TokenTree]) -> Outputs:
        self.typical = True
        inputs, masks = self._forward.inputs(trees)
        safe = self._inference.safe
        outputs = self._inference.run(lambda: self._pass(trees, inputs, masks))
        self.typical &= self._inference.safe == safe
        return outputs

    def _pass(self, trees: Sequence[TokenTree], inputs: dict[str, Tensor], masks: Any) -> Outputs:
        with self._forward.running(trees, inputs):
            return self._forward.call(**inputs, **masks_given(masks))

    def keep(self, chosen: Sequence[Sequence[int]]) -> None:
        self._forward.layout.cache.keep(chosen)

    def flush(self) -> None:
        """Nothing waits."""

    def bucket(self, nodes: int) -> int:
        return nodes

    def close(self) -> None:
        """Nothing that was made in inference mode stays on the model."""
        self._inference.leave()


class InferenceMode:
    """Runs one call's passes in inference mode, if that is ``safe``; None = look before the first pass. It saves
    several per cent of a pass that is bound by many small operations. Its tensors can be neither trained with nor
    written into later, so what a model's code keeps of them is copied when the call ends."""

    def __init__(self, model: PreTrainedModel, safe: bool | None = None) -> None:
        self._model = model
        self.safe = safe
        self._is_used = False
        self._mode = torch.inference_mode()

    def run(self, run: Callable[[], _T]) -> _T:
        """Run a pass that may be run again where it fails."""
        if self.safe is None:
            self.safe = is_safe(self._model)
        if not self.safe:
            return run()
        self._is_used = True
        try:
            with self._mode:
                return run()
        except RuntimeError as error:
            if "inference" not in str(error).lower():
                raise
            # The model does something with its tensors that they do not take in this mode.
            self.leave()
            self.safe = False
            return run()

    def entered(self) -> AbstractContextManager[Any]:
        """For passes that cannot be run again, because they change a state."""
        if self.safe is None:
            self.safe = is_safe(self._model)
        self._is_used |= self.safe
        return torch.inference_mode() if self.safe else nullcontext()

    def leave(self, *layers: object) -> None:
        """Copy what passes of this mode left on the model, and on ``layers`` of a cache that were written in it; what
        modules share they share afterwards, too."""
        if not self._is_used:
            return
        copies: dict[int, tuple[Tensor, Tensor]] = {}  # with the originals, so that no id is used twice
        for holder, name, value in inference_tensors(self._model):
            holder[name] = _copied(value, copies)
        for layer in layers:
            vars(layer).update({name: _copied(value, copies) for name, value in vars(layer).items()})


def _copied(value: Any, copies: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """The same with copies, made outside of inference mode, of tensors that were made in it; dicts and lists stay."""
    if not holds_inference(value):
        return value
    if isinstance(value, Tensor):
        if id(value) not in copies:
            copies[id(value)] = value, value.clone()
        return copies[id(value)][1]
    if type(value) is dict:
        value.update({key: _copied(part, copies) for key, part in value.items()})
    elif type(value) is list:
        value[:] = [_copied(part, copies) for part in value]
    else:
        return tuple(_copied(part, copies) for part in value)
    return value
