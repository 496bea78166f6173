"""Plain generate against lookahead on many prompts with random settings: how many texts differ.

    python -m benchmarks.exactness --model DIR --prompts 100 --out benchmarks/results/exactness.json

Every prompt is decoded greedily and sampled (temperature 0.8, the number of the prompt as the seed), each with settings
drawn at random: W, N and G, or (--automatic) sources, nodes and memory. A text counts as different if one token is.
S is over all of them. The last line on stdout is one JSON document.
"""

import json
import random
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track

import lookahead
from benchmarks.machine import describe
from lookahead import DecodingStats, Lookahead

HERE = Path(__file__).parent


SOURCES = ("recycling", "suffix", "pool", "window")


def given(rng: random.Random, index: int) -> Lookahead:
    """Random W, N, G and flags."""
    return Lookahead(
        window_size=rng.randint(1, 16),
        ngram_size=rng.randint(2, 7),
        verification_set_size=rng.randint(0, 16),
        pool_from_prompt=rng.random() < 0.5,
        pool_from_output=rng.random() < 0.5,
        always_forward_one=rng.random() < 0.5,
        seed=index,
    )


def automatic(rng: random.Random, index: int) -> Lookahead:
    """Random sources, often all of them, sized by the step times or by a random number, with or without a memory."""
    few = tuple(rng.sample(SOURCES, rng.randint(1, len(SOURCES))))
    return Lookahead(
        sources=SOURCES if rng.random() < 0.5 else few,
        nodes=rng.randint(1, 64) if rng.random() < 0.5 else None,
        seed=index if rng.random() < 0.25 else None,  # a seed means no memory
    )


def main(
    model_dir: Annotated[Path | None, typer.Option("--model", help="A model folder; default: the bundled one.")] = None,
    prompts_file: Annotated[Path, typer.Option(help="JSON lines with a 'prompt'.")] = HERE / "prompts" / "code.jsonl",
    prompts: Annotated[int, typer.Option(help="How many of them.")] = 100,
    new_tokens: int = 128,
    dtype: str = "float32",
    seed: int = 0,
    choose: Annotated[
        bool, typer.Option("--automatic/--given", help="The automatic mode, or lookahead decoding with given W, N, G.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
) -> None:
    """Count the differences."""
    kind = getattr(torch, dtype)
    if model_dir is None:
        model, tokenizer = lookahead.load_bundled(dtype=kind)
    else:
        model, tokenizer = lookahead.load_model(model_dir, dtype=kind)
    lookahead.augment_all()
    rng = random.Random(seed)
    texts = [json.loads(line)["prompt"] for line in prompts_file.read_text().splitlines()[:prompts]]
    results: dict[str, Any] = {}
    modes: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "sampled": {"do_sample": True, "temperature": 0.8},
    }
    for mode, settings in modes.items():
        differ, tokens, stats = [], 0, DecodingStats()
        for index, text in enumerate(track(texts, description=mode, console=Console(stderr=True))):
            strategy = (automatic if choose else given)(rng, index)
            inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
            common = {**inputs, **settings, "max_new_tokens": new_tokens, "return_dict_in_generate": True}
            torch.manual_seed(index)
            plain = model.generate(**common)
            torch.manual_seed(index)
            ours = model.generate(**common, lookahead_strategy=strategy)
            tokens += plain.sequences.shape[1] - inputs["input_ids"].shape[1]
            stats += ours.stats
            if not torch.equal(plain.sequences, ours.sequences):
                differ.append({"prompt": index, "strategy": strategy.to_dict()})
        results[mode] = {"texts": len(texts), "tokens": tokens, "S": stats.mean_acceptance_length, "differ": differ}
    document = json.dumps(
        {"benchmark": "exactness", "automatic": choose, "dtype": dtype, "results": results, **describe()}
    )
    if out is not None:
        out.write_text(document + "\n")
    print(document)


if __name__ == "__main__":
    typer.run(main)
