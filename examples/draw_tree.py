"""Draw one real forward pass of the automatic mode: its draft tree, and the path that was accepted.

    python examples/draw_tree.py [FILE]        # writes docs/tree.svg by default

Each source is wrapped by an observer of its own, so only the public interface of sources is used.
"""

import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import lookahead
from lookahead import Lookahead
from lookahead.sources import RecyclingSource, SuccessorTable, SuffixSource

PROMPT = 'def parse_args(argv=None):\n    """Parse the command line and return its options."""'
NODES = 14  # drafted nodes a pass
KEPT = 3  # the first pass that accepts so many drafted tokens, and rejects others, is drawn
FILLS = {"recycling": "#cfe2ff", "suffix": "#ffe0b8", "both": "#e3d2f7"}
KEPT_LINE = 'stroke="#1a7f37" stroke-width="3"'
OTHER_LINE = 'stroke="#9aa0a6"'
STEP_X, STEP_Y, TOP = 128, 34, 56  # pixels


@dataclass
class Pass:
    """One scored tree, the path kept of it, and which nodes each source proposed."""

    tree: object
    path: object
    proposed: dict[str, set[int]] = field(default_factory=dict)

    def fill(self, node: int) -> str:
        """The colour of a drafted node's sources."""
        names = [name for name, nodes in self.proposed.items() if node in nodes]
        return FILLS["both" if len(names) > 1 else names[0]]


class Observed:
    """A source that notes, before it learns from a pass, which nodes of the tree it proposes."""

    def __init__(self, source, passes: list[Pass]) -> None:
        self.name, self.priors = source.name, source.priors
        self.start, self.root, self.step, self.propose = source.start, source.root, source.step, source.propose
        self._source, self._passes = source, passes

    def learn(self, tree, path, successors) -> None:
        if not self._passes or self._passes[-1].tree is not tree:
            self._passes.append(Pass(tree, path))
        states = [self.root()]
        for parent, token in zip(tree.parents[1:], tree.tokens[1:], strict=True):
            states.append(self.step(states[parent], token))
        mine = [{token for token, _ in self.propose(state)} for state in states]
        self._passes[-1].proposed[self.name] = {
            node for node in range(1, len(tree)) if tree.tokens[node] in mine[tree.parents[node]]
        }
        self._source.learn(tree, path, successors)


def observed_passes() -> tuple[list[Pass], object]:
    """All passes of one greedy call, and the tokenizer."""
    model, tokenizer = lookahead.load_bundled()
    passes: list[Pass] = []
    sources = (
        lambda row: Observed(RecyclingSource(SuccessorTable()), passes),
        lambda row: Observed(SuffixSource(), passes),
    )
    strategy = Lookahead(sources=sources, nodes=NODES, seed=0)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    model.generate(**inputs, custom_generate=strategy, do_sample=False, max_new_tokens=64)
    return passes, tokenizer


def layout(tree, path) -> dict[int, tuple[int, int]]:
    """Column and line of every node: the column is its depth, the accepted path is the first line."""
    places: dict[int, tuple[int, int]] = {}
    line = 0

    def place(node: int) -> None:
        nonlocal line
        places[node] = (tree.depths[node], line)
        children = sorted(tree.children[node].values(), key=lambda child: (child not in path.nodes, child))
        if node == path.nodes[-1]:
            line += bool(children)  # the bonus token stands beside it
        for number, child in enumerate(children):
            line += number > 0
            place(child)

    place(0)
    return places


def shown(text: str) -> str:
    """A text with its white space made visible."""
    return text.replace("\n", "↵").replace(" ", "␣")


def centre(place: tuple[int, int]) -> tuple[int, int]:
    """Where a column and line lie, in pixels."""
    return 70 + STEP_X * place[0], TOP + STEP_Y * (place[1] + 1)


