"""One checkout's side of benchmarks.compare: it holds a model and answers requests, a line of JSON each.

It runs with a checkout as PYTHONPATH and uses only what is public in every version of the library. Requests are the
arguments of :func:`load` (they name ``model``), and then those of :func:`call`.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import lookahead


def load(model: str | None, dtype: str, device: str, threads: int) -> tuple[Any, Any]:
    """Load a model anew, so that it remembers nothing, and its tokenizer."""
    torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    loaded = lookahead.load_model(model, kind, device) if model else lookahead.load_bundled(kind, device)
    settings, tokenizer = loaded[0].generation_config, loaded[1]
    settings.eos_token_id = None  # every text has full length
    if settings.pad_token_id is None:
        settings.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id or 0
    return loaded


def call(held: tuple[Any, Any], prompt: str | list[int], seed: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Decode one prompt, a text or tokens: the tokens written, clock and process milliseconds, and passes.

    Of ``arguments``, which are those of ``generate``, ``lookahead_strategy`` holds the fields of a ``Lookahead``.
    """
    model, tokenizer = held
    row = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    ids = torch.tensor([row], device=model.device)
    if "lookahead_strategy" in arguments:
        arguments["lookahead_strategy"] = lookahead.Lookahead(**arguments["lookahead_strategy"])
    torch.manual_seed(seed)
    wait = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    wait()
    clock, process = time.perf_counter(), time.process_time()
    output = model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **arguments)
    wait()
    found = {"wall_ms": 1e3 * (time.perf_counter() - clock), "cpu_ms": 1e3 * (time.process_time() - process)}
    tokens, stats = output.sequences[0, ids.shape[1] :].tolist(), getattr(output, "stats", None)
    return {**found, "tokens": tokens, "passes": stats.steps if stats else len(tokens)}


def answer(opened: Callable[..., Any], called: Callable[..., dict[str, Any]]) -> None:
    """Answer until the input ends; nothing but answers goes to stdout. What ``opened`` returns, of a request that names
    a model, is the first argument of ``called``."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    lookahead.augment_all()
    held: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        if "model" in request:
            held = opened(**request)
        told = {"package": lookahead.__file__} if "model" in request else called(held, **request)
        answers.write(json.dumps(told) + "\n")
        answers.flush()


if __name__ == "__main__":
    answer(load, call)
