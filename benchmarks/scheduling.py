"""Many requests on one device: tokens a second of a scheduler, of plain static batches of as many rows, and of
transformers' continuous batching, which chooses its rows itself."""

import random
import statistics
from typing import Annotated, Any

import torch
import typer
from transformers import ContinuousBatchingConfig, GenerationConfig

import lookahead
from benchmarks import options
from benchmarks.harness import Run, in_turn, load, quiet_console, texts_of, timed, watched

LENGTHS = {"equal": (128,), "mixed": (16, 32, 64, 128, 256)}
Request = tuple[list[int], int]


def static(model: Any, requests: list[Request], rows: int, mode: dict[str, Any]) -> None:
    """Batches of ``rows`` requests in their order, each as long as its longest text."""
    for start in range(0, len(requests), rows):
        part = requests[start : start + rows]
        width = max(len(ids) for ids, _ in part)
        padding = [width - len(ids) for ids, _ in part]
        ids = torch.tensor([[0] * pad + ids for pad, (ids, _) in zip(padding, part, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max(n for _, n in part), **mode)


def scheduled(model: Any, requests: list[Request], rows: int, mode: dict[str, Any], drafts: bool) -> None:
    """All requests, ``rows`` of them at a time."""
    with lookahead.Scheduler(model, rows) as scheduler:
        for seed, (ids, new_tokens) in enumerate(requests):
            given = torch.tensor([ids])
            inputs = {"input_ids": given, "attention_mask": torch.ones_like(given), "max_new_tokens": new_tokens}
            scheduler.submit(seed=seed, use_lookahead=drafts, **inputs, **mode)
        scheduler.run()


def continuous(model: Any, requests: list[Request], mode: dict[str, Any]) -> None:
    """All requests to transformers' own scheduler, with room for all of them in its cache."""
    longest = max(len(ids) + new_tokens for ids, new_tokens in requests)
    blocks = len(requests) * (longest // 64 + 2)
    sizes = ContinuousBatchingConfig(page_size=64, num_blocks=blocks, max_batch_tokens=512, allow_block_sharing=False)
    given = GenerationConfig(**mode, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(given, continuous_batching_config=sizes) as manager:
        for ids, new_tokens in requests:
            manager.add_request(ids, max_new_tokens=new_tokens)
        done = 0
        while done < len(requests):
            done += manager.get_result(timeout=60) is not None


def main(
    model_dir: options.ModelDir = None,
    rows: Annotated[str, typer.Option(help="Comma-separated rows of a pass.")] = "1,2,4,8,16",
    modes: options.Modes = "greedy,t0.8",
    prompts: options.Prompts = 32,
    rounds: options.Rounds = 3,
    threads: options.Threads = None,
    out: options.Out = None,
) -> None:
    """Race a scheduler, with and without drafts, against static batches; ratios are medians of rounds in turn."""
    console = quiet_console(threads)
    model, tokenizer = load(model_dir, "float32")
    texts = [*texts_of("code"), *texts_of("prose")]
    wanted = [options.MODES[name] for name in options.chosen(modes, options.MODES, "mode")]
    run = Run("scheduling", out, model=model_dir, prompts=prompts, rounds=rounds, rows=[])
    cases = [(mode, kind, count) for mode in wanted for kind in LENGTHS for count in options.whole_numbers(rows)]
    for mode, kind, count in watched(console, "Racing", cases):
        draw = random.Random(1)
        chosen = [texts[number % len(texts)] for number in range(prompts)]
        requests = [(tokenizer(text)["input_ids"][:120], draw.choice(LENGTHS[kind])) for text in chosen]
        given = model, requests, count, mode
        ways = {
            "static": lambda given=given: static(*given),
            "continuous": lambda given=given: continuous(given[0], given[1], given[3]),
            "plain rows": lambda given=given: scheduled(*given, False),
            "scheduler": lambda given=given: scheduled(*given, True),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        ways["scheduler"]()
        for turn in range(rounds):
            for name in in_turn(ways, turn):
                seconds[name].append(timed("cpu", ways[name])[1])
        tokens = sum(new_tokens for _, new_tokens in requests)
        pairs = {name: zip(seconds["static"], seconds[name], strict=True) for name in ways}
        ratios = {name: round(statistics.median(a / b for a, b in pair), 3) for name, pair in pairs.items()}
        speeds = {name: round(tokens / statistics.median(each)) for name, each in seconds.items()}
        run.add("rows", [{"mode": mode, "lengths": kind, "rows": count, "tokens_per_s": speeds, "ratio": ratios}])
        console.print(mode, kind, count, speeds, ratios)
    run.finish()


if __name__ == "__main__":
    typer.run(main)
