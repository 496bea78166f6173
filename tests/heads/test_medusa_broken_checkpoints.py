"""Checkpoints that are incomplete, damaged, malicious or not there are refused by name."""

import json
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.checkpoints import BASE, PUBLISHED, SERVED, Tensors, made, medusa, shard, store, vllm
from helpers.medusa import HIDDEN
from helpers.models import VOCAB, fresh_model, tiny_model
from helpers.refusals import refuses
from safetensors.torch import load_file, save_file

from jacobi import LookaheadError
from lookahead.medusa import MedusaHeads, read_heads


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def plus(more: Tensors) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | more


def renamed(change: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


SQUARE, LONG, WIDE = torch.zeros(HIDDEN, HIDDEN), torch.zeros(HIDDEN), torch.zeros(VOCAB, HIDDEN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("1.1.linear.weight"), "but they lack 1.1.linear.weight. Get a complete"),
        (without("1.1.linear.bias", "2.0.linear.bias"), "but they lack 1.1.linear.bias, 2.0.linear.bias"),
        (without("1.2.weight"), "3 heads of 2 layers with output layers of their own, but they lack 1.2.weight"),
        (without("0.2.weight", "1.2.weight"), "lack 0.2.weight, 1.2.weight"),
        (without("1.1.linear.weight", "1.1.linear.bias"), "lack 1.1.linear.bias, 1.1.linear.weight"),
        (
            lambda tensors: plus({"1.1.weight": WIDE})(
                without("1.1.linear.weight", "1.1.linear.bias", "1.2.weight")(tensors)
            ),
            "lack 1.1.linear.bias, 1.1.linear.weight, 1.2.weight and have 1.1.weight, which is not part",
        ),
        (
            plus({"2.2.linear.weight": SQUARE, "2.2.linear.bias": LONG}),
            "3 heads of 3 layers .* lack 0.2.linear.bias, 0.2.linear.weight, 0.3.weight, 1.2.linear.bias and",
        ),
        (lambda tensors: {k: t for k, t in tensors.items() if k[0] != "1"}, "has heads 0, 2: expected numbers from 0"),
        (lambda tensors: {k: t for k, t in tensors.items() if k[0] != "0"}, "has heads 1, 2: expected"),
        (
            lambda tensors: {k: t for k, t in tensors.items() if not k[1:].startswith(".0.")},
            "has layers 1: expected numbers from 0 on without gaps",
        ),
        (plus({"0.gate": LONG}), "have 0.gate, which is not part of such heads"),
        (plus({"0.2.bias": LONG}), "have 0.2.bias"),
        (plus({"norm.weight": LONG}), "have norm.weight"),
        (plus({"00.0.linear.weight": SQUARE}), "have 00.0.linear.weight"),
        (plus({"999999999.0.linear.weight": SQUARE}), "has heads 0, 1, 2, 999999999: expected"),
        (plus({"1.0.linear.weight": torch.zeros(HIDDEN, 8)}), r"1.0.linear.weight has shape \[32, 8\], expected"),
        (plus({"1.1.linear.bias": torch.zeros(8)}), r"1.1.linear.bias has shape \[8\], expected \[32\]"),
        (plus({"1.2.weight": torch.zeros(50, HIDDEN)}), r"1.2.weight has shape \[50, 32\], expected \[48, 32\]"),
        (plus({"0.0.linear.weight": torch.tensor(0.0)}), r"0.0.linear.weight has shape \[\], expected"),
        (plus({"0.0.linear.weight": SQUARE.to(torch.int8)}), "0.0.linear.weight is torch.int8, torch.strided"),
        (plus({"2.2.weight": WIDE.to(torch.float8_e4m3fn)}), "2.2.weight is torch.float8_e4m3fn"),
        (renamed(lambda name: f"head.{name}"), "holds no Medusa heads: expected tensors like 0.0.linear.weight"),
        (lambda tensors: BASE, "holds no Medusa heads.*it has lm_head.weight, model.embed_tokens.weight"),
        (lambda tensors: {}, "holds no Medusa heads.*; it is empty"),
    ],
)
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_incomplete_heads_are_refused(
    file: str, change: Callable[[Tensors], Tensors], message: str, tmp_path: pathlib.Path
) -> None:
    store(tmp_path, file, change(medusa(made())), **PUBLISHED)
    refuses(message, read_heads, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("lm_heads.1.weight"), "lack lm_heads.1.weight"),
        (without(*(f"lm_heads.{head}.weight" for head in range(3))), "lack lm_heads.0.weight, lm_heads.1.weight"),
        (without("blocks.1.layers.1.bias"), "lack blocks.1.layers.1.bias"),
        (plus({"blocks.0.norm": LONG}), "have blocks.0.norm"),
        (plus({"lm_head.weight": WIDE}), "have lm_head.weight"),
    ],
)
def test_vllms_incomplete_heads_are_refused(
    change: Callable[[Tensors], Tensors], message: str, tmp_path: pathlib.Path
) -> None:
    store(tmp_path, "model.safetensors", change(vllm(made())), **SERVED)
    refuses(message, read_heads, tmp_path)


