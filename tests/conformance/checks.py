"""What has to hold for a family: a verdict, and equality with plain ``generate`` in every way a call can go."""

import re
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from conformance.families import Family, Inputs, build, inputs_for, wide
from helpers.knowing import knowing
from helpers.models import F32, F64, run, same_outputs, same_tokens
from helpers.packing import AT_ONCE as PACKED_AT_ONCE
from torch import Tensor, nn
from transformers import GenerationMixin

from lookahead import Jacobi, Lookahead, LookaheadError
from lookahead.models.names import CACHE
from lookahead.models.traits import ModelTraits
from lookahead.runtime import packing
from lookahead.runtime.tracing import schedule as tracing
from lookahead.support import route as support
from lookahead.support.bits import Texts, bits_of

NEW_TOKENS = 24
TOLERANCE = 1e-3  # of the logits' spread, by which scores and caches may differ: float32 sums in other orders


STRATEGIES = [
    None,
    Lookahead(window_size=5, ngram_size=4, verification_set_size=5, seed=0),
    Lookahead(window_size=2, ngram_size=3, verification_set_size=0, seed=1),
    Lookahead(window_size=9, ngram_size=2, verification_set_size=3, seed=2),
    Jacobi(block_size=4, mode="hybrid", seed=3),
    Jacobi(block_size=5, mode="sliding", seed=4),
]
AT_ONCE = {"_COST": 0.0, "_COMPARED": 0.0, "LOOKS": 2}  # passes are traced from a call's third on
_ADVICE = re.compile(r"[.\s]*Drop use_lookahead( for this model)?\.$|\.$")
# What another processor measures otherwise, and what another version of torch or transformers words otherwise.
_MEASURED = re.compile(r"\bby [-+.\d]+(?:e[-+]?\d+)?(?:nan|inf)? of their spread, allowed [-+.\d]+(?:e[-+]?\d+)?")
_MESSAGE = re.compile(r"\((\w+(?:Error|Exception)): .*\)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a family; in the form in which it is recorded."""

    family: str
    kind: str
    architecture: str
    route: str
    reason: str | None = None
    attention: str | None = None
    cache: str | None = None
    dtype: str | None = None
    bfloat16: str | None = None  # what its numbers keep there, see `lookahead.support.bits`
    bfloat16_reason: str | None = None

    def to_dict(self) -> dict[str, str]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in fields.items() if value is not None}


def stable(reason: str) -> str:
    """A reason without what differs between machines and versions."""
    reason = _MEASURED.sub("by too much", reason)
    reason = _MESSAGE.sub(r"(\1)", reason)
    return _ADVICE.sub("", reason)


def tiny(family: Family) -> tuple[Any, Inputs]:
    """The family's tiny model and what it reads, in float64 if it runs there.

    Eager attention has no float64 with left padding.
    """
    errors: list[Exception] = []
    for dtype in (F64, F32):
        model = build(family)
        if dtype is F64:
            if model.config.get_text_config(decoder=True)._attn_implementation == "eager":
                continue
            if any("experts" in name for name, _ in model.named_modules()) and hasattr(
                model, "set_experts_implementation"
            ):
                model.set_experts_implementation("eager")
        model = model.to(dtype)
        try:
            inputs = inputs_for(family, model)
            settings = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_scores": True}
            scores = run(model, inputs(1), **settings)[0].scores
        except Exception as error:
            errors.append(error)
            continue
        if all(line.isfinite().any() for line in scores):
            return model, inputs
    raise errors[-1] if errors else RuntimeError("no finite scores")


def judged(family: Family) -> tuple[Verdict, Any, Inputs | None]:
    """What lookahead makes of a family, and its model and inputs if there are any."""
    try:
        model, inputs = tiny(family)
    except Exception as error:
        name = type(error).__name__
        return Verdict(family.name, family.kind, family.architecture, "unbuilt", name), None, None
    route, reason = support.verdict(model)
    cache = run(model, inputs(1), max_new_tokens=2, return_dict_in_generate=True)[0].get(CACHE)
    cache = getattr(cache, "self_attention_cache", cache)
    kinds = sorted({type(layer).__name__ for layer in getattr(cache, "layers", [])})
    attention = str(model.config.get_text_config(decoder=True)._attn_implementation)
    dtype = str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix("torch.")
    kind = "encoder-decoder" if model.config.is_encoder_decoder else "causal"
    reason = None if reason is None else stable(reason)
    names = {"family": family.name, "kind": kind, "architecture": family.architecture}
    facts = {"attention": attention, "cache": ", ".join(kinds) or "none", "dtype": dtype}
    return Verdict(**names, route=route, reason=reason, **facts, **bits(family, route)), model, inputs


