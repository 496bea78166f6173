"""Trees of Medusa's candidates, drawn in text and as a picture."""

from pathlib import Path

from rich.tree import Tree

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
    """Save the tree as a picture: depth downwards; the more often a node is kept, the larger. Needs matplotlib."""
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    values = _values(grown)
    places = _places(grown.paths)
    leaves = max(places.values()) + 1
    depth = grown.choices.depth
    figure = Figure(figsize=(min(40.0, max(6.0, leaves * 0.3)), 1.2 * (depth + 1)), layout="constrained")
    axes = figure.subplots()
    spots = {path: (places[path], -len(path)) for path in [(), *grown.paths]}
    lines = [[spots[path[:-1]], spots[path]] for path in grown.paths]
    axes.add_collection(LineCollection(lines, colors="0.8", linewidths=0.8, zorder=1))
    across, down = zip(*spots.values(), strict=True)
    axes.scatter(across, down, s=[20 + 280 * values[path] for path in spots], c="#9ecae1", zorder=2)
    for path in grown.paths:
        axes.annotate(str(path[-1]), spots[path], ha="center", va="center", fontsize=7, zorder=3)
    axes.set_title(f"{len(grown.paths)} nodes, {grown.expected_length + 1:.2f} tokens a pass expected")
    axes.set_yticks(range(0, -depth - 1, -1), ["root", *(f"head {head}" for head in range(depth))])
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    figure.savefig(file, dpi=150)


def reached(grown: CalibratedTree) -> list[float]:
    """The chance that a pass keeps 1, 2, ... drafted tokens or more."""
    shares = [0.0] * (grown.choices.depth + 1)
    for path, value in _values(grown).items():
        shares[len(path)] += value
    return shares[1:]


def _values(grown: CalibratedTree) -> dict[Ranks, float]:
    """Each node's chance to be kept; the root's is 1."""
    return {(): 1.0} | dict(zip(grown.paths, node_values(grown.accuracies, grown.choices), strict=True))


def _places(paths: tuple[Ranks, ...]) -> dict[Ranks, float]:
    """Each node's place from left to right: leaves side by side, parents above the middle of their children."""
    parents = {path[:-1] for path in paths}
    leaves = [path for path in sorted(paths) if path not in parents]
    places: dict[Ranks, float] = {path: place for place, path in enumerate(leaves)}
    for parent in sorted(parents, key=len, reverse=True):
        below = [places[path] for path in paths if path[:-1] == parent]
        places[parent] = sum(below) / len(below)
    return places
