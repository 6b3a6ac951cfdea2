"""The data sets that `maskfleet data get` knows: addresses, sizes and checksums of their archives."""

from __future__ import annotations

from dataclasses import dataclass

from maskfleet.errors import DataError


@dataclass(frozen=True, slots=True)
class ArchiveFacts:
    """One zip archive; `path` is below the address of the data set or of a mirror of it."""

    path: str
    bytes: int
    sha256: str
    optional: bool = False  # only with --test

    @property
    def name(self) -> str:
        """The file name."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class DataSet:
    """A public data set; its files may be read from any of `addresses`."""

    name: str
    addresses: tuple[str, ...]
    archives: tuple[ArchiveFacts, ...]

    def urls(self, archive: ArchiveFacts, mirror: str | None) -> list[str]:
        """Where to look for an archive, in this order; a mirror may have all archives in one folder."""
        if mirror is not None:
            return [f"{mirror.rstrip('/')}/{path}" for path in (archive.path, archive.name)]
        return [f"{address}/{archive.path}" for address in self.addresses]


# COCO publishes no checksums. Sizes and SHA-256 are those that projects which downloaded the archives independently of
# each other agree on: the SHA-256 of ParlAI's coco_caption and of torchvision's prototype data sets are equal (that of
# test2017 is ParlAI's and others', not torchvision's). None was compared with the official server from here. The first
# address is the bucket behind the second one, for whose host name S3 has no certificate.
COCO2017 = DataSet(
    "coco2017",
    ("https://s3.amazonaws.com/images.cocodataset.org", "https://images.cocodataset.org"),
    (
        ArchiveFacts(
            "annotations/annotations_trainval2017.zip",
            252_907_541,
            "113a836d90195ee1f884e704da6304dfaaecff1f023f49b6ca93c4aaae470268",
        ),
        ArchiveFacts(
            "zips/val2017.zip", 815_585_330, "4f7e2ccb2866ec5041993c9cf2a952bbed69647b115d0f74da7ce8f4bef82f05"
        ),
        ArchiveFacts(
            "zips/train2017.zip", 19_336_861_798, "69a8bb58ea5f8f99d24875f21416de2e9ded3178e903f1f7603e283b9e06d929"
        ),
        ArchiveFacts(
            "zips/test2017.zip",
            6_646_970_404,
            "c7908c3c9f94ba2f3340ebbeec58c25db6be8774f18d68c2f15d0e369d95baba",
            optional=True,
        ),
    ),
)
DATA_SETS = {COCO2017.name: COCO2017}


def data_set(name: str) -> DataSet:
    """The data set of this name."""
    if name not in DATA_SETS:
        raise DataError(f"there is no data set {name!r} to download", remedy=f"known: {', '.join(DATA_SETS)}")
    return DATA_SETS[name]
