"""Lines of noise: what C draws is what torch draws, and the noise at a place is its line's."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.marks import built

from lookahead import _native
from lookahead.verify import noise as room
from lookahead.verify.noise import NoiseAt, NoiseLine, draw, draws_in_c


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """Whether C draws what torch draws is found out again."""
    room._is_alike.cache_clear()
    yield
    room._is_alike.cache_clear()


@built
def test_c_draws_what_this_torch_draws() -> None:
    assert draws_in_c()


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("before", [0, 1, 311, 312, 623, 624])
@pytest.mark.parametrize("vocab", [1, 7, 512, 513, 4096, 20000])
def test_lines_are_those_of_one_call_each(vocab: int, before: int) -> None:
    """From the middle of a generator's numbers, too; two rows are one line."""
    ours, theirs = (torch.Generator().manual_seed(vocab + before) for _ in range(2))
    for generator in (ours, theirs):
        torch.randint(9, (before,), generator=generator)
    for count, batch in ((1, 1), (3, 2)):
        lines = draw(count, batch, vocab, ours)
        for line in lines:
            assert line.noise.equal(torch.empty(batch, vocab).exponential_(generator=theirs))
            assert line.state.equal(theirs.get_state())
            assert np.array_equal(np.asarray(line.view), line.noise.numpy())
        assert ours.get_state().equal(theirs.get_state())
        assert torch.rand(3, generator=ours).equal(torch.rand(3, generator=theirs))


@pytest.mark.usefixtures("either_way")
def test_no_line_leaves_the_generator_as_it_is() -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert draw(0, 1, 9, generator) == draw(-2, 1, 9, generator) == []
    assert generator.get_state().equal(before)


@built
def test_ten_million_numbers_of_which_hardly_one_differs() -> None:
    """The logarithm is rounded once more in another place; then numbers differ in their last bit."""
    ours, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    differ = 0
    for _ in range(10):
        (line,) = draw(1, 1, 1 << 20, ours)
        expected = torch.empty(1, 1 << 20).exponential_(generator=theirs)
        differ += int((line.noise != expected).sum())
        torch.testing.assert_close(line.noise, expected, rtol=2e-7, atol=0.0)
    assert differ <= 2


@built
@pytest.mark.parametrize(
    "wrong", [np.zeros((2, 16), np.uint8), np.zeros((2, 5056), np.uint8), np.zeros((1, 5056), np.uint8)]
)
def test_another_kind_of_generator(wrong: np.ndarray) -> None:
    with pytest.raises(ValueError, match="states of torch's generator on a CPU"):
        _native.speedups.exponential(wrong.data, np.zeros((1, 9), np.float32).data)


@built
@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize("how", ["another layout", "other numbers", "another state"])
def test_a_torch_that_draws_in_another_way(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own ``exponential_`` is called."""
    speedups = _native.speedups

    class Other:
        @staticmethod
        def exponential(states: Any, noise: Any) -> None:
            if how == "another layout":
                raise ValueError(how)
            speedups.exponential(states, noise)
            changed = np.asarray(noise if how == "other numbers" else states)
            changed[-1, -1] += 1

    monkeypatch.setattr(_native, "speedups", Other)
    assert not draws_in_c()
    ours, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    (line,) = draw(1, 1, 99, ours)
    assert line.noise.equal(torch.empty(1, 99).exponential_(generator=theirs))
    assert line.state.equal(ours.get_state())


def test_noise_at_places() -> None:
    """One line as it is, a few places stacked, and many of few lines gathered."""
    noise = torch.rand(3, 2, 11)
    lines = {index: NoiseLine(each, torch.empty(0), None) for index, each in zip((4, 7, 9), noise, strict=True)}
    for places in ([(0, 7), (1, 7)], [(1, 7)], [(1, 9), (0, 4)], [(1, 7), (0, 4), (0, 7), (1, 4), (1, 7), (0, 7)]):
        at = NoiseAt({index: lines[index] for _, index in places}, places)
        expected = torch.stack([lines[index].noise[row] for row, index in places])
        assert at.all().equal(expected)
        tokens = torch.randint(11, (len(places), 5))
        assert at.of(tokens).equal(expected.gather(1, tokens))
