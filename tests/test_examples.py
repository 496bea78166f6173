"""Every example runs as it stands, says what it is there to say, and stays short."""

import runpy
from pathlib import Path

import pytest
from helpers.cli import save_tiny_model

from lookahead import bundled

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "quickstart": ["identical: True", "lookahead: ", "tokens per pass: ", "with W=3, N=3, G=3"],
    "streaming": ["-- printed as it comes", "-- read from a thread", " ms  "],
    "sampling": [f"-- temperature {t}: same text as plain sampling: True" for t in (0.2, 0.6, 1.0)],
    "batch": [
        *(f"-- sequence {number}: identical: True" for number in range(3)),
        "passes of the whole batch",
        " at once: ",
    ],
    "own_source": ["tokens in ", "The same text both times: True"],
    "translate": ["identical: True", " tokens per pass", "right: "],
    "own_family": ["before: chain, ", "after: tree, ", "identical: True"],
    "stop_strings": ["-- without a stop string: ", "-- stop at '\\n': ", "-- stop at '\\n\\n': ", "identical: True"],
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model; a tiny random one where it is not there."""
    if (bundled.BUNDLED / "config.json").exists():
        return bundled.BUNDLED
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("name", SAYS)
def test_example_runs(
    name: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bundled, "BUNDLED", model_folder)
    monkeypatch.setattr("sys.argv", [name, "20"])  # steps of training, where there is any
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(text in printed for text in SAYS[name]), printed
    assert ": False" not in printed


@pytest.mark.parametrize("name", SAYS)
def test_example_is_under_80_lines(name: str) -> None:
    most = 125 if name == "own_family" else 80  # it defines a model
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < most
