"""Jacobi decoding: a block of guesses, all of them improved in every pass."""

from dataclasses import dataclass
from typing import Any, ClassVar

from jacobi import Drafter, JacobiDrafter, JacobiMode, LookaheadError, guesser
from lookahead.draft.context import RowContext, Wants
from lookahead.strategies.base import Strategy


@dataclass(frozen=True, kw_only=True)
class Jacobi(Strategy):
    """Jacobi decoding (Santilli et al., ACL 2023); see :class:`jacobi.JacobiDrafter` for the modes.

    Models trained for consistency (CLLM, arXiv 2403.00835; Jacobi Forcing, arXiv 2512.14681) gain by it. What the paper
    decodes with n = 64, K = 2, r = 0.85 and a queue of 4 tails is here, where the known token is not counted::

        Jacobi(mode="jacobi", block_size=63, blocks=2, spawn_ratio=0.85, tails=4)

    Attributes:
        mode: ``"jacobi"`` (block Jacobi), ``"gauss-seidel"``, ``"hybrid"`` or ``"sliding"``.
        block_size: tokens in a block; None is all that is still to be written, and only block Jacobi can do that.
        initial_guess: what new places of a block start from: ``"text"`` draws from the text so far, ``"tail"`` copies
            its end, ``"pad"`` repeats the pad token; or token ids, used in order.
        blocks: most blocks at a time (K): one in use, and others behind it. A sliding block has none behind it.
        spawn_ratio: the share of a block that has to be settled before the next one is set behind it (r).
        tails: how many rejected states of the block are kept; each may give a further branch of the tree, from behind
            the last token's first occurrence in it. A model that takes one branch a pass has none.
        return_trajectory: with ``return_dict_in_generate``, the output's ``trajectories`` holds every iterate fed to
            the model, as ``[row][pass]`` lists of token ids.
        verification, seed, stats: see :class:`Strategy`.
    """

    name: ClassVar[str] = "jacobi"

    mode: JacobiMode = "sliding"
    block_size: int | None = 16
    initial_guess: str | tuple[int, ...] = "text"
    blocks: int = 1
    spawn_ratio: float = 0.85
    tails: int = 0
    return_trajectory: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size is not None:
            self._whole("block_size", 1)
        elif self.mode != "jacobi":
            raise LookaheadError(f"Jacobi(mode={self.mode!r}) needs a block_size of at least 1: got None.")
        self._whole("blocks", 1)
        self._whole("tails", 0)
        if self.blocks > 1 and (self.mode == "sliding" or self.block_size is None):
            got = f"mode={self.mode!r}, block_size={self.block_size}"
            raise LookaheadError(
                f"Jacobi(blocks={self.blocks}) needs blocks that end: expected mode='jacobi' (or 'gauss-seidel', "
                f"'hybrid') and a block_size, got {got}."
            )
        self._between("spawn_ratio", "above 0 and at most 1", lambda ratio: 0 < ratio <= 1)
        if isinstance(self.initial_guess, str):
            self._one_of("initial_guess", ("text", "tail", "pad"))
            return
        given = self.initial_guess
        if not isinstance(given, list | tuple) or not given or not all(type(t) is int and t >= 0 for t in given):
            self._refuse("initial_guess", "'text', 'tail', 'pad' or a list of token ids")
        object.__setattr__(self, "initial_guess", tuple(given))

    def wants(self, *, batch: int, vocab_size: int, new_tokens: int, drawn: bool) -> Wants:
        """What is chosen at every node: the next iterate, of which the sampled text is the fixed point."""
        return Wants(choices=drawn)

    def drafter(self, row: RowContext) -> Drafter:
        kind: Any = self.initial_guess
        if not isinstance(kind, str) and max(kind) >= row.vocab_size:
            last = f"this model's vocabulary ends at {row.vocab_size - 1}"
            raise LookaheadError(f"Jacobi(initial_guess=) holds token {max(kind)}: {last}.")
        text = list(row.prompt)
        guess = guesser(kind, text, row.vocab_size, row.pad, row.rng)
        return JacobiDrafter(
            self.mode,
            self.block_size,
            guess,
            row.end_tokens,
            text,
            self.return_trajectory,
            blocks=self.blocks,
            spawn_ratio=self.spawn_ratio,
            tails=0 if row.chain else self.tails,
        )
