"""Let a model write, and keep what it said: a memory, by which later calls draft better from their first pass on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from jacobi import LookaheadError
from lookahead.chat_format import prompt_ids, turns, written
from lookahead.generation.memories import learning
from lookahead.models.traits import ModelTraits
from lookahead.stats import DecodingStats
from lookahead.strategies.lookahead import Lookahead
from lookahead.support import route as support
from lookahead.training.data import BATCH
from lookahead.training.distillation import TEMPERATURE, padded
from lookahead.training.evaluation import PROMPT
from lookahead.training.settings import TrainingSettings

_MARK = "QUESTION"

Ids = list[int]


@dataclass(frozen=True)
class Learnt:
    """What :func:`learn` has written and kept."""

    file: Path  # where later calls find it, or ``out``
    stats: DecodingStats  # of all passes


def learn(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[str] | None = None,
    *,
    tokens: int = 20_000,
    out: str | Path | None = None,
    raw: bool = False,
    seed: int = 0,
    report: Callable[[float], None] | None = None,
) -> Learnt:
    """Let a model answer prompts by lookahead decoding, and add what it said to its memory. Texts of later calls stay
    the same; their drafts are better. Kept are the best next tokens at each place of the answers, behind the three
    tokens before it, and the weights that drafts have learnt: no prompt is kept as such.

    Args:
        prompts: what is asked, in the tokenizer's chat template if it has one: answered greedily first, then again and
            again with drawn tokens. None: the model writes questions of its own; half the answers are drawn.
        tokens: about how many to write. The newest 196,608 are kept.
        out: the memory's file, 40 MB at most; None = the one in the user's cache folder, which calls find themselves.
        raw: prompts as they are, also where there is a chat template.
        seed: of what is drawn.
        report: called with the share that is done, from 0 to 1.

    Raises:
        LookaheadError: an argument is wrong, the model takes no trees, or the file is another's or cannot be written.
    """
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise LookaheadError(f"tokens must be a whole number above 0: got {tokens!r}.")
    if prompts is not None and (isinstance(prompts, str) or not prompts):
        raise LookaheadError(f"prompts must be texts, one at least, or None: got {prompts!r:.60}.")
    traits = ModelTraits.of(model)
    asked = None if prompts is None else [prompt_ids(tokenizer, prompt, raw) for prompt in prompts]
    for prompt in asked or [[0]]:
        support.check(model, traits, torch.tensor([prompt]), {})
    route, reason = support.route(model, traits)
    if route != "tree":
        raise LookaheadError(f"{traits.name} cannot learn for later: {reason}. Its drafts have no memory.")
    ends, room, stats = turns(model, tokenizer)[0], traits.depth_limit or inf, DecodingStats()
    texts = _own(model, tokenizer, raw, ends) if asked is None else _again(asked)
    with learning(model, out) as file, torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        while (left := tokens - stats.emitted) > 0:
            batch, drawn = next(texts)
            most = min(TrainingSettings.answer_tokens, -(-left // len(batch)), room - max(map(len, batch)))
            stats += _written(model, batch, drawn, ends, most).stats
            if report is not None:
                report(min(1.0, stats.emitted / tokens))
    return Learnt(file, stats)


def _again(prompts: list[Ids]) -> Iterator[tuple[list[Ids], bool]]:
    """Prompts in batches, and whether their answers are drawn: from the second time on."""
    for turn in count():
        for first in range(0, len(prompts), BATCH):
            yield prompts[first : first + BATCH], turn > 0


def _own(model: PreTrainedModel, tokenizer: Any, raw: bool, ends: Ids) -> Iterator[tuple[list[Ids], bool]]:
    """Prompts that the model writes: questions, where it has a chat template, else beginnings of texts."""
    asks = bool(getattr(tokenizer, "chat_template", None)) and not raw
    begins = [token for token in (tokenizer.bos_token_id, *ends, 0) if token is not None][:1]
    if asks:
        opening = written(tokenizer, [{"role": "user", "content": _MARK}], opens=False)[0].partition(_MARK)[0]
        begins = list(tokenizer(opening, add_special_tokens=False)["input_ids"]) or begins
    for turn in count():
        found = _written(model, [begins] * BATCH, True, ends, PROMPT, temperature=1.0, top_p=0.95, top_k=0)
        said = [[token for token in line if token not in ends] for line in found.sequences[:, len(begins) :].tolist()]
        if asks:
            questions = [tokenizer.decode(line, skip_special_tokens=True).strip() or _MARK for line in said]
            yield [prompt_ids(tokenizer, question) for question in questions], turn % 2 > 0
        else:
            yield [begins + line for line in said], turn % 2 > 0


def _written(model: PreTrainedModel, prompts: list[Ids], drawn: bool, ends: Ids, most: float, **settings: Any) -> Any:
    """What ``generate`` writes after prompts of several lengths."""
    if drawn and "temperature" not in settings:
        own = model.generation_config.temperature
        settings["temperature"] = own if own and own != 1.0 else TEMPERATURE
    settings |= {"do_sample": drawn, "max_new_tokens": int(most), "eos_token_id": ends or None}
    given = padded(model, prompts) | settings
    return model.generate(**given, custom_generate=Lookahead(), return_dict_in_generate=True)
