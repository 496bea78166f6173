"""Passes in inference mode: without what autograd notes beside every operation, which ``no_grad`` alone keeps up.

That saves several per cent of a pass that is bound by many small operations (a CPU, small models). Tensors of that mode
can be neither trained with nor written into later, so it is used only where all code in a pass is transformers' or
torch's own, and what such code keeps on the model is copied when the call ends.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.models.code_safety import holds_inference, inference_tensors, is_safe

_T = TypeVar("_T")


class InferenceMode:
    """Runs one call's passes in inference mode, if that is ``safe``; None = look before the first pass."""

    def __init__(self, model: PreTrainedModel, safe: bool | None = None) -> None:
        self._model = model
        self._is_safe = safe
        self._is_used = False

    def run(self, run: Callable[[], _T]) -> _T:
        """Run a pass that may be run again where it fails."""
        if self._is_safe is None:
            self._is_safe = is_safe(self._model)
        if not self._is_safe:
            return run()
        self._is_used = True
        try:
            with torch.inference_mode():
                return run()
        except RuntimeError as error:
            if "inference" not in str(error).lower():
                raise
            # The model does something with its tensors that they do not take in this mode.
            self.leave()
            self._is_safe = False
            return run()

    def leave(self) -> None:
        """Copy what passes of this mode left on the model; what modules share they share afterwards, too."""
        if not self._is_used:
            return
        copies: dict[int, tuple[Tensor, Tensor]] = {}  # with the originals, so that no id is used twice
        for holder, name, value in inference_tensors(self._model):
            holder[name] = _copied(value, copies)


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