def test_heads_that_do_not_fit_the_model_are_refused(tmp_path: pathlib.Path) -> None:
    folder = store(tmp_path, "medusa_lm_head.pt", medusa(made()), **PUBLISHED)
    with pytest.raises(LookaheadError, match=r"vocabulary of 48 and belong to owner/model, and Llama.* has one of 50"):
        read_heads(folder, fresh_model("llama", vocab_size=50))
    refuses("hidden size of 32", read_heads, folder, fresh_model("llama", hidden_size=64))
    broken = medusa(made()) | {"1.0.linear.bias": torch.full((HIDDEN,), float("nan"))}
    with pytest.raises(LookaheadError, match=r"32 of 32 numbers of blocks.1.0.linear.bias are NaN"):
        read_heads(store(tmp_path, "medusa_lm_head.pt", broken), tiny_model("llama"))
    unknown = BASE | medusa(made(), "medusa_head.") | {"medusa_head.0.9.gate": LONG}
    refuses(r"have 0.9.gate", read_heads, store(tmp_path / "full", "model.safetensors", unknown))


class Touch:
    """Unpickled by an ordinary unpickler, it makes a file."""

    def __init__(self, file: pathlib.Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self.file,)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "pytorch_model.bin", "heads.bin"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_pickle_is_not_executed(file: str, zipped: bool, tmp_path: pathlib.Path) -> None:
    trap, proof = tmp_path / "trap", tmp_path / "proof"
    content = medusa(made()) | {"0.0.linear.weight": Touch(trap)}
    torch.save(content, tmp_path / file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(LookaheadError, match=f"{file} is not a plain file of tensors, and nothing in it was executed"):
        MedusaHeads.from_pretrained(tmp_path)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Touch(proof)))
    assert proof.exists()  # so the trap does work


def test_a_malicious_shard_is_not_executed(tmp_path: pathlib.Path) -> None:
    trap = tmp_path / "trap"
    shard(tmp_path, medusa(made(), "medusa_head."), "bin")
    torch.save({"x": Touch(trap)}, tmp_path / "pytorch_model-00002-of-00003.bin")
    refuses(r"00002-of-00003.bin is not a plain file of tensors", read_heads, tmp_path)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(2)], "holds a list: expected tensors by name"),
        ({"state_dict": {"0.0.linear.weight": SQUARE}}, "holds a dict under 'state_dict'"),
        ({0: SQUARE}, "holds a Tensor under 0"),
        (torch.zeros(2), "holds a Tensor: expected tensors by name"),
    ],
)
def test_other_contents_of_a_pickle_are_refused(content: Any, message: str, tmp_path: pathlib.Path) -> None:
    torch.save(content, tmp_path / "medusa_lm_head.pt")
    refuses(message, read_heads, tmp_path)


@pytest.mark.parametrize("content", [b"", b"no pickle", b"\x80\x04.", b"PK\x03\x04broken", b"\x80\x02]q\x00(e."])
def test_damaged_files_are_refused(content: bytes, tmp_path: pathlib.Path) -> None:
    (tmp_path / "medusa_lm_head.pt").write_bytes(content)
    refuses(r"medusa_lm_head.pt is not a plain file of tensors", read_heads, tmp_path)
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(content)
    refuses(r"medusa_lm_head.safetensors cannot be read as safetensors", read_heads, tmp_path)


def test_damaged_shards_are_refused(tmp_path: pathlib.Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    shard(tmp_path, medusa(made(), "medusa_head."))
    whole = json.loads(index.read_text())
    part = tmp_path / "model-00001-of-00003.safetensors"
    kept = load_file(part)
    save_file(dict(list(kept.items())[1:]), part)
    refuses(r"00001-of-00003.safetensors lacks medusa_head.*which model.safetensors.ind", read_heads, tmp_path)
    part.unlink()
    refuses(r"names model-00001-of-00003.safetensors, which is not there", read_heads, tmp_path)
    for shards, message in (
        ({"weight_map": dict.fromkeys(whole["weight_map"], "../evil.safetensors")}, "names the shard '../evil"),
        ({"weight_map": {"medusa_head.0.0.linear.weight": 1}}, "is no index of a sharded model"),
        ({}, "is no index of a sharded model"),
        ([], "holds list: expected a JSON object"),
    ):
        index.write_text(json.dumps(shards))
        refuses(message, read_heads, tmp_path)


def test_sources_that_are_not_there_are_refused(tmp_path: pathlib.Path) -> None:
    for source in (tmp_path / "none", "./none", "~/none/none", "none", "a/b/c"):
        refuses(r"none does not exist|a/b/c does not exist", read_heads, source)
    refuses(r"holds no Medusa heads: expected one of .*, found no file of tensors", read_heads, tmp_path)
    for name in ("a.pt", "b.safetensors"):
        (tmp_path / name).touch()
    refuses(r"found a.pt, b.safetensors; name the one to read", read_heads, tmp_path)
    (tmp_path / "config.json").write_text("{")
    refuses(r"config.json cannot be read", read_heads, store(tmp_path, "medusa_lm_head.pt", medusa(made())))