def edge(start: tuple[int, int], end: tuple[int, int], line: str) -> str:
    """A curve from a parent to its child."""
    (x0, y0), (x1, y1) = centre(start), centre(end)
    middle = (x0 + x1) // 2
    return f'<path d="M{x0} {y0} C{middle} {y0} {middle} {y1} {x1} {y1}" fill="none" {line}/>'


def box(place: tuple[int, int], label: str, fill: str, line: str, ink: str = "#1f2328") -> str:
    """A node: a box around its token."""
    (x, y), width = centre(place), 16 + 8 * len(label)
    rectangle = f'<rect x="{x - width // 2}" y="{y - 12}" width="{width}" height="24" rx="6" fill="{fill}" {line}/>'
    return f'{rectangle}\n<text x="{x}" y="{y + 5}" text-anchor="middle" fill="{ink}">{escape(label)}</text>'


def legend(top: int) -> list[str]:
    """What the colours mean, in three columns of two lines."""
    entries = [
        ("root: the last token so far", f'fill="#1f2328" {OTHER_LINE}'),
        *((f"drafted by {name}", f'fill="{fill}" {OTHER_LINE}') for name, fill in FILLS.items()),
        ("accepted", f'fill="#ffffff" {KEPT_LINE}'),
        ("bonus token: the model's own", f'fill="#ffffff" {KEPT_LINE} stroke-dasharray="5 3"'),
    ]
    parts = []
    for number, (words, style) in enumerate(entries):
        x, y = (16, 276, 470)[number // 2], top + 26 * (number % 2)
        parts.append(f'<rect x="{x}" y="{y}" width="22" height="16" rx="4" {style}/>')
        parts.append(f'<text x="{x + 30}" y="{y + 13}">{escape(words)}</text>')
    return parts


def drawn(one: Pass, before: str, tokenizer) -> str:
    """The pass as an SVG picture; ``before`` is the text that it continues."""
    tree, path = one.tree, one.path
    places = layout(tree, path)
    last = places[path.nodes[-1]]
    bonus = (last[0] + 1, last[1])
    kept = {node: KEPT_LINE if node in path.nodes else OTHER_LINE for node in places}
    parts = [edge(places[tree.parents[node]], places[node], kept[node]) for node in range(1, len(tree))]
    parts.append(edge(last, bonus, KEPT_LINE))
    for node, place in places.items():
        label = shown(tokenizer.decode([tree.tokens[node]]))
        colours = (one.fill(node), kept[node]) if node else ("#1f2328", KEPT_LINE, "#ffffff")
        parts.append(box(place, label, *colours))
    label = shown(tokenizer.decode([path.tokens[-1]]))
    parts.append(box(bonus, label, "#ffffff", f'{KEPT_LINE} stroke-dasharray="5 3"'))

    accepted = len(path.tokens) - 1
    title = (
        f"One forward pass: {len(tree) - 1} drafted nodes, {accepted} accepted + 1 bonus token = {accepted + 1} tokens"
    )
    width = max(730, 140 + STEP_X * max(bonus[0], *tree.depths))
    height = TOP + STEP_Y * (2 + max(line for _, line in places.values())) + 70
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="monospace" '
            'font-size="13" fill="#1f2328">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            f'<text x="16" y="26" font-weight="bold">{escape(title)}</text>',
            f'<text x="16" y="50">Text so far: …{escape(shown(before[-40:]))}</text>',
            *parts,
            *legend(height - 56),
            "</svg>\n",
        ]
    )


def main() -> None:
    """Draw the first pass that accepts enough, and rejects something."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs" / "tree.svg"
    passes, tokenizer = observed_passes()
    number = next(n for n, p in enumerate(passes) if KEPT < len(p.path.nodes) < len(p.tree))
    one = passes[number]
    before = tokenizer.decode([token for p in passes[:number] for token in p.path.tokens])
    target.write_text(drawn(one, before, tokenizer), encoding="utf-8")
    print(f"{target}: {len(one.tree) - 1} drafted nodes, {len(one.path.tokens) - 1} accepted.")


if __name__ == "__main__":
    main()
