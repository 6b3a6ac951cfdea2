"""One download in a process of its own, for tests that kill it: CATALOGUE DESTINATION WORKERS."""

from __future__ import annotations

import sys
from pathlib import Path

from coco_zips import read_catalogue

from maskfleet.data.get import archive
from maskfleet.data.get.get import Origin, get_data_set

archive.SEGMENT_BYTES = 20_000
get_data_set(
    read_catalogue(Path(sys.argv[1])),
    sys.argv[2],
    origin=Origin(),
    workers=int(sys.argv[3]),
    progress=lambda tally: None,
)
