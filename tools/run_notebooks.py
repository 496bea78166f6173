"""Run the notebooks from top to bottom and store them with what they print: ``python tools/run_notebooks.py [--model
FOLDER] [NAME ...]``. A folder takes the place of what they name as ``MODEL``, while they run.

Only what a reader sees is kept: no times of cells, no numbers of runs, no names of machines or folders.
"""

import argparse
import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "examples" / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
NAMED = re.compile(r'^MODEL = "[^"]*"', re.MULTILINE)


def run(file: Path, model: str | None) -> None:
    notebook = nbformat.read(file, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    for cell in notebook.cells:
        cell.source = cell.source if model is None else NAMED.sub(lambda _: f"MODEL = {model!r}", cell.source)
    where = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=1800, kernel_name="python3", resources=where, coalesce_streams=True).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.metadata, cell.source = {}, source
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [kept for kept in cell.outputs if kept.get("name") != "stderr"]  # bars, and warnings
            for output in cell.outputs:
                if "execution_count" in output:
                    output["execution_count"] = None
                output.pop("metadata", None) if output.output_type == "stream" else output.update(metadata={})
    nbformat.write(notebook, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", metavar="FOLDER")
    parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args()
    for name in given.names or sorted(file.stem for file in NOTEBOOKS.glob("*.ipynb")):
        run(NOTEBOOKS / f"{name}.ipynb", given.model)
