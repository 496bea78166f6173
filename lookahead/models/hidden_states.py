"""Hidden states of a pass, by named taps: noted on their way through the model, for heads that draft from them. A tap
says whose input is noted: ``"last"`` is what the output layer reads, ``"layer.3"`` what decoder layer 3 reads (counted
from 0), so that ``"layer.0"`` is the embedding."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from jacobi import LookaheadError

LAST = "last"


class Outputs(NamedTuple):
    logits: Tensor  # [batch, node, vocab]
    hidden: tuple[Tensor, ...] = ()  # for each tap in its order [batch, node, hidden]; empty where nobody wants any


class HiddenStates:
    """What tapped modules read in the last pass of one call, one thread. A context manager, with forward pre-hooks on
    the modules. They note nothing in other threads, nor outside of the passes that :meth:`expect` and :meth:`take`
    stand around. One module alone is taken for the output layer."""

    def __init__(self, modules: Mapping[str, nn.Module] | nn.Module) -> None:
        self._modules = {LAST: modules} if isinstance(modules, nn.Module) else dict(modules)
        self.taps = tuple(self._modules)
        self.passes = 0
        self._states: dict[str, Tensor] = {}
        self._noted: dict[str, Tensor] = {}
        self._thread: int | None = None  # that is inside a pass
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        for tap, module in self._modules.items():
            self._handles.append(module.register_forward_pre_hook(partial(self.note, tap)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._states, self._noted, self._thread = [], {}, {}, None

    def of(self, tap: str = LAST) -> Tensor:
        """What a tapped module read in the last pass, ``[batch, node, hidden]``; the next pass may overwrite it."""
        return self._states[tap]

    def note(self, tap: str, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._thread == threading.get_ident() and inputs and isinstance(inputs[0], Tensor):
            self._noted[tap] = inputs[0]

    def expect(self) -> None:
        self._noted, self._thread = {}, threading.get_ident()

    def take(self, logits: Tensor) -> tuple[Tensor, ...]:
        """A pass is over: what was read, by tap, for ``logits`` ``[batch, node, vocab]``; an error if it misfits."""
        noted, self._noted, self._thread = self._noted, {}, None
        return tuple(self._aligned(tap, noted.get(tap), logits) for tap in self.taps)

    def _aligned(self, tap: str, states: Tensor | None, logits: Tensor) -> Tensor:
        if states is not None and tap != LAST and states.ndim == 3:
            states = states[:, -logits.shape[1] :]  # layers read all tokens of the prompt, the output layer some
        if states is not None and states.shape[:-1] == logits.shape[:-1]:
            return states
        what = "output layer" if tap == LAST else f"tapped layer {tap!r}"
        got = "not called at all" if states is None else f"called with {list(states.shape)}"
        raise LookaheadError(
            f"The {what} of this model ({type(self._modules[tap]).__name__}) was {got} in a pass whose logits are "
            f"{list(logits.shape)}: expected it to be called with hidden states, [batch, token, hidden]. "
            "Medusa's heads cannot run beside this model."
        )

    def put(self, hidden: Sequence[Tensor]) -> None:
        """Make ``hidden``, in the order of the taps, the last pass's."""
        self._states = dict(zip(self.taps, hidden, strict=True))
        self.passes += 1


def tapped(model: Any, taps: Sequence[str]) -> dict[str, nn.Module]:
    """The modules of a causal model that ``taps`` name; a LookaheadError if there is no such layer or tap."""
    found: dict[str, nn.Module] = {}
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (part for part in model.get_decoder().modules() if isinstance(part, nn.ModuleList))
    layers = next((layers for layers in lists if len(layers) == count), ())
    for tap in taps:
        if tap == LAST:
            found[tap] = model.get_output_embeddings()
            continue
        kind, _, number = tap.partition(".")
        if kind != "layer" or not number.isdecimal() or int(number) >= len(layers):
            raise LookaheadError(
                f"There is no tap {tap!r} on {type(model).__name__}: expected 'last', or 'layer.0' to "
                f"'layer.{len(layers) - 1}'."
            )
        found[tap] = layers[int(number)]
    return found


def watched(hidden: HiddenStates | None, run: Callable[[], Any], last: int) -> Any:
    """The outputs of a pass, whose ``last`` tokens' hidden states ``hidden`` then holds; None = nobody wants them."""
    if hidden is None:
        return run()
    hidden.expect()
    outputs = run()
    hidden.put([states[:, -last:] for states in hidden.take(outputs.logits)])
    return outputs


def passed(model: Any, layer: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A pass: logits ``[batch, token, vocab]``, and what the output layer read for them ``[batch, token, hidden]``."""
    with HiddenStates(layer) as states:
        states.expect()
        logits: Tensor = model(**inputs).logits
        return logits, states.take(logits)[0]


def own_hook(hook: Any) -> bool:
    """Whether a hook on a module is :class:`HiddenStates`', which changes nothing of what the module does."""
    return isinstance(getattr(getattr(hook, "func", None), "__self__", None), HiddenStates)
