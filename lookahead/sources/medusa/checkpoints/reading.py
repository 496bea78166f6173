"""Heads in files: every published format is read, told apart by the names of its tensors, and two are written.

What the tensors say counts. config.json only adds what they cannot tell: the name of the base model, and the vocabulary
of heads that use the model's output layer. Where it contradicts the tensors, a warning says so.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from jacobi import LookaheadError
from lookahead._files import whole_folder
from lookahead.models.output_layer import COMPUTE_DTYPES, copyable_weight, output_layer, output_sizes, placement
from lookahead.sources.medusa.checkpoints.formats import LM_HEAD, MEDUSA, TOKEN_MAP, VLLM, Layout, layout_of
from lookahead.sources.medusa.checkpoints.storage import HEADS_FILE, MODEL_FILE, Place, StoredTensors, place_of
from lookahead.sources.medusa.heads import MedusaHeads

Format = Literal["medusa", "vllm"]

_ROUNDING = 0.02  # of the largest number: what another half precision may change in a copy of the output layer

_log = logging.getLogger("lookahead")


@dataclass(frozen=True)
class Checkpoint:
    """Heads, and what they were read from.

    Attributes:
        heads: on the CPU, in the dtype they are stored in (the widest one, if there are several).
        format: which of the published formats it is, in words.
        files: the names of the files that were read, config.json left out.
        remarks: where config.json contradicts the tensors, a sentence each.
    """

    heads: MedusaHeads
    format: str
    files: tuple[str, ...]
    remarks: tuple[str, ...]


def read_heads(
    source: str | Path,
    model: Any = None,
    *,
    force_download: bool = False,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    revision: str | None = None,
) -> MedusaHeads:
    """Read heads from a folder, a file or a repository of the hub, whatever format they are in.

    Args:
        source: a folder, a file of tensors, the index of a sharded model, or ``owner/name``.
        model: the model that they are for: they are checked against it, and moved to its device and dtype.
        force_download: do not use what was downloaded before.
        token: for the hub.
        cache_dir: where downloads are kept.
        local_files_only: download nothing.
        revision: branch, tag or commit of the repository.

    Raises:
        LookaheadError: there are no heads, they are not complete, a file would have to run code, or they do not fit the
            model.
    """
    hub = {"force_download": force_download, "token": token, "cache_dir": cache_dir}
    hub |= {"local_files_only": local_files_only, "revision": revision}
    heads = read_checkpoint(source, model, hub=hub).heads
    return heads if model is None else heads.to(*placement(model))


def read_checkpoint(source: str | Path, model: Any = None, *, hub: Mapping[str, Any] | None = None) -> Checkpoint:
    """As :func:`read_heads`, with what was found on the way; the heads stay where and as they are stored.

    Args:
        source: as there.
        model: the model that they are checked against.
        hub: how to download, as :func:`huggingface_hub.hf_hub_download` takes it.
    """
    place = place_of(source, hub or {})
    tensors = place.tensors()
    config = place.config()
    checkpoint = _assemble(place, tensors, config, model)
    for remark in checkpoint.remarks:
        _log.warning("%s: %s", place.name, remark)
    if model is not None:
        checkpoint.heads.check(model)
    return checkpoint


def write_heads(
    heads: MedusaHeads, folder: str | Path, format: Format = "medusa", *, model: Any = None, replace: bool = False
) -> None:
    """Write heads to a folder: all of it or nothing.

    Args:
        heads: what to write.
        folder: where to; made, if it is not there.
        format: ``"medusa"`` is what :meth:`MedusaHeads.save_pretrained` writes: version 1, or version 2 if the heads
            use the model's output layer. ``"vllm"`` is what vLLM loads as a draft model; it needs an output layer in
            the file, so heads without one also need ``model``.
        model: the model of the heads, whose output layer is copied where one is needed.
        replace: whether the folder may hold files; they are gone afterwards.

    Raises:
        LookaheadError: the folder is not empty, cannot be written to, the heads hold NaN, or vLLM's format cannot hold
            them.
    """
    if format not in ("medusa", "vllm"):
        raise LookaheadError(f"Heads cannot be written as {format!r}: expected 'medusa' or 'vllm'.")
    heads.check_finite()
    write: Callable[[Path], Any] = heads.save_pretrained
    if format == "vllm":
        write = partial(_write_vllm, heads, shared=None if heads.own_output else _shared_output(heads, model))
    try:
        with whole_folder(folder, replace) as part:
            write(part)
    except OSError as error:
        raise LookaheadError(f"{folder} cannot be written: {error}.") from error


def write_files(heads: MedusaHeads, folder: Path) -> None:
    """Write the tensors and config.json in the format of version 1, or of version 2 for heads without output layers."""
    if heads.token_map is not None:
        raise LookaheadError(
            f"These heads score {len(heads.token_map)} of {heads.vocab_size} tokens, and only vLLM's format can say "
            "which: write them as 'vllm' (--to vllm on the command line)."
        )
    outputs = range(heads.num_heads if heads.own_output else 0)
    names = MEDUSA.names(heads.num_heads, heads.num_layers, ("weight", "bias"), outputs)
    config = {
        "base_model_name_or_path": heads.base_model,
        "hidden_size": heads.hidden_size,
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "version": "1" if heads.own_output else "2",
        "vocab_size": heads.vocab_size,
    }
    _write(heads, names, {}, folder / HEADS_FILE, config)


def _write_vllm(heads: MedusaHeads, folder: Path, *, shared: Tensor | None) -> None:
    outputs = range(heads.num_heads if shared is None else 0)
    names = VLLM.names(heads.num_heads, heads.num_layers, ("weight", "bias"), outputs)
    vocab_size = heads.vocab_size if shared is None else shared.shape[0]
    config = {
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": heads.base_model,
        "hidden_size": heads.hidden_size,
        "medusa_fc_bias": True,
        "model_type": "medusa",
        "num_heads": heads.num_heads,
        "num_hidden_layers": heads.num_layers,
        "original_lm_head": shared is not None,
        "torch_dtype": str(next(heads.parameters()).dtype).removeprefix("torch."),
        "truncated_vocab_size": vocab_size if heads.token_map is None else len(heads.token_map),
        "vocab_size": vocab_size,
    }
    extra = {} if shared is None else {VLLM.output.format(head=0): shared}
    if heads.token_map is not None:
        extra[TOKEN_MAP] = heads.token_map
    _write(heads, names, extra, folder / MODEL_FILE, config)
    heads.generate_model_card().save(folder / "README.md")


def _shared_output(heads: MedusaHeads, model: Any) -> Tensor:
    """The output layer that vLLM needs beside heads without one."""
    if model is None:
        raise LookaheadError(
            "vLLM's format holds an output layer, and these heads use the model's: expected the model as well. Name it "
            "(--model on the command line)."
        )
    heads.check(model)
    layer = output_layer(model)
    weight = copyable_weight(layer)
    if weight is None or getattr(layer, "bias", None) is not None:
        what = "is not a plain floating weight in memory" if weight is None else "has a bias"
        raise LookaheadError(
            f"The output layer of {type(model).__name__} {what}: vLLM's format holds a floating weight only. Use heads "
            "with output layers of their own."
        )
    return weight


def _write(heads: MedusaHeads, names: dict[str, str], extra: dict[str, Tensor], file: Path, config: Any) -> None:
    state = heads.state_dict()
    tensors = {theirs: state[ours] for ours, theirs in names.items()} | extra
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    text = json.dumps(config, indent=2, sort_keys=True)
    file.with_name("config.json").write_text(text + "\n", encoding="utf-8")


def _assemble(place: Place, tensors: StoredTensors, config: dict[str, Any], model: Any) -> Checkpoint:
    layout = layout_of(place.name, tensors.files, config)
    get = partial(_get, place, tensors, layout)
    names = layout.names
    state = {ours: get(theirs) for ours, theirs in names.items()}
    hidden_size = _size(state["blocks.0.0.linear.weight" if layout.num_layers else "outputs.0.weight"], -1)
    vocab_size = _size(state["outputs.0.weight"], 0) if layout.outputs else None
    expected = {"linear.weight": [hidden_size, hidden_size], "linear.bias": [hidden_size]}
    for ours, tensor in state.items():
        shape = next((shape for end, shape in expected.items() if ours.endswith(end)), [vocab_size, hidden_size])
        if list(tensor.shape) != shape:
            raise LookaheadError(
                f"{place.name}: {layout.stored[names[ours]]} has shape {list(tensor.shape)}, expected {shape} after "
                "the first head. The heads do not belong together, or are damaged."
            )
    token_map: Tensor | None = None
    if TOKEN_MAP in layout.stored and vocab_size is not None:
        known = config.get("vocab_size") if model is None else output_sizes(model)[1]
        token_map = _token_map(place, get(TOKEN_MAP, floating=False), vocab_size, known)
    remarks = _remarks(config, layout, hidden_size, vocab_size if token_map is None else None)
    if layout.copied:
        copy = state.pop("outputs.0.weight", None)
        if copy is None and LM_HEAD in layout.stored:
            copy = get(LM_HEAD)
        if copy is not None:
            vocab_size = _size(copy, 0) if token_map is None else known
            _check_copy(place, copy, model, token_map)
            token_map = None  # the model's own layer scores all tokens
    if vocab_size is None and isinstance(config.get("vocab_size"), int):
        vocab_size = config["vocab_size"]
    if vocab_size is None and model is not None:
        _, vocab_size = output_sizes(model)
    if not layout.biased:
        for ours in [name for name in state if name.endswith("linear.weight")]:
            state[ours.replace("weight", "bias")] = torch.zeros(hidden_size, dtype=state[ours].dtype)
    base_model = config.get("base_model_name_or_path")
    if not isinstance(base_model, str):
        base_model = place.name if layout.full else None
    with torch.device("meta"):
        heads = MedusaHeads(hidden_size, vocab_size, layout.num_heads, layout.num_layers, layout.own_output, base_model)
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in state.values()))
    heads.load_state_dict({name: tensor.to(dtype) for name, tensor in state.items()}, assign=True)
    if token_map is not None:
        heads.token_map, heads.vocab_size = token_map, known
    files = {tensors.files[key].name for key in layout.stored.values()}
    return Checkpoint(heads.eval(), layout.title, tuple(sorted(files)), tuple(remarks))


def _get(place: Place, tensors: StoredTensors, layout: Layout, name: str, floating: bool = True) -> Tensor:
    key = layout.stored[name]
    try:
        tensor = tensors.get(key)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise LookaheadError(f"{place.name}: {key} cannot be read: {error}.") from error
    if floating and (tensor.dtype not in COMPUTE_DTYPES or tensor.layout is not torch.strided or tensor.is_meta):
        raise LookaheadError(
            f"{place.name}: {key} is {tensor.dtype}, {tensor.layout} on {tensor.device}: expected plain floating "
            "numbers. Quantised heads are not supported."
        )
    return tensor


def _size(tensor: Tensor, axis: int) -> int:
    return tensor.shape[axis] if tensor.ndim else 0


def _token_map(place: Place, token_map: Tensor, scored: int, vocab_size: Any) -> Tensor | None:
    """The tokens that output layers over ``scored`` of them score; None where they score all and need no map.

    Raises:
        LookaheadError: the map is not one of such layers, or nothing says how large the vocabulary is.
    """
    if token_map.numel() < scored:
        return None
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool):
        raise LookaheadError(
            f"{place.name} has a token_map: its output layers score {scored} chosen tokens, and nothing says of how "
            "many. Name the model that the heads are for, or give vocab_size in config.json."
        )
    tokens = token_map.flatten().long() if not token_map.is_floating_point() else token_map.new_empty(0)
    within = bool(((tokens >= 0) & (tokens < vocab_size)).all())
    if len(tokens) != scored or len(tokens.unique()) != scored or not within:
        raise LookaheadError(
            f"{place.name}: token_map, {token_map.dtype} of shape {list(token_map.shape)}, is not that of its output "
            f"layers: expected {scored} different tokens from 0 to {vocab_size - 1}."
        )
    return tokens


def _check_copy(place: Place, copy: Tensor, model: Any, token_map: Tensor | None = None) -> None:
    """Refuse an output layer that is said to be the model's, or some lines of it, and is not."""
    weight = None if model is None else copyable_weight(output_layer(model))
    if weight is not None and token_map is not None:
        weight = weight[token_map.to(weight.device)]
    if weight is None or copy.shape != weight.shape:
        return  # other shapes are MedusaHeads.check's to refuse
    difference = (copy.to(weight.device, weight.dtype) - weight).abs().max()
    if not difference <= _ROUNDING * weight.abs().max():
        raise LookaheadError(
            f"{place.name} says original_lm_head, but its output layer is not that of {type(model).__name__}: they "
            f"differ by up to {float(difference):.3g}. Use heads that were trained for this model."
        )


def _remarks(config: dict[str, Any], layout: Layout, hidden_size: int, vocab_size: int | None) -> list[str]:
    """Where config.json contradicts the tensors."""
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
