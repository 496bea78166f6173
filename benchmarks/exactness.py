"""Plain ``generate`` against lookahead on many prompts with random settings: how many texts differ.

    python -m benchmarks.exactness --automatic --prompts 100 --out build/bench/exactness.json

Every prompt is decoded greedily and sampled (temperature 0.8, the number of the prompt as the seed), each with settings
drawn at random: W, N and G, or (--automatic) sources, nodes and memory. A text differs if one token does.
"""

import random
from typing import Annotated, Any

import torch
import typer

import lookahead
from benchmarks import options
from benchmarks.ablation import ALL
from benchmarks.harness import Run, load, quiet_console, texts_of, watched
from benchmarks.options import MODES
from lookahead import DecodingStats, Lookahead


def given(rng: random.Random, index: int) -> Lookahead:
    """Random W, N, G and flags."""
    sizes = {"window_size": rng.randint(1, 16), "ngram_size": rng.randint(2, 7)}
    sizes |= {"verification_set_size": rng.randint(0, 16)}
    names = ("pool_from_prompt", "pool_from_output", "always_forward_one")
    return Lookahead(**sizes, **{name: rng.random() < 0.5 for name in names}, seed=index)


def automatic(rng: random.Random, index: int) -> Lookahead:
    """Random sources, often all of them, sized by the latency curve or at random, with or without a memory."""
    few = tuple(rng.sample(ALL, rng.randint(1, len(ALL))))
    sources, nodes = (ALL if rng.random() < 0.5 else few), (rng.randint(1, 64) if rng.random() < 0.5 else None)
    return Lookahead(sources=sources, nodes=nodes, seed=index if rng.random() < 0.25 else None)  # a seed: no memory


def main(
    model_dir: options.ModelDir = None,
    source: Annotated[str, typer.Option("--set", help="A file of prompts/ without its suffix.")] = "code",
    prompts: options.Prompts = 100,
    new_tokens: options.NewTokens = 128,
    dtype: options.Dtype = "float32",
    seed: int = 0,
    choose: Annotated[bool, typer.Option("--automatic/--given", help="Sources and nodes, or W, N, G.")] = False,
    out: options.Out = None,
) -> None:
    """Count the differences."""
    console = quiet_console(None)
    run = Run("exactness", out, automatic=choose, dtype=dtype, results={})
    model, tokenizer = load(model_dir, dtype, full_length=False)
    lookahead.augment_all()
    rng = random.Random(seed)
    texts = texts_of(source)[:prompts]
    for name, mode in (("greedy", "greedy"), ("sampled", "t0.8")):
        differ, tokens, stats = [], 0, DecodingStats()
        for index, text in enumerate(watched(console, name, texts)):
            strategy = (automatic if choose else given)(rng, index)
            inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
            common: dict[str, Any] = {**inputs, **MODES[mode], "max_new_tokens": new_tokens}
            torch.manual_seed(index)
            plain = model.generate(**common)
            torch.manual_seed(index)
            ours = model.generate(**common, lookahead_strategy=strategy, return_dict_in_generate=True)
            tokens += plain.shape[1] - inputs["input_ids"].shape[1]
            stats += ours.stats
            if not torch.equal(plain, ours.sequences):
                differ.append({"prompt": index, "strategy": strategy.to_dict()})
        found = {"tokens": tokens, "S": stats.mean_acceptance_length, "differ": differ}
        run.document["results"][name] = {"texts": len(texts), **found}
    run.finish()


if __name__ == "__main__":
    typer.run(main)
