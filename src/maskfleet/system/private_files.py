"""Small files of the work folder that only their owner may read."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from maskfleet.errors import InfraError


def write_private(path: Path, text: str) -> None:
    """Write `text` at once, with mode 0600 from the first byte on."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, data: object) -> None:
    write_private(path, f"{json.dumps(data, indent=2, sort_keys=True)}\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; nothing if there is no such file."""
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InfraError(f"{path} is not JSON: {error}", remedy="mend the file, or delete it to begin anew") from error
    if not isinstance(data, dict):
        raise InfraError(f"{path} does not hold a JSON object", remedy="mend the file, or delete it to begin anew")
    return data


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
