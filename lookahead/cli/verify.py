"""``lookahead verify``: plain decoding against lookahead, and what a difference between the two means.

Greedy texts are identical in float32 and float64. In half precision a pass over several tokens rounds differently from
a pass over one, so where two tokens score almost the same the other one may win. Such a *tie* is told from a *bug* by
measuring the rounding error at that very position.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedModel

from lookahead.cli import common
from lookahead.cli.prompts import PROMPTS, PromptsOption, read_prompts
from lookahead.models.compat import last_logits

Verdict = Literal["identical", "tie", "bug"]
_STYLES = {"identical": "green", "tie": "yellow", "bug": "bold red"}
_WIDTHS = (4, 16, 64)  # tokens in the passes that the rounding error is measured with, besides the whole text


@dataclass(frozen=True)
class Divergence:
    """The first place where two greedy texts differ.

    Attributes:
        at: index of the token, counted from the first new one.
        plain_token: id that plain decoding wrote; None if its text had ended.
        lookahead_token: id that lookahead wrote; None if its text had ended.
        margin: how far the best score lies above the second best in plain decoding, in logits.
        gap: how far plain decoding's token lies above ours there, in logits.
        rounding_error: how far a logit moves there when a pass holds more tokens than one.
        verdict: ``"tie"`` if the gap is no larger than what two rounding errors can close, else ``"bug"``.
    """

    at: int
    plain_token: int | None
    lookahead_token: int | None
    margin: float | None
    gap: float | None
    rounding_error: float | None
    verdict: Verdict


def first_divergence(
    model: PreTrainedModel, inputs: dict[str, Tensor], plain: Sequence[int], ours: Sequence[int]
) -> Divergence | None:
    """Find and judge the first difference between two greedy continuations of one prompt; None if there is none."""
    if list(plain) == list(ours):
        return None
    shared = min(len(plain), len(ours))
    at = next((i for i in range(shared) if plain[i] != ours[i]), shared)
    if at == shared:  # one text goes on where the other has ended: no rounding does that
        over = plain[at] if at < len(plain) else None, ours[at] if at < len(ours) else None
        return Divergence(at, *over, margin=None, gap=None, rounding_error=None, verdict="bug")
    output = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=at + 1,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    scores = output.scores[at][0]
    best, second = scores.topk(2).values.tolist()
    gap = float(scores[plain[at]] - scores[ours[at]])
    error = _rounding_error(model, output.sequences[:, :-1], output.logits[at][0])
    verdict: Verdict = "tie" if gap <= 2 * error else "bug"
    return Divergence(at, plain[at], ours[at], best - second, gap, error, verdict)


@torch.no_grad()
def _rounding_error(model: PreTrainedModel, ids: Tensor, single: Tensor) -> float:
    """How far the next token's logits move with the number of tokens in the pass, at most, in logits.

    Args:
        model: the model.
        ids: the text so far, ``[1, token]``.
        single: the next token's logits ``[vocab]`` as one-token passes gave them.
    """
    few = last_logits(model, 1)
    length, errors = ids.shape[1], []
    for width in (length, *(width for width in _WIDTHS if width < length)):
        past = None
        if width < length:
            past = model(input_ids=ids[:, :-width], use_cache=True, **few).past_key_values
        logits = model(input_ids=ids[:, -width:], past_key_values=past, use_cache=True, **few).logits[0, -1]
        errors.append((logits.float() - single.float()).abs().max().item())
    return max(errors)


def verify(
    model: common.ModelOption = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; may be given several times.")] = None,
    prompts: PromptsOption = None,
    max_new_tokens: common.NewTokensOption = 128,
    window_size: common.WindowOption = None,
    ngram_size: common.NgramOption = None,
    verification_set_size: common.GuessesOption = None,
    dtype: common.DtypeOption = "float32",
    device: common.DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the table.")] = False,
) -> None:
    """Compare plain decoding with lookahead: exit status 0 if texts are identical or tied, 1 on a bug."""
    strategy = common.lookahead_from(window_size, ngram_size, verification_set_size, seed=0)
    texts = [*(prompt or []), *(read_prompts(prompts) if prompts else [])] or list(PROMPTS)
    loaded, tokenizer = common.load(model, dtype, device)
    encoded = [common.encode(tokenizer, text, loaded) for text in texts]
    results: list[dict[str, Any]] = []
    with common.progress() as progress:
        for text, inputs in progress.track(list(zip(texts, encoded, strict=True)), description="Comparing"):
            plain = common.decode(loaded, inputs, None, do_sample=False, max_new_tokens=max_new_tokens)
            ours = common.decode(loaded, inputs, strategy, do_sample=False, max_new_tokens=max_new_tokens)
            found = first_divergence(loaded, inputs, plain.tokens, ours.tokens)
            results.append(
                {
                    "prompt": text,
                    "tokens": len(plain.tokens),
                    "tokens_per_pass": ours.stats.mean_acceptance_length if ours.stats else None,
                    "verdict": found.verdict if found else "identical",
                    "divergence": asdict(found) if found else None,
                }
            )
    verdicts = [result["verdict"] for result in results]
    worst: Verdict = "bug" if "bug" in verdicts else "tie" if "tie" in verdicts else "identical"
    if as_json:
        settings = {
            "model": "bundled" if model is None else model,
            "strategy": strategy.to_dict(),
            "max_new_tokens": max_new_tokens,
            "dtype": dtype,
            "device": str(loaded.device),
        }
        document = {"verdict": worst, "results": results, "settings": settings, "versions": common.versions()}
        typer.echo(json.dumps(document, indent=2))
    else:
        _show(results, tokenizer, worst, dtype)
    if worst == "bug":
        raise typer.Exit(1)


def tell(found: Divergence, tokenizer: Any) -> str:
    """A divergence in a sentence."""

    def name(token: int | None) -> str:
        return "the end" if token is None else repr(tokenizer.decode([token]))

    place = f"token {found.at + 1}: plain {name(found.plain_token)}, lookahead {name(found.lookahead_token)}"
    if found.gap is None:
        return place
    return f"{place}; gap {found.gap:.3g}, top-1/top-2 margin {found.margin:.3g}, rounding {found.rounding_error:.3g}"


def _show(results: list[dict[str, Any]], tokenizer: Any, worst: Verdict, dtype: str) -> None:
    console = Console(highlight=False)
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("", justify="right")
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=40)
    table.add_column("tokens", justify="right")
    table.add_column("tokens/pass", justify="right")
    table.add_column("verdict")
    for number, result in enumerate(results, start=1):
        prompt, per_pass, verdict = result["prompt"], result["tokens_per_pass"], result["verdict"]
        speed = "" if per_pass is None else f"{per_pass:.2f}"
        told = Text(verdict, style=_STYLES[verdict])
        table.add_row(str(number), Text(" ".join(prompt.split())), str(result["tokens"]), speed, told)
    console.print(table)
    for number, result in enumerate(results, start=1):
        if result["divergence"] is not None:
            place = tell(Divergence(**result["divergence"]), tokenizer)
            console.print(Text(f"{number}: {result['verdict']} at {place}"))
    counts = {verdict: sum(result["verdict"] == verdict for result in results) for verdict in _STYLES}
    console.print(
        f"{counts['identical']} identical, {counts['tie']} tied, {counts['bug']} with a bug; "
        f"{len(results)} prompts, greedy, {dtype}"
    )
    if worst == "tie":
        console.print("A tie: the scores of the two tokens lie closer together than rounding can tell apart.")
    if worst == "bug":
        console.print("A bug: the scores lie further apart than rounding explains. Please report it.", style="bold red")
