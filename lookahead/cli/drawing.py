"""Trees of Medusa's candidates, drawn in text and as a picture."""

from pathlib import Path
from typing import Any

from rich.tree import Tree

from lookahead.pictures import figure
from lookahead.sources.medusa.accuracies import CalibratedTree, node_values

Ranks = tuple[int, ...]

_DRAWN = 40  # nodes with children that the text has lines for


def drawing(grown: CalibratedTree) -> Tree:
    """The tree in text: a line for each node with children that is kept often; the others share one at their parent."""
    values = _values(grown)
    children: dict[Ranks, list[Ranks]] = {(): []}
    for path in grown.paths:
        children[path] = []
        children[path[:-1]].append(path)
    below = dict.fromkeys(children, 0)
    for path in reversed(grown.paths):
        below[path[:-1]] += 1 + below[path]
    inner = sorted((path for path in grown.paths if children[path]), key=lambda path: -values[path])
    drawn = set(inner[:_DRAWN])
    top = Tree("the model's own token; below it the ranks of the heads' candidates, and how often they are kept")
    branches: dict[Ranks, Tree] = {(): top}
    for path in filter(branches.__contains__, [(), *grown.paths]):
        rest = []
        for child in children[path]:
            if child in drawn:
                branches[child] = branches[path].add(f"[bold]{child[-1]}[/bold] {values[child]:.3f}")
            else:
                more = f" (and {below[child]} below)" if below[child] else ""
                rest.append(f"{child[-1]} {values[child]:.3f}{more}")
        if rest:
            branches[path].add(", ".join(rest), style="dim")
    return top


def draw(grown: CalibratedTree, file: Path) -> None:
    """Save the tree as a picture, with the rank of each node and how often it is kept. Needs matplotlib."""
    values, places = _values(grown), {path: place for place, path in enumerate([(), *grown.paths])}
    title = f"{len(grown.paths)} nodes, {grown.expected_length + 1:.2f} tokens a pass expected"
    nodes: dict[str, Any] = {"parents": [places.get(path[:-1], -1) if path else -1 for path in places], "accepted": []}
    nodes["tokens"] = ["root", *(str(path[-1]) for path in grown.paths)]
    nodes |= {"chances": [100 * values[path] for path in places], "sources": [""] * len(places), "written": []}
    figure.draw(nodes, title, file)


def reached(grown: CalibratedTree) -> list[float]:
    """The chance that a pass keeps 1, 2, ... drafted tokens or more."""
    shares = [0.0] * (grown.choices.depth + 1)
    for path, value in _values(grown).items():
        shares[len(path)] += value
    return shares[1:]


def _values(grown: CalibratedTree) -> dict[Ranks, float]:
    """Each node's chance to be kept; the root's is 1."""
    return {(): 1.0} | dict(zip(grown.paths, node_values(grown.accuracies, grown.choices), strict=True))
