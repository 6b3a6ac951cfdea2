"""The script that creates the Python environment of a launch on a host."""

from __future__ import annotations

import inspect
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from maskfleet.launch.ssh import environment


def wheel(folder: Path, name: str, *needs: str) -> Path:
    """A wheel of an empty package."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    required = "".join(f"Requires-Dist: {need}\n" for need in needs)
    files = {
        f"{name}/__init__.py": "",
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{required}",
        f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as packed:
        for member, text in files.items():
            packed.writestr(member, text)
    return path


@pytest.mark.slow
def test_an_environment_made_in_one_uses_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the Deep Learning AMI, whose torch is in the environment /opt/pytorch: pip must not get another one."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "ami"], check=True)
    [packages] = (tmp_path / "ami" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel(tmp_path, "torch_of_the_ami")) as packed:
        packed.extractall(packages)
    script = tmp_path / "environment.py"
    script.write_text(inspect.getsource(environment))
    ours = wheel(tmp_path, "ours", "torch_of_the_ami>=1")
    made = tmp_path / "made"
    done = subprocess.run(
        [tmp_path / "ami" / "bin" / "python", script, made, ours], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    look = "import ours, torch_of_the_ami; print(torch_of_the_ami.__file__)"
    seen = subprocess.run([made / "bin" / "python", "-c", look], capture_output=True, text=True, check=True)
    assert Path(seen.stdout.strip()).is_relative_to(packages)
