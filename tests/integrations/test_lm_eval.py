"""lm-evaluation-harness: the same texts and results as its own model, with stop strings that end in mid-pass."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lookahead.cli.prompts import PROMPTS

pytestmark = pytest.mark.integrations
lm_eval = pytest.importorskip("lm_eval")

ASSETS = Path(__file__).parents[2] / "lookahead" / "assets" / "tiny-coder"
TASK = """
task: local_code
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{prompt}}}}"
generation_kwargs:
  until: {until}
  max_gen_toks: 48
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""
PROGRAM = """
import json, sys
from lookahead.integrations.lm_eval import LookaheadLM
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
folder, model, batch, gen_kwargs, lookahead = json.loads(sys.argv[1])
arguments = {"pretrained": sys.argv[2], "dtype": "float64"} | ({"lookahead": lookahead} if lookahead else {})
found = simple_evaluate(
    model=model, model_args=arguments, tasks=["local_code"], batch_size=batch, device="cpu", gen_kwargs=gen_kwargs,
    task_manager=TaskManager(include_path=folder), log_samples=True, bootstrap_iters=0,
)
samples = sorted(found["samples"]["local_code"], key=lambda sample: sample["doc_id"])
print("TEXTS" + json.dumps([sample["resps"] for sample in samples]))
"""


@pytest.fixture(scope="module", params=[["\n\n"], ["return", "self."]], ids=["blank-line", "words"])
def task(request: Any, tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("task")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    (folder / "local_code.yaml").write_text(TASK.format(data=data, until=json.dumps(request.param)))
    return folder


def texts(folder: Path, model: str, batch: int, gen_kwargs: str | None = None, lookahead: Any = None) -> Any:
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "TQDM_DISABLE": "1"}
    given = json.dumps([str(folder), model, batch, gen_kwargs, lookahead])
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, given, str(ASSETS)]
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.partition("TEXTS")[2])


def test_texts_are_those_of_hf(task: Path) -> None:
    for batch in (1, 4):
        plain = texts(task, "hf", batch)
        assert len(plain) == len(PROMPTS)
        assert texts(task, "hf-lookahead", batch) == plain
        if batch == 1:
            assert texts(task, "hf", batch, "use_lookahead=True") == plain
            settings = {"window_size": 5, "ngram_size": 4, "verification_set_size": 5}
            assert texts(task, "hf-lookahead", batch, None, {"strategy": "lookahead"} | settings) == plain
