"""Answers to Spec-Bench's questions, in the format that its own scripts read.

    python -m benchmarks.race --questions question.jsonl --answers ours.jsonl --answers-baseline plain.jsonl

Spec-Bench (Xia et al., arXiv 2401.07851) divides the sum of ``new_tokens`` by the sum of ``wall_time`` and averages
``accept_lengths``, the tokens of each pass.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import typer

from benchmarks.racing import Method, wait


@dataclass
class Answer:
    """What one method wrote for one question: items a turn, but the tokens of every pass in one list."""

    turns: list[str] = field(default_factory=list)
    decoding_steps: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    wall_time: list[float] = field(default_factory=list)
    accept_lengths: list[int] = field(default_factory=list)

    def row(self, question: dict[str, Any], model_id: str) -> dict[str, Any]:
        """The line of an answer file."""
        return {
            "question_id": question["question_id"],
            "category": question["category"],
            "answer_id": uuid.uuid4().hex,
            "model_id": model_id,
            "choices": [{"index": 0, **vars(self)}],
            "tstamp": time.time(),
        }


def read_questions(file: Path, count: int | None = None) -> list[dict[str, Any]]:
    """The questions of a file of JSON lines.

    Raises:
        typer.BadParameter: a line is no question, by its number.
    """
    questions = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            question = json.loads(line)
            turns = question["turns"]
            fits = {"question_id", "category"} <= question.keys() and turns and all(isinstance(t, str) for t in turns)
        except (ValueError, KeyError, TypeError):
            fits = False
        if not fits:
            raise typer.BadParameter(
                f"{file}, line {number}: expected a JSON object with question_id, category and turns, a list of texts."
            )
        questions.append(question)
    return questions[:count]


def conversation(tokenizer: Any, turns: list[str], answers: list[str]) -> list[int]:
    """The ids of a conversation up to its newest turn: by the chat template, or as lines if there is none."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": turns[0]}]
        for answer, turn in zip(answers, turns[1:], strict=True):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    parts = [turns[0]]
    for answer, turn in zip(answers, turns[1:], strict=True):
        parts += [answer, turn]
    return list(tokenizer("\n".join(parts))["input_ids"])


def with_passes(method: Method) -> Method:
    """The same method, which also tells what each pass wrote; plain decoding needs nothing for that."""
    if method.kind != "ours":
        return method
    strategy = replace(method.settings["lookahead_strategy"], stats="detailed")
    return replace(method, settings={"lookahead_strategy": strategy})


def answer(
    model: Any, tokenizer: Any, method: Method, question: dict[str, Any], mode: dict[str, Any], new_tokens: int
) -> Answer:
    """Decode every turn of a question; a conversation longer than the model's positions loses its beginning."""
    table = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    done = Answer()
    torch.manual_seed(0)
    for number in range(len(question["turns"])):
        row = conversation(tokenizer, question["turns"][: number + 1], done.turns)
        row = row[-max(1, table - new_tokens) :] if table else row
        ids = torch.tensor([row], device=model.device)
        wait(model.device)
        start = time.perf_counter()
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            return_dict_in_generate=True,
            **mode,
            **method.settings,
        )
        wait(model.device)
        done.wall_time.append(time.perf_counter() - start)
        written = output.sequences[0, ids.shape[1] :]
        ours = method.kind == "ours"
        lengths = [each["tokens"][0] for each in output.stats.passes] if ours else [1] * len(written)
        done.turns.append(tokenizer.decode(written, skip_special_tokens=True).strip())
        done.new_tokens.append(len(written))
        done.decoding_steps.append(len(lengths))
        done.accept_lengths += lengths
    return done


def answer_all(
    model: Any,
    tokenizer: Any,
    contenders: dict[str, tuple[Method, Path]],
    questions: list[dict[str, Any]],
    mode: dict[str, Any],
    new_tokens: int,
    model_id: str,
    track: Callable[[list[dict[str, Any]]], Iterator[dict[str, Any]]] = iter,
) -> dict[str, Any]:
    """Answer every question with every contender in turn, write their files, and sum up as Spec-Bench does."""
    found: dict[str, list[Answer]] = {name: [] for name in contenders}
    files = {}
    for name, (method, out) in contenders.items():
        out.parent.mkdir(parents=True, exist_ok=True)
        files[name] = out.open("w", encoding="utf-8")
        first = {**questions[0], "turns": ["x"]}
        answer(model, tokenizer, with_passes(method), first, mode, min(16, new_tokens))
    try:
        for question in track(questions):
            for name, (method, _) in contenders.items():
                done = answer(model, tokenizer, with_passes(method), question, mode, new_tokens)
                found[name].append(done)
                line = done.row(question, f"{model_id}-{name}")
                files[name].write(json.dumps(line, ensure_ascii=False) + "\n")
                files[name].flush()
    finally:
        for file in files.values():
            file.close()
    return {name: _summary(questions, answers, found.get("plain")) for name, answers in found.items()}


def _summary(
    questions: list[dict[str, Any]], answers: list[Answer], plain: list[Answer] | None
) -> dict[str, dict[str, Any]]:
    """By category and overall: mean tokens a pass, mean tokens a second, and equal texts if the baseline ran."""
    groups: dict[str, list[int]] = {"overall": list(range(len(questions)))}
    for index, question in enumerate(questions):
        groups.setdefault(question["category"], []).append(index)
    table = {}
    for category, members in groups.items():
        lengths = [length for i in members for length in answers[i].accept_lengths]
        rates = [sum(answers[i].new_tokens) / sum(answers[i].wall_time) for i in members]
        table[category] = {
            "questions": len(members),
            "S": sum(lengths) / max(1, len(lengths)),
            "tokens_per_s_mean": sum(rates) / len(rates),
            "answers_that_differ": (
                None if plain is None else sum(answers[i].turns != plain[i].turns for i in members)
            ),
        }
    return table
