"""Hidden states of a pass, by named taps: noted on their way through the model, for heads that draft from them. A tap
says whose input is noted: ``"last"`` is what the output layer reads, ``"norm"`` what the final norm reads,
``"layer.3"`` what decoder layer 3 reads (counted from 0), so that ``"layer.0"`` is the embedding."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from jacobi import LookaheadError

LAST, NORM = "last", "norm"


class Outputs(NamedTuple):
    logits: Tensor  # [batch, node, vocab]
    hidden: tuple[Tensor, ...] = ()  # for each tap in its order [batch, node, hidden]; empty where nobody wants any


class HiddenStates:
    """Inputs of tapped modules in the last pass of one call, one thread. A context manager, with forward pre-hooks on
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
        """Input of a tapped module in the last pass, ``[batch, node, hidden]``; the next pass may overwrite it."""
        return self._states[tap]

    def note(self, tap: str, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._thread == threading.get_ident() and inputs and isinstance(inputs[0], Tensor):
            self._noted[tap] = inputs[0]

    def expect(self) -> None:
        self._noted, self._thread = {}, threading.get_ident()

    def take(self, logits: Tensor, whole: bool = False) -> tuple[Tensor, ...]:
        """A pass is over: what was read, by tap, for ``logits`` ``[batch, node, vocab]``, or with ``whole`` at all
        tokens, of which there may be more; an error if it misfits."""
        noted, self._noted, self._thread = self._noted, {}, None
        return tuple(self._aligned(tap, noted.get(tap), logits, whole) for tap in self.taps)

    def _aligned(self, tap: str, states: Tensor | None, logits: Tensor, whole: bool) -> Tensor:
        if states is not None and tap != LAST and states.ndim == 3 and states.shape[1] >= logits.shape[1]:
            if whole:
                return states
            states = states[:, -logits.shape[1] :]  # layers read all tokens of the prompt, the output layer some
        if states is not None and states.shape[:-1] == logits.shape[:-1]:
            return states
        what = "output layer" if tap == LAST else f"tapped layer {tap!r}"
        got = "not called at all" if states is None else f"called with {list(states.shape)}"
        raise LookaheadError(
            f"The {what} of this model ({type(self._modules[tap]).__name__}) was {got} in a pass whose logits are "
            f"{list(logits.shape)}: expected it to be called with hidden states, [batch, token, hidden]. "
            "Heads cannot run beside this model."
        )

    def put(self, hidden: Sequence[Tensor]) -> None:
        """Make ``hidden``, in the order of the taps, the last pass's."""
        self._states = dict(zip(self.taps, hidden, strict=True))
        self.passes += 1


def tapped(model: Any, taps: Sequence[str]) -> dict[str, nn.Module]:
    """The modules of a causal model that ``taps`` name; a LookaheadError if there is no such layer or tap."""
    found: dict[str, nn.Module] = {}
    layers = decoder_layers(model)
    for tap in taps:
        if tap in (LAST, NORM):
            found[tap] = model.get_output_embeddings() if tap == LAST else final_norm(model)
            continue
        kind, _, number = tap.partition(".")
        if kind != "layer" or not number.isdecimal() or int(number) >= len(layers):
            raise LookaheadError(
                f"There is no tap {tap!r} on {type(model).__name__}: expected 'last', 'norm', or 'layer.0' to "
                f"'layer.{len(layers) - 1}'."
            )
        found[tap] = layers[int(number)]
    return found


def decoder_layers(model: Any) -> Sequence[Any]:
    """The decoder layers of a causal model; none if they cannot be told."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists: Iterator[Any] = (part for part in model.get_decoder().modules() if isinstance(part, nn.ModuleList))
    return next((layers for layers in lists if len(layers) == count), ())


def final_norm(model: Any) -> nn.Module:
    """The norm behind the last decoder layer; a LookaheadError if it cannot be told."""
    decoder = model.get_decoder()
    for name in ("norm", "ln_f", "final_layernorm", "final_layer_norm"):
        if isinstance(found := getattr(decoder, name, None), nn.Module):
            return found
    raise LookaheadError(f"The final norm of {type(model).__name__} cannot be told: expected decoder.norm or ln_f.")


def watched(hidden: HiddenStates | None, run: Callable[[], Any], last: int | None) -> Any:
    """The outputs of a pass, whose ``last`` tokens' hidden states ``hidden`` then holds; None = nobody wants them. For
    the prompt's pass ``last`` is None: what layers read is held of all tokens, what the output layer read of one."""
    if hidden is None:
        return run()
    hidden.expect()
    outputs = run()
    found = zip(hidden.taps, hidden.take(outputs.logits, whole=last is None), strict=True)
    hidden.put([states if last is None and tap != LAST else states[:, -(last or 1) :] for tap, states in found])
    return outputs


def passed(model: Any, layer: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A pass: logits ``[batch, token, vocab]``, and what the output layer read for them ``[batch, token, hidden]``."""
    with HiddenStates(layer) as states:
        states.expect()
        logits: Tensor = model(**inputs).logits
        return logits, states.take(logits)[0]


def own_hook(hook: Any) -> bool:
    """True if a hook on a module is :class:`HiddenStates`', which changes nothing of what the module does."""
    return isinstance(getattr(getattr(hook, "func", None), "__self__", None), HiddenStates)
