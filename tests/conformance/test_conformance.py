"""Every family that transformers knows: its route is the recorded one, and its text is plain decoding's.

The families come from transformers' own mappings, so a new one appears by itself: as a failure that says how it is
recorded. ``make test`` looks at one of each kind in brief and at a dozen with fewer drafts, ``make conformance`` at all
in full.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from conformance import checks
from conformance.families import FAMILIES, Family
from conformance.record import DOCUMENT, RECORD, document, recorded
from helpers.packing import packs

pytestmark = pytest.mark.usefixtures("augmented", "passes_count")

# One family for each way in which models differ.
FAST = {
    f"{family.name}-{family.architecture}"
    for family in FAMILIES
    if family.architecture
    in (
        "BloomForCausalLM",
        "DeepseekV32ForCausalLM",
        "FalconForCausalLM",
        "Gemma2ForCausalLM",
        "GPTNeoForCausalLM",
        "GptOssForCausalLM",
        "Lfm2ForCausalLM",
        "Llama4ForCausalLM",
        "MambaForCausalLM",
        "MarianMTModel",
        "MistralForCausalLM",
        "OPTForCausalLM",
        "OpenAIGPTLMHeadModel",
        "T5ForConditionalGeneration",
    )
}

RECORDED = json.loads(RECORD.read_text())["transformers"] == transformers.__version__
OLDER = {  # routes in older versions, where no small model of the one can be made and the other draws in its passes
    "cohere_compass_text-CohereCompassForCausalLM": "unbuilt",
    "nllb-moe-NllbMoeForConditionalGeneration": "plain",
}
SLOW = ("VibeVoiceAsrForConditionalGeneration",)  # its model takes 20 seconds to make


def _conforms(family: Family, how: Callable[..., None] = checks.exact) -> None:
    known = recorded()
    found, model, inputs = checks.judged(family)
    assert family.key in known, (
        f"{family.name} is new: it was found to be {found.to_dict()}. Look at it, then record it with "
        f"`python tests/conformance/record.py {family.name}`."
    )
    expected = known[family.key]
    route, reason = expected["route"], expected.get("reason")
    if not RECORDED and found.route in (route, OLDER.get(family.key)):  # the errors behind a reason are others there
        route, reason = found.route, found.reason
    assert (found.route, found.reason) == (route, reason), (
        f"{family.name} has silently turned from {route} to {found.route} ({found.reason}). If that is "
        f"meant, record it with `python tests/conformance/record.py {family.name}`."
    )
    kept = {found.bfloat16, expected.get("bfloat16")}  # processors differ in whether it is plain decoding's
    assert len(kept) == 1 or kept == {"plain", "repeatable"} or not RECORDED, (
        f"{family.name} keeps other bits in bfloat16: {found.to_dict()}. If that is meant, record it."
    )
    if found.route in ("tree", "chain"):
        how(model, inputs)
        if found.bfloat16 in ("plain", "repeatable") and how is not checks.exact_in_brief:
            checks.same_bits(family)
        if found.route == "tree" and expected["kind"] == "causal" and packs(torch.float32):
            checks.exact_on_packed_weights(model, inputs)
    elif found.route == "plain" and how is not checks.exact_in_brief:
        checks.refused_or_plain(model, inputs)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.key in FAST], ids=lambda f: f.key)
def test_a_dozen_families(family: Family) -> None:
    """What ``make test`` looks at."""
    _conforms(family, partial(checks.exact, fully=False))


REST = [f for f in FAMILIES if f.key not in FAST]


def one_of_each_kind() -> list[Family]:
    """The first family of each kind that the record tells apart, and all that it does not know."""
    chosen: dict[Any, Family] = {}
    for family in REST:
        found = recorded().get(family.key, {"reason": family.key})
        kind = tuple(found.get(name) for name in ("kind", "route", "reason", "attention", "cache"))
        if family.architecture not in SLOW:
            chosen.setdefault(kind, family)
    return list(chosen.values())


@pytest.mark.parametrize("family", one_of_each_kind(), ids=lambda f: f.key)
def test_one_of_each_kind_in_brief(family: Family) -> None:
    _conforms(family, checks.exact_in_brief)


@pytest.mark.conformance
@pytest.mark.parametrize("family", REST, ids=lambda f: f.key)
def test_every_family(family: Family) -> None:
    """The rest in full."""
    _conforms(family)


def test_the_record_is_of_this_transformers() -> None:
    """No family has disappeared."""
    if not RECORDED:
        pytest.skip("the record is of another transformers")
    assert set(recorded()) <= {family.key for family in FAMILIES}, f"{RECORD} names families that are gone"


def test_the_document_is_the_records() -> None:
    """``docs/models.md`` is made from the record."""
    assert DOCUMENT.read_text() == document(recorded()), "make it with `python tests/conformance/record.py --document`"
