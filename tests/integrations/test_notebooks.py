"""The notebooks run from top to bottom; ``tools/run_notebooks.py`` stores what they print."""

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


def test_there_are_some() -> None:
    assert {file.stem for file in NOTEBOOKS} == {"choosing", "medusa", "quickstart", "sampling"}


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path) -> None:
    book = nbformat.read(file, as_version=4)
    assert len(book.cells) <= 16
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": ROOT}}).execute()
    told = [output for cell in book.cells for output in cell.get("outputs", ()) if output.output_type == "stream"]
    assert any(output.name == "stdout" and output.text.strip() for output in told)
