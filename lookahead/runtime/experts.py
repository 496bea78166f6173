"""Which kernel multiplies the experts of a mixture in a pass.

transformers has one for prompts (``grouped_mm``), which sorts tokens by expert, and on accelerators another one for
decoding (``batched_mm``), which gathers the weights of every token's experts: of a tree of 64 nodes several times all
experts of the layer. So a pass takes that one if it has one node a sequence, as transformers does, or gathers no more
than the layer has. Each call of the kernel chooses, in its thread, and no setting of the model is touched.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lookahead.models.compat import expert_registries
from lookahead.runtime.registry import Wrapped, this_pass


def _by_width(
    registry: dict[str, Any],
    grouped: Callable[..., Tensor],
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    kernel = grouped
    if this_pass.width is not None and _is_accelerated(hidden_states):
        fits = top_k_index.numel() <= getattr(module, "num_experts", 0)  # copies of an expert's weights, and experts
        kernel = registry["batched_mm"] if fits or this_pass.width == 1 else grouped
    return kernel(module, hidden_states, top_k_index, *args, **kwargs)


def _is_accelerated(states: Tensor) -> bool:
    return states.device.type != "cpu"


_WRAPPED = [Wrapped(registry, "grouped_mm", partial(_by_width, registry)) for registry in expert_registries()]


@contextmanager
def expert_kernels() -> Iterator[None]:
    """Let passes choose their kernels while the block runs."""
    with ExitStack() as stack:
        for wrapped in _WRAPPED:
            stack.enter_context(wrapped.on())
        yield
