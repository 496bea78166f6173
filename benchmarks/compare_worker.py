"""One checkout's side of benchmarks.compare: it holds a model and answers requests, a line of JSON each.

It runs with a checkout's path as PYTHONPATH, and uses only what is public in every version of the library. Requests:
``{"load": FOLDER or null, "dtype", "device", "threads"}``, then ``{"prompt", "seed", "arguments", "strategy"}``, where
``strategy`` holds the fields of a ``Lookahead`` or is null.
"""

import json
import os
import sys
import time
from typing import Any

import torch
import transformers

import lookahead


class Worker:
    """A loaded model, and timed calls of its ``generate``."""

    def load(self, load: str | None, dtype: str, device: str, threads: int) -> dict[str, Any]:
        """Load a model anew, so that it remembers nothing; tell which checkout's code this is."""
        torch.set_num_threads(threads)
        kind = getattr(torch, dtype)
        if load is None:
            self.model, self.tokenizer = lookahead.load_bundled(dtype=kind, device=device)
        else:
            self.model, self.tokenizer = lookahead.load_model(load, dtype=kind, device=device)
        settings = self.model.generation_config
        settings.eos_token_id = None  # every text has full length
        if settings.pad_token_id is None:
            settings.pad_token_id = self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0
        lookahead.augment_all()
        return {"package": lookahead.__file__}

    def call(
        self, prompt: str, seed: int, arguments: dict[str, Any], strategy: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Decode one prompt: its tokens, wall and process milliseconds, and counts."""
        ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"].to(self.model.device)
        if strategy is not None:
            arguments = {**arguments, "lookahead_strategy": lookahead.Lookahead(**strategy)}
        torch.manual_seed(seed)
        self._wait()
        wall, process = time.perf_counter(), time.process_time()
        output = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **arguments
        )
        self._wait()
        wall_ms, cpu_ms = 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - process)
        tokens = output.sequences[0, ids.shape[1] :].tolist()
        found: dict[str, Any] = {"tokens": tokens, "wall_ms": wall_ms, "cpu_ms": cpu_ms, "passes": len(tokens)}
        stats = getattr(output, "stats", None)
        if stats is not None:
            found |= {"passes": stats.steps, "drafted": stats.drafted, "fallback": stats.plain}
        return found

    def _wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    """Answer until the input ends; only answers go to stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        answer = worker.load(**request) if "load" in request else worker.call(**request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
