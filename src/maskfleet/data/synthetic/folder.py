"""Replaces a folder of generated shapes, and never anything else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maskfleet.data.synthetic.dataset import SPEC_FILE, SPLITS
from maskfleet.errors import DataError
from maskfleet.system.files import set_aside

OUR_FILES = re.compile(
    rf"(\.maskfleet|annotations|{'|'.join(SPLITS)}|{re.escape(SPEC_FILE)}"
    rf"|annotations/instances_({'|'.join(SPLITS)})\.json|annotations/\.maskfleet(/.*)?"
    rf"|({'|'.join(SPLITS)})/\d{{12}}\.jpg)"
)


@contextmanager
def replacing_shapes(root: Path) -> Iterator[None]:
    """Set an old folder of shapes aside while a new one is made; it comes back if that fails.

    DataError if the folder is no such set, or holds a file that making shapes did not write.
    """
    root = Path(root)
    if not root.exists() or (root.is_dir() and not any(root.iterdir())):
        yield
        return
    _expect_ours(root)
    with set_aside(root):
        yield


def _expect_ours(root: Path) -> None:
    if not _is_shapes_spec(root / SPEC_FILE):
        raise DataError(
            f"{root} does not contain generated shapes, and --force replaces nothing else",
            remedy="choose a new folder",
        )
    unknown = [path for path in sorted(root.rglob("*")) if not OUR_FILES.fullmatch(path.relative_to(root).as_posix())]
    if unknown:
        raise DataError(
            f"{root} contains files that were not generated, such as {unknown[0]}",
            remedy="move them elsewhere, or choose a new folder: --force deletes nothing but generated shapes",
        )


def _is_shapes_spec(path: Path) -> bool:
    """Whether the file is the spec that `make_shapes` writes."""
    try:
        spec = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(spec, dict) and {"recipe", "seed", "num_train", "num_val"} <= spec.keys()
