"""Heads from the hub, and heads that are written."""

import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import eagle, redrafter
from helpers.checkpoints import BASE, PUBLISHED, assert_same, made, medusa, shard, store
from helpers.refusals import refuses
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
from torch import nn

from lookahead.eagle import EagleHead
from lookahead.heads import storage
from lookahead.heads.medusa import heads as medusa_heads
from lookahead.medusa import MedusaHeads, read_heads, write_heads
from lookahead.redrafter import RecurrentHead


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
    refuses(r"owner/heads on the hub has none of .*, or cannot be reached", read_heads, "owner/heads")
    monkeypatch.setattr(storage, "hf_hub_download", refusing)
    refuses("owner/heads cannot be read from the hub: no space left", read_heads, "owner/heads")


def refusing(*_args: Any, **_settings: Any) -> str:
    raise OSError("no space left")


def test_the_hub_is_named_where_it_cannot_be_reached() -> None:
    refuses("nobody/nothing on the hub has none of", read_heads, "nobody/nothing", local_files_only=True)


@pytest.mark.parametrize("name", ["EAGLE", "ReDrafter"])
def test_folders_that_hold_no_head(name: str, tmp_path: pathlib.Path) -> None:
    """Files that are cut, or hold code, and none at all; Medusa's are in test_medusa_broken_checkpoints."""
    kind: Any = EagleHead if name == "EAGLE" else RecurrentHead
    for binary, match in ((False, "cannot be read as safetensors"), (True, "is not a plain file of tensors")):
        folder = tmp_path / match
        if name == "EAGLE":
            eagle.write_head(folder, eagle.random_network(1), binary=binary)
        else:
            redrafter.write_head(folder, redrafter.random_head(), binary=binary)
        file = folder / ("pytorch_model.bin" if binary else "model.safetensors")
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        refuses(match, kind.from_pretrained, folder)
    torch.save({"fc.weight": nn.Linear(2, 2)}, file)
    refuses("nothing in it was executed", kind.from_pretrained, folder)
    file.unlink()
    refuses(f"holds no {name} head: expected one of model.safetensors", kind.from_pretrained, folder)


def test_writing_is_refused_before_anything_is_written(tmp_path: pathlib.Path) -> None:
    heads = made()
    refuses("not empty", write_heads, heads, store(tmp_path / "full", "model.safetensors", BASE))
    (tmp_path / "file").touch()
    refuses("file/heads cannot be written", write_heads, heads, tmp_path / "file" / "heads")
    heads.get_parameter("outputs.0.weight").data[0, 0] = float("nan")
    refuses("heads are broken", write_heads, heads, tmp_path / "heads")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def test_a_failed_write_leaves_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_heads(made(), tmp_path / "heads")
    before = {path.name: path.read_bytes() for path in (tmp_path / "heads").iterdir()}
    monkeypatch.setattr(medusa_heads, "save_file", refusing)
    for folder in ("heads", "other"):
        refuses(f"{folder} cannot be written: no space left", write_heads, made(2), tmp_path / folder, replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "heads").iterdir()} == before


def test_tensors_that_say_more_than_their_file_holds_are_refused(tmp_path: pathlib.Path) -> None:
    """A stride of 0, many names for one storage, and compressed records, none of which is ever made whole."""
    file = tmp_path / "medusa_lm_head.pt"
    torch.save({"0.0.linear.weight": torch.zeros(1).expand(1 << 20, 1 << 20)}, file)
    refuses("expected all of them to be stored", read_heads, file)
    one = torch.zeros(64, 64)
    torch.save({f"{head}.0.linear.weight": one for head in range(100)}, file)
    refuses("expected all of them to be stored", read_heads, file)
    torch.save({"0.0.linear.weight": torch.zeros(64, 64), "0.0.linear.bias": torch.zeros(64)}, file)
    assert read_heads(file).hidden_size == 64
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(file) as stored, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as out:
        for record in stored.infolist():
            out.writestr(record.filename, stored.read(record))
    refuses("compressed", read_heads, packed)
