"""Executes a notebook as Jupyter would, with a kernel in another environment; run by the environment that has nbclient.

run_notebook.py NOTEBOOK KERNEL_PYTHON FOLDER [PARAMETERS] > executed.ipynb

PARAMETERS is Python code. It is executed after the cell with the tag `parameters`, as papermill does.
"""

from __future__ import annotations

import json
import os
import site
import sys
from pathlib import Path

START = (
    "import sys; sys.path.append({packages!r}); sys.argv = ['kernel', '-f', {connection!r}];"
    "from ipykernel.kernelapp import IPKernelApp; IPKernelApp.launch_instance()"
)


def main(notebook: Path, python: str, folder: Path, parameters: str = "") -> None:
    spec = folder / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    code = START.format(packages=site.getsitepackages()[0], connection="{connection_file}")
    # Only ipykernel comes from here, behind everything that the other environment has of its own.
    kernel = {"argv": [python, "-c", code], "display_name": "python3", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(kernel))
    os.environ["JUPYTER_PATH"] = str(folder / "jupyter")
    os.environ["IPYTHONDIR"] = str(folder / "ipython")

    import nbformat
    from nbclient import NotebookClient

    content = nbformat.read(notebook, as_version=4)
    nbformat.validate(content)
    if parameters:
        [at] = [at for at, cell in enumerate(content.cells) if "parameters" in cell.metadata.get("tags", [])]
        content.cells.insert(at + 1, nbformat.v4.new_code_cell(parameters))
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(content, timeout=900, kernel_name="python3", resources=resources).execute()
    sys.stdout.write(nbformat.writes(content))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
