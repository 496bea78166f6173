"""A source whose candidates stand in a table, and estimates with given rates."""

from collections.abc import Sequence

from jacobi import Path, Successors, TokenTree

SLOTS = 2  # of a kind: first to propose a token, or in agreement


class TableSource:
    """Candidates by the path from the root; what is not in the table has none."""

    def __init__(
        self, name: str, table: dict[tuple[int, ...], list[tuple[int, int]]], priors: Sequence[float] = (0.5,)
    ) -> None:
        self.name = name
        self.priors = priors
        self.table = table
        self.asked: list[tuple[int, ...]] = []

    def start(self, prompt: Sequence[int], successors: Successors | None) -> None:
        pass

    def root(self) -> tuple[int, ...]:
        return ()

    def step(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def propose(self, state: tuple[int, ...]) -> list[tuple[int, int]]:
        self.asked.append(state)
        return self.table.get(state, [])

    def learn(self, tree: TokenTree, path: Path, successors: Successors | None) -> None:
        pass
