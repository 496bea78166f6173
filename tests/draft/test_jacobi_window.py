"""The lookahead window against the papers' description written out slowly."""

from itertools import islice

from helpers.toy import examples
from helpers.windows import SlowWindow, counter
from hypothesis import given
from hypothesis import strategies as st

from lookahead.draft.published import JacobiWindow

W, N = st.integers(1, 6), st.integers(2, 6)


def depths(window: JacobiWindow) -> list[int]:
    """Depth of every cell: level + column, and level 0 is stored without its column 0."""
    return [
        level + column + (level == 0) for level, tokens in enumerate(window.levels) for column in range(len(tokens))
    ]


def columns(window: JacobiWindow) -> int:
    """Columns of the newest level, the root included where that is level 0."""
    return len(window.levels[-1]) + (len(window.levels) == 1)


@examples(100)
@given(W, N, st.integers(0, 12))
def test_window_is_the_slow_one(w: int, n: int, passes: int) -> None:
    """Levels and harvested n-grams, with every token different."""
    tokens = counter()
    fill = list(islice(tokens, w + n - 3))
    window, slow = JacobiWindow(w, n, fill), SlowWindow(w, n, fill)
    for _ in range(passes):
        root, new = next(tokens), list(islice(tokens, columns(window)))
        assert window.advance(root, new) == slow.advance(root, new)
        assert window.levels == slow.levels()


@examples(150)
@given(W, N, st.integers(0, 8), st.integers(0, 12))
def test_narrow_leaves_nothing_deeper_than_room(w: int, n: int, passes: int, spare: int) -> None:
    """What fits stays as it is, and a narrowed window goes on as a window."""
    tokens = counter()
    window = JacobiWindow(w, n, list(islice(tokens, w + n - 3)))
    for _ in range(passes):
        window.advance(next(tokens), list(islice(tokens, columns(window))))
    room = len(window.levels) - 1 + spare
    before = [list(level) for level in window.levels]
    fitting = sum(depth <= room for depth in depths(window))
    window.narrow(room)
    assert all(depth <= room for depth in depths(window))
    assert len(depths(window)) == fitting
    assert all(level == old[: len(level)] for level, old in zip(window.levels, before, strict=True))
    assert columns(window) > 0
    window.advance(next(tokens), list(islice(tokens, columns(window))))
    assert all(depth <= room for depth in depths(window)), "the root moved by one, so there is more than enough"


@examples(100)
@given(W, N, st.integers(0, 8), st.integers(0, 4))
def test_skip_shifts_every_level_and_refills_the_right_edge(w: int, n: int, passes: int, count: int) -> None:
    tokens = counter()
    window = JacobiWindow(w, n, list(islice(tokens, w + n - 3)))
    for _ in range(passes):
        window.advance(next(tokens), list(islice(tokens, columns(window))))
    before, refill = [list(level) for level in window.levels], list(islice(tokens, count))
    window.skip(refill)
    assert window.levels == [(level + refill)[count:] for level in before]
