"""One way to decode of benchmarks.rivals: it holds a model and answers requests, a line of JSON each.

Requests are the arguments of :func:`opened` (they name the ``model``), and then those of the writer that it returns.
"""

import resource
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch
import transformers

import lookahead
from benchmarks.compare_worker import answer

# A prompt, tokens to write, temperature, seed: tokens, and when each came.
Writer = Callable[[list[int], int, float, int], Iterable[tuple[int, float]]]
RIVALS = {"llama.cpp": "llama_cpp", "OpenVINO": "openvino_genai"}  # and their modules; with "lookup" they draft, too


def opened(way: str, model: str, gguf: str, threads: int, context: int) -> Writer:
    """What writes as ``RIVAL`` or ``RIVAL lookup`` does, ``PRECISION plain`` or ``PRECISION lookahead``."""
    torch.set_num_threads(threads)
    name, *drafts = way.split()
    if name == "OpenVINO":
        return _openvino(bool(drafts), gguf, threads)
    return _llama(bool(drafts), gguf, threads, context) if name in RIVALS else _ours(name, *drafts, model)


def _llama(drafts: bool, gguf: str, threads: int, context: int) -> Writer:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = LlamaPromptLookupDecoding() if drafts else None
    held = {"n_threads": threads, "n_threads_batch": threads, "draft_model": draft, "verbose": False}
    model = Llama(gguf, n_ctx=context, **held)

    def write(prompt: list[int], new_tokens: int, temperature: float, seed: int) -> Iterable[tuple[int, float]]:
        model.reset()  # or a prompt that begins as the last one did would be read in part
        model.set_seed(seed)
        settings = {"temp": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return ((token, time.perf_counter()) for token in islice(model.generate(prompt, **settings), new_tokens))

    return write


def _openvino(drafts: bool, gguf: str, threads: int) -> Writer:
    import openvino
    import openvino_genai as genai

    model = genai.LLMPipeline(gguf, "CPU", INFERENCE_NUM_THREADS=threads, prompt_lookup=drafts)
    lookup = {"num_assistant_tokens": 10, "max_ngram_size": 2} if drafts else {}  # as llama-cpp-python has them

    class Timed(genai.StreamerBase):  # type: ignore[misc]
        def write(self, tokens: int | list[int]) -> Any:
            self.came += [time.perf_counter()] * (1 if isinstance(tokens, int) else len(tokens))
            return genai.StreamingStatus.RUNNING

        end = int  # nothing to do

    def write(prompt: list[int], new_tokens: int, temperature: float, seed: int) -> Iterable[tuple[int, float]]:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 1 << 20, "rng_seed": seed}
        settings, timed = (sampling if temperature else {}) | lookup, Timed()
        config = genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, **settings)
        timed.came = []
        output = model.generate(openvino.Tensor(torch.tensor([prompt]).numpy()), config, timed)
        return zip(output.tokens[0], timed.came, strict=False)

    return write


def _ours(precision: str, way: str, folder: str) -> Writer:
    model, _ = lookahead.load_model(folder, torch.bfloat16)
    model.generation_config.eos_token_id = None  # every text has full length
    model.generation_config.pad_token_id = 0
    if precision != "bfloat16":
        lookahead.quantize(model, precision)  # type: ignore[arg-type]
    settings: dict[str, Any] = {"use_lookahead": True} if way == "lookahead" else {}

    class Timed(transformers.generation.streamers.BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            self.came += [time.perf_counter()] * value.numel()

        end = int  # nothing to do

    def write(prompt: list[int], new_tokens: int, temperature: float, seed: int) -> Iterable[tuple[int, float]]:
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        timed, ids = Timed(), torch.tensor([prompt])
        timed.came = []
        sampling |= settings | {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens}
        output = model.generate(ids, streamer=timed, **sampling)[0].tolist()
        return list(zip(output, timed.came, strict=True))[len(prompt) :]

    return write


def call(write: Writer, **request: Any) -> dict[str, Any]:
    """Write one text: its tokens, the seconds to the first one and to the last, and the process's most memory."""
    begun = time.perf_counter()
    tokens, came = zip(*write(**request), strict=True)
    seconds = {"first_s": came[0] - begun, "last_s": came[-1] - begun}
    return {"tokens": tokens, **seconds, "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


if __name__ == "__main__":
    answer(opened, call)
