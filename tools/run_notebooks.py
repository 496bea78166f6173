"""Run the notebooks from top to bottom and store them with what they print: ``python tools/run_notebooks.py [NAME]``.

Only what a reader sees is kept: no times of cells, no numbers of runs, no names of machines or folders.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "examples" / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def run(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    where = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where, coalesce_streams=True).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [kept for kept in cell.outputs if kept.get("name") != "stderr"]  # bars, and warnings
            for output in cell.outputs:
                if "execution_count" in output:
                    output["execution_count"] = None
                output.pop("metadata", None) if output.output_type == "stream" else output.update(metadata={})
    nbformat.write(notebook, file)


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(file.stem for file in NOTEBOOKS.glob("*.ipynb")):
        run(NOTEBOOKS / f"{name}.ipynb")
