"""What a training job leaves in /opt/ml/model, which SageMaker uploads to S3 as model.tar.gz."""

from __future__ import annotations

import shutil
from pathlib import Path

from maskfleet.config.load import CHECKPOINTS, METRICS_FILE, RUN_FILE

# Small files first: after a stop request there may be no time for the checkpoints.
_COPIED = (
    *(RUN_FILE, METRICS_FILE, "environment.json", "log*.txt", "report.html", "detections.npz", "tensorboard"),
    *("model.safetensors", CHECKPOINTS),
)
_TEMPORARY = shutil.ignore_patterns(".*", "*.tmp")


def copy_artifacts(run_dir: Path, model: Path) -> None:
    """Copy the results of the run, without its locks and temporary files: `model` becomes a run directory."""
    model.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED:
        for source in sorted(run_dir.glob(pattern)):
            if source.is_dir():
                shutil.copytree(source, model / source.name, ignore=_TEMPORARY, dirs_exist_ok=True)
            else:
                shutil.copy2(source, model / source.name)
