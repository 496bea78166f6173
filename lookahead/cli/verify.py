"""``lookahead verify``: plain decoding against lookahead, and what a difference between the two means. Greedy texts are
identical in float32 and float64. In half precision a pass over several tokens may round differently from one over one,
so the other of two close tokens may win: a *tie*, if the rounding error measured there allows it. Bits are counted:
of how many tokens all logits are plain decoding's, and the same when the text is written again with other drafts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any, Literal

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedModel
from typer import Exit

from lookahead.cli import common
from lookahead.cli.arguments import Verify
from lookahead.cli.common import Decoded
from lookahead.models.compat import last_logits
from lookahead.models.names import CACHE
from lookahead.stats import counted

Severity = Literal["identical", "tie", "bug"]
_STYLES = {"identical": "green", "tie": "yellow", "bug": "bold red"}
_SHOWN = 40  # letters of a prompt
_WIDTHS = (4, 16, 64)  # tokens in the passes that the rounding error is measured with, besides the whole text


@dataclass(frozen=True)
class Divergence:
    """The first place where two greedy texts differ; scores are in logits, and None where a text had ended."""

    at: int  # from the first new token
    plain_token: int | None  # None if that text had ended
    lookahead_token: int | None
    margin: float | None  # plain decoding's best score less its second best
    gap: float | None  # plain decoding's score of its own token less that of ours
    rounding_error: float | None  # how far a logit moves when a pass holds more tokens than one
    verdict: Severity  # "tie" if two rounding errors can close the gap, else "bug"


def judged(model: PreTrainedModel, inputs: dict[str, Tensor], plain: Sequence[int], ours: Sequence[int]) -> Divergence:
    """Find and judge the first difference between two greedy continuations of one prompt that differ."""
    shared = min(len(plain), len(ours))
    at = next((i for i in range(shared) if plain[i] != ours[i]), shared)
    if at == shared:  # one text goes on where the other has ended: no rounding does that
        theirs, own = (text[at] if at < len(text) else None for text in (plain, ours))
        return Divergence(at, theirs, own, margin=None, gap=None, rounding_error=None, verdict="bug")
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    output = model.generate(**inputs, do_sample=False, max_new_tokens=at + 1, **wanted)
    scores = output.scores[at][0]
    best, second = scores.topk(2).values.tolist()
    gap = float(scores[plain[at]] - scores[ours[at]])
    error = _rounding_error(model, output.sequences[:, :-1], output.logits[at][0])
    verdict: Severity = "tie" if gap <= 2 * error else "bug"
    return Divergence(at, plain[at], ours[at], best - second, gap, error, verdict)


@torch.no_grad()
def _rounding_error(model: PreTrainedModel, ids: Tensor, single: Tensor) -> float:
    """Largest distance of the logits after ``ids`` ``[1, token]`` in longer passes from ``single`` ``[vocab]``."""
    few = last_logits(model, 1)
    length, errors = ids.shape[1], []
    for width in (length, *(width for width in _WIDTHS if width < length)):
        past = model(input_ids=ids[:, :-width], use_cache=True, **few)[CACHE] if width < length else None
        logits = model(input_ids=ids[:, -width:], use_cache=True, **few, **{CACHE: past}).logits[0, -1]
        errors.append((logits.float() - single.float()).abs().max().item())
    return max(errors)


def same_bits(one: Decoded, other: Decoded) -> int:
    """How many tokens, from the first one on, are equal and come from equal logits."""
    pairs = zip(one.tokens, other.tokens, one.logits, other.logits, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1] and torch.equal(pair[2], pair[3]), pairs))


def verify(options: Verify) -> None:
    strategy = common.forgetful(options, seed=0)
    model, tokenizer = common.load_for(options)
    texts = [*(options.prompt or []), *options.texts] or list(common.built_in(tokenizer, options.raw))
    encoded = [common.encode(tokenizer, text, model, options.raw) for text in texts]
    settings: dict[str, Any] = {"max_new_tokens": options.max_new_tokens}
    given = settings | {"do_sample": False, "output_logits": True}
    results: list[dict[str, Any]] = []
    with common.progress() as progress:
        for text, inputs in progress.track(list(zip(texts, encoded, strict=True)), description="Comparing"):
            plain = common.decode(model, inputs, None, **given)
            ours = common.decode(model, inputs, strategy, **given)
            again = common.decode(model, inputs, replace(strategy, seed=1), **given)
            found = None if plain.tokens == ours.tokens else judged(model, inputs, plain.tokens, ours.tokens)
            result = {"prompt": text, "tokens": len(plain.tokens)}
            result["tokens_per_pass"] = ours.stats.mean_acceptance_length if ours.stats else None
            result["verdict"] = found.verdict if found else "identical"
            result |= {"plain_bits": same_bits(plain, ours), "same_bits": same_bits(ours, again)}
            results.append(result | {"divergence": asdict(found) if found else None})
    worst = max((result["verdict"] for result in results), key=list(_STYLES).index)
    document = {"verdict": worst, "results": results, "settings": common.described(options, model, strategy, settings)}
    dtype = common.dtype_name(model)
    common.report(document, options.as_json, lambda console: _show(console, results, tokenizer, worst, dtype))
    if worst == "bug":
        raise Exit(1)


def tell(found: Divergence, tokenizer: Any) -> str:
    def name(token: int | None) -> str:
        return "the end" if token is None else repr(tokenizer.decode([token]))

    place = f"token {found.at + 1}: plain {name(found.plain_token)}, lookahead {name(found.lookahead_token)}"
    if found.gap is None:
        return place
    return f"{place}; gap {found.gap:.3g}, top-1/top-2 margin {found.margin:.3g}, rounding {found.rounding_error:.3g}"


def _show(console: Console, results: list[dict[str, Any]], tokenizer: Any, worst: Severity, dtype: str) -> None:
    rows = []
    for number, result in enumerate(results, start=1):
        per_pass, verdict, prompt = result["tokens_per_pass"], result["verdict"], " ".join(result["prompt"].split())
        speed = "" if per_pass is None else f"{per_pass:.2f}"
        prompt = prompt if len(prompt) <= _SHOWN else prompt[: _SHOWN - 1] + "…"
        rows.append((str(number), prompt, str(result["tokens"]), speed, Text(verdict, style=_STYLES[verdict])))
    console.print(common.columns(("", "prompt", "tokens", "tokens/pass", "verdict"), rows))
    for number, result in enumerate(results, start=1):
        if result["divergence"] is not None:
            told = tell(Divergence(**result["divergence"]), tokenizer)
            console.print(Text(f"{number}: {result['verdict']} at {told}"))
    identical, tied, bugs = (sum(result["verdict"] == verdict for result in results) for verdict in _STYLES)
    count = counted(len(results), "prompt")
    console.print(f"{identical} identical, {tied} tied, {bugs} with a bug; {count}, greedy, {dtype}")
    tokens, plain, again = (sum(result[key] for result in results) for key in ("tokens", "plain_bits", "same_bits"))
    told = f"{plain} have plain decoding's bits, {again} the same bits when written again."
    console.print(f"Of {counted(tokens, 'token')} {told}")
    if worst == "tie":
        console.print("A tie: the scores of the two tokens lie closer together than rounding can tell apart.")
    if worst == "bug":
        console.print("A bug: the scores lie further apart than rounding explains. Please report it.", style="bold red")
