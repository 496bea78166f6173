"""Which tokens are written: processors, sampling and stopping rules, token by token, exactly as in ``generate``.

There are two ways through a batch, chosen once per call:

* *row by row*: every row walks its own tree as far as it gets. For one row this is all there is; for several it needs
  processors and rules that look at one row at a time.
* *together*: all rows write token t before any writes t+1, so that a processor or a rule of the user's sees the whole
  batch as plain ``generate`` shows it. Rows whose tree got further wait.

Sampling draws ``multinomial(p, 1)``, which is ``argmax(p / noise)`` with one [batch, vocab] exponential noise per
written index. Rows that advance at different speeds each read their own line of the same noise, so the text and the
generator's final state are plain decoding's.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors_module
from transformers.generation import stopping_criteria as criteria_module

from jacobi import LookaheadError, Path, Scores, TokenTree, reject, walk
from lookahead.runtime.scores import nan_error
from lookahead.verify.processors import PREFIX_FREE, ROW_PROCESSORS, ROW_RULES, SIMPLE_RULES, direct, for_row
from lookahead.verify.sequences import Text

_MOST_ROOM = 1 << 16  # deepest tree where nothing else sets a limit
# Indices a sampled row may lead the slowest one: each keeps a [batch, vocab] noise alive, so bytes are bounded too.
_MOST_LEAD = 32
_MOST_NOISE_BYTES = 64 << 20


class Emission:
    """The text of a batch as it is written (implements :class:`jacobi.Verifier`).

    Args:
        input_ids: ``[batch, prompt]``.
        processors: as ``generate`` prepared them.
        criteria: as ``generate`` prepared them.
        config: as ``generate`` prepared it.
        verification: ``"exact"`` or ``"rejection"``.
        keep_up: finished rows go on writing pad tokens until all have the same length, so that scores and the cache
            are what plain decoding leaves.
        model_room: depth each row's tree may have for the model's sake; None = no limit.
        model_holds: whether a row has to wait for the others for the model's sake.
        in_lockstep: all rows have to advance together, for the model's sake.
    """

    def __init__(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        *,
        verification: Literal["exact", "rejection"],
        keep_up: bool,
        model_room: Callable[[], list[int] | None],
        model_holds: Callable[[int], bool] = lambda row: False,
        in_lockstep: bool = False,
    ) -> None:
        self.pad = int(config._pad_token_tensor) if config._pad_token_tensor is not None else 0
        self._text = Text(input_ids, self.pad)
        self.batch, self.prompt_length = input_ids.shape
        self.written = self._text.written
        self.finished = [False] * self.batch
        self._ends_at: dict[int, int] = {}  # new tokens of a row when it ended; what follows is padding
        self.scores: list[dict[int, Tensor]] | None = None
        self.logits: list[dict[int, Tensor]] | None = None
        if config.return_dict_in_generate and config.output_scores:
            self.scores = [{} for _ in range(self.batch)]
        if config.return_dict_in_generate and config.output_logits:
            self.logits = [{} for _ in range(self.batch)]
        self._processors = direct(processors)
        self._row_processors = [for_row(processors, row, self.batch) for row in range(self.batch)]
        self._criteria = criteria
        self._sample = bool(config.do_sample)
        self._rejection = verification == "rejection" and self._sample
        self._keep_up = keep_up and self.batch > 1
        self._model_room = model_room
        self._model_holds = model_holds
        lengths = [rule.max_length for rule in criteria if isinstance(rule, criteria_module.MaxLengthCriteria)]
        self._max_length = min(lengths, default=self.prompt_length + _MOST_ROOM)
        self._steps = 0
        self._noise: dict[int, Tensor] = {}
        self._noise_drawn = 0
        self._most_written = math.inf  # of a row, before it waits for the others
        kinds = {type(rule) for rule in criteria}
        self.pads = any(hasattr(rule, "eos_token_id") for rule in criteria)
        self.end_tokens = frozenset(
            token
            for rule in criteria
            if isinstance(rule, criteria_module.EosTokenCriteria)
            for token in rule.eos_token_id.flatten().tolist()
        )
        self._simple = kinds <= SIMPLE_RULES
        processor_kinds = {type(p) for p in processors}
        row_wise = processor_kinds <= ROW_PROCESSORS and kinds <= ROW_RULES
        # Without an end token finished rows write real tokens until the last one is done, which only index order shows.
        uniform = self.pads or kinds <= {criteria_module.MaxLengthCriteria}
        self.together = self.batch > 1 and (in_lockstep or not (row_wise and uniform))
        self._direct = not (self._sample or processors or self.scores is not None or self.logits is not None)
        in_step = self.batch > 1 and not (self.together or self._rejection or self._direct)
        self._prefix_free = processor_kinds <= PREFIX_FREE
        self._in_step = in_step and self._prefix_free
        self._nan_is_fine = processors_module.InfNanRemoveLogitsProcessor in processor_kinds

    @property
    def done(self) -> bool:
        """Every row has ended (and, if they keep up, has the same length)."""
        if not all(self.finished):
            return False
        lengths = {len(row) for row in self.written}
        return not self._keep_up or len(lengths) == 1

    @property
    def most_new(self) -> int:
        """Tokens that a row can write at most."""
        return max(0, self._max_length - self.prompt_length)

    def room(self) -> list[int]:
        """A node at depth d decides token d+1 after the root, which must still fit."""
        left = [self._max_length - self.prompt_length - len(row) - 1 for row in self.written]
        limit = self._model_room()
        rooms = [max(0, min(pair)) for pair in zip(left, limit or left, strict=True)]
        if not any(self.finished):
            return rooms
        # A finished row only has to catch up with the longest (or, together, to come along for a tree's depth).
        longest = self._text.longest
        return [
            min(room, max(0, longest - len(row) - 1) * self._keep_up) if done and not self.together else room
            for room, done, row in zip(rooms, self.finished, self.written, strict=True)
        ]

    def idle(self, row: int) -> bool:
        """Whether a row has nothing more to write, not even padding."""
        behind = len(self.written[row]) < self._text.longest
        return self.finished[row] and not (self._keep_up and behind)

    def decide(self, trees: Sequence[TokenTree], scores: Scores) -> list[Path]:
        """Write what the model would have written, as far as the trees go."""
        self._steps += 1
        if self.together:
            return self._decide_together(trees, scores)
        paths = [Path() for _ in trees]
        self._most_written = self._leaders_limit()
        following = [row for row in range(self.batch) if self.finished[row]]
        going = [row for row in range(self.batch) if not self.finished[row] and not self._held(row)]
        self._write(going, trees, scores, paths)
        for row in following:
            if self._keep_up and len(self.written[row]) < self._text.longest:
                paths[row] = self._walk_finished(row, trees[row], scores)
        if self._noise:
            waiting = [len(row) for row, done in zip(self.written, self.finished, strict=True) if not done]
            for index in [index for index in self._noise if not waiting or index < min(waiting)]:
                del self._noise[index]
        return paths

    def _write(self, rows: Sequence[int], trees: Sequence[TokenTree], scores: Scores, paths: list[Path]) -> None:
        """Let unfinished rows write, each as far as it gets; fills their ``paths``."""
        if self._in_step:
            self._walk_in_step(rows, trees, scores, paths)
            return
        for row in rows:
            paths[row] = self._walk(row, trees[row], scores)

    def _walk(self, row: int, tree: TokenTree, scores: Scores) -> Path:
        greedy, written = scores.greedy[row], self.written[row]

        def stop(token: int) -> bool:
            written.append(token)
            if self._ends(row, token):
                self._finish(row)
            return self.finished[row] or self._held(row)

        if self._direct:
            if not scores.broken:
                return walk(tree, greedy.__getitem__, stop)

            def choose(node: int) -> int:
                self._checked(scores, row, node)
                return greedy[node]

            return walk(tree, choose, stop)
        drawn_from: list[Tensor] = []
        path = walk(tree, lambda node: self._choose(row, tree, node, scores, drawn_from), stop)
        path.distributions = drawn_from
        return path

    def _walk_in_step(
        self, rows: Sequence[int], trees: Sequence[TokenTree], scores: Scores, paths: Sequence[Path]
    ) -> None:
        """Walk several rows' trees depth by depth, so that each depth is one call of processors and one draw for all.

        Every row gets what it would get on its own: the processors look at no prefix, and noise is read by line.
        """
        nodes = dict.fromkeys(rows, 0)
        while nodes:
            at = list(nodes)
            raw = self._picked(scores, list(nodes.items()))
            processed = self._without_prefix(raw)
            chosen = processed
            if self._sample:
                chosen = torch.nn.functional.softmax(processed, dim=-1)
                self._check_probabilities(chosen, at)
                for row, line in zip(at, chosen, strict=True):
                    paths[row].distributions.append(line)
                chosen = chosen / torch.stack([self._noise_line(row, chosen) for row in at])
            for place, (row, token) in enumerate(zip(at, chosen.argmax(-1).tolist(), strict=True)):
                self._record(row, processed[place], raw[place])
                node = nodes.pop(row)
                paths[row].nodes.append(node)
                paths[row].tokens.append(token)
                self.written[row].append(token)
                if self._ends(row, token):
                    self._finish(row)
                child = trees[row].children[node].get(token)
                if child is not None and not self.finished[row] and not self._held(row):
                    nodes[row] = child

    def _picked(self, scores: Scores, places: Sequence[tuple[int, int]]) -> Tensor:
        """The logits ``[place, vocab]`` at (row, node) places, as processors may write into them."""
        for row, node in places:
            self._checked(scores, row, node)
        rows, nodes = torch.tensor(places, device=scores.logits.device).T
        return scores.logits[rows, nodes].to(copy=True, dtype=torch.float32, device=self._text.device)

    def _without_prefix(self, raw: Tensor) -> Tensor:
        """What processors that look at no prefix make of ``[place, vocab]``."""
        return self._processors(torch.zeros((len(raw), 1), dtype=torch.long, device=raw.device), raw)

    def _record(self, row: int, processed: Tensor, raw: Tensor) -> None:
        """Note the scores ``[vocab]`` of the token that a row writes next, where they are asked for."""
        index = len(self.written[row])
        if self.scores is not None:
            self.scores[row][index] = processed
        if self.logits is not None:
            self.logits[row][index] = raw

    def _check_probabilities(self, probabilities: Tensor, rows: Sequence[int]) -> None:
        finite = probabilities.sum(-1).isfinite()
        if not finite.all():
            row = rows[int((~finite).nonzero()[0])]
            raise LookaheadError(
                f"The processed scores of row {row}, token {len(self.written[row]) + 1}, give no probabilities: "
                "expected at least one finite score and none that is +inf. Check the logits processors."
            )

    def _walk_finished(self, row: int, tree: TokenTree, scores: Scores) -> Path:
        written, longest = self.written[row], self._text.longest

        def choose(node: int) -> int:
            if self.scores is not None or self.logits is not None:
                self._process(row, scores.logits[row, node])
            return self.pad

        def stop(token: int) -> bool:
            written.append(token)
            return len(written) >= longest

        return walk(tree, choose, stop)

    def _finish(self, row: int) -> None:
        self.finished[row] = True
        if self.pads:
            self._ends_at[row] = len(self.written[row])

    def lengths(self) -> list[int]:
        """New tokens of each row, padding left out."""
        return [self._ends_at.get(row, len(written)) for row, written in enumerate(self.written)]

    def _held(self, row: int) -> bool:
        """Whether a row has to wait: for the model's sake, or sampled and far in the lead."""
        return self._model_holds(row) or len(self.written[row]) >= self._most_written

    def _leaders_limit(self) -> float:
        """How many tokens sampled rows may have written, by what the slowest has now."""
        if not self._sample or self.batch == 1:
            return math.inf
        slowest = min((len(w) for w, done in zip(self.written, self.finished, strict=True) if not done), default=0)
        line_bytes = max((noise.nbytes for noise in self._noise.values()), default=1)
        return slowest + max(1, min(_MOST_LEAD, _MOST_NOISE_BYTES // line_bytes))

    def _choose(self, row: int, tree: TokenTree, node: int, scores: Scores, drawn_from: list[Tensor]) -> int:
        self._checked(scores, row, node)
        processed = self._process(row, scores.logits[row, node])
        if not self._sample:
            return int(processed.argmax(-1))
        probabilities = torch.nn.functional.softmax(processed, dim=-1)
        drawn_from.append(probabilities[0])
        if self._rejection:
            return reject(probabilities[0], list(tree.children[node]))
        if self.batch == 1:
            return int(torch.multinomial(probabilities, 1))
        self._check_probabilities(probabilities, [row])
        return int((probabilities[0] / self._noise_line(row, probabilities)).argmax(-1))

    def _noise_line(self, row: int, like: Tensor) -> Tensor:
        index = len(self.written[row])
        while self._noise_drawn <= index:
            shape = (self.batch, like.shape[-1])
            self._noise[self._noise_drawn] = torch.empty(shape, dtype=like.dtype, device=like.device).exponential_()
            self._noise_drawn += 1
        return self._noise[index][row]

    def _process(self, row: int, logits: Tensor) -> Tensor:
        raw = logits[None].to(copy=True, dtype=torch.float32, device=self._text.device)
        prefix = raw.new_zeros((1, 1), dtype=torch.long) if self._prefix_free else self._text.prefix(row)
        processed = self._row_processors[row](prefix, raw)
        self._record(row, processed[0], raw[0])
        return processed

    def _ends(self, row: int, token: int) -> bool:
        if self._simple:
            return token in self.end_tokens or self.prompt_length + len(self.written[row]) >= self._max_length
        scores = None
        if self.scores is not None:
            scores = tuple(line[None] for line in self.scores[row].values())
        done = self._criteria(self._text.prefix(row), scores)
        return bool(done.item() if isinstance(done, Tensor) else done)

    def _decide_together(self, trees: Sequence[TokenTree], scores: Scores) -> list[Path]:
        paths = [Path() for _ in trees]
        nodes = [0] * self.batch
        rows = torch.arange(self.batch, device=scores.logits.device)
        while True:
            for row, node in enumerate(nodes):
                if not self.finished[row]:
                    self._checked(scores, row, node)
            at = torch.tensor(nodes, device=scores.logits.device)
            raw = scores.logits[rows, at].to(copy=True, dtype=torch.float32, device=self._text.device)
            processed = self._processors(self._text.prefixes(), raw)
            tokens = self._choose_together(trees, nodes, processed, paths)
            for row, token in enumerate(tokens):
                paths[row].nodes.append(nodes[row])
                paths[row].tokens.append(token)
                self._record(row, processed[row], raw[row])
                self.written[row].append(token)
            done = self._criteria(self._text.prefixes(), self._score_tuple())
            flags = done.tolist() if isinstance(done, Tensor) else [bool(done)]
            flags = flags if isinstance(flags, list) else [flags]
            flags = flags * self.batch if len(flags) == 1 else flags
            for row in (row for row, now in enumerate(flags) if now and not self.finished[row]):
                self._finish(row)
            if all(self.finished):
                return paths
            children = [tree.children[node].get(token) for tree, node, token in zip(trees, nodes, tokens, strict=True)]
            if any(child is None for child in children):
                return paths
            nodes = [child for child in children if child is not None]

    def _choose_together(
        self, trees: Sequence[TokenTree], nodes: Sequence[int], processed: Tensor, paths: Sequence[Path]
    ) -> list[int]:
        if not self._sample:
            tokens = processed.argmax(-1).tolist()
        else:
            probabilities = torch.nn.functional.softmax(processed, dim=-1)
            for path, line in zip(paths, probabilities, strict=True):
                path.distributions.append(line)
            if self._rejection:
                tokens = [
                    reject(line, list(tree.children[node]))
                    for line, tree, node in zip(probabilities, trees, nodes, strict=True)
                ]
            else:
                tokens = torch.multinomial(probabilities, 1).squeeze(1).tolist()
        if not self.pads:
            return tokens
        return [self.pad if done else token for token, done in zip(tokens, self.finished, strict=True)]

    def _score_tuple(self) -> tuple[Tensor, ...] | None:
        if self.scores is None:
            return None
        indices = range(min(len(row) for row in self.scores))
        return tuple(torch.stack([row[index] for row in self.scores]) for index in indices)

    def _checked(self, scores: Scores, row: int, node: int) -> None:
        if (row, node) in scores.broken and not self._nan_is_fine:
            raise nan_error(self._steps, row, len(self.written[row]) + 1)

    def sequences(self) -> Tensor:
        """Prompt and text ``[batch, token]``, shorter rows padded."""
        return self._text.padded()

    def recorded(self, kind: Literal["scores", "logits"]) -> tuple[Tensor, ...] | None:
        """Scores or logits as ``generate`` returns them: one ``[batch, vocab]`` for each written index."""
        rows: list[dict[int, Tensor]] | None = getattr(self, kind)
        if rows is None:
            return None
        return tuple(torch.stack([row[index] for row in rows]) for index in range(len(rows[0])))
