"""One way to decode of benchmarks.rivals: it holds a model and answers requests, a line of JSON each.

Requests are the arguments of :func:`opened` (they name the ``model``), and then those of the writer that it returns.
"""

import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

import lookahead
from benchmarks.compare_worker import answer

Writer = Callable[[list[int], int, float, int], Iterator[int]]  # a prompt, tokens to write, temperature, seed: tokens
LLAMA = ("llama.cpp", "llama.cpp lookup")  # ways of llama-cpp-python


def opened(way: str, model: str, gguf: str, threads: int, context: int) -> Writer:
    """What writes in one of :data:`LLAMA`'s ways, or ``PRECISION plain`` and ``PRECISION lookahead``."""
    torch.set_num_threads(threads)
    return _llama(way, gguf, threads, context) if way in LLAMA else _ours(*way.split(), model)


def _llama(way: str, gguf: str, threads: int, context: int) -> Writer:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = LlamaPromptLookupDecoding() if way == LLAMA[1] else None
    held = {"n_threads": threads, "n_threads_batch": threads, "draft_model": draft, "verbose": False}
    model = Llama(gguf, n_ctx=context, **held)

    def write(prompt: list[int], new_tokens: int, temperature: float, seed: int) -> Iterator[int]:
        model.reset()  # or a prompt that begins as the last one did would be read in part
        model.set_seed(seed)
        settings = {"temp": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        for _, token in zip(range(new_tokens), model.generate(prompt, **settings), strict=False):
            yield token

    return write


def _ours(precision: str, way: str, folder: str) -> Writer:
    model, _ = lookahead.load_model(folder, torch.bfloat16)
    model.generation_config.eos_token_id = None  # every text has full length
    model.generation_config.pad_token_id = 0
    if precision != "bfloat16":
        lookahead.quantize(model, precision)  # type: ignore[arg-type]
    settings: dict[str, Any] = {"use_lookahead": True} if way == "lookahead" else {}

    class Timed(transformers.generation.streamers.BaseStreamer):
        """Notes when each token came."""

        def put(self, value: torch.Tensor) -> None:
            self.came += [time.perf_counter()] * value.numel()

        def end(self) -> None:
            """Nothing to do."""

    def write(prompt: list[int], new_tokens: int, temperature: float, seed: int) -> Iterator[int]:
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        streamer, ids = Timed(), torch.tensor([prompt])
        streamer.came = write.came = []  # type: ignore[attr-defined]
        sampling |= settings | {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens}
        output = model.generate(ids, streamer=streamer, **sampling)[0, len(prompt) :].tolist()
        del write.came[: len(prompt)]  # type: ignore[attr-defined]
        yield from output

    return write


def call(write: Writer, **request: Any) -> dict[str, Any]:
    """Write one text: its tokens, the seconds to the first one and to the last, and the process's most memory."""
    begun, came, tokens = time.perf_counter(), list[float](), list[int]()
    for token in write(**request):
        tokens.append(token)
        came.append(time.perf_counter())
    came = getattr(write, "came", came)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"tokens": tokens, "first_s": came[0] - begun, "last_s": came[-1] - begun, "memory_mb": memory}


if __name__ == "__main__":
    answer(opened, call)
