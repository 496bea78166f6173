"""Heads in every published format, written here by hand, and everything that is refused."""

import json
import logging
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models import VOCAB, fresh_model, prompts, same_as_plain, tiny_model
from helpers.toy import examples
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sources.test_medusa_heads import HIDDEN, drawn, states
from torch import Tensor
from typer.testing import CliRunner

from jacobi import LookaheadError
from lookahead.cli import app
from lookahead.medusa import Medusa, MedusaHeads, output_layer, read_heads, write_heads
from lookahead.sources.medusa.checkpoints import storage, writing
from lookahead.sources.medusa.checkpoints.reading import read_checkpoint

Tensors = dict[str, Tensor]

BASE = {"model.embed_tokens.weight": torch.ones(VOCAB, 4), "lm_head.weight": torch.ones(VOCAB, 4)}


def made(num_heads: int = 3, num_layers: int = 2, own_output: bool = True) -> MedusaHeads:
    """Random heads beside the tiny Llama."""
    return drawn(MedusaHeads.for_model(tiny_model("llama"), num_heads, num_layers, own_output))


def medusa(heads: MedusaHeads, prefix: str = "") -> Tensors:
    """The tensors as FasterDecoding/Medusa names them: a Sequential for each head."""
    tensors = {}
    for head, blocks in enumerate(heads.blocks):
        for layer, block in enumerate(blocks.children()):
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = block.get_parameter("linear.weight")
            tensors[f"{prefix}{head}.{layer}.linear.bias"] = block.get_parameter("linear.bias")
        if heads.own_output:
            tensors[f"{prefix}{head}.{heads.num_layers}.weight"] = heads.get_parameter(f"outputs.{head}.weight")
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def vllm(heads: MedusaHeads, prefix: str = "", bias: bool = True) -> Tensors:
    """The tensors as vLLM names them."""
    tensors = {}
    for head, blocks in enumerate(heads.blocks):
        for layer, block in enumerate(blocks.children()):
            tensors[f"{prefix}blocks.{head}.layers.{layer}.weight"] = block.get_parameter("linear.weight")
            if bias:
                tensors[f"{prefix}blocks.{head}.layers.{layer}.bias"] = block.get_parameter("linear.bias")
        if heads.own_output:
            tensors[f"{prefix}lm_heads.{head}.weight"] = heads.get_parameter(f"outputs.{head}.weight")
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def store(folder: pathlib.Path, file: str, tensors: Tensors, **config: Any) -> pathlib.Path:
    """A checkpoint of one file, with config.json if there is anything in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def shard(folder: pathlib.Path, tensors: Tensors, suffix: str = "safetensors") -> pathlib.Path:
    """A sharded model: every third tensor in each of three files."""
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    shards = {name: f"{stem}-{1 + index % 3:05}-of-00003.{suffix}" for index, name in enumerate(sorted(tensors))}
    for file in set(shards.values()):
        store(folder, file, {name: tensor for name, tensor in tensors.items() if shards[name] == file})
    index = {"metadata": {"total_size": 1}, "weight_map": shards}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return folder


def assert_same(read: MedusaHeads, heads: MedusaHeads) -> None:
    """Assert equal shapes and weights, and that both compute the same."""
    for name in ("hidden_size", "num_heads", "num_layers", "own_output"):
        assert getattr(read, name) == getattr(heads, name), name
    assert read.state_dict().keys() == heads.state_dict().keys()
    for name, tensor in heads.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name
    output = output_layer(tiny_model("llama"))
    assert torch.equal(read(states(2), output), heads(states(2), output))
    assert not read.training and all(weight.requires_grad for weight in read.parameters())


PUBLISHED = {"base_model_name_or_path": "owner/model", "medusa_num_heads": 3, "medusa_num_layers": 2}
SERVED = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2, "vocab_size": VOCAB, "hidden_size": HIDDEN}

FORMATS: dict[str, tuple[Callable[[pathlib.Path, MedusaHeads], pathlib.Path], str]] = {
    "pt": (lambda f, h: store(f, "medusa_lm_head.pt", medusa(h), **PUBLISHED), "Medusa, version {}"),
    "safetensors": (lambda f, h: store(f, "medusa_lm_head.safetensors", medusa(h), **PUBLISHED), "Medusa, version {}"),
    "no config": (lambda f, h: store(f, "medusa_lm_head.pt", medusa(h)), "Medusa, version {}"),
    "file": (lambda f, h: store(f, "heads.pt", medusa(h), **PUBLISHED) / "heads.pt", "Medusa, version {}"),
    "other name": (lambda f, h: store(f, "heads.safetensors", medusa(h), **PUBLISHED), "Medusa, version {}"),
    "prefix": (
        lambda f, h: store(f, "medusa_lm_head.pt", medusa(h, "medusa_head."), **PUBLISHED),
        "Medusa, version {}",
    ),
    "full": (
        lambda f, h: store(f, "model.safetensors", BASE | medusa(h, "medusa_head."), **PUBLISHED),
        "full model with heads (Medusa, version {})",
    ),
    "full bin": (
        lambda f, h: store(f, "pytorch_model.bin", BASE | medusa(h, "medusa_head."), **PUBLISHED),
        "full model with heads (Medusa, version {})",
    ),
    "full shards": (
        lambda f, h: shard(f, BASE | medusa(h, "medusa_head.")),
        "full model with heads (Medusa, version {})",
    ),
    "full bin shards": (
        lambda f, h: shard(f, BASE | medusa(h, "medusa_head."), "bin"),
        "full model with heads (Medusa, version {})",
    ),
    "index": (
        lambda f, h: shard(f, BASE | medusa(h, "medusa_head.")) / "model.safetensors.index.json",
        "full model with heads (Medusa, version {})",
    ),
}


@pytest.mark.parametrize("own_output", [True, False], ids=["own", "shared"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read(name: str, own_output: bool, tmp_path: pathlib.Path) -> None:
    heads = made(own_output=own_output)
    write, title = FORMATS[name]
    checkpoint = read_checkpoint(write(tmp_path / "heads", heads))
    assert_same(MedusaHeads.from_tensors(checkpoint.tensors), heads)
    assert checkpoint.format == title.format(1 if own_output else 2)
    assert checkpoint.remarks == ()
    assert checkpoint.tensors.config.vocab_size == (VOCAB if own_output else None)
    assert_same(MedusaHeads.from_pretrained(write(tmp_path / "heads", heads)), heads)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_vllms_format_is_read(file: str, prefix: str, tmp_path: pathlib.Path) -> None:
    heads = made()
    checkpoint = read_checkpoint(store(tmp_path, file, vllm(heads, prefix), **SERVED))
    assert_same(MedusaHeads.from_tensors(checkpoint.tensors), heads)
    assert (checkpoint.format, checkpoint.files, checkpoint.remarks) == ("vLLM", (file,), ())


def test_vllms_blocks_may_have_no_bias(tmp_path: pathlib.Path) -> None:
    heads = made()
    for name, weight in heads.named_parameters():
        if name.endswith("bias"):
            weight.data.zero_()
    assert_same(read_heads(store(tmp_path, "model.safetensors", vllm(heads, bias=False))), heads)


@pytest.mark.parametrize("name", ["lm_heads.0.weight", "lm_head.weight"])
def test_vllms_one_output_layer_is_the_models(name: str, tmp_path: pathlib.Path) -> None:
    model, heads = tiny_model("llama"), made(own_output=False)
    tensors = vllm(heads) | {name: output_layer(model).weight.detach().clone()}
    folder = store(tmp_path, "model.safetensors", tensors, original_lm_head=True)
    assert_same(read_heads(folder), heads)
    assert read_heads(folder).vocab_size == VOCAB
    assert_same(read_heads(folder, model), heads)
    half = {key: tensor.half() for key, tensor in tensors.items()}
    assert read_heads(store(tmp_path, "model.safetensors", half), model).vocab_size == VOCAB
    store(tmp_path, "model.safetensors", tensors | {name: torch.randn(VOCAB, HIDDEN)})
    with pytest.raises(LookaheadError, match="says original_lm_head, but its output layer is not that of Llama"):
        read_heads(folder, model)


def test_the_parts_of_one_head_count_once(tmp_path: pathlib.Path) -> None:
    for num_heads, num_layers in ((1, 1), (1, 3), (12, 1)):
        heads = made(num_heads, num_layers)
        assert_same(read_heads(store(tmp_path, "medusa_lm_head.pt", medusa(heads))), heads)
    heads = made(2, 0)
    assert_same(read_heads(store(tmp_path, "medusa_lm_head.pt", medusa(heads))), heads)


@given(st.integers(1, 4), st.integers(0, 3), st.booleans(), st.sampled_from([medusa, vllm]))
@examples(25)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, num_heads: int, num_layers: int, own: bool, naming: Any
) -> None:
    heads = made(num_heads, max(num_layers, int(not own)), own)
    folder = tmp_path_factory.mktemp("heads")
    write_heads(heads, folder, naming.__name__, model=tiny_model("llama"))
    (file,) = folder.glob("*.safetensors")
    held = load_file(file)
    if naming is vllm and not own:
        assert torch.equal(held.pop("lm_heads.0.weight"), output_layer(tiny_model("llama")).weight)
    expected = naming(heads)
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
    assert_same(read_heads(folder), heads)


def test_tensors_win_over_a_wrong_config(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    heads = made()
    wrong = {"medusa_num_heads": 2, "medusa_num_layers": 1, "hidden_size": 4096, "vocab_size": 32000}
    with caplog.at_level(logging.WARNING, "lookahead"):
        checkpoint = read_checkpoint(store(tmp_path, "medusa_lm_head.pt", medusa(heads), **wrong))
    assert_same(MedusaHeads.from_tensors(checkpoint.tensors), heads)
    assert checkpoint.tensors.config.vocab_size == VOCAB
    assert len(checkpoint.remarks) == 4
    assert "config.json says medusa_num_heads 2, and the tensors 3" in caplog.text
    served = {"num_heads": 5, "num_hidden_layers": 2, "original_lm_head": True}
    checkpoint = read_checkpoint(store(tmp_path / "vllm", "model.safetensors", vllm(heads), **served))
    assert_same(MedusaHeads.from_tensors(checkpoint.tensors), heads)
    assert [remark.split(",")[0] for remark in checkpoint.remarks] == [
        "config.json says num_heads 5",
        "config.json says original_lm_head",
    ]


def test_the_config_adds_what_tensors_do_not_tell(tmp_path: pathlib.Path) -> None:
    heads = made(own_output=False)
    folder = store(tmp_path, "medusa_lm_head.pt", medusa(heads), vocab_size=VOCAB, **PUBLISHED)
    assert read_heads(folder).vocab_size == VOCAB
    assert read_heads(folder).base_model == "owner/model"
    full = store(tmp_path / "full", "model.safetensors", BASE | medusa(heads, "medusa_head."))
    assert read_heads(full).base_model == str(full)
    assert read_heads(full).vocab_size is None
    assert read_heads(full, tiny_model("llama")).vocab_size == VOCAB


def test_only_the_heads_of_a_full_model_are_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = made()
    shard(tmp_path, BASE | medusa(heads, "medusa_head."))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    for name in BASE:
        index["weight_map"][name] = "model-of-gigabytes.safetensors"  # which is not even there
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = read_checkpoint(tmp_path)
    assert_same(MedusaHeads.from_tensors(checkpoint.tensors), heads)
    assert checkpoint.files == tuple(f"model-{part:05}-of-00003.safetensors" for part in (1, 2, 3))
    read = []
    real = storage.safe_open

    class Watched:
        def __init__(self, *args: Any, **settings: Any) -> None:
            self.file = real(*args, **settings)

        def keys(self) -> Any:
            return self.file.keys()

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(storage, "safe_open", Watched)
    read_heads(store(tmp_path / "one", "model.safetensors", BASE | medusa(heads, "medusa_head.")))
    assert sorted(read) == sorted(medusa(heads, "medusa_head."))


def test_dtypes_are_kept_and_mixed_ones_widened(tmp_path: pathlib.Path) -> None:
    tensors = medusa(made())
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        half = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        read = read_heads(store(tmp_path, "medusa_lm_head.pt", half))
        assert {weight.dtype for weight in read.parameters()} == {dtype}
        tensors["0.0.linear.bias"] = tensors["0.0.linear.bias"].half()
    mixed = {name: tensor.to(torch.bfloat16 if "linear" in name else torch.float16) for name, tensor in tensors.items()}
    read = read_heads(store(tmp_path, "medusa_lm_head.pt", mixed))
    assert {weight.dtype for weight in read.parameters()} == {torch.float32}
    assert torch.equal(read.get_parameter("outputs.2.weight"), mixed["2.2.weight"].float())


def test_files_of_old_torch_versions_are_read(tmp_path: pathlib.Path) -> None:
    heads = made()
    torch.save(medusa(heads), tmp_path / "medusa_lm_head.pt", _use_new_zipfile_serialization=False)
    assert_same(read_heads(tmp_path), heads)


def test_safetensors_are_preferred_and_heads_over_models(tmp_path: pathlib.Path) -> None:
    heads = made()
    store(tmp_path, "medusa_lm_head.safetensors", medusa(heads))
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"not read")
    store(tmp_path, "model.safetensors", BASE)
    assert read_checkpoint(tmp_path).files == ("medusa_lm_head.safetensors",)


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
        (
            without("1.1.linear.weight", "1.1.linear.bias"),
            "lack 1.1.linear.bias, 1.1.linear.weight",
        ),
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
    with pytest.raises(LookaheadError, match=message):
        read_heads(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("lm_heads.1.weight"), "lack lm_heads.1.weight"),
        (without(*(f"lm_heads.{head}.weight" for head in range(3))), "lack lm_heads.0.weight, lm_heads.1.weight"),
        (without("blocks.1.layers.1.bias"), "lack blocks.1.layers.1.bias"),
        (plus({"blocks.0.norm": LONG}), "have blocks.0.norm"),
        (plus({"lm_head.weight": WIDE}), "have lm_head.weight"),
        (plus({"token_map": torch.arange(VOCAB + 1)}), "expected 48 different tokens from 0 to 47"),
        (
            plus({"token_map": torch.zeros(VOCAB, dtype=torch.long)}),
            "token_map, torch.int64 of shape .48., is not",
        ),
        (plus({"token_map": torch.arange(VOCAB) + 1}), "expected 48 different tokens"),
        (plus({"token_map": torch.arange(VOCAB) / 2}), "token_map, torch.float32"),
    ],
)
def test_vllms_incomplete_heads_are_refused(
    change: Callable[[Tensors], Tensors], message: str, tmp_path: pathlib.Path
) -> None:
    store(tmp_path, "model.safetensors", change(vllm(made())), **SERVED)
    with pytest.raises(LookaheadError, match=message):
        read_heads(tmp_path)


def test_a_token_map_is_not_needed_where_all_tokens_are_scored(tmp_path: pathlib.Path) -> None:
    heads = made()
    tensors = vllm(heads) | {"token_map": torch.arange(0, VOCAB, 2)}
    assert_same(read_heads(store(tmp_path, "model.safetensors", tensors, truncated_vocab_size=24)), heads)


@pytest.mark.usefixtures("augmented")
def test_heads_that_score_some_tokens(tmp_path: pathlib.Path) -> None:
    """vLLM's truncated vocabulary: the others are never proposed, and it is written again as it was."""
    full, chosen = made(), torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:20]
    tensors = {name: part[chosen] if name.startswith("lm_heads") else part for name, part in vllm(full).items()}
    folder = store(
        tmp_path / "a", "model.safetensors", tensors | {"token_map": chosen}, **SERVED | {"truncated_vocab_size": 20}
    )
    model = tiny_model("llama")
    heads = read_heads(folder, model)
    assert heads.vocab_size == VOCAB and heads.token_map is not None and heads.token_map.tolist() == chosen.tolist()
    expected, found = full(states(2)), heads(states(2))
    assert torch.equal(found[..., chosen], expected[..., chosen])
    others = [token for token in range(VOCAB) if token not in chosen.tolist()]
    assert bool((found[..., others] == -torch.inf).all())
    assert set(heads.top(states(2), None, 20)[1].unique().tolist()) == set(chosen.tolist())
    settings: list[dict[str, Any]] = [{"choices": [20, 1]}, {"choices": [30, 2]}, {"sources": ("heads", "suffix")}]
    for setting in settings:  # some ask for more candidates than are scored
        same_as_plain(model, prompts(2), Medusa(heads, **setting), max_new_tokens=20)
    write_heads(heads, tmp_path / "b", "vllm")
    assert load_file(tmp_path / "b" / "model.safetensors").keys() == tensors.keys() | {"token_map"}
    again = read_heads(tmp_path / "b")
    assert torch.equal(again(states(2)), found) and again.vocab_size == VOCAB
    with pytest.raises(LookaheadError, match="score 20 of 48 tokens, and only vLLM's format can say which"):
        write_heads(heads, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    (folder / "config.json").unlink()
    assert read_heads(folder, model).vocab_size == VOCAB
    with pytest.raises(LookaheadError, match="nothing says of how many"):
        read_heads(folder)


def test_a_copy_of_some_lines_of_the_models_layer(tmp_path: pathlib.Path) -> None:
    """Then the model's own layer is there, with all of them."""
    model, heads, chosen = tiny_model("llama"), made(own_output=False), torch.arange(1, VOCAB, 2)
    copy = output_layer(model).weight.detach()[chosen]
    config = SERVED | {"original_lm_head": True, "truncated_vocab_size": len(chosen)}
    tensors = vllm(heads) | {"token_map": chosen, "lm_heads.0.weight": copy.clone()}
    assert_same(read_heads(store(tmp_path / "a", "model.safetensors", tensors, **config), model), heads)
    tensors["lm_heads.0.weight"] = torch.randn(copy.shape, dtype=copy.dtype)
    with pytest.raises(LookaheadError, match="says original_lm_head, but its output layer is not"):
        read_heads(store(tmp_path / "b", "model.safetensors", tensors, **config), model)


def test_an_unknown_tensor_of_the_heads_in_a_full_model_is_refused(tmp_path: pathlib.Path) -> None:
    tensors = BASE | medusa(made(), "medusa_head.") | {"medusa_head.0.9.gate": LONG}
    with pytest.raises(LookaheadError, match=r"have 0.9.gate"):
        read_heads(store(tmp_path, "model.safetensors", tensors))


def test_heads_that_do_not_fit_the_model_are_refused(tmp_path: pathlib.Path) -> None:
    folder = store(tmp_path, "medusa_lm_head.pt", medusa(made()), **PUBLISHED)
    with pytest.raises(LookaheadError, match=r"vocabulary of 48 and belong to owner/model, and Llama.* has one of 50"):
        read_heads(folder, fresh_model("llama", vocab_size=50))
    with pytest.raises(LookaheadError, match="hidden size of 32"):
        read_heads(folder, fresh_model("llama", hidden_size=64))
    broken = medusa(made()) | {"1.0.linear.bias": torch.full((HIDDEN,), float("nan"))}
    with pytest.raises(LookaheadError, match=r"32 of 32 numbers of blocks.1.0.linear.bias are NaN"):
        read_heads(store(tmp_path, "medusa_lm_head.pt", broken), tiny_model("llama"))


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
    with pytest.raises(LookaheadError, match=r"00002-of-00003.bin is not a plain file of tensors"):
        read_heads(tmp_path)
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
    with pytest.raises(LookaheadError, match=message):
        read_heads(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no pickle", b"\x80\x04.", b"PK\x03\x04broken", b"\x80\x02]q\x00(e."])
def test_damaged_files_are_refused(content: bytes, tmp_path: pathlib.Path) -> None:
    (tmp_path / "medusa_lm_head.pt").write_bytes(content)
    with pytest.raises(LookaheadError, match=r"medusa_lm_head.pt is not a plain file of tensors"):
        read_heads(tmp_path)
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(content)
    with pytest.raises(LookaheadError, match=r"medusa_lm_head.safetensors cannot be read as safetensors"):
        read_heads(tmp_path)


def test_damaged_shards_are_refused(tmp_path: pathlib.Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    shard(tmp_path, medusa(made(), "medusa_head."))
    whole = json.loads(index.read_text())
    part = tmp_path / "model-00001-of-00003.safetensors"
    kept = load_file(part)
    save_file(dict(list(kept.items())[1:]), part)
    with pytest.raises(
        LookaheadError, match=r"00001-of-00003.safetensors lacks medusa_head.*which model.safetensors.ind"
    ):
        read_heads(tmp_path)
    part.unlink()
    with pytest.raises(LookaheadError, match=r"names model-00001-of-00003.safetensors, which is not there"):
        read_heads(tmp_path)
    for shards, message in (
        ({"weight_map": dict.fromkeys(whole["weight_map"], "../evil.safetensors")}, "names the shard '../evil"),
        ({"weight_map": {"medusa_head.0.0.linear.weight": 1}}, "is no index of a sharded model"),
        ({}, "is no index of a sharded model"),
        ([], "holds list: expected a JSON object"),
    ):
        index.write_text(json.dumps(shards))
        with pytest.raises(LookaheadError, match=message):
            read_heads(tmp_path)


def test_sources_that_are_not_there_are_refused(tmp_path: pathlib.Path) -> None:
    for source in (tmp_path / "none", "./none", "~/none/none", "none", "a/b/c"):
        with pytest.raises(LookaheadError, match=r"none does not exist|a/b/c does not exist"):
            read_heads(source)
    with pytest.raises(LookaheadError, match=r"holds no Medusa heads: expected one of .*, found no file of tensors"):
        read_heads(tmp_path)
    for name in ("a.pt", "b.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(LookaheadError, match=r"found a.pt, b.safetensors; name the one to read"):
        read_heads(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LookaheadError, match=r"config.json cannot be read"):
        read_heads(store(tmp_path, "medusa_lm_head.pt", medusa(made())))


def hub_of(folder: pathlib.Path, asked: list[Any]) -> Callable[..., str]:
    """A hub of one repository, ``owner/heads``, which is ``folder``."""

    def download(repo_id: str, filename: str, **settings: Any) -> str:
        asked.append((filename, settings))
        if repo_id != "owner/heads":
            raise RepositoryNotFoundError("no such repository", response=None)  # type: ignore[arg-type]
        if not (folder / filename).is_file():
            raise EntryNotFoundError(f"no {filename}")
        return str(folder / filename)

    return download


def test_heads_are_read_from_the_hub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(storage, "hf_hub_download", hub_of(tmp_path, asked))
    heads = made()
    shard(tmp_path, BASE | medusa(heads, "medusa_head."))
    assert_same(MedusaHeads.from_pretrained("owner/heads", revision="main", local_files_only=True), heads)
    assert all(settings["revision"] == "main" and settings["local_files_only"] for _, settings in asked)
    assert read_heads("owner/heads").base_model == "owner/heads"
    store(tmp_path, "medusa_lm_head.pt", medusa(heads), **PUBLISHED)
    assert read_heads("owner/heads").base_model == "owner/model"
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(LookaheadError, match=r"owner/heads on the hub has none of .*, or cannot be reached"):
        read_heads("owner/heads")
    monkeypatch.setattr(storage, "hf_hub_download", refusing)
    with pytest.raises(LookaheadError, match="owner/heads cannot be read from the hub: no space left"):
        read_heads("owner/heads")


def refusing(*_args: Any, **_settings: Any) -> str:
    raise OSError("no space left")


def test_the_hub_is_named_where_it_cannot_be_reached() -> None:
    with pytest.raises(LookaheadError, match="nobody/nothing on the hub has none of"):
        read_heads("nobody/nothing", local_files_only=True)


def test_vllms_config_is_complete(tmp_path: pathlib.Path) -> None:
    for own, folder in ((True, tmp_path / "own"), (False, tmp_path / "shared")):
        write_heads(made(own_output=own).half(), folder, "vllm", model=tiny_model("llama"))
        config = json.loads((folder / "config.json").read_text())
        assert config == SERVED | {
            "architectures": ["MedusaModel"],
            "base_model_name_or_path": None,
            "medusa_fc_bias": True,
            "original_lm_head": not own,
            "torch_dtype": "float16",
            "truncated_vocab_size": VOCAB,
        }
        assert (folder / "README.md").exists()


def test_vllms_format_needs_an_output_layer(tmp_path: pathlib.Path) -> None:
    heads = made(own_output=False)
    biased = fresh_model("llama")
    biased.lm_head = torch.nn.Linear(HIDDEN, VOCAB)
    packed = fresh_model("llama")
    packed.lm_head.weight = torch.nn.Parameter(packed.lm_head.weight.to(torch.int8), requires_grad=False)
    for model, message in (
        (None, "vLLM's format holds an output layer, and these heads use the model's: expected the model"),
        (biased, "output layer of LlamaForCausalLM has a bias"),
        (packed, "output layer of LlamaForCausalLM is not a plain floating weight"),
        (fresh_model("llama", vocab_size=50), "heads are those of another model"),
    ):
        with pytest.raises(LookaheadError, match=message):
            write_heads(heads, tmp_path / "heads", "vllm", model=model)
    assert not list(tmp_path.iterdir())


def test_writing_is_refused_before_anything_is_written(tmp_path: pathlib.Path) -> None:
    heads = made()
    with pytest.raises(LookaheadError, match="cannot be written as 'onnx': expected 'medusa' or 'vllm'"):
        write_heads(heads, tmp_path / "heads", "onnx")  # type: ignore[arg-type]
    with pytest.raises(LookaheadError, match="not empty"):
        write_heads(heads, store(tmp_path / "full", "model.safetensors", BASE))
    (tmp_path / "file").touch()
    with pytest.raises(LookaheadError, match="file/heads cannot be written"):
        write_heads(heads, tmp_path / "file" / "heads")
    heads.get_parameter("outputs.0.weight").data[0, 0] = float("nan")
    with pytest.raises(LookaheadError, match="heads are broken"):
        write_heads(heads, tmp_path / "heads")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def test_a_failed_write_leaves_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_heads(made(), tmp_path / "heads")
    before = {path.name: path.read_bytes() for path in (tmp_path / "heads").iterdir()}
    monkeypatch.setattr(writing, "save_file", refusing)
    for folder in ("heads", "other"):
        with pytest.raises(LookaheadError, match=f"{folder} cannot be written: no space left"):
            write_heads(made(2), tmp_path / folder, replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "heads").iterdir()} == before


def convert(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["convert-medusa", *map(str, arguments)])


def test_the_command_converts_there_and_back(tmp_path: pathlib.Path) -> None:
    heads = made()
    source = store(tmp_path / "pt", "medusa_lm_head.pt", medusa(heads), **PUBLISHED | {"medusa_num_heads": 5})
    result = convert(source, tmp_path / "vllm", "--to", "vllm")
    assert result.exit_code == 0, result.output
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for row in ("format Medusa, version 1", "files medusa_lm_head.pt", "heads 3", "layers 2", "output layers own"):
        assert row in rows
    assert "config.json says medusa_num_heads 5" in " ".join(rows)
    assert_same(read_heads(tmp_path / "vllm"), heads)
    result = convert(tmp_path / "vllm", tmp_path / "back", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["read"] == {
        "format": "vLLM",
        "files": ["model.safetensors"],
        "heads": 3,
        "layers": 2,
        "output_layers": "own",
        "hidden_size": HIDDEN,
        "vocabulary": VOCAB,
        "dtype": "float64",
        "parameters": sum(weight.numel() for weight in heads.parameters()),
        "base_model": "owner/model",
    }
    assert document["written"] == "medusa"
    assert_same(MedusaHeads.from_pretrained(tmp_path / "back"), heads)
    assert load_file(tmp_path / "back" / "medusa_lm_head.safetensors").keys() == medusa(heads).keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "pt", "vllm"]


def test_the_command_takes_the_output_layer_of_a_model(tmp_path: pathlib.Path) -> None:
    model = fresh_model("llama")
    model.save_pretrained(tmp_path / "model")
    heads = drawn(MedusaHeads.for_model(model, 2, own_output=False))
    source = store(tmp_path / "pt", "medusa_lm_head.pt", medusa(heads))
    refused = convert(source, tmp_path / "vllm", "--to", "vllm")
    assert refused.exit_code == 2 and "(--model on the command line)" in refused.output
    assert not (tmp_path / "vllm").exists()
    result = convert(source, tmp_path / "vllm", "--to", "vllm", "--model", tmp_path / "model")
    assert result.exit_code == 0, result.output
    assert torch.equal(load_file(tmp_path / "vllm" / "model.safetensors")["lm_heads.0.weight"], model.lm_head.weight)
    result = convert(tmp_path / "vllm", tmp_path / "back", "--model", tmp_path / "model")
    assert result.exit_code == 0, result.output
    read = MedusaHeads.from_pretrained(tmp_path / "back")
    assert torch.equal(read(states(2), model.lm_head), heads(states(2), model.lm_head))
    other = fresh_model("llama", hidden_size=64)
    other.save_pretrained(tmp_path / "other")
    refused = convert(source, tmp_path / "no", "--model", tmp_path / "other")
    assert refused.exit_code == 2 and "heads are those of another model" in " ".join(refused.output.split())
    assert not (tmp_path / "no").exists()


def test_the_command_overwrites_only_by_force(tmp_path: pathlib.Path) -> None:
    heads = made()
    source = store(tmp_path / "pt", "medusa_lm_head.pt", medusa(heads))
    target = store(tmp_path / "target", "old.safetensors", BASE)
    refused = convert(source, target)
    assert refused.exit_code == 2 and "--force" in refused.output
    assert [path.name for path in target.iterdir()] == ["old.safetensors"]
    assert convert(source, target, "--force").exit_code == 0
    assert sorted(path.name for path in target.iterdir()) == ["README.md", "config.json", "medusa_lm_head.safetensors"]
    for inside in (source, source / "medusa_lm_head.pt"):
        refused = convert(inside, source, "--force")
        assert refused.exit_code == 2 and "which would be replaced" in " ".join(refused.output.split())
    assert [path.name for path in source.iterdir()] == ["medusa_lm_head.pt"]
    broken = medusa(heads) | {"0.0.linear.bias": torch.full((HIDDEN,), float("inf"))}
    refused = convert(store(tmp_path / "pt", "medusa_lm_head.pt", broken), tmp_path / "new")
    assert refused.exit_code == 2 and "heads are broken" in refused.output
    assert not (tmp_path / "new").exists()


def test_the_config_of_a_full_model_is_not_mistaken_for_that_of_heads(tmp_path: pathlib.Path) -> None:
    model = fresh_model("llama")
    model.save_pretrained(tmp_path)
    heads = drawn(MedusaHeads.for_model(model, 3, 1))
    tensors = load_file(tmp_path / "model.safetensors")
    store(tmp_path, "model.safetensors", tensors | medusa(heads, "medusa_head."))
    checkpoint = read_checkpoint(tmp_path, model)
    assert_same(MedusaHeads.from_tensors(checkpoint.tensors), heads)
    assert checkpoint.remarks == () and checkpoint.tensors.config.vocab_size == VOCAB
