"""Files of prompts are read by one rule, whatever the command."""

import json
from pathlib import Path

import pytest

from jacobi import LookaheadError
from lookahead.cli import load_command
from lookahead.cli.prompts import read_prompts


def test_a_line_is_a_prompt_or_an_object_that_holds_one(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('x = 1\n\n  {"prompt": "y\\nz", "id": 3}\n"quoted"\n3\n{ return x; }\n{x: 1}\n')
    assert read_prompts(file) == ["x = 1", "y\nz", '"quoted"', "3", "{ return x; }", "{x: 1}"]


def test_every_line_of_a_jsonl_file_is_an_object(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": text}) for text in ("x = 1", "ü\n")) + "\n\n")
    assert read_prompts(file) == ["x = 1", "ü\n"]
    for line, message in (("x = 1", "is not JSON"), ('"x = 1"', 'expected an object with a "prompt"')):
        file.write_text(f'{{"prompt": "x"}}\n{line}\n')
        with pytest.raises(LookaheadError, match=rf"--prompts \S+prompts\.jsonl, line 2.*{message}"):
            read_prompts(file)


@pytest.mark.parametrize("name", ["tree", "tune", "verify"])
def test_the_rule_is_in_each_commands_help(name: str) -> None:
    (option,) = (parameter for parameter in load_command(name).params if parameter.name == "prompts")
    assert 'every line of a .jsonl file, is a JSON object with a "prompt"' in option.help
