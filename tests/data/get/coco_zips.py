"""Archives shaped like COCO's, and a data set that consists of them."""

from __future__ import annotations

import hashlib
import io
import json
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from web_server import WebServer

from maskfleet.data.get.catalogue import ArchiveFacts, DataSet


def coco_files(images: int = 12, seed: int = 0, size: int = 3000) -> dict[str, dict[str, bytes]]:
    """Files by archive: images that cannot be packed, annotations that can."""
    generator = random.Random(seed)
    found: dict[str, dict[str, bytes]] = {"annotations/annotations_trainval2017.zip": {}}
    for split in ("val2017", "train2017"):
        count = images if split == "train2017" else max(1, images // 3)
        names = [f"{split}/{number:012d}.jpg" for number in range(count)]
        found[f"zips/{split}.zip"] = {name: generator.randbytes(generator.randint(1, size)) for name in names}
        table = {"images": [{"id": number, "file_name": name} for number, name in enumerate(names)]}
        annotations = found["annotations/annotations_trainval2017.zip"]
        annotations[f"annotations/instances_{split}.json"] = json.dumps(table).encode() * 20
    return found


def zipped(files: Mapping[str, bytes], *, folders: bool = True) -> bytes:
    """A zip archive: images stored, the rest packed, folders as members of their own, as COCO's."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for folder in sorted({name.partition("/")[0] for name in files}) if folders else ():
            archive.mkdir(folder)
        for name, content in files.items():
            packing = zipfile.ZIP_STORED if name.endswith(".jpg") else zipfile.ZIP_DEFLATED
            archive.writestr(name, content, packing)
    return buffer.getvalue()


def zip64(files: Mapping[str, bytes], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The same with the structures that zipfile writes for archives of more than 4 GB and 65,535 members."""
    with monkeypatch.context() as patch:
        patch.setattr(zipfile, "ZIP64_LIMIT", 100)
        patch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 2)
        content = zipped(files)
    assert b"PK\x06\x06" in content, "the end of a zip64 directory"
    return content


def data_set_of(archives: Mapping[str, bytes], address: str) -> DataSet:
    """A data set of these archives, by path."""
    facts = [
        ArchiveFacts(path, len(content), hashlib.sha256(content).hexdigest(), optional="test" in path)
        for path, content in archives.items()
    ]
    return DataSet("coco2017", (address,), tuple(facts))


def serve(web: WebServer, archives: Mapping[str, bytes]) -> DataSet:
    """Put archives on the server."""
    web.files |= {f"/coco/{path}": content for path, content in archives.items()}
    return data_set_of(archives, f"{web.url}/coco")


def merged(files: Mapping[str, Mapping[str, bytes]]) -> dict[str, bytes]:
    """All files of all archives."""
    return {name: content for of_archive in files.values() for name, content in of_archive.items()}


def write_catalogue(path: Path, data_set: DataSet) -> None:
    """The data set as JSON, for another process."""
    archives = [[one.path, one.bytes, one.sha256] for one in data_set.archives]
    path.write_text(json.dumps({"addresses": data_set.addresses, "archives": archives}))


def read_catalogue(path: Path) -> DataSet:
    found = json.loads(path.read_text())
    return DataSet("coco2017", tuple(found["addresses"]), tuple(ArchiveFacts(*one) for one in found["archives"]))
