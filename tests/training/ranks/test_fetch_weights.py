"""One rank per host fetches the weights; the others wait, and get its error if it fails."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from by_hand import outputs, start_ranks
from web_server import WebServer

NAME = "COCO-MaskRCNN-R50C41x"


@pytest.mark.slow
@pytest.mark.parametrize("exists", [True, False])
def test_one_rank_per_host_fetches_for_all(web: WebServer, tmp_path: Path, exists: bool) -> None:
    if exists:
        buffer = io.BytesIO()
        np.savez(buffer, **{"conv0/W": np.zeros(3, np.float32)})
        web.files[f"/{NAME}.npz"] = buffer.getvalue()
    env = {
        "MASKFLEET_HOSTS": '[["oak", 2], ["elm", 1]]',
        "MASKFLEET_CACHE": str(tmp_path / "cache"),
        "MASKFLEET_OFFLINE": "",
        "SSL_CERT_FILE": str(web.ca_file),
    }
    script = [str(Path(__file__).with_name("fetch_once.py")), str(tmp_path), web.url, NAME]
    ranks = start_ranks([script] * 3, env=env)
    printed = outputs(ranks)
    assert [process.returncode for process in ranks] == [0, 0, 0], "\n".join(printed)
    results = [next(line for line in text.splitlines() if line.startswith("RESULT")).split(" ", 2) for text in printed]
    assert results[1][1] == "0", "the second rank of a host does not fetch"
    if exists:
        assert {path for *_, path in results} == {str(tmp_path / "cache/weights" / f"{NAME}.npz")}
        assert len([one for one in web.asked if one.end > 1]) == 1
    else:
        assert all(f"{NAME}.npz does not exist (404)" in what for *_, what in results)
