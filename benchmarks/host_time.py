"""Host time: what a pass takes beside the model's forward and the scoring of its logits, piece by piece.

    python -m benchmarks.host_time --vocab bundled,49k,152k --nodes 1,8,24,64 --out build/bench/host_time.json

The bundled model writes code (``wide``: with 152k tokens, of which the new ones are never likely), and a Llama of one
narrow layer and many tokens writes noise, with a fixed number of drafted nodes (0 = automatic). Times are processor
time of the one thread in milliseconds: medians over full passes, in the automatic mode means over all of them.
``noise`` is drawing the next tokens' noise while drafting, which plain decoding draws, too.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from unittest import mock

import torch
import typer

import lookahead
from benchmarks import options
from benchmarks.harness import Run, load, quiet_console, random_prompt, texts_of
from benchmarks.options import chosen, whole_numbers
from benchmarks.step_time import random_model
from lookahead.draft.context import Drafts
from lookahead.generation.group import Observers
from lookahead.runtime import scores
from lookahead.runtime.forward import TreeForward
from lookahead.runtime.tracing import schedule
from lookahead.runtime.tree import TreeModel
from lookahead.verify.noise import Noise

VOCABULARIES = {"bundled": 0, "49k": 49152, "152k": 151936, "wide": 151936}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "t0.8": {"do_sample": True, "temperature": 0.8, "top_k": 0},
    "t0.8 warped": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9},
}
COUNTED = ("forward", "score", "inputs", "keep", "aside", "late", "noise")
HOST = ("draft", "inputs", "launch and unpack", "verify", "keep", "learn", "observe", "aside", "late")
PIECES = (*HOST, "noise", "forward", "score")


def widened(model: Any, size: int) -> Any:
    """The model with tokens that are never likely after its own, up to a vocabulary of ``size``."""
    old, embedding, output = model.config.vocab_size, model.get_input_embeddings(), model.get_output_embeddings()
    with torch.no_grad():
        states = model.model(torch.randint(0, old, (4, 256))).last_hidden_state.flatten(0, 1).float()
        unlikely = torch.linalg.lstsq(states, torch.full((len(states), 1), -60.0)).solution.T.to(output.weight.dtype)
        for layer, line in ((embedding, embedding.weight[:1]), (output, unlikely)):
            layer.weight = torch.nn.Parameter(torch.cat([layer.weight, line.expand(size - old, -1)]))
    model.config.vocab_size = model.vocab_size = size
    return model


@contextmanager
def timed(rows: list[dict[str, float]]) -> Iterator[None]:
    """Notes the pieces of every pass in ``rows``."""
    spent = dict.fromkeys(COUNTED, 0.0)

    def counting(key: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = call(*args, **kwargs)
            spent[key] += 1e3 * (time.thread_time() - start)
            return result

        return timing

    def see(observers: Any, step: Any) -> None:
        start = time.thread_time()
        seen(observers, step)
        times = {
            "draft": step.draft_ms - spent["noise"],
            "verify": step.verify_ms,
            **spent,
            "learn": step.keep_ms - spent["keep"],
        }
        times["launch and unpack"] = step.forward_ms - sum(spent[each] for each in ("forward", "score", "inputs"))
        rows.append(times | {"observe": 1e3 * (time.thread_time() - start), "nodes": max(map(len, step.trees)) - 1})
        spent.update(dict.fromkeys(COUNTED, 0.0))

    seen = Observers.see
    with (
        mock.patch.object(sys.modules["jacobi.loop"], "perf_counter", time.thread_time),
        mock.patch.object(TreeForward, "call", counting("forward", TreeForward.call)),
        mock.patch.object(TreeForward, "inputs", counting("inputs", TreeForward.inputs)),
        mock.patch.object(TreeModel, "keep", counting("keep", TreeModel.keep)),
        mock.patch.object(Observers, "catch_up", counting("aside", Observers.catch_up)),
        mock.patch.object(Drafts, "catch_up", counting("late", Drafts.catch_up)),
        mock.patch.object(Noise, "line", counting("noise", Noise.line)),
        mock.patch.object(scores, "_on_cpu", counting("score", scores._on_cpu)),
        mock.patch.object(Observers, "see", see),
        mock.patch.object(schedule, "_COST", 1e9),  # nothing is traced
    ):
        yield


def measured(
    model: Any, prompts: list[list[int]], nodes: int, settings: dict[str, Any], new: int, batch: int
) -> dict[str, Any]:
    """Medians over the passes with (nearly) all nodes; in the automatic mode means over all passes."""
    rows: list[dict[str, float]] = []
    strategy = lookahead.Lookahead(nodes=nodes or None)
    for first in [*range(0, len(prompts) - batch + 1, batch)] * 2:
        torch.manual_seed(0)
        shortest = min(map(len, prompts[first : first + batch]))
        tokens = torch.tensor([prompt[:shortest] for prompt in prompts[first : first + batch]])
        with timed(rows):
            model.generate(tokens, max_new_tokens=new, lookahead_strategy=strategy, **settings)
    full = [row for row in rows[1:] if row["nodes"] >= 0.7 * nodes and row["forward"]]
    middle = statistics.median if nodes else statistics.fmean
    times = {piece: middle(row[piece] for row in full) for piece in PIECES} if full else {}
    return {"passes": len(full), "host_ms": sum(times[piece] for piece in HOST) if full else None, "pieces_ms": times}


def main(
    vocab: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(VOCABULARIES)}.")] = "bundled,49k,152k",
    nodes: Annotated[
        str, typer.Option(help="Comma-separated drafted nodes of a sequence; 0 = automatic.")
    ] = "1,8,24,64",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    choices: Annotated[str, typer.Option(help=f"Comma-separated, or all: {', '.join(CHOICES)}.")] = "all",
    dtype: options.Dtype = "float32",
    prompts: options.Prompts = 8,
    new_tokens: options.NewTokens = 48,
    out: options.Out = None,
) -> None:
    """Measure every vocabulary, choice and size."""
    console = quiet_console(1)
    lookahead.augment_all()
    run = Run("host time", out, dtype=dtype, batch=batch, prompts=prompts, new_tokens=new_tokens, rows=[])
    for name in chosen(vocab, VOCABULARIES, "vocabulary"):
        model, tokenizer = load(None, dtype)
        texts = [tokenizer(text)["input_ids"] for text in texts_of("code-no-loop")[:prompts]]
        size = VOCABULARIES[name]
        if name == "wide":
            model = widened(model, size)
        elif size:
            model = random_model((64, 1, 2, 1, 64, size, False, 32), getattr(torch, dtype), "cpu")
            model.lm_head.weight.data.mul_(8.0)  # some tokens are likely
            model.generation_config.pad_token_id = 0
            texts = [random_prompt(index, size) for index in range(prompts)]
        for choice in chosen(choices, CHOICES, "choice"):
            for count in whole_numbers(nodes):
                found = measured(model, texts, count, CHOICES[choice], new_tokens, batch)
                run.add("rows", [{"vocabulary": name, "choice": choice, "nodes": count, **found}])
                console.print(run.document["rows"][-1])
    run.finish()


if __name__ == "__main__":
    typer.run(main)
