"""Executes a notebook as Jupyter would, with a kernel in another environment; run by the environment that has nbclient.

run_notebook.py NOTEBOOK KERNEL_PYTHON FOLDER > executed.ipynb
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


def main(notebook: Path, python: str, folder: Path) -> None:
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
    NotebookClient(content, timeout=300, kernel_name="python3").execute()
    sys.stdout.write(nbformat.writes(content))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