def in_bfloat16(family: Family) -> Any:
    """A model of the family in bfloat16, as wide as it can be made."""
    try:
        with wide():
            return build(family).to(torch.bfloat16)
    except Exception:
        return build(family).to(torch.bfloat16)


def bits(family: Family, route: str) -> dict[str, str]:
    """What a small model of the family keeps in bfloat16 if it is asked to, ``"none"`` with the reason if nothing."""
    try:
        model = in_bfloat16(family)
        if route == "tree":  # some layers attend in ways that only a pass shows
            given = inputs_for(family, model)(1) | {"max_new_tokens": 6, "do_sample": False}
            run(model, given, use_lookahead=True, lookahead_strategy=Lookahead(repeatable=True))
        with torch.no_grad():
            return {"bfloat16": str(bits_of(model, ModelTraits.of(model), route, True).keeps)}
    except Exception as error:
        reason = str(error).split("cannot be kept: ")[-1].split(". Leave")[0]
        known = isinstance(error, LookaheadError)
        return {"bfloat16": "none", "bfloat16_reason": reason if known else type(error).__name__}


def same_bits(family: Family) -> None:
    """Assert that a family's texts in bfloat16 are the same for all drafts, and plain decoding's if that is kept."""
    model = in_bfloat16(family)
    inputs = inputs_for(family, model)
    strategies = [replace(each, repeatable=True) for each in (Lookahead(), Lookahead(nodes=3), STRATEGIES[1])]
    for batch, sampled in product((1, 3), (False, True)):
        given = inputs(batch) | {"max_new_tokens": NEW_TOKENS, "do_sample": sampled}
        with torch.no_grad():
            keeps = bits_of(model, ModelTraits.of(model), "tree", True, Texts(batch, 64)).keeps  # no window is as long
        texts = [run(model, given, use_lookahead=True, lookahead_strategy=each)[0] for each in strategies]
        texts += [run(model, given)[0]] if keeps == "plain" else []
        for text in texts[1:]:
            assert torch.equal(text, texts[0])


def exact(model: Any, inputs: Inputs, *, fully: bool = True) -> None:
    """Assert that a model writes plain decoding's text: greedy, sampled, in a batch, from a cache, for all drafts.

    And from traced passes, where it has any. Not ``fully``: greedy alone and sampled in a batch, for fewer drafts.
    """
    strategies = STRATEGIES if fully else STRATEGIES[:2] + STRATEGIES[4:5]
    with torch.no_grad():
        may_be_traced = support.route(model)[0] == "tree" and tracing.untraceable(model) is None
    for batch in (1, 3):
        given = inputs(batch)
        start = _start(model, given)
        for sample in (False, True) if fully else (batch > 1,):
            settings = {"max_new_tokens": NEW_TOKENS, "do_sample": sample, "return_dict_in_generate": True}
            settings["output_logits"] = True
            # Pop2Piano keeps the settings of a call for the next one.
            plain = run(model, given, use_lookahead=False, **settings)
            if batch == 1:
                _windows_are_short(plain[0].get(CACHE), start)
            right = knowing(plain[0].sequences, start)
            lines = torch.cat(plain[0].logits)
            tolerance = TOLERANCE * max(1.0, lines[lines.isfinite()].std().item())
            for strategy in [right, *strategies] if not sample else [right, *strategies[:2]]:
                ours = run(model, given, use_lookahead=True, lookahead_strategy=strategy, **settings)
                same_outputs(ours, plain, model.dtype, tolerance)
                stats = ours[0].stats
                if stats is None:
                    assert own_output(model), "nothing tells what the call did"
                    continue
                assert not stats.plain, "handed over, though the route says otherwise"
                if batch == 1 and strategy is right:
                    assert stats.mean_acceptance_length > 1.5, "drafts of the true text were not followed"
            with patch.multiple(tracing, **AT_ONCE):
                for strategy in strategies[:2]:
                    ours = run(model, given, use_lookahead=True, lookahead_strategy=strategy, **settings)
                    same_outputs(ours, plain, model.dtype, tolerance)
                if may_be_traced:
                    _is_traced(model)
        _continued(model, given)
    _leaving(model, inputs(6))


