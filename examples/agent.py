"""A coding agent: OpenAI's client with two tools, whose edits are predicted from the file that it has read.

    lookahead serve --model DIR       # a model whose chat template writes tools, as Qwen2.5-Coder-0.5B-Instruct's does
    python examples/agent.py calc.py "Rename the function add to plus."

The first call is forced to read, the second to write: small models do not find that out. What is forced is drafted
whole, and the new file mostly from the old one. In a call's arguments a file is JSON, so its prediction is, too.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from openai import OpenAI

PATH = {"type": "string", "description": "Where the file lies."}
CONTENT = {"type": "string", "description": "All that the file is to hold."}


def tools_for(files: list[str]) -> list[Any]:
    """Two functions, which know the files that there are."""
    path = PATH | {"enum": files}
    read = {"type": "object", "properties": {"path": path}, "required": ["path"], "additionalProperties": False}
    write = read | {"properties": {"path": path, "content": CONTENT}, "required": ["path", "content"]}
    described = {"read_file": ("Tells what a file holds.", read), "write_file": ("Replaces a whole file.", write)}
    functions = [{"name": n, "description": d, "parameters": p} for n, (d, p) in described.items()]
    return [{"type": "function", "function": function} for function in functions]


def run(call: Any, folder: Path) -> str:
    """What a call returns; the two tools never leave the folder."""
    arguments = json.loads(call.function.arguments)
    file = folder / Path(arguments["path"]).name
    if call.function.name == "read_file":
        return file.read_text()
    file.write_text(arguments["content"])
    return f"{file.name} is written."


def work(client: OpenAI, model: str, files: list[Path], task: str, **settings: Any) -> list[Any]:
    """Let the model do a task with ``files`` of one folder; its answers, the last of which is text."""
    tools = tools_for([file.name for file in files])
    messages: list[Any] = [{"role": "user", "content": f"{task} The files are: {', '.join(f.name for f in files)}."}]
    answers: list[Any] = []
    for forced in ("read_file", "write_file", None):
        asked: dict[str, Any] = {"model": model, "messages": messages, "tools": tools, "tool_choice": "none"} | settings
        if forced:
            asked["tool_choice"] = {"type": "function", "function": {"name": forced}}
        if forced == "write_file":
            old = json.dumps(messages[-1]["content"], ensure_ascii=False)[1:-1]
            asked["prediction"] = {"type": "content", "content": old}
        answers.append(client.chat.completions.create(**asked))
        said = answers[-1].choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        done = ((call.id, run(call, files[0].parent)) for call in said.tool_calls or ())
        messages += [{"role": "tool", "tool_call_id": id, "content": told} for id, told in done]
    return answers


def main(
    file: Path,
    task: Annotated[str, typer.Argument(help="What is to be done with it.")],
    base_url: str = "http://127.0.0.1:8000/v1",
) -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    model = client.models.list().data[0].id
    for answer in work(client, model, [file], task, temperature=0, max_tokens=512):
        said, usage = answer.choices[0].message, answer.usage
        told = ", ".join(f"{call.function.name}({call.function.arguments})" for call in said.tool_calls or ())
        print(told or said.content)
        spent = usage.model_dump()["lookahead"]
        predicted = usage.completion_tokens_details.accepted_prediction_tokens
        print(f"  {usage.completion_tokens} tokens in {spent['passes']} passes, {predicted} of them predicted")


if __name__ == "__main__":
    typer.run(main)
