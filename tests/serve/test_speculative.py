"""``--speculative-config``: vLLM's words for what drafts."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.models import fresh_model
from helpers.mtp import with_layers
from helpers.refusals import refuses

from lookahead import Lookahead
from lookahead.bundled import BUNDLED, BUNDLED_EAGLE
from lookahead.cli.arguments import Chat
from lookahead.cli.common import drafting
from lookahead.cli.speculative import speculation
from lookahead.eagle import Eagle
from lookahead.mtp import Mtp

FOUND: dict[str, tuple[dict[str, Any], type]] = {
    "nothing": ({}, Lookahead),
    "n-grams": ({"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 2}, Lookahead),
    "suffixes": ({"method": "suffix"}, Lookahead),
    "a head": ({"method": "eagle3", "model": str(BUNDLED_EAGLE), "draft_tensor_parallel_size": 1}, Eagle),
    "a head whose kind is not said": ({"model": str(BUNDLED_EAGLE)}, Eagle),
    "a draft model": ({"method": "draft_model", "model": str(BUNDLED)}, Lookahead),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("most", [{}, {"num_speculative_tokens": 5}])
def test_what_drafts(loaded: tuple[Any, Any], name: str, most: dict[str, int]) -> None:
    given, kind = FOUND[name]
    strategy = drafting(Chat(speculative_config=json.dumps(given | most)), *loaded)
    assert type(strategy) is kind and strategy.max_nodes == most.get("num_speculative_tokens", 128)
    assert (getattr(strategy, "draft_model", None) is not None) == (name == "a draft model")


def test_the_models_own_layers(tmp_path: Path, loaded: tuple[Any, Any]) -> None:
    model = with_layers(tmp_path, "mimo")
    options = Chat(speculative_config='{"method": "deepseek_mtp", "num_speculative_tokens": 1}')
    assert isinstance(drafting(options, model, loaded[1]), Mtp)
    refuses("MTP", drafting, options, fresh_model("llama"), loaded[1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON .*: expected an object"),
        ("[]", "must be a JSON object"),
        ('{"method": "mlp_speculator", "model": "a"}', "method='mlp_speculator': expected mtp, draft_model, eagle, "),
        ('{"method": "eagle3"}', "model=None: expected the folder of what drafts by eagle3"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens=0: expected a whole number"),
        ('{"method": "ngram", "rejection_sample_method": "synthetic"}', "has rejection_sample_method: expected method"),
    ],
)
def test_what_is_not_there_is_named(text: str, message: str) -> None:
    refuses(message, speculation, text)


def test_one_of_two_options_says_what_drafts() -> None:
    refuses("both say what drafts", Chat, draft="a", speculative_config="{}")
