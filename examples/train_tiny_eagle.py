"""Train the bundled model's EAGLE head from source that is on this machine.

    python examples/train_tiny_eagle.py --minutes 46

The corpus is that of ``train_tiny_coder.py``, divided in the same way, so the files that the head is evaluated on were
never trained on by the model either. The head learns from what the model itself writes, sampled, after pieces of the
corpus. Stopping and starting again resumes.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from train_tiny_coder import collect
from train_tiny_medusa import NAME, pieces

from lookahead.bundled import load_bundled
from lookahead.cli import common
from lookahead.cli.train import show, teller
from lookahead.eagle import EagleSettings, fit
from lookahead.training.items import Item

SHIPPED = ("config.json", "model.safetensors", "README.md", "evaluation.json")


def main(
    work: Annotated[Path, typer.Option(help="Folder for checkpoints.")] = Path("build/tiny-eagle"),
    out: Annotated[Path, typer.Option(help="Where the head goes.")] = Path("lookahead/assets/tiny-coder-eagle"),
    site: Annotated[list[Path] | None, typer.Option(help="A further folder of installed packages.")] = None,
    minutes: Annotated[float, typer.Option(help="Training time in all, over restarts.")] = 46.0,
    answers: Annotated[int, typer.Option(help="Answers to learn from.")] = 5700,
    cap_mb: Annotated[float, typer.Option(help="At most this many megabytes from one package.")] = 16.0,
    seed: int = 0,
) -> None:
    """Train, evaluate and export; a second run with the same --work resumes."""
    model, tokenizer = load_bundled()
    splits, _ = collect(site or [], cap_mb)
    train, held_out = ([Item(*entry) for entry in splits[split].items()] for split in ("train", "held_out"))
    train.sort(key=lambda item: item.number)
    settings = EagleSettings(
        feature_layers=(2, 4, 6),
        feed_forward=1024,
        own_output=False,
        unroll=4,
        distil=True,
        answer_tokens=192,
        temperature=0.8,
        learning_rate=3e-3,
        epochs=6.0,
        max_minutes=minutes,
        batch_size=4,
        block_size=256,
        seed=seed,
    )
    with common.progress() as progress:
        evaluation = fit(
            model,
            tokenizer,
            pieces(train, answers),
            pieces(held_out, 64),
            work,
            settings,
            name=NAME,
            resume=(work / "checkpoints" / "settings.json").exists(),
            report=teller(progress),
        )
    assert evaluation is not None  # one process
    show(Console(), evaluation)
    out.mkdir(parents=True, exist_ok=True)
    for name in SHIPPED:
        shutil.copyfile(work / name, out / name)
    print(json.dumps({"out": str(out), "bytes": sum((out / name).stat().st_size for name in SHIPPED)}))


if __name__ == "__main__":
    typer.run(main)
