"""Reads heads in every published format. The tensors decide. config.json only adds what they cannot tell: the base
model's name, and the vocabulary of heads that use the model's output layer. Where it contradicts the tensors, a warning
says so. The formats are told apart by the names of the tensors.

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

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from jacobi import LookaheadError
from lookahead.heads.storage import StoredTensors, locate, some
from lookahead.models.output_layer import COMPUTE_DTYPES, copyable_weight, output_layer, output_sizes

_ROUNDING = 0.02  # of the largest number: what another half precision may change in a copy of the output layer

_log = logging.getLogger("lookahead")


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
TOKEN_MAP, LM_HEAD = "token_map", "lm_head.weight"  # what else vLLM's files may hold; the first is not read


@dataclass(frozen=True)
class HeadsLayout:
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


def layout_of(name: str, tensors: Iterable[str], config: dict[str, Any]) -> HeadsLayout:
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
    layout = HeadsLayout(naming, full, stored, num_heads, num_layers, held, biased, copied)
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


@dataclass(frozen=True)
class Checkpoint:
    """Heads without their module, and what was read."""

    sizes: dict[str, Any]  # as MedusaHeads takes them
    state: dict[str, Tensor]  # as MedusaHeads.state_dict() gives it; on the CPU, in the widest dtype that is stored
    told: dict[str, Any]  # the "format" in words, "files", and "remarks" where config.json contradicts the tensors


def read_checkpoint(source: str | Path, model: Any, hub: Mapping[str, Any]) -> Checkpoint:
    """Read heads from a folder, a file of tensors, the index of a sharded model, or a repository of the hub. ``model``
    is the heads': it tells the vocabulary, and a copy of its output layer is compared with it. ``hub`` says how to
    download, as :func:`huggingface_hub.hf_hub_download` takes it. A LookaheadError says that there are no heads, that
    they are incomplete or damaged, that a file would have to run code, or that the copy differs."""
    location = locate(source, hub)
    tensors, config = location.tensors(), location.config()
    layout = layout_of(location.name, tensors.files, config)
    stored = _Stored(location.name, tensors, layout)
    state = stored.state()
    hidden_size, scored = _sizes(state)
    stated, of_model = config.get("vocab_size"), None if model is None else output_sizes(model)[1]
    remarks = _remarks(config, layout, hidden_size, scored)
    if layout.copied and (copy := stored.copied_output(state)) is not None:
        _check_copy(location.name, copy, model)
        scored = _size(copy, 0)
    known = stated if isinstance(stated, int) else of_model
    vocab_size = known if scored is None else scored
    base_model = config.get("base_model_name_or_path")
    if not isinstance(base_model, str):
        base_model = location.name if layout.full else None
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size, "base_model": base_model}
    sizes |= {"num_heads": layout.num_heads, "num_layers": layout.num_layers, "own_output": layout.own_output}
    for remark in remarks:
        _log.warning("%s: %s", location.name, remark)
    files = {tensors.files[key].name for key in layout.stored.values()}
    told = {"format": layout.title, "files": sorted(files)} | ({"remarks": remarks} if remarks else {})
    return Checkpoint(sizes, _completed(state, layout), told)


@dataclass(frozen=True)
class _Stored:
    source: str
    tensors: StoredTensors
    layout: HeadsLayout

    def get(self, name: str) -> Tensor:
        key = self.layout.stored[name]
        try:
            tensor = self.tensors.get(key)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise LookaheadError(f"{self.source}: {key} cannot be read: {error}.") from error
        if tensor.dtype not in COMPUTE_DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
            raise LookaheadError(
                f"{self.source}: {key} is {tensor.dtype}, {tensor.layout} on {tensor.device}: expected plain floating "
                "numbers. Quantised heads are not supported."
            )
        return tensor

    def state(self) -> dict[str, Tensor]:
        """The heads' tensors by :class:`MedusaHeads`' names; their shapes agree."""
        names = self.layout.names
        state = {ours: self.get(theirs) for ours, theirs in names.items()}
        hidden_size, scored = _sizes(state)
        for ours, tensor in state.items():
            expected = [scored, hidden_size] if ours.startswith("outputs.") else [hidden_size]
            if ours.endswith("linear.weight"):
                expected = [hidden_size, hidden_size]
            if list(tensor.shape) != expected:
                raise LookaheadError(
                    f"{self.source}: {self.layout.stored[names[ours]]} has shape {list(tensor.shape)}, expected "
                    f"{expected} after the first head. The heads do not belong together, or are damaged."
                )
        return state

    def copied_output(self, state: dict[str, Tensor]) -> Tensor | None:
        """Take the copy of the model's output layer out of ``state``, or read it; None where it is not stored."""
        copy = state.pop("outputs.0.weight", None)
        return self.get(LM_HEAD) if copy is None and LM_HEAD in self.layout.stored else copy


def _sizes(state: dict[str, Tensor]) -> tuple[int, int | None]:
    """The hidden size and the tokens that output layers score, from the first head; None without output layers."""
    output = state.get("outputs.0.weight")
    hidden = state.get("blocks.0.0.linear.weight", output)
    assert hidden is not None  # every layout has one of the two
    return _size(hidden, -1), None if output is None else _size(output, 0)


def _size(tensor: Tensor, axis: int) -> int:
    return tensor.shape[axis] if tensor.ndim else 0


def _completed(state: dict[str, Tensor], layout: HeadsLayout) -> dict[str, Tensor]:
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in state.values()))
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    if layout.biased:
        return state
    weights = [name for name in state if name.endswith("linear.weight")]
    return state | {name.replace("weight", "bias"): state[name].new_zeros(len(state[name])) for name in weights}


def _check_copy(source: str, copy: Tensor, model: Any) -> None:
    weight = None if model is None else copyable_weight(output_layer(model))
    if weight is None or copy.shape != weight.shape:
        return  # other shapes are MedusaHeads.check's to refuse
    difference = (copy.to(weight.device, weight.dtype) - weight).abs().max()
    if not difference <= _ROUNDING * weight.abs().max():
        raise LookaheadError(
            f"{source} says original_lm_head, but its output layer is not that of {type(model).__name__}: they differ "
            f"by up to {float(difference):.3g}. Use heads that were trained for this model."
        )


def _remarks(config: dict[str, Any], layout: HeadsLayout, hidden_size: int, vocab_size: int | None) -> list[str]:
    vllm = layout.naming is VLLM
    heads, layers = ("num_heads", "num_hidden_layers") if vllm else ("medusa_num_heads", "medusa_num_layers")
    found = {heads: layout.num_heads, layers: layout.num_layers, "hidden_size": hidden_size, "vocab_size": vocab_size}
    remarks = [
        f"config.json says {field} {config[field]!r}, and the tensors {number}; those are used."
        for field, number in found.items()
        if number is not None and config.get(field) not in (None, number)
    ]
    if vllm and config.get("original_lm_head") is True and layout.own_output:
        remarks.append("config.json says original_lm_head, and there is an output layer for each head; those are used.")
    return remarks
