"""The next token of a sequence, chosen as ``generate`` chooses it: processors first, then the argmax or a draw."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import InfNanRemoveLogitsProcessor

from jacobi import LookaheadError, Path, Scores, TokenTree, chances_of, reject
from lookahead import _native
from lookahead.runtime.cuda_graphs.capture import undisturbed
from lookahead.runtime.scores import fetch, nan_error, on_host, send
from lookahead.verify.noise import Noise, NoiseAt, is_drawn_by_noise
from lookahead.verify.processors import PREFIX_FREE, RowProcessors, direct, settings_of
from lookahead.verify.sequences import Records, Sequences
from lookahead.verify.shortlist import UNSURE, Pick, Shortlist

Place = tuple[int, int]  # (row, node)
Chosen = Sequence[int]  # a token and, if it is drawn, whether its scores give probabilities


@dataclass(frozen=True, slots=True)
class ScoredPass:
    """One pass while it is decided about."""

    number: int  # from 1
    trees: Sequence[TokenTree]
    scores: Scores
    paths: list[Path]  # which grow
    known: dict[Place, Pick] = field(default_factory=dict)  # choices at places that are likely to be asked about

    def draw(self, shortlist: Shortlist, row: int, node: int, lines: Sequence[memoryview | None]) -> None:
        """Choose at a place, and on from there as far as noise has been drawn for drafts."""
        best, tree = self.scores.successors, self.trees[row]
        said = None if best is None or self.number == 1 else best[row]  # the first pass has those of the prompt, too
        for choice in shortlist.path(self.scores.logits[row], node, tree, lines, row, said):
            self.known[row, node] = choice
            node = tree.children[node].get(choice[0], -1)

    def forget(self) -> None:
        """Other numbers are drawn from now on than those by which tokens were chosen ahead."""
        self.scores.beside = ()
        self.known.clear()


def _argmax(lines: Tensor) -> Tensor:
    if on_host(lines.device) and lines.dtype == torch.float32:  # NumPy takes a fifth of torch's time
        return torch.from_numpy(lines.numpy().argmax(-1))[:, None]
    return lines.argmax(-1, keepdim=True)


def _packed(tokens: Tensor, firsts: Tensor | None) -> Tensor:
    return tokens.int() if firsts is None else torch.cat([tokens.int(), firsts.isfinite().int()], dim=1)


def _branch(tree: TokenTree, node: int) -> list[int]:
    return [tree.tokens[above] for above in tree.path(node)[1:]]


class Sampler:
    """Chooses tokens for one or several sequences at once: it draws (``sample``), or takes the argmax. In ``lockstep``
    all sequences are always asked about together and are equally long, so that processors and one ``multinomial`` see
    the batch as plain decoding shows it. With ``own_draws`` it draws by :func:`jacobi.reject`. If it is not
    ``watched``, only transformers' own row-wise processors and rules run between two tokens.

    A choice is a function of the logits at a node and of the noise of its index, so tokens can be chosen at all nodes
    before it is known which are visited. That is done where waiting for the device costs more (:meth:`look`); on a CPU
    tokens are chosen where the walk gets to. Chosen tokens come packed, int32 ``[place, 2]``: the token, and whether
    its scores give probabilities."""

    def __init__(
        self,
        sequences: Sequences,
        processors: LogitsProcessorList,
        config: GenerationConfig,
        sample: bool,
        own_draws: bool,
        lockstep: bool,
        watched: bool,
        everywhere: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        kinds = {type(processor) for processor in processors}
        self.records = Records(config, sequences.batch)
        # What sequences draw from, each at its own pace; None where nothing is drawn, or not by noise.
        by_noise = sample and not (own_draws or watched) and is_drawn_by_noise(sequences.device)
        self.noise = Noise(sequences, generator) if by_noise else None
        self.is_argmax = not (sample or processors or self.records)  # of the raw logits, and nothing is recorded
        self._sequences, self._sample, self._own_draws, self._lockstep = sequences, sample, own_draws, lockstep
        self._processors = direct(processors)
        self._row_processors = RowProcessors(processors, sequences.prompt_length)
        self._prefix_free = kinds <= PREFIX_FREE
        self._no_text = torch.zeros((1, 1), dtype=torch.long, device=sequences.device)  # for those that look at none
        self._nan_is_fine = InfNanRemoveLogitsProcessor in kinds
        self.looks = not (self.is_argmax or watched or (sample and self.noise is None))
        self._everywhere, self._generator = everywhere, generator
        self._settings = settings_of(processors)
        self._shortlist = None if self.noise is None or self.records else Shortlist.of(processors)
        self._seen: tuple[Tensor, Tensor] | None = None  # of the pass: processed scores and logits [batch, node, vocab]

    def look(
        self, trees: Sequence[TokenTree], logits: Tensor, depths: Sequence[int] | None = None
    ) -> tuple[Tensor, ...]:
        """Choose at every node, int32 ``[batch, node, n]``, and bring the next drafts' noise; nothing where choosing is
        left to :meth:`choose`, unless the trees are parts of others, of these ``depths``."""
        self._seen = None
        waits = on_host(logits.device)
        pays = depths is not None or not waits or (self._everywhere and self._prefix_free)
        if not self.looks or not pays or all(self._sequences.finished):
            return ()
        batch, nodes = logits.shape[:2]
        raw = self._copied(logits.detach()).flatten(0, 1)
        places = [(row, min(node, len(tree) - 1)) for row, tree in enumerate(trees) for node in range(nodes)]
        shortlist = self._shortlist_for(logits)
        if shortlist is not None and shortlist.top_k and depths is None and not self._everywhere:
            chosen = shortlist.listed(raw, self._noise_at(trees, places, raw, ahead=True))
        else:
            processed = self.process(places, raw, trees)
            if self.records:
                self._seen = processed.unflatten(0, (batch, nodes)), raw.unflatten(0, (batch, nodes))
            chosen = _packed(*self._chosen(trees, places, processed, ahead=True))
        chosen = chosen.unflatten(0, (batch, nodes))
        if self.noise is not None and depths is not None:  # other parts may write so many tokens
            last = max(self.noise.reachable(row, depth) for row, depth in enumerate(depths))
            self.noise.at([(0, last)], raw.shape[-1], ahead=True)
        if self.noise is None or waits or depths is not None:
            return (chosen,)
        return chosen, self.noise.bring(max(max(tree.depths) for tree in trees))

    def alike(self, logits: Tensor) -> Hashable | None:
        """Stands for all that makes a token of ``logits`` and noise: samplers of which it is the same can choose for
        each other. None where the text before counts, or what cannot be compared, or a list of the best decides."""
        other = self.records or self._lockstep or self._own_draws or self.is_argmax or self._shortlist_for(logits)
        if other or not self._prefix_free or self._settings is None or (self._sample and self.noise is None):
            return None
        return self._sample, self._settings

    def choose(self, now: ScoredPass, places: Sequence[Place]) -> list[int]:
        """The next token at one place of each of several rows."""
        self.check_finite(now, places)
        greedy = now.scores.greedy
        tokens = [greedy[row][node] for row, node in places] if self.is_argmax else self._read(now, places)
        if not self._lockstep or not self._sequences.pads:
            return tokens
        finished = self._sequences.finished
        return [self._sequences.pad if done else token for token, done in zip(tokens, finished, strict=True)]

    def _read(self, now: ScoredPass, places: Sequence[Place]) -> list[int]:
        if (now.scores.beside or now.known) and self.noise is not None and self.noise.is_stale():
            now.forget()
        chosen = self._looked_up(now, places) if now.scores.beside else self._listed(now, places)
        if chosen is None or (self._sample and any(fine == UNSURE for _, fine in chosen)):
            processed = self.processed(now, places)
            if self._own_draws:
                drawn = []
                for (row, node), line in zip(places, processed.softmax(-1), strict=True):
                    tree, given = now.trees[row], list(now.trees[row].children[node])
                    drawn.append(reject(line, given, drawn_from=chances_of(tree, node, line)))
                return drawn
            tokens, firsts = self._chosen(now.trees, places, processed)
            if firsts is not None and on_host(firsts.device):
                return list(tokens.flatten().tolist())
            chosen = fetch(_packed(tokens, firsts)).tolist()
        if self._sample:
            self.check_chances([fine for _, fine in chosen], [row for row, _ in places])
        return [token for token, *_ in chosen]

    def _looked_up(self, now: ScoredPass, places: Sequence[Place]) -> Sequence[Chosen]:
        """Tokens that :meth:`look` has found at these places."""
        rows, nodes = zip(*places, strict=True)
        if self.noise is not None and len(now.scores.beside) > 1:
            self.noise.told(now.scores.beside[1])
        for row, node in places if self._seen is not None else ():
            processed, raw = (seen[row, node].clone() for seen in self._seen or ())
            self.records.note(row, len(self._sequences.written[row]), processed, raw)
        found: np.ndarray = now.scores.beside[0][list(rows), list(nodes)]
        if self._shortlist is None or found.shape[1] == 2:
            return list(found.tolist())
        return self._shortlist.unpacked(found, now.scores.logits.shape[-1])

    def _listed(self, now: ScoredPass, places: Sequence[Place]) -> Sequence[Chosen] | None:
        """Tokens that the best logits decide on a host; None where they do not."""
        shortlist = self._shortlist_for(now.scores.logits)
        if shortlist is None or self.noise is None or not on_host(self._sequences.device):
            return None
        if _native.speedups is None:
            raw = self.logits(now, places)
            listed = shortlist.listed(raw, self._noise_at(now.trees, places, raw))
            return shortlist.unpacked(listed.numpy(), raw.shape[-1])
        for row, node in (place for place in places if place not in now.known):
            lines = self.noise.views(len(self._sequences.written[row]), now.scores.logits.shape[-1])
            now.draw(shortlist, row, node, lines)
        return [now.known[place] for place in places]

    def _shortlist_for(self, logits: Tensor) -> Shortlist | None:
        shortlist = self._shortlist
        return shortlist if shortlist and shortlist.decides(on_host(logits.device)) else None

    def _noise_at(
        self, trees: Sequence[TokenTree], places: Sequence[Place], like: Tensor, ahead: bool = False
    ) -> NoiseAt:
        assert self.noise is not None
        if ahead:
            at = [(row, self.noise.reachable(row, trees[row].depths[node])) for row, node in places]
        else:
            at = [(row, len(self._sequences.written[row])) for row, _ in places]
        return self.noise.at(at, like.shape[-1], ahead)

    def choose_alike(self, choices: Sequence[tuple["Sampler", ScoredPass, Place]]) -> list[int] | None:
        """The tokens at one place of each of several passes, whose samplers are :attr:`alike`; None where they are not
        finite numbers: each sampler by itself says what is wrong."""
        if any(now.scores.broken or now.scores.beside for _, now, _ in choices):
            return None
        raw = torch.cat([now.scores.logits[row, node][None] for _, now, (row, node) in choices])
        processed = self.process([(0, 0)] * len(choices), self._copied(raw))
        if not self._sample:
            return list(_argmax(processed).flatten().tolist())
        chances = processed.softmax(-1)
        lines = [sampler._noise_at(now.trees, [place], chances[:1]).all() for sampler, now, place in choices]
        firsts = chances[:, :1].clone()
        packed = fetch(_packed(_argmax(chances.div_(torch.cat(lines))), firsts))
        return list(packed[:, 0].tolist()) if packed[:, 1].all() else None

    def _chosen(
        self, trees: Sequence[TokenTree], places: Sequence[Place], processed: Tensor, ahead: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens ``[place, 1]``, and if drawn, each place's first probability ``[place, 1]``: finite if all are."""
        if not self._sample:
            return _argmax(processed), None
        chances = processed.softmax(-1)
        firsts = chances[:, :1].clone()
        if on_host(firsts.device) and not ahead:  # before anything is drawn
            self.check_chances(list(map(isfinite, firsts.flatten().tolist())), [row for row, _ in places])
        if self.noise is None:
            return undisturbed(partial(torch.multinomial, chances, 1, generator=self._generator)), firsts
        return _argmax(chances.div_(self._noise_at(trees, places, chances, ahead).all())), firsts

    def processed(self, now: ScoredPass, places: Sequence[Place]) -> Tensor:
        """Processed scores ``[place, vocab]`` for each row's next token, which are recorded."""
        raw = self.logits(now, places)
        processed = self.process(places, raw)
        for place, (row, _) in enumerate(places if self.records else ()):
            self.records.note(row, len(self._sequences.written[row]), processed[place], raw[place])
        return processed

    def logits(self, now: ScoredPass, places: Sequence[Place]) -> Tensor:
        """The logits ``[place, vocab]`` as processors may have them; an error if they are NaN."""
        self.check_finite(now, places)
        logits = now.scores.logits
        if len(places) == 1:
            return self._copied(logits[places[0]][None])
        if places == [(row, 0) for row in range(len(logits))]:
            return self._copied(logits[:, 0])
        return self._copied(logits[tuple(send(places, logits.device).T)])

    def _copied(self, logits: Tensor) -> Tensor:
        """Logits in float32; a copy where they are recorded, or processors may write into them."""
        copy = bool(self.records) or not self._prefix_free
        return logits.to(copy=copy, dtype=torch.float32, device=self._sequences.device)

    def process(self, places: Sequence[Place], raw: Tensor, below: Sequence[TokenTree] | None = None) -> Tensor:
        """Scores that processors make of logits ``[place, vocab]`` after each row's text (and path in ``below``)."""
        if self._prefix_free:
            return self._processors(self._no_text, raw)
        if self._lockstep and below is None:
            return self._processors(self._sequences.prefixes(), raw)
        rows = [row for row, _ in places]
        branches = [_branch(below[row], node) for row, node in places] if below else [()] * len(rows)
        by_length: dict[int, list[int]] = {}  # places whose texts are equally long, as those of one depth are
        for place, (row, branch) in enumerate(zip(rows, branches, strict=True)):
            by_length.setdefault(len(self._sequences.written[row]) + len(branch), []).append(place)
        if self._row_processors.pads or len(by_length) == 1:
            return self._row_processors(rows, self._sequences.texts(rows, branches), raw)
        processed = torch.empty_like(raw)
        for group in by_length.values():
            mine, at = [rows[place] for place in group], send(group, raw.device)
            texts = self._sequences.texts(mine, [branches[place] for place in group])
            processed[at] = self._row_processors(mine, texts, raw[at])
        return processed

    def check_finite(self, now: ScoredPass, places: Sequence[Place]) -> None:
        """Refuse NaN at ``places`` of unfinished rows, unless a processor removes it."""
        if not now.scores.broken or self._nan_is_fine:
            return
        for row, _ in (place for place in places if place in now.scores.broken):
            if not self._sequences.finished[row]:
                raise nan_error(now.number, row, len(self._sequences.written[row]) + 1)

    def check_chances(self, fine: Sequence[int], rows: Sequence[int]) -> None:
        """Refuse scores of ``rows`` that give no probabilities because of what processors left."""
        if not all(fine):
            row = rows[[bool(each) for each in fine].index(False)]
            raise LookaheadError(
                f"The processed scores of row {row}, token {len(self._sequences.written[row]) + 1}, give no "
                "probabilities: expected at least one finite score and none that is +inf. Check the logits processors."
            )
