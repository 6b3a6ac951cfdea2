"""The last lines of a run."""

from __future__ import annotations

from pathlib import Path

from maskfleet.launch.supervise.job_files import Endpoint, Host, Job, JobFolder
from maskfleet.launch.supervise.prepare import write_job_files
from maskfleet.launch.supervise.supervisor import Supervisor

JOB = Job("a", "supervisor", (Host("localhost", 1),), 1, 0, 0, "/")


def train_to(run_dir: Path, step: int) -> None:
    (run_dir / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')


def test_a_restart_that_no_heartbeat_saw_is_told_before_the_end(tmp_path: Path) -> None:
    write_job_files(tmp_path, {"launch/job.json": JOB.to_json()})
    folder = JobFolder(tmp_path)
    folder.host(0).mkdir(parents=True, exist_ok=True)
    folder.write_endpoint(Endpoint(0, 0, "localhost", 0, [0]))
    supervisor = Supervisor(tmp_path, 0)
    supervisor.state = "running"
    for step in (50, 53):
        train_to(tmp_path, step)
        supervisor.heartbeats.send()
    supervisor.restarts = 1
    train_to(tmp_path, 60)
    folder.write_outcome("done", 0, "")
    assert supervisor._finish() == 0
    told = [event.what for event in folder.events()]
    assert [told[0].partition(",")[0], *told[1:]] == ["ranks restarted at step 53", "the run is done"]
