"""Heads from files: SafeAILab's format of EAGLE-1, -2 and -3, and that of speculators."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jacobi import LookaheadError
from lookahead.models.compat import MODEL_ERRORS
from lookahead.sources.eagle.network import EagleNetwork, EagleSizes
from lookahead.sources.eagle.sizes import FIRST, Beside, sizes_of
from lookahead.sources.medusa.checkpoints.storage import WHOLE_MODELS, check_tensors, locate

_LAYER = re.compile(r"^(?:midlayer|transformer)\.")
_NOT_READ = re.compile(r"(?:^|\.)(?:verifier_|rotary_emb\.|mask_token|lm_head\.bias)")


def read(source: str | Path, hub: Mapping[str, Any] | None = None, beside: Beside | None = None) -> EagleNetwork:
    """The head that ``source`` holds: a folder, a file in it, or a repository of the hub. A LookaheadError names what
    is missing or foreign; no code from a file is run."""
    location, name = locate(source, hub or {}), str(source)
    stored, config = location.tensors(WHOLE_MODELS, "EAGLE head"), location.config()
    names = {_canonical(stored_as): stored_as for stored_as in stored.files}
    tensors = {each: stored.get(stored_as) for each, stored_as in names.items() if not _NOT_READ.search(each)}
    mask, offsets = tensors.pop("t2d", None), tensors.pop("d2t", None)
    sizes = sizes_of(tensors, config, name, beside)
    offsets = _offsets(offsets, mask, sizes.draft_vocab_size, name)
    if offsets is not None and sizes.draft_vocab_size is None:  # it takes these rows of the model's output layer
        sizes = replace(sizes, draft_vocab_size=len(offsets))
    sizes = replace(sizes, vocab_size=_vocabulary(sizes, mask, offsets))
    try:
        with torch.device("meta"):
            network = EagleNetwork(sizes)
    except MODEL_ERRORS as error:
        raise LookaheadError(
            f"{source}: RoPE cannot be as config.json says, {sizes.rope}: {error!r}. Mend it."
        ) from error
    _fill(network, tensors, name)
    network.d2t = offsets
    return network.eval()


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    name = name.replace("fusion_fc.", "fc.", 1) if name.startswith("fusion_fc.") else name
    return name if name.startswith("layers.") else _LAYER.sub(FIRST, name)


def _fill(network: EagleNetwork, tensors: dict[str, Tensor], source: str) -> None:
    if "input_norm.weight" in tensors:
        tensors["fc_norm.0.weight"] = tensors.pop("input_norm.weight")
    expected = {name: value.shape for name, value in network.state_dict().items() if name != "d2t"}
    check_tensors(tensors, expected, source, f"head of EAGLE-{network.sizes.version}")
    network.load_state_dict(tensors, assign=True, strict=False)
    network.rotary = type(network.rotary)(network.rotary.config)  # its table is in no file


def _offsets(offsets: Tensor | None, mask: Tensor | None, rows: int | None, source: str) -> Tensor | None:
    """``d2t``, where the head scores only some tokens, checked against ``t2d``, from which it follows, and against the
    ``rows`` of the head's output layer."""
    ids = None if mask is None else _marked(mask, rows, source)
    if offsets is None:
        return None if ids is None or mask is None or len(ids) == len(mask) else ids - torch.arange(len(ids))
    if offsets.is_floating_point() or offsets.ndim != 1 or rows not in (None, len(offsets)):
        expected = "one" if rows is None else f"[{rows}]"
        raise LookaheadError(
            f"{source}: d2t is {offsets.dtype} {list(offsets.shape)}, expected {expected} whole numbers."
        )
    offsets = offsets.long()
    scored = offsets + torch.arange(len(offsets))
    if bool((scored < 0).any()) or len(scored.unique()) < len(scored):
        raise LookaheadError(
            f"{source}: d2t gives negative tokens, or one twice: expected offsets to different tokens."
        )
    if ids is not None and not torch.equal(scored.sort().values, ids):
        what = (
            "holds the tokens themselves" if torch.equal(offsets.sort().values, ids) else "gives other tokens than t2d"
        )
        raise LookaheadError(
            f"{source}: d2t {what}: expected offsets, the token that t2d marks minus its place in the head's output."
        )
    return offsets


def _marked(mask: Tensor, rows: int | None, source: str) -> Tensor:
    """The tokens that ``t2d`` marks."""
    if mask.ndim != 1 or mask.is_floating_point():
        raise LookaheadError(f"{source}: t2d is {mask.dtype} {list(mask.shape)}, expected a flag for each token.")
    ids = mask.bool().nonzero()[:, 0]
    if rows not in (None, len(ids)):
        raise LookaheadError(
            f"{source}: t2d marks {len(ids)} tokens, and lm_head.weight scores {rows}: expected as many."
        )
    return ids


def _vocabulary(sizes: EagleSizes, mask: Tensor | None, offsets: Tensor | None) -> int | None:
    """How many tokens the head's model has. The config is asked last, and not believed against the tensors."""
    if mask is not None:
        return len(mask)
    if offsets is None:
        return sizes.draft_vocab_size or sizes.own_embeddings or sizes.vocab_size
    most = int((offsets + torch.arange(len(offsets))).max())
    return sizes.vocab_size if sizes.vocab_size is None or sizes.vocab_size > most else None
