"""The programs of the images: `train` and `serve`, which SageMaker starts, and Jupyter in the notebook image."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from image_store import ImageStore, expect_built, notebook_wheels

from maskfleet import __version__
from maskfleet.system.deploy_files import deploy_path, notebooks_path
from micro_run import MICRO
from ports import free_port

pytest_plugins = ("image_fixtures",)

# A notebook with one cell, run by a kernel of the image.
ONE_CELL = """
import nbformat
from nbclient import NotebookClient
notebook = nbformat.v4.new_notebook()
cell = nbformat.v4.new_code_cell("import maskfleet; print('maskfleet', maskfleet.__version__)")
notebook.cells.append(cell)
NotebookClient(notebook, timeout=600).execute()
print(notebook.cells[0].outputs[0].text)
"""


def write_job(ml: Path, channel: str) -> None:
    """The tree of a SageMaker job on one host, whose channel `train` is the folder `channel` of the container."""
    resources = {
        "current_host": "algo-1",
        "hosts": ["algo-1"],
        "current_instance_type": "ml.m5.xlarge",
        "network_interface_name": "lo",
    }
    settings = {**MICRO, "train.epoch_schedule": ((1, None),)}
    files = {
        "hyperparameters": {"recipe": "demo"} | {name: json.dumps(value) for name, value in settings.items()},
        "resourceconfig": resources,
        "inputdataconfig": {"train": {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}},
    }
    for folder in ("input/config", "input/data"):
        (ml / folder).mkdir(parents=True)
    for name, content in files.items():
        (ml / "input" / "config" / f"{name}.json").write_text(json.dumps(content))
    (ml / "input" / "data" / "train").symlink_to(channel)


def ask(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, dict[str, Any]]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as connection:
        connection.request(method, path, body, {"Content-Type": "image/jpeg"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_programs_that_sagemaker_starts_train_and_serve_in_the_image(store: ImageStore, train: str) -> None:
    dockerfile = deploy_path("docker", "sagemaker", "Dockerfile")
    given = ("--build-arg", f"TRAIN_IMAGE={train}", "--file", str(dockerfile))
    store.done("buildah", "build", "--tag", "sagemaker", *given, str(dockerfile.parent))
    name, root = store.container("localhost/sagemaker")
    size = ("--height", "64", "--width", "64", "--classes", "2", "--max-objects", "3")
    store.inside(name, "maskfleet", "data", "make-shapes", "/shapes", "--train", "4", "--val", "2", *size)
    write_job(root / "opt" / "ml", "/shapes")
    store.inside(name, "train", OMP_NUM_THREADS="1")
    assert not (root / "opt" / "ml" / "output" / "failure").exists()
    assert (root / "opt" / "ml" / "model" / "model.safetensors").is_file()
    image = next((root / "shapes").rglob("*.jpg")).read_bytes()
    with served(store, name) as port:
        assert ask(port, "GET", "/ping")[1]["status"] == "ok"
        status, answer = ask(port, "POST", "/invocations", image)
        assert status == 200
        assert "detections" in answer
        assert ask(port, "POST", "/invocations", b"no image")[0] == 400


@contextmanager
def served(store: ImageStore, container: str) -> Iterator[int]:
    """The program `serve` in a container -> its port, which is a port of this host: buildah shares the network."""
    port = free_port()
    options = ["--env", f"SAGEMAKER_BIND_TO_PORT={port}", "--env", "OMP_NUM_THREADS=1"]
    with (
        (store.folder / "serve.log").open("w+b") as log,
        subprocess.Popen(
            ["buildah", "run", *options, container, "--", "sh", "-c", "echo $$ > /pid; exec serve"],
            cwd=store.folder,
            env=store.env,
            stdout=log,
            stderr=log,
        ) as process,
    ):
        try:
            deadline = time.monotonic() + 600
            while not (store.folder / "serve.log").read_text().count("answers on"):
                assert process.poll() is None, (store.folder / "serve.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield port
        finally:
            store.inside(container, "sh", "-c", "kill -TERM $(cat /pid)")
            assert process.wait(120) == 0, (store.folder / "serve.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_notebook_image_runs_jupyter_on_its_notebooks(store: ImageStore, train: str) -> None:
    """Its Dockerfile on the training image; packages come from a folder instead of an index."""
    context = store.folder / "notebook"
    (context / "deploy" / "docker").mkdir(parents=True)
    shutil.copy(deploy_path("docker", "constraints.txt"), context / "deploy" / "docker")
    shutil.copytree(notebooks_path(), context / "notebooks")
    shutil.copytree(notebook_wheels(), context / "wheels")
    given = {"TRAIN_IMAGE": train, "PIP_ARGS": "--no-index --find-links=/context/wheels"}
    options = [word for one, value in given.items() for word in ("--build-arg", f"{one}={value}")]
    dockerfile = str(deploy_path("docker", "notebook", "Dockerfile"))
    made = store("buildah", "build", "--tag", "notebook", *options, "--file", dockerfile, str(context))
    expect_built(made)
    name, root = store.container("localhost/notebook")
    assert store.inside(name, "id", "-u") == "1000"
    assert "jupyterlab" in store.inside(name, "jupyter", "--version")
    # The base of this test has TensorBoard's package without its program.
    assert store.inside(name, "python", "-m", "tensorboard.main", "--version").splitlines()[-1] == "2.21.0"
    assert "syntax is ok" in store("buildah", "run", "--user", "0", name, "--", "nginx", "-t").stderr
    assert sorted(path.name for path in (root / "opt" / "maskfleet" / "notebooks").iterdir()) == sorted(
        path.name for path in notebooks_path().glob("*.ipynb")
    )
    (root / "home" / "fleet" / "cell.py").write_text(ONE_CELL)
    assert store.inside(name, "python", "/home/fleet/cell.py").splitlines()[-1] == f"maskfleet {__version__}"
