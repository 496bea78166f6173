"""What a server counts, and what keeps its clients apart."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.serving import NAME, PROMPT, Asked, bundled, client, plain, served

from lookahead.generation.watch import Pass, RowPass
from lookahead.serve.jobs import Answer, AnswerStream
from lookahead.serve.metrics import Metrics
from lookahead.stats import DecodingStats

pytestmark = pytest.mark.usefixtures("augmented", "nodes_are_cheap")
BOARD = Path(__file__).parents[2] / "docs/grafana.json"
METRIC = re.compile(r"vllm:\w+")
GIVEN: dict[str, Any] = {"model": NAME, "temperature": 0}


def test_passes_with_drafts_are_counted() -> None:
    job = Asked(8)
    stream = AnswerStream(job, 0, bundled()[1])
    alone = RowPass((5,), (-1,), ("",), (1.0,), (0,), (6,))
    drafted = RowPass((5, 6), (-1, 0), ("", "pool"), (1.0, 0.5), (0,), (7,))
    for index, row in enumerate((alone, alone, drafted, alone)):
        stream.see(Pass(index, (row,), 0.0, 0.0, 0.0, 0.0))
    metrics = Metrics("m", lambda: 0, lambda: 0)
    counted = {"drafted": 6, "histogram": {1: 2, 2: 1, 4: 1}, "sources": {"pool": 1, "suffix": 3}}
    metrics.count(Answer(0, [6, 6, 7, 6], 1, 0, "length", DecodingStats(steps=4, **counted), stream.drafts))
    lines = metrics.text().decode().splitlines()
    assert 'vllm:spec_decode_num_drafts_total{model_name="m"} 1.0' in lines
    by_depth = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    found = {line.split("position=")[1]: line for line in lines if line.startswith(by_depth)}
    assert list(found) == ['"0"} 2.0', '"1"} 1.0', '"2"} 1.0']
    by_source = "vllm:spec_decode_num_accepted_tokens_per_source_total"
    assert f'{by_source}{{model_name="m",source="suffix"}} 3.0' in lines


def test_the_board_asks_for_figures_that_there_are() -> None:
    board = json.loads(BOARD.read_text(encoding="utf-8"))
    asked = {name for panel in board["panels"] for each in panel["targets"] for name in METRIC.findall(each["expr"])}
    known = Metrics("m", lambda: 0, lambda: 0).text().decode()
    assert len(asked) > 9 and all(f"# TYPE {name.removesuffix('_bucket')} " in known for name in asked)


def test_requests_of_another_salt_find_no_kept_cache() -> None:
    with served(rows=1) as address, client(address) as openai:
        given = GIVEN | {"max_tokens": 8, "prompt": PROMPT * 4}
        salts = (None, "a", "b", "a", None)
        usages = [openai.completions.create(**given, extra_body={"cache_salt": salt}).usage for salt in salts]
    assert [bool(usage.prompt_tokens_details.cached_tokens) for usage in usages] == [False, False, False, True, True]


@pytest.mark.parametrize("most", [0, 2])
def test_a_request_bounds_its_drafts(openai: Any, most: int) -> None:
    answer = openai.completions.create(**GIVEN, prompt=PROMPT, max_tokens=40, extra_body={"speculative.n_max": most})
    assert answer.choices[0].text == plain(PROMPT, max_new_tokens=40, do_sample=False)
    passes, drafted = (answer.usage.lookahead[name] for name in ("passes", "drafted_tokens"))
    assert drafted <= most * passes and (passes == 40) == (most == 0)
