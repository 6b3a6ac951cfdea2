"""Another user of this machine, or of its network, finds nothing of a local run to talk to."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from workshop import Workshop, ranks_of, until

from maskfleet.launch.backend import parse_handle
from maskfleet.launch.findings import Verdict
from maskfleet.launch.local import doctor
from maskfleet.launch.local.doctor import examine
from maskfleet.launch.supervise.job_files import JobFolder
from maskfleet.launch.supervise.processes import job_id, processes_of
from maskfleet.system.network import Listener, listeners
from maskfleet.training.output.metrics import read_metrics


@pytest.mark.slow
def test_a_local_run_listens_on_loopback_only_and_others_cannot_read_its_store(workshop: Workshop) -> None:
    handle = workshop.launched("--name", "a", "--ranks", "2", "--set", "train.epoch_schedule=[[4000, null]]")
    run_dir = Path(parse_handle(handle).path)
    folder = JobFolder(run_dir)
    try:
        until(lambda: any(record["step"] >= 2 for record in read_metrics(run_dir)))
        heartbeat = folder.heartbeat(0)
        assert heartbeat is not None
        ranks = ranks_of(run_dir)
        assert len(ranks) == 2
        found = listeners([heartbeat.pid, *processes_of(job_id(run_dir))])
        assert {one.pid for one in found} == set(ranks), "gloo connects the ranks"
        assert [one for one in found if not one.is_loopback] == []
        [store] = folder.path.glob("host-0/ranks-0/store/*")
        assert stat.filemode(store.stat().st_mode) == "-rw-------"
        assert stat.filemode(store.parent.stat().st_mode) == "drwx------"
    finally:
        workshop("cancel", handle)
    assert not store.parent.exists()


def test_the_doctor_warns_of_a_run_that_listens_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "listeners", lambda pids: [Listener(1, "0.0.0.0", 29400), Listener(1, "10.0.0.1", 29401)]
    )
    [finding] = [one for one in examine(tmp_path) if one.name == "open ports"]
    assert finding.verdict is Verdict.WARN
    assert finding.found == "a run listens on 0.0.0.0 port 29400"
    assert finding.remedy
