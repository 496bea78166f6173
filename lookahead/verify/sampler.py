"""The next token of a sequence, chosen as ``generate`` chooses it: processors first, then the argmax or a draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import InfNanRemoveLogitsProcessor

from jacobi import LookaheadError, Path, Scores, TokenTree, reject
from lookahead.runtime.scores import nan_error
from lookahead.verify.noise import Noise
from lookahead.verify.processors import PREFIX_FREE, direct, for_row
from lookahead.verify.sequences import Sequences

Place = tuple[int, int]  # (row, node)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass while it is decided about; ``number`` counts from 1, and ``paths`` grow."""

    number: int
    trees: Sequence[TokenTree]
    scores: Scores
    paths: list[Path]


class Records:
    """What was noted for each written token; false if nothing is asked for."""

    def __init__(self, config: GenerationConfig, batch: int) -> None:
        wanted = {"scores": config.output_scores, "logits": config.output_logits}
        kinds = [kind for kind, asked in wanted.items() if asked and config.return_dict_in_generate]
        self._lines: dict[str, list[dict[int, Tensor]]] = {kind: [{} for _ in range(batch)] for kind in kinds}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def note(self, row: int, index: int, scores: Tensor, logits: Tensor) -> None:
        """Note processed scores and logits ``[vocab]`` of a row's token ``index``."""
        for kind, line in (("scores", scores), ("logits", logits)):
            if kind in self._lines:
                self._lines[kind][row][index] = line

    def scores_of(self, row: int) -> tuple[Tensor, ...] | None:
        """The scores of one row so far, ``[1, vocab]`` each; None if not asked for."""
        scores = self._lines.get("scores")
        return None if scores is None else tuple(line[None] for line in scores[row].values())

    def of(self, kind: Literal["scores", "logits"]) -> tuple[Tensor, ...] | None:
        """One ``[batch, vocab]`` for each index that all rows have; None if not asked for."""
        rows = self._lines.get(kind)
        if rows is None:
            return None
        return tuple(torch.stack([row[index] for row in rows]) for index in range(min(map(len, rows))))

    def taken(self, kind: Literal["scores", "logits"]) -> tuple[Tensor, ...] | None:
        """The same, which are then noted no longer: what rows hold of an index goes as its batch is put together."""
        rows = self._lines.pop(kind, None)
        if rows is None:
            return None
        return tuple(torch.stack([row.pop(index) for row in rows]) for index in range(min(map(len, rows))))


class Sampler:
    """Chooses tokens for one or several sequences at once: it draws (``sample``), or takes the argmax. In ``lockstep``
    all sequences are always asked about together and are equally long, so that processors and one ``multinomial`` see
    the batch as plain decoding shows it. With ``rejection`` it draws by :func:`jacobi.reject`."""

    def __init__(
        self,
        sequences: Sequences,
        processors: LogitsProcessorList,
        config: GenerationConfig,
        sample: bool,
        rejection: bool,
        lockstep: bool,
    ) -> None:
        kinds = {type(processor) for processor in processors}
        self.records = Records(config, sequences.batch)
        # What sequences draw from, each at its own pace; None where nothing is drawn, or all at once.
        self.noise = Noise(sequences) if sample and sequences.batch > 1 and not lockstep else None
        self.is_argmax = not (sample or processors or self.records)  # of the raw logits, and nothing is recorded
        self._sequences, self._sample, self._rejection, self._lockstep = sequences, sample, rejection, lockstep
        self._processors = direct(processors)
        self._row_processors = [for_row(processors, row, sequences.batch) for row in range(sequences.batch)]
        self._prefix_free = kinds <= PREFIX_FREE
        self._nan_is_fine = InfNanRemoveLogitsProcessor in kinds

    def choose(self, now: Pass, places: Sequence[Place]) -> list[int]:
        """The next token at one place of each of several rows; what it was drawn from enters their paths."""
        processed = self.look(now, places)
        tokens = processed.argmax(-1).tolist() if not self._sample else self._draw(now, places, processed.softmax(-1))
        if not self._lockstep or not self._sequences.pads:
            return tokens
        finished = self._sequences.finished
        return [self._sequences.pad if done else token for token, done in zip(tokens, finished, strict=True)]

    def _draw(self, now: Pass, places: Sequence[Place], probabilities: Tensor) -> list[int]:
        rows = [row for row, _ in places]
        for row, line in zip(rows, probabilities, strict=True):
            now.paths[row].distributions.append(line)
        if self._rejection:
            tokens = []
            for (row, node), line in zip(places, probabilities, strict=True):
                tree = now.trees[row]
                tokens.append(reject(line, list(tree.children[node]), drawn_from=(tree.drawn_from or {}).get(node)))
            return tokens
        if self.noise is None:
            return list(torch.multinomial(probabilities, 1).squeeze(1).tolist())
        self.check_probabilities(probabilities, rows)
        return list((probabilities / self.noise.lines(rows, probabilities)).argmax(-1).tolist())

    def look(self, now: Pass, places: Sequence[Place]) -> Tensor:
        """Processed scores ``[place, vocab]`` for each row's next token, which are recorded."""
        raw = self.logits(now, places)
        processed = self.process(places, raw)
        for place, (row, _) in enumerate(places if self.records else ()):
            self.records.note(row, len(self._sequences.written[row]), processed[place], raw[place])
        return processed

    def logits(self, now: Pass, places: Sequence[Place]) -> Tensor:
        """The logits ``[place, vocab]``, which processors may write into; an error if they are NaN."""
        self.check_finite(now, places)
        logits = now.scores.logits
        if len(places) == 1:
            found = logits[places[0][0], places[0][1]][None]
        else:
            rows, nodes = torch.tensor(places, device=logits.device).T
            found = logits[rows, nodes]
        return found.to(copy=True, dtype=torch.float32, device=self._sequences.device)

    def process(self, places: Sequence[Place], raw: Tensor, below: Sequence[TokenTree] | None = None) -> Tensor:
        """What processors make of logits ``[place, vocab]`` after each row's text (and its path in ``below``)."""
        if self._prefix_free:
            return self._processors(torch.zeros((len(raw), 1), dtype=torch.long, device=raw.device), raw)
        if self._lockstep:
            return self._processors(self._sequences.prefixes(), raw)
        lines = []
        for place, (row, node) in enumerate(places):
            prefix = self._sequences.prefix(row)
            if below is not None:
                branch = [below[row].tokens[above] for above in below[row].path(node)[1:]]
                prefix = torch.cat([prefix, prefix.new_tensor([branch])], dim=1)
            lines.append(self._row_processors[row](prefix, raw[place : place + 1]))
        return lines[0] if len(lines) == 1 else torch.cat(lines)

    def check_finite(self, now: Pass, places: Sequence[Place]) -> None:
        """Refuse NaN at ``places`` of unfinished rows, unless a processor removes it."""
        if not now.scores.broken or self._nan_is_fine:
            return
        for row, _ in (place for place in places if place in now.scores.broken):
            if not self._sequences.finished[row]:
                raise nan_error(now.number, row, len(self._sequences.written[row]) + 1)

    def check_probabilities(self, probabilities: Tensor, rows: Sequence[int]) -> None:
        """Refuse ``[place, vocab]`` that are none because of what processors left."""
        finite = probabilities.sum(-1).isfinite()
        if not finite.all():
            row = rows[int((~finite).nonzero()[0])]
            raise LookaheadError(
                f"The processed scores of row {row}, token {len(self._sequences.written[row]) + 1}, give no "
                "probabilities: expected at least one finite score and none that is +inf. Check the logits processors."
            )
