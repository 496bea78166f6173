"""The last hidden states of a pass: what a model's output layer reads, noted on its way."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from jacobi import LookaheadError

Outputs = tuple[Tensor, Tensor | None]  # logits [batch, node, vocab]; what the output layer read, if it is wanted


class HiddenStates:
    """The input of an output layer in the last pass of one call, one thread.

    A context manager: a forward pre-hook sits on the layer while the block runs. It notes nothing in other threads, and
    nothing outside of the passes that :meth:`expect` and :meth:`take` stand around.

    Args:
        layer: the model's output layer.

    Attributes:
        last: ``[batch, node, hidden]`` of the last pass, aligned with its logits; the next pass may overwrite it.
        passes: how many there were.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.last: Tensor | None = None
        self.passes = 0
        self._layer = layer
        self._noted: Tensor | None = None
        self._thread: int | None = None  # that is inside a pass
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> Self:
        self._handle = self._layer.register_forward_pre_hook(self.note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = self.last = self._noted = self._thread = None

    def note(self, _layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """The hook."""
        if self._thread == threading.get_ident() and inputs and isinstance(inputs[0], Tensor):
            self._noted = inputs[0]

    def expect(self) -> None:
        """A pass begins."""
        self._noted, self._thread = None, threading.get_ident()

    def take(self, logits: Tensor) -> Tensor:
        """A pass is over: what the layer read to make ``logits``.

        Args:
            logits: ``[batch, node, vocab]``.

        Returns:
            ``[batch, node, hidden]``.

        Raises:
            LookaheadError: the layer was not called, or with something that does not fit the logits.
        """
        noted, self._noted, self._thread = self._noted, None, None
        if noted is None or noted.shape[:-1] != logits.shape[:-1]:
            got = "not called at all" if noted is None else f"called with {list(noted.shape)}"
            raise LookaheadError(
                f"The output layer of this model ({type(self._layer).__name__}) was {got} in a pass whose logits are "
                f"{list(logits.shape)}: expected it to be called with the last hidden states, [batch, token, hidden]. "
                "Medusa's heads cannot run beside this model."
            )
        return noted

    def put(self, hidden: Tensor) -> None:
        """Make ``hidden`` the last pass's."""
        self.last = hidden
        self.passes += 1


def watched(hidden: HiddenStates | None, run: Callable[[], Any], last: int) -> Any:
    """A pass, after which what the output layer read for its ``last`` tokens is the last pass's.

    Args:
        hidden: who wants to know; None = nobody does.
        run: the pass; what it returns has ``logits``.
        last: tokens.
    """
    if hidden is None:
        return run()
    hidden.expect()
    outputs = run()
    hidden.put(hidden.take(outputs.logits)[:, -last:])
    return outputs


def passed(model: Any, layer: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A pass: logits ``[batch, token, vocab]``, and what the output layer read for them ``[batch, token, hidden]``."""
    with HiddenStates(layer) as states:
        states.expect()
        logits: Tensor = model(**inputs).logits
        return logits, states.take(logits)


def own_hook(hook: Any) -> bool:
    """Whether a hook on a layer is :class:`HiddenStates`', which changes nothing of what the layer does."""
    return isinstance(getattr(hook, "__self__", None), HiddenStates)
