"""Self-distillation: the labels are the model's own answers (Cai et al., arXiv 2401.10774, section 2.3.2)."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lookahead.chat_format import end_tokens
from lookahead.strategies.lookahead import Lookahead
from lookahead.training.data import BATCH, Example, Progress
from lookahead.training.settings import TrainingSettings

TEMPERATURE = 0.8  # of drawn texts, where nobody names one


def processes_of(model: PreTrainedModel) -> Any:
    """Those of a training, by accelerate."""
    from accelerate import PartialState  # an optional package, which check_stage has looked for

    return PartialState(cpu=model.device.type == "cpu")


def own_answers(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    settings: TrainingSettings,
    report: Progress | None = None,
) -> list[Example]:
    """Let the model, in evaluation mode, answer prompts of token ids; only the answers' tokens carry loss. Answers are
    kept in files of ``folder``, so that no restart repeats them. Of several processes each answers its share."""
    processes = processes_of(model)
    folder.mkdir(parents=True, exist_ok=True)
    task = json.dumps([list(map(list, prompts)), settings.answer_tokens, settings.temperature, settings.seed])
    name = hashlib.sha256(task.encode()).hexdigest()[:12]
    known = _read(folder, name)
    left = [number for number in range(len(prompts)) if number not in known]
    processes.wait_for_everyone()  # all have seen the same files
    left = left[processes.process_index :: processes.num_processes]
    with (folder / f"{name}.{processes.process_index}.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n")  # after a line that was cut off
        for start in range(0, len(left), BATCH):
            numbers = left[start : start + BATCH]
            answers = _answer(model, [prompts[n] for n in numbers], settings, settings.seed + numbers[0])
            lines = [json.dumps({"prompt": n, "answer": a}) + "\n" for n, a in zip(numbers, answers, strict=True)]
            file.write("".join(lines))
            file.flush()
            if report is not None:
                report(min(1.0, (start + BATCH) / len(left)))
    processes.wait_for_everyone()
    known = _read(folder, name)
    pairs = [(prompt, known[number]) for number, prompt in enumerate(prompts)]
    return [Example.of([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)) for prompt, answer in pairs]


@contextmanager
def writing(temperature: float | None, seed: int) -> Iterator[dict[str, Any]]:
    """Settings for ``generate`` with lookahead decoding: greedy, or sampled without touching torch's own generators."""
    settings = {"custom_generate": Lookahead(seed=seed, stats="none"), "return_dict_in_generate": False}
    if temperature is None:
        yield settings | {"do_sample": False}
        return
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield settings | {"do_sample": True, "temperature": temperature}


def _read(folder: Path, name: str) -> dict[int, list[int]]:
    """The answers that are there, by the prompt's number; empty and broken lines are left out."""
    answers: dict[int, list[int]] = {}
    for file in sorted(folder.glob(f"{name}.*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                record = json.loads(line)
                answers[record["prompt"]] = record["answer"]
    return answers


def padded(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Prompts of several lengths as ``generate`` takes them: padded on the left."""
    pad = next(token for token in (model.generation_config.pad_token_id, *end_tokens(model), 0) if token is not None)
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": pad}


@torch.no_grad()
def _answer(
    model: PreTrainedModel, prompts: list[Sequence[int]], settings: TrainingSettings, seed: int
) -> list[list[int]]:
    ends, inputs = end_tokens(model), padded(model, prompts)
    with writing(settings.temperature, seed) as given:
        output = model.generate(**inputs, **given, max_new_tokens=settings.answer_tokens)
    answers: list[list[int]] = output[:, inputs["input_ids"].shape[1] :].tolist()
    return [answer[: next((at + 1 for at, token in enumerate(answer) if token in ends), None)] for answer in answers]
