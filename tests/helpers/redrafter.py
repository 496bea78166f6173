"""Random recurrent heads for tiny models, their files, and one that is wired to know a model."""

import json
from pathlib import Path
from typing import Any

import torch
from helpers.models import VOCAB
from safetensors.torch import save_file
from torch import Tensor

from lookahead.redrafter import RecurrentHead, RecurrentSizes

KINDS: dict[str, dict[str, Any]] = {
    "rnn": {"rnn": True},
    "sums": {"rnn": False},
    "rnn projected": {"rnn": True, "exit_size": 24, "layers": 2},
    "sums projected": {"rnn": False, "exit_size": 24, "layers": 0},
}


def random_head(seed: int = 0, **changes: Any) -> RecurrentHead:
    """A random head in float64."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = RecurrentHead(RecurrentSizes(**sizes | changes)).double()
        with torch.no_grad():
            for weight in head.parameters():
                weight.copy_(torch.randn_like(weight) * 0.3)
    return head.eval()


def knowing_head(successors: dict[int, int], rnn: bool) -> RecurrentHead:
    """A head for ``helpers.models.successor_model``, whose embeddings tell tokens apart: it scores highest what follows
    the last token. A sum of embeddings does not say which token was last, but the last one's successor is not in it."""
    head = random_head(hidden_size=VOCAB, rnn=rnn, layers=1)
    follows = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for token, successor in successors.items():
        follows[successor, token] = 1.0
    with torch.no_grad():
        for weight in head.parameters():
            weight.zero_()
        if head.rnn_w is not None:
            head.rnn_w.weight.copy_(torch.eye(VOCAB))
        else:
            follows -= torch.eye(VOCAB)
        head.weight[:, VOCAB:] = follows
    return head


def apple_tensors(head: RecurrentHead) -> dict[str, Tensor]:
    """Its tensors under the names of Apple's files, spelt out."""
    sizes, tensors = head.sizes, {}
    if head.input_proj is not None:
        tensors |= {"input_proj.weight": head.input_proj.weight, "input_proj.bias": head.input_proj.bias}
    for layer in range(sizes.layers):
        block: Any = head.lm_head[layer]
        tensors |= {f"lm_head.{layer}.linear.weight": block.linear.weight}
        tensors |= {f"lm_head.{layer}.linear.bias": block.linear.bias}
    tensors[f"lm_head.{sizes.layers}.weight"] = head.weight
    if head.rnn_u is not None and head.rnn_w is not None:
        tensors |= {"rnn_u.weight": head.rnn_u.weight, "rnn_u.bias": head.rnn_u.bias}
        tensors |= {"rnn_w.weight": head.rnn_w.weight}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def write_head(folder: Path, head: RecurrentHead, *, binary: bool = False, **changes: Any) -> Path:
    """Write a folder as Apple publishes it; of ``changes``, tensors by their names with ``__`` for dots, None = left
    out."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = apple_tensors(head)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    if binary:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": head.sizes.vocab_size,
        "hidden_size": head.sizes.hidden_size,
        "exit_dim": head.weight.shape[1],
        "num_draft_layers": head.sizes.layers,
        "rnn": head.sizes.rnn,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
