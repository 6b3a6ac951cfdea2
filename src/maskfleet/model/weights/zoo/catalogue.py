"""The weights that `maskfleet weights get` knows."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import PurePath

from maskfleet.errors import WeightsError

# TensorPack's model zoo. Its pages link to it by plain HTTP; HTTPS is tried first.
ADDRESSES = ("https://models.tensorpack.com/FasterRCNN", "http://models.tensorpack.com/FasterRCNN")
SUFFIX = ".npz"


@dataclass(frozen=True, slots=True)
class ZooFile:
    """One file of TensorPack's model zoo; `size` and `sha256` only where somebody published them."""

    name: str
    what: str
    size: int | None = None
    sha256: str | None = None

    @property
    def file_name(self) -> str:
        """The name with its suffix."""
        return f"{self.name}{SUFFIX}"

    def urls(self, mirror: str | None) -> list[str]:
        """Where to look for it, in this order."""
        return [f"{address.rstrip('/')}/{self.file_name}" for address in ((mirror,) if mirror else ADDRESSES)]


# Names: the README of TensorPack's examples/FasterRCNN, and its model zoo. Sizes: TensorPack's sotabench.py, where it
# has them. TensorPack publishes no checksums: the SHA-256 of a file is pinned in the cache when it is first fetched.
_FILES = (
    ZooFile("ImageNet-R50-AlignPadding", "ResNet-50 for ImageNet"),
    ZooFile("ImageNet-R101-AlignPadding", "ResNet-101 for ImageNet"),
    ZooFile("ImageNet-R50-GroupNorm32-AlignPadding", "ResNet-50 with group normalization for ImageNet"),
    ZooFile("ImageNet-R101-GroupNorm32-AlignPadding", "ResNet-101 with group normalization for ImageNet"),
    ZooFile("COCO-MaskRCNN-R50C41x", "Mask R-CNN, R50-C4, box AP 36.2, mask AP 31.8"),
    ZooFile("COCO-MaskRCNN-R50FPN2x", "Mask R-CNN, R50-FPN, box AP 38.9, mask AP 35.4", 165_362_754),
    ZooFile("COCO-MaskRCNN-R50FPN2xGN", "Mask R-CNN, R50-FPN with GN, box AP 40.4, mask AP 36.3", 167_363_872),
    ZooFile("COCO-MaskRCNN-R50FPN1xCas", "Cascade Mask R-CNN, R50-FPN, box AP 41.7, mask AP 36.2"),
    ZooFile("COCO-MaskRCNN-R50FPN4xGNCasAug", "Cascade Mask R-CNN, R50-FPN with GN, stronger augmentation"),
    ZooFile("COCO-MaskRCNN-R101C41x", "Mask R-CNN, R101-C4, box AP 40.1, mask AP 34.6"),
    ZooFile("COCO-MaskRCNN-R101FPN1x", "Mask R-CNN, R101-FPN, box AP 40.7, mask AP 36.8"),
    ZooFile("COCO-MaskRCNN-R101FPN3xCasAug", "Cascade Mask R-CNN, R101-FPN, stronger augmentation"),
    ZooFile(
        "COCO-MaskRCNN-R101FPN9xGNCasAugScratch", "Cascade Mask R-CNN, R101-FPN with GN, from scratch", 355_680_386
    ),
)
ZOO = {one.name: one for one in _FILES}


def zoo_file(text: str) -> ZooFile | None:
    """The published file that a name or a path ends with, with or without its suffix; None if there is none."""
    return ZOO.get(PurePath(text).name.removesuffix(SUFFIX))


def expect_zoo_file(text: str) -> ZooFile:
    """The same; WeightsError if there is none."""
    found = zoo_file(text)
    if found is None:
        close = difflib.get_close_matches(text, ZOO, n=1, cutoff=0.3)
        hint = f"did you mean {close[0]}? " if close else ""
        raise WeightsError(
            f"there are no published weights called {text!r}", remedy=f"{hint}`maskfleet weights list` shows all names"
        )
    return found
