"""The published formats, told apart by the names of the tensors.

| format | names of the tensors | output layers |
|---|---|---|
| Medusa, version 1 | ``{head}.{layer}.linear.weight|bias``, ``{head}.{layers}.weight`` | the heads' own |
| Medusa, version 2 | ``{head}.{layer}.linear.weight|bias`` | the model's |
| full model (Medusa-2) | ``medusa_head.`` and the above, beside the model's own | either |
| vLLM | ``blocks.{head}.layers.{layer}.weight|bias``, ``lm_heads.{head}.weight`` | either |

Sources: FasterDecoding/Medusa (``medusa_model.py``, ``train_legacy.py``), text-generation-inference (version 2), and
vLLM's ``MedusaModel``, whose config fields ``original_lm_head`` (one output layer, a copy of the model's) and
``medusa_fc_bias`` (off: the residual blocks have no bias) are understood.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jacobi import LookaheadError
from lookahead.heads.storage import some


@dataclass(frozen=True)
class Naming:
    """How a format names the tensors of a head."""

    block: str
    output: str
    block_pattern: re.Pattern[str]  # groups: head, layer
    output_pattern: re.Pattern[str]  # group: head

    def names(self, num_heads: int, num_layers: int, parts: Iterable[str], outputs: Iterable[int]) -> dict[str, str]:
        """The format's name for each of :class:`MedusaHeads`' own names."""
        names = {
            f"blocks.{head}.{layer}.linear.{part}": self.block.format(head=head, layer=layer, part=part)
            for head in range(num_heads)
            for layer in range(num_layers)
            for part in parts
        }
        return names | {f"outputs.{head}.weight": self.output.format(head=head, layers=num_layers) for head in outputs}


MEDUSA = Naming(
    "{head}.{layer}.linear.{part}",
    "{head}.{layers}.weight",
    re.compile(r"(\d+)\.(\d+)\.linear\.(?:weight|bias)"),
    re.compile(r"(\d+)\.\d+\.weight"),
)
VLLM = Naming(
    "blocks.{head}.layers.{layer}.{part}",
    "lm_heads.{head}.weight",
    re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(?:weight|bias)"),
    re.compile(r"lm_heads\.(\d+)\.weight"),
)
TOKEN_MAP, LM_HEAD = "token_map", "lm_head.weight"  # what else vLLM's files may hold


@dataclass(frozen=True)
class Layout:
    naming: Naming
    full: bool  # whether it holds a whole model
    stored: dict[str, str]  # the full name of each tensor of the heads, by its name in the format
    num_heads: int
    num_layers: int  # residual blocks of a head
    outputs: tuple[int, ...]  # the heads whose output layers it holds
    biased: bool  # whether the blocks have biases
    copied: bool  # whether its output layer is a copy of the model's

    @property
    def own_output(self) -> bool:
        return bool(self.outputs) and not self.copied

    @property
    def names(self) -> dict[str, str]:
        parts = ("weight", "bias") if self.biased else ("weight",)
        return self.naming.names(self.num_heads, self.num_layers, parts, self.outputs)

    @property
    def title(self) -> str:
        title = "vLLM" if self.naming is VLLM else f"Medusa, version {1 if self.own_output else 2}"
        return f"full model with heads ({title})" if self.full else title


def layout_of(name: str, tensors: Iterable[str], config: dict[str, Any]) -> Layout:
    """A checkpoint's format by the names of its tensors, and by config.json whether its output layer is a copy."""
    naming, prefix, full = _naming(name, tensors)
    stored = {key.removeprefix(prefix): key for key in tensors if key.startswith(prefix) or not full}
    blocks = [match for key in stored if (match := naming.block_pattern.fullmatch(key))]
    outputs = {int(match[1]) for key in stored if (match := naming.output_pattern.fullmatch(key))}
    num_heads = _count(name, "heads", {int(match[1]) for match in blocks} | outputs)
    num_layers = _count(name, "layers", {int(match[2]) for match in blocks})
    vllm = naming is VLLM
    copied = vllm and not outputs and LM_HEAD in stored
    copied |= vllm and outputs <= {0} and config.get("original_lm_head") is True
    held = tuple(outputs) if copied else tuple(range(num_heads if outputs or vllm else 0))
    biased = not vllm or any(key.endswith(".bias") for key in stored)
    layout = Layout(naming, full, stored, num_heads, num_layers, held, biased, copied)
    wanted = set(layout.names.values())
    missing = sorted(wanted - stored.keys())
    unknown = sorted(stored.keys() - wanted - ({TOKEN_MAP} if vllm else set()) - ({LM_HEAD} if copied else set()))
    if missing or unknown:
        faults = [f"lack {some(missing)}"] * bool(missing)
        faults += [f"have {some(unknown)}, which is not part of such heads"] * bool(unknown)
        outputs_text = "output layers of their own" if layout.own_output else "the model's output layer"
        raise LookaheadError(
            f"{name} does not hold complete Medusa heads. By the names of its tensors they are {num_heads} heads of "
            f"{num_layers} layers with {outputs_text}, but they {' and '.join(faults)}. Get a complete checkpoint."
        )
    if num_layers == 0 and not layout.own_output:
        raise LookaheadError(f"{name} holds no residual blocks and no output layers of heads.")
    return layout


def _naming(name: str, tensors: Iterable[str]) -> tuple[Naming, str, bool]:
    """A checkpoint's naming, the prefix that its names may have, and whether it holds a whole model."""
    keys = list(tensors)
    if any(key.startswith("medusa_head.") for key in keys):
        return MEDUSA, "medusa_head.", not all(key.startswith("medusa_head.") for key in keys)
    prefix = "medusa_heads."
    if any(key.removeprefix(prefix).startswith(("blocks.", "lm_heads.")) for key in keys):
        return VLLM, prefix, False
    if any(re.match(r"\d+\.", key) for key in keys):
        return MEDUSA, "", False
    raise LookaheadError(
        f"{name} holds no Medusa heads: expected tensors like 0.0.linear.weight, medusa_head.0.0.linear.weight or "
        f"blocks.0.layers.0.weight; {f'it has {some(sorted(keys))}' if keys else 'it is empty'}."
    )


def _count(name: str, what: str, numbers: set[int]) -> int:
    if numbers != set(range(len(numbers))):
        found = some(map(str, sorted(numbers)))
        raise LookaheadError(f"{name} has {what} {found}: expected numbers from 0 on without gaps.")
    return len(numbers)
