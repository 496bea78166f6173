"""Answers to Spec-Bench's questions, in the format that its own scripts read.

    python -m benchmarks.specbench question.jsonl --answers ours.jsonl --answers-baseline plain.jsonl

Spec-Bench (Xia et al., arXiv 2401.07851) divides the sum of ``new_tokens`` by the sum of ``wall_time`` and averages
``accept_lengths``, the tokens of each pass. The last line on stdout is one JSON document.
"""

import json
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import lookahead
from benchmarks import options
from benchmarks.contenders import METHODS, Method, methods
from benchmarks.harness import Run, load, progress, quiet_console, wait
from benchmarks.options import MODES, chosen


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
        row = {"question_id": question["question_id"], "category": question["category"]}
        row |= {"answer_id": uuid.uuid4().hex, "model_id": model_id}
        return {**row, "choices": [{"index": 0, **vars(self)}], "tstamp": time.time()}


def read_questions(file: Path, count: int | None = None) -> list[dict[str, Any]]:
    """The questions of a file of JSON lines; a line that is none is refused by its number."""
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
    if not tokenizer.chat_template:
        pairs = zip(answers, turns[1:], strict=True)
        return list(tokenizer("\n".join([turns[0], *(text for pair in pairs for text in pair)]))["input_ids"])
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(answers, turns[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def answer(
    model: Any, tokenizer: Any, method: Method, turns: list[str], mode: dict[str, Any], new_tokens: int
) -> Answer:
    """Decode every turn of a question; a conversation longer than the model's positions loses its beginning."""
    table = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    settings = {"max_new_tokens": new_tokens, "return_dict_in_generate": True, **mode, **method.settings}
    done = Answer()
    torch.manual_seed(0)
    for number in range(len(turns)):
        row = conversation(tokenizer, turns[: number + 1], done.turns)
        row = row[-max(1, table - new_tokens) :] if table else row
        ids = torch.tensor([row], device=model.device)
        wait(model.device)
        start = time.perf_counter()
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
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


def with_passes(method: Method) -> Method:
    """The same method, which also tells what each pass wrote; plain decoding needs nothing for that."""
    if method.kind != "ours":
        return method
    strategy = replace(method.settings["lookahead_strategy"], stats="detailed")
    return replace(method, settings={"lookahead_strategy": strategy})


def main(
    questions: Annotated[Path, typer.Argument(help="Spec-Bench's question.jsonl.", exists=True, dir_okay=False)],
    answers: Annotated[Path | None, typer.Option(help="Where our answers go.")] = None,
    answers_baseline: Annotated[Path | None, typer.Option(help="Where plain generate's answers go.")] = None,
    method: Annotated[str, typer.Option(help=f"Ours: one of {', '.join(METHODS)}.")] = "auto",
    model_dir: options.ModelDir = None,
    count: Annotated[int | None, typer.Option(help="How many questions; default: all.")] = None,
    mode: Annotated[str, typer.Option(help=f"One of {', '.join(MODES)}.")] = "greedy",
    new_tokens: options.NewTokens = 128,
    dtype: options.Dtype = "float32",
    threads: options.Threads = None,
    device: str = "cpu",
    out: options.Out = None,
) -> None:
    """Answer every question with each method that has a file to go to, in turn."""
    console = quiet_console(threads)
    table, _ = methods(chosen(method, METHODS, "method"), device)
    files = {name: file for name, file in ((method, answers), ("plain", answers_baseline)) if file is not None}
    if not files:
        raise typer.BadParameter("expected --answers, --answers-baseline or both: got neither")
    contenders = {name: with_passes(table[name]) for name in files}
    asked, settings = read_questions(questions, count), MODES[chosen(mode, MODES, "mode")[0]]
    named = {"model": str(model_dir or "bundled"), "device": device, "dtype": dtype, "mode": mode}
    run = Run("questions", out, **named, new_tokens=new_tokens, questions=len(asked), results={})
    lookahead.augment_all()
    loaded = load(model_dir, dtype, device, full_length=False)
    found: dict[str, list[Answer]] = {name: [] for name in contenders}
    for name, contender in contenders.items():
        answer(*loaded, contender, ["x"], settings, min(16, new_tokens))
        files[name].parent.mkdir(parents=True, exist_ok=True)
        files[name].write_text("")
    with progress(console, "questions", len(asked)) as tick:
        for question in asked:
            for name, contender in contenders.items():
                found[name].append(answer(*loaded, contender, question["turns"], settings, new_tokens))
                line = found[name][-1].row(question, f"{Path(named['model']).name}-{dtype}-{name}")
                with files[name].open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
            tick()
    for name, given in found.items():
        lengths = [length for each in given for length in each.accept_lengths]
        seconds = sum(sum(each.wall_time) for each in given)
        figures = {"S": sum(lengths) / len(lengths), "tokens_per_s": sum(lengths) / seconds}
        same = [ours.turns == plain.turns for ours, plain in zip(given, found.get("plain", given), strict=True)]
        run.document["results"][name] = {"all": {**figures, "answers_that_differ": same.count(False)}}
    run.finish()


if __name__ == "__main__":
    typer.run(main)
