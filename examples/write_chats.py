"""Conversations that a chat model has with itself, to train a head on: it writes the questions, and answers them.

    python examples/write_chats.py --model DIR --out chats.jsonl --minutes 30
    lookahead train --kind eagle --model DIR --data chats.jsonl -o HEAD

Behind the opening of a user's turn a chat model writes what users ask it (Xu et al., arXiv 2406.08464). A third of the
answers are greedy, a third drawn at temperature 0.8, a third at 1.0. Many requests share the passes.
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from lookahead import Lookahead, Scheduler, load_model
from lookahead.chat_format import end_tokens

MARK = "@@@"
ASKED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 0, "min_p": 0.04, "max_new_tokens": 160}
ANSWERED: list[dict[str, Any]] = [
    {"do_sample": False, "max_new_tokens": 256},
    *({"do_sample": True, "temperature": heat, "top_k": 0, "max_new_tokens": 256} for heat in (0.8, 1.0)),
]


def written(
    scheduler: Any, tokenizer: Any, prompts: list[str], settings: list[dict[str, Any]], seed: int, ends: set[int]
) -> list[tuple[str, bool]]:
    """What follows each prompt, and whether it came to an end."""
    tickets, lengths = [], []
    for number, (prompt, given) in enumerate(zip(prompts, settings, strict=True)):
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False, return_token_type_ids=False)
        tickets.append(scheduler.submit(seed=seed + number, **inputs, **given))
        lengths.append(inputs["input_ids"].shape[1])
    scheduler.run()
    rows = [ticket.result()[0, length:] for ticket, length in zip(tickets, lengths, strict=True)]
    kept = [[token for token in row.tolist() if token not in ends] for row in rows]
    texts = [tokenizer.decode(tokens).strip() for tokens in kept]
    return [(text, len(row) > len(tokens)) for text, row, tokens in zip(texts, rows, kept, strict=True)]


def main(
    model: Annotated[str, typer.Option(help="The chat model's folder.")],
    out: Annotated[Path, typer.Option(help="JSON lines are added to this file.")],
    minutes: float = 30.0,
    rows: Annotated[int, typer.Option(help="Conversations at a time.")] = 32,
    seed: int = 0,
) -> None:
    loaded, tokenizer = load_model(model)
    ends = {*end_tokens(loaded), tokenizer.eos_token_id}
    turn = [{"role": "user", "content": MARK}]
    opening, header = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True).split(MARK)
    start, count = time.monotonic(), 0
    with Scheduler(loaded, rows, Lookahead(stats="none")) as scheduler, out.open("a", encoding="utf-8") as file:
        while time.monotonic() - start < 60 * minutes:
            seed += 2 * rows
            found = written(scheduler, tokenizer, [opening] * rows, [ASKED] * rows, seed, ends)
            asked = [question for question, ended in found if question and ended]
            prompts = [opening + question + header for question in asked]
            ways = [ANSWERED[number % 3] for number in range(len(asked))]
            answers = written(scheduler, tokenizer, prompts, ways, seed + rows, ends)
            for question, (answer, _) in zip(asked, answers, strict=True):
                if answer:
                    said = {"user": question, "assistant": answer}
                    messages = [{"role": role, "content": content} for role, content in said.items()]
                    file.write(json.dumps({"messages": messages}) + "\n")
                    count += 1
            file.flush()
            print(f"{count} conversations, {(time.monotonic() - start) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    typer.run(main)
