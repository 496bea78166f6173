"""The text of a lossy decode: candidates are kept by a rule of their own, not by what the model would have drawn."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from jacobi import LookaheadError, Path, Scores, TokenTree, longest
from lookahead.verify.processors import ROW_PROCESSORS, ROW_RULES, STATEFUL
from lookahead.verify.verifier import Emission


class LossyEmission(Emission):
    """Writes in each row the longest path of kept candidates, and after it the most likely token.

    Nothing is drawn, and no draft-free decoding writes this text. Processors are asked at every kept candidate, along
    its own prefix; stopping rules only about what is written, token by token.

    Args:
        input_ids, processors, criteria, config, settings: see :class:`lookahead.verify.verifier.Emission`.
        rule: which tokens may be kept where processed scores are ``[place, vocab]``; bool of the same shape.

    Raises:
        LookaheadError: a processor keeps state from call to call; or, with several rows, a processor or stopping rule
            may look at the whole batch.
    """

    def __init__(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        *args: Any,
        rule: Callable[[Tensor], Tensor],
        **settings: Any,
    ) -> None:
        if settings.get("in_lockstep") and len(input_ids) > 1:
            raise LookaheadError(
                "Lossy acceptance writes each row of a batch at its own pace, and the rows of this model can only "
                f"advance together: got {len(input_ids)} rows, expected one. Use acceptance='exact'."
            )
        super().__init__(input_ids, processors, criteria, *args, **settings)
        self._rule = rule
        self._sample = self.together = False
        kinds = {type(processor) for processor in processors}
        for kind in kinds & STATEFUL:
            raise LookaheadError(
                f"Lossy acceptance asks processors along several candidate texts, and {kind.__name__} remembers the "
                "last one: expected processors without a state. Use acceptance='exact', or drop it."
            )
        others = [kind.__name__ for kind in kinds - ROW_PROCESSORS]
        others += [kind.__name__ for kind in {type(rule) for rule in criteria} - ROW_RULES]
        if self.batch > 1 and others:
            raise LookaheadError(
                f"Lossy acceptance writes each row of a batch at its own pace, and {sorted(others)[0]} may look at "
                f"the whole batch: got {self.batch} rows, expected one, or transformers' own row-wise processors and "
                "stopping rules. Decode one row at a time, or use acceptance='exact'."
            )

    def _write(self, rows: Sequence[int], trees: Sequence[TokenTree], scores: Scores, paths: list[Path]) -> None:
        seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # processed and raw scores by (row, node)

        def judge(places: Sequence[tuple[int, int]]) -> list[Mapping[int, float]]:
            processed = self._look(places, trees, scores, seen)
            values = processed.log_softmax(-1).masked_fill(~self._rule(processed), -torch.inf)
            tokens = [list(trees[row].children[node]) for row, node in places]
            lines = torch.tensor([line for line, under in enumerate(tokens) for _ in under], device=values.device)
            columns = torch.tensor([token for under in tokens for token in under], device=values.device)
            found = iter(values[lines, columns].tolist())
            told = [dict(zip(under, found, strict=False)) for under in tokens]
            return [{token: value for token, value in line.items() if value > -torch.inf} for line in told]

        kept = longest({row: trees[row] for row in rows}, judge, self.end_tokens)
        last = [(row, nodes[-1]) for row, nodes in kept.items() if not self._is_end(trees[row], nodes[-1])]
        missing = [place for place in last if place not in seen]
        if missing:
            self._look(missing, trees, scores, seen)
        following: dict[int, int] = {}
        if last:
            best = torch.stack([seen[place][0] for place in last]).argmax(-1).tolist()
            following = {row: token for (row, _), token in zip(last, best, strict=True)}
        for row, nodes in kept.items():
            tokens = [trees[row].tokens[node] for node in nodes[1:]]
            tokens += [following[row]] if row in following else []
            for node, token in zip(nodes, tokens, strict=False):
                self._record(row, *seen[row, node])
                paths[row].nodes.append(node)
                paths[row].tokens.append(token)
                self.written[row].append(token)
                if self._ends(row, token):
                    self._finish(row)
                    break

    def _is_end(self, tree: TokenTree, node: int) -> bool:
        return node > 0 and tree.tokens[node] in self.end_tokens

    def _look(
        self,
        places: Sequence[tuple[int, int]],
        trees: Sequence[TokenTree],
        scores: Scores,
        seen: dict[tuple[int, int], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Processed scores ``[place, vocab]``, each along the node's own prefix; they are noted in ``seen``."""
        raw = self._picked(scores, places)
        if self._prefix_free:
            processed = self._without_prefix(raw)
        else:
            lines = []
            for place, (row, node) in enumerate(places):
                branch = [trees[row].tokens[above] for above in trees[row].path(node)[1:]]
                text = torch.cat([self._text.prefix(row), self._text.prefix(row).new_tensor([branch])], dim=1)
                lines.append(self._row_processors[row](text, raw[place : place + 1]))
            processed = torch.cat(lines)
        self._check_probabilities(processed.softmax(-1), [row for row, _ in places])
        seen.update(zip(places, zip(processed, raw, strict=True), strict=True))
        return processed