def _leaving(model: Any, given: dict[str, Any]) -> None:
    """Assert the same of sequences that end one after the other, and leave the passes of the others if they can."""
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    text, _ = run(model, given, use_lookahead=False, **settings)
    if not isinstance(text, Tensor):
        return  # some return all they have, whatever is asked for, so that nobody leaves
    start = _start(model, given)
    settings["eos_token_id"] = sorted({int(text[row, start + 2 + 3 * row]) for row in range(4)})
    for sample in (False, True):
        same_tokens(model, given, Lookahead(nodes=5), **settings | {"do_sample": sample})


def exact_in_brief(model: Any, inputs: Inputs) -> None:
    """Assert that a model writes plain decoding's greedy text with drafts of that text, and follows them."""
    given = inputs(1)
    start = _start(model, given)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    plain, _ = run(model, given, use_lookahead=False, **settings)
    right = knowing(plain.sequences, start)
    ours, _ = run(model, given, use_lookahead=True, lookahead_strategy=right, **settings)
    assert torch.equal(ours.sequences, plain.sequences)
    assert own_output(model) or ours.stats.mean_acceptance_length > 1.5, "drafts of the true text were not followed"


def exact_on_packed_weights(model: Any, inputs: Inputs) -> None:
    """Assert that a model of trees, in float32, writes plain decoding's text on packed weights."""
    model = model.float()
    with patch.multiple(packing, **PACKED_AT_ONCE):
        packing.packing_of(model).spend(1, 1.0)
        for batch in (1, 3):
            settings = {"max_new_tokens": NEW_TOKENS, "do_sample": batch > 1, "top_k": 0}
            plain, _ = run(model, inputs(batch), use_lookahead=False, **settings)
            ours, _ = run(model, inputs(batch), use_lookahead=True, lookahead_strategy=Lookahead(nodes=6), **settings)
            assert torch.equal(ours, plain)
        layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
        assert packing.packing_of(model).weights or not layers


def _start(model: Any, given: dict[str, Any]) -> int:
    """How many tokens a text has before anything is written."""
    return 1 if model.config.is_encoder_decoder else given["input_ids"].shape[1]


def _is_traced(model: Any) -> None:
    """Assert that a model's passes were traced, or could not be for a reason that lies in its code."""
    found = tracing._kept.of(model)[-1]
    assert found.made or re.search("reads tensors|TorchScript interpreter", str(found.failure)), found.failure


def own_output(model: Any) -> bool:
    """Whether a model's own ``generate`` makes a new output of ours, which leaves the statistics behind (Whisper)."""
    return type(model).generate is not GenerationMixin.generate


def _windows_are_short(cache: Any, prompt: int) -> None:
    """Assert that texts outgrow every sliding window: by the prompt alone, or (no prompt) by what is written."""
    cache = getattr(cache, "self_attention_cache", cache)
    for layer in getattr(cache, "layers", []):
        window = getattr(layer, "sliding_window", None)
        assert window is None or window < max(prompt, NEW_TOKENS), f"the window of {window} is never left"


def _continued(model: Any, given: dict[str, Any]) -> None:
    """A second turn from the cache that the first one left, in rows of different lengths if ``given`` has such."""
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    outputs = []
    for use in (False, True):
        settings = {"do_sample": False, "return_dict_in_generate": True, "use_lookahead": use}
        turn = run(model, given, max_new_tokens=9, **settings)[0]
        cache = turn.get(CACHE)
        if cache is None:
            return
        batch = len(turn.sequences)
        more = torch.randint(4, 40, (batch, 5), generator=torch.Generator().manual_seed(3))
        text = torch.cat([turn.sequences, more], dim=1)
        mask = torch.ones_like(text)
        if not prefix and "attention_mask" in given:
            mask[:, : given["attention_mask"].shape[1]] = given["attention_mask"]
        following = given | {f"{prefix}input_ids": text, ModelTraits.of(model).cache_argument: cache}
        if not prefix:
            following["attention_mask"] = mask
        outputs.append(run(model, following, max_new_tokens=12, **settings)[0].sequences.tolist())
    assert outputs[0] == outputs[1]


def refused_or_plain(model: Any, inputs: Inputs) -> None:
    """Assert that a model that lookahead does not decode is refused by name, or gets plain decoding's text."""
    for sample in (False, True):
        settings = {"max_new_tokens": NEW_TOKENS, "do_sample": sample}
        plain = run(model, inputs(1), use_lookahead=False, **settings)[0]
        try:
            ours = run(model, inputs(1), use_lookahead=True, **settings)[0]
        except LookaheadError:
            return
        assert ours.tolist() == plain.tolist()
