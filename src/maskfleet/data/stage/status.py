"""`maskfleet data status`: whether a folder or an S3 prefix holds a complete data set, without reading its files."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from maskfleet.data.files.shard_index import INDEX_NAME
from maskfleet.data.stage.folder import Folder
from maskfleet.data.stage.index import Index
from maskfleet.data.stage.manifest import FileProblem, accepted
from maskfleet.data.stage.transfer import Location
from maskfleet.errors import DataError

State = Literal["complete", "partial", "unverified", "empty"]


@dataclass(frozen=True, slots=True)
class StagingStatus:
    """What is at a location, by its listing and its manifest.

    `complete`: a staging has finished, and all of its files are there with their sizes and, in S3, their etags.
    `partial`: some files of the manifest are missing or different, or a staging was interrupted.
    `unverified`: there are files, but no manifest and no staging that was interrupted.
    """

    state: State
    files: int  # that are listed in the manifest or journal and are there as recorded
    bytes: int
    missing: int  # listed, but not there
    changed: int  # listed, and there with another size or etag
    unlisted: int  # there, but not listed
    unlisted_bytes: int
    unstorable: int  # there, but with a name or of a kind that staging never writes, as it could not be copied on
    is_sharded: bool
    examples: tuple[str, ...]  # some missing or changed files
    unstorable_example: str  # one of `unstorable` and what is wrong with it; empty if there is none


def staging_status(uri: str) -> StagingStatus:
    """The status of a folder or of s3://bucket/prefix; nothing is written, and no file is read but the manifest."""
    with ExitStack() as stack:
        location = _location(uri, stack)
        index = stack.enter_context(closing(Index()))
        refused: list[FileProblem] = []
        index.load("present", accepted(location.items(), refused))
        index.load("record", location.records())
        has_manifest = next(location.manifest(), None) is not None
        counts = index.compare_records()
        sharded = index.is_present(INDEX_NAME)
        listed = counts.matching + counts.missing + counts.changed
        state: State = "unverified" if counts.unlisted else "empty"
        if location.is_interrupted():
            state = "partial"
        if listed:
            is_complete = has_manifest and not counts.missing and not counts.changed
            state = "complete" if is_complete else "partial"
        return StagingStatus(
            state,
            counts.matching,
            counts.matching_bytes,
            counts.missing,
            counts.changed,
            counts.unlisted,
            counts.unlisted_bytes,
            len(refused),
            sharded,
            tuple(index.different_records(5)),
            str(min(refused, key=lambda one: one.path)) if refused else "",
        )


def _location(uri: str, stack: ExitStack) -> Location:
    if uri.startswith("s3://"):
        from maskfleet.data.stage.s3 import Prefix

        return stack.enter_context(closing(Prefix(uri, workers=1)))
    folder = Path(uri).expanduser()
    if not folder.is_dir():
        raise DataError(f"{uri} is not a folder", remedy="give a folder or s3://bucket/prefix")
    return Folder(folder)
