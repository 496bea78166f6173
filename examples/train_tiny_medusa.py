"""Train the bundled model's Medusa heads, and grow their tree, from source that is on this machine.

    pip install --no-deps --target build/corpus -r examples/tiny_coder_corpus.txt
    python examples/train_tiny_medusa.py --site build/corpus

The corpus is that of ``train_tiny_coder.py``, divided in the same way, so the files that the heads are evaluated on
were never trained on by the model either. The heads learn from what the model itself writes after pieces of the corpus
(self-distillation), because that is what they are to foresee; ``--no-distil`` trains them on the corpus as it is.
Stopping and starting again resumes.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from train_tiny_coder import collect

from lookahead.bundled import load_bundled
from lookahead.cli import common
from lookahead.cli.train import show, teller
from lookahead.heads.medusa.accuracies import CalibratedTree, grow_tree
from lookahead.heads.medusa.calibration import calibrate
from lookahead.heads.medusa.settings import MedusaSettings
from lookahead.heads.medusa.training import MedusaRecipe
from lookahead.medusa import MedusaHeads
from lookahead.training.evaluation import spread
from lookahead.training.items import Item

NAME = "tiny-coder"
PIECE = 600  # characters of the corpus to begin an answer with; the model reads the first 128 tokens of them
STRIDE = 8000  # characters from one piece of a file to the next
SHIPPED = ("config.json", "medusa_lm_head.safetensors", "README.md", "evaluation.json")


def pieces(items: list[Item], most: int) -> list[Item]:
    """Beginnings for the model to continue: from the first line at every STRIDE characters, at most ``most`` in all."""
    found = []
    for item in items:
        for at in range(0, max(1, len(item.text) - PIECE), STRIDE):
            start = item.text.find("\n", at) + 1 if at else 0
            found.append(Item(item.source, item.text[start : start + PIECE]))
    step = max(1.0, len(found) / most)
    return [found[int(index * step)] for index in range(min(most, len(found)))]


def main(
    work: Annotated[Path, typer.Option(help="Folder for checkpoints.")] = Path("build/tiny-medusa"),
    out: Annotated[Path, typer.Option(help="Where heads and tree go.")] = Path("lookahead/assets/tiny-coder-medusa"),
    site: Annotated[list[Path] | None, typer.Option(help="A further folder of installed packages.")] = None,
    minutes: Annotated[float, typer.Option(help="Training time in all, over restarts.")] = 60.0,
    heads: int = 4,
    layers: int = 4,
    distil: Annotated[bool, typer.Option(help="Learn from the model's own greedy answers.")] = True,
    answers: Annotated[int, typer.Option(help="(distil) Answers to learn from.")] = 5000,
    batch: int = 2,
    data_mb: Annotated[float, typer.Option(help="About how much of the corpus to read, chosen by hash.")] = 60.0,
    cap_mb: Annotated[float, typer.Option(help="At most this many megabytes from one package.")] = 16.0,
    nodes: Annotated[int, typer.Option(help="Of the tree, without its root.")] = 63,
    prompts: Annotated[int, typer.Option(help="Training files to calibrate the tree on.")] = 64,
    seed: int = 0,
) -> None:
    """Train, evaluate, calibrate and export; a second run with the same --work resumes."""
    model, tokenizer = load_bundled()
    splits, _ = collect(site or [], cap_mb)
    train, held_out = ([Item(*entry) for entry in splits[split].items()] for split in ("train", "held_out"))
    train.sort(key=lambda item: item.number)
    total = 0
    for count, item in enumerate(train):
        total += len(item.text)
        if total > 1e6 * data_mb:
            del train[count:]
            break
    settings = MedusaSettings(
        num_heads=heads,
        num_layers=layers,
        batch_size=batch,
        max_minutes=minutes,
        seed=seed,
        epochs=4.0 if distil else 2.0,
        distil=distil,
    )
    learnt, seen = (pieces(train, answers), pieces(held_out, 256)) if distil else (train, held_out)
    console = Console()
    with common.progress() as progress:
        resume = (work / "checkpoints" / "settings.json").exists()
        evaluation = MedusaRecipe.fit(
            model,
            tokenizer,
            learnt,
            seen,
            work,
            settings,
            name=NAME,
            resume=resume,
            evaluation_tokens=131072,
            report=teller(progress),
        )
        assert evaluation is not None  # one process
        trained = MedusaHeads.from_pretrained(work, model=model)
        starts = [tokenizer(item.text, verbose=False)["input_ids"][:64] for item in spread(train, prompts)]
        bar = progress.add_task("Calibrating the tree", total=1.0)
        table = calibrate(model, trained, starts, report=lambda done: progress.update(bar, completed=done))
    show(console, evaluation)
    tree = CalibratedTree(choices=grow_tree(table, nodes), accuracies=table, model=NAME, heads=f"{NAME}-medusa")
    out.mkdir(parents=True, exist_ok=True)
    for name in SHIPPED:
        shutil.copyfile(work / name, out / name)
    tree.save(out / "tree.json")
    size = sum((out / name).stat().st_size for name in (*SHIPPED, "tree.json"))
    print(json.dumps({"out": str(out), "bytes": size, "expected_tokens_per_pass": 1 + tree.expected_length}))


if __name__ == "__main__":
    typer.run(main)
