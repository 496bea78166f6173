"""What has to hold for a family: a verdict, and equality with plain ``generate`` in every way a call can go."""

from dataclasses import dataclass
from typing import Any

import torch
from conftest import F32, F64, prompts, run, same_as_plain
from families import Family, build
from known import known

from lookahead import Lookahead, LookaheadError, support

NEW_TOKENS = 24
TOLERANCE = 1e-4  # of scores and caches: some families compute in float32 whatever their dtype


STRATEGIES = [
    None,
    Lookahead(window_size=5, ngram_size=4, verification_set_size=5, seed=0),
    Lookahead(window_size=2, ngram_size=3, verification_set_size=0, seed=1),
    Lookahead(window_size=9, ngram_size=2, verification_set_size=3, seed=2),
]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a family; in the form in which it is recorded."""

    architecture: str
    route: str
    reason: str | None = None
    attention: str | None = None
    cache: str | None = None
    dtype: str | None = None

    def to_dict(self) -> dict[str, str]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in fields.items() if value is not None}


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def tiny(family: Family) -> Any:
    """The family's tiny model, in float64 if it runs there; eager attention has no float64 with left padding."""
    errors = []
    for dtype in (F64, F32):
        model = build(family)
        if dtype is F64:
            if model.config.get_text_config()._attn_implementation == "eager":
                continue
            if any("experts" in name for name, _ in model.named_modules()) and hasattr(
                model, "set_experts_implementation"
            ):
                model.set_experts_implementation("eager")
        model = model.to(dtype)
        try:
            scores = run(model, prompts(1), max_new_tokens=3, return_dict_in_generate=True, output_scores=True)[
                0
            ].scores
        except Exception as error:
            errors.append(error)
            continue
        if all(line.isfinite().any() for line in scores):
            return model
    raise errors[-1] if errors else RuntimeError("no finite scores")


def judged(family: Family) -> tuple[Verdict, Any]:
    """What lookahead makes of a family, and its model if there is one."""
    try:
        model = tiny(family)
    except Exception as error:
        return Verdict(family.architecture, "unbuilt", _short(error)), None
    route, reason = support.verdict(model)
    if reason is not None:
        reason = (
            reason.removesuffix(" Drop use_lookahead.").removesuffix(" Drop use_lookahead for this model.").rstrip(".")
        )
    cache = run(model, prompts(1), max_new_tokens=2, return_dict_in_generate=True)[0].get("past_key_values")
    kinds = sorted({type(layer).__name__ for layer in getattr(cache, "layers", [])})
    attention = str(model.config.get_text_config()._attn_implementation)
    dtype = str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix("torch.")
    return Verdict(family.architecture, route, reason, attention, ", ".join(kinds) or "none", dtype), model


def exact(model: Any) -> None:
    """Assert that a model writes plain decoding's text: greedy, sampled, in a batch, from a cache, for all drafts."""
    for batch in (1, 3):
        inputs = prompts(batch)
        for sample in (False, True):
            settings = {"max_new_tokens": NEW_TOKENS, "do_sample": sample}
            output = same_as_plain(
                model, inputs, known(model, inputs, **settings), output_logits=True, tolerance=TOLERANCE, **settings
            )
            if batch == 1:
                assert output.stats.mean_acceptance_length > 1.5, "drafts of the true text were not followed"
            for strategy in STRATEGIES if not sample else STRATEGIES[:2]:
                same_as_plain(model, inputs, strategy, tolerance=TOLERANCE, **settings)
    _continued(model)


def _continued(model: Any) -> None:
    """A second turn from the cache that the first one left."""
    outputs = []
    first = prompts(1)
    for use in (False, True):
        turn = run(model, first, max_new_tokens=9, do_sample=False, return_dict_in_generate=True, use_lookahead=use)[0]
        cache = turn.past_key_values
        if cache is None:
            return
        following = torch.cat([turn.sequences, prompts(1, 5, seed=3)["input_ids"]], dim=1)
        inputs = {"input_ids": following, "attention_mask": torch.ones_like(following)}
        outputs.append(
            run(model, inputs, max_new_tokens=12, do_sample=False, past_key_values=cache, use_lookahead=use)[0]
        )
    assert outputs[0].tolist() == outputs[1].tolist()


def refused_or_plain(model: Any) -> None:
    """Assert that a model that lookahead does not decode is refused by name, or gets plain decoding's text."""
    inputs = prompts(1)
    try:
        ours = run(model, inputs, max_new_tokens=NEW_TOKENS, do_sample=False, use_lookahead=True)[0]
    except LookaheadError:
        return
    assert ours.tolist() == run(model, inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
