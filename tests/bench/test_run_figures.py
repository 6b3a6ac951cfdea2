"""The figures of the benchmarks that watch a run, on records written by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from machine import GPU_STATE, gpu_query, gpu_values
from run_figures import (
    Interval,
    Switch,
    by_phase,
    checkpoint_pauses,
    flatness,
    intervals_of,
    seconds_at_end,
    shares,
    speed_of,
    step_alone,
    validation_pauses,
    whole_rates,
)
from running import StartedRun, as_sets
from samples import GpuSamples, HostSamples, ProcessMemory, all_processes, family
from watching import Watch

BATCH = 10


def line(step: int, at: float, images_per_s: float, wait_s: float = 0.0, checkpoint_s: float = 0.0) -> dict[str, Any]:
    speed = {"images_per_s": images_per_s, "data_wait_s": wait_s, "checkpoint_s": checkpoint_s}
    return {"step": step, "time": at, **speed}


def evaluation(step: int, at: float, seconds: float) -> dict[str, Any]:
    stages = {"evaluation_detect_s": seconds - 1.0, "evaluation_score_s": 0.5}
    return {
        "step": step,
        "time": at,
        "evaluation_s": seconds,
        "checkpoint_s": 0.25,
        **stages,
        "mAP(bbox)/IoU=0.5:0.95": 0.3,
    }


LINES = [
    line(20, 1004.0, 50.0),  # 200 images at 50/s: the first step started at 1000
    line(40, 1006.0, 100.0, wait_s=0.01),
    line(60, 1009.0, 66.667, checkpoint_s=0.9),  # one second more than usual
    line(80, 1011.0, 100.0),
    evaluation(80, 1016.25, 5.0),
    line(100, 1021.0, 100.0),  # its clock started at 1019: 3 s of pictures after the evaluation
    evaluation(100, 1025.0, 4.0),
]


def test_intervals_start_at_the_line_before_or_after_an_evaluation() -> None:
    found = intervals_of(LINES, BATCH)
    assert [(one.after_step, one.step) for one in found] == [(0, 20), (20, 40), (40, 60), (60, 80), (80, 100)]
    assert [one.started_at for one in found] == [1000, 1004, 1006, 1009, 1019]
    assert [one.seconds for one in found] == [4, 2, 3, 2, 2]
    assert found[1].wait_s == pytest.approx(0.2)
    assert found[1].own_step_s == pytest.approx((2 - 0.2) / 20)
    assert found[2].own_step_s == pytest.approx((3 - 0.9) / 20)


def test_speed_counts_checkpoints_and_no_validation() -> None:
    found = speed_of(intervals_of(LINES, BATCH)[1:], BATCH)
    assert found == {
        "first_step": 21,
        "last_step": 100,
        "steps": 80,
        "seconds": 9.0,
        "images_per_s": 88.89,
        "step_ms_median": 100.0,
        "data_wait_ms_per_step": 2.5,
    }
    assert speed_of([], BATCH) == {"steps": 0}


def test_an_interval_with_a_part_of_the_switch_belongs_to_neither_phase() -> None:
    intervals = intervals_of(LINES, BATCH)
    phases = by_phase(intervals, Switch(ended_at=1008.0, seconds=1.5))
    assert {name: [one.step for one in some] for name, some in phases.items()} == {
        "eager": [20, 40],
        "switch": [60],
        "full speed": [80, 100],
    }
    assert by_phase(intervals, None) == {"full speed": intervals}
    late = by_phase(intervals[:2], Switch(ended_at=1008.0, seconds=1.5))
    assert late["full speed"] == []


def test_the_step_alone_leaves_waiting_out() -> None:
    slow, fast = Interval(0, 20, 0.0, 4.0, 2.0, 0.0), Interval(20, 40, 4.0, 5.0, 0.0, 0.0)
    found = step_alone([slow, slow, fast], BATCH)
    assert found["ms_without_waiting"] == 100.0  # of 100, 100 and 50
    assert found["ms_fastest_tenth"] == 50.0
    assert shares(90.0, found, 120.0) == {
        "of_step_without_waiting": 0.9,
        "of_fastest_tenth": 0.45,
        "of_benchmark": 0.75,
    }
    assert step_alone([], BATCH) == {}


def test_a_checkpoint_loses_what_its_interval_takes_longer() -> None:
    [pause] = checkpoint_pauses(intervals_of(LINES, BATCH)[1:])
    assert pause == {"steps": [41, 60], "host_waited_s": 0.9, "lost_s": 1.0}
    assert checkpoint_pauses([]) == []


def test_a_validation_pauses_the_run_until_its_next_step_starts() -> None:
    first, last = validation_pauses(LINES, BATCH, num_images=50, ended_at=1030.0)
    assert first["pause_s"] == 1019.0 - 1011.0
    assert first["images_per_s"] == 10.0
    assert first["stages_s"] == {"detect": 4.0, "score": 0.5}
    assert first["stages_images_per_s"] == {"detect": 12.5, "score": 100.0}
    assert first["checkpoint_before_s"] == 0.25
    assert first["ap"] == {"mAP(bbox)/IoU=0.5:0.95": 0.3}
    assert "end_s" not in first
    assert (last["pause_s"], last["end_s"]) == (4.0, 5.0)


def test_the_end_of_a_run_begins_after_a_validation_that_no_step_follows() -> None:
    assert seconds_at_end(LINES, 1031.5) == 6.5
    assert seconds_at_end(LINES[:-1], 1031.5) == 0
    assert seconds_at_end([], 1031.5) == 0


def test_whole_rates_add_the_validations() -> None:
    intervals = intervals_of(LINES, BATCH)  # 1,000 images in 13 s
    rates = whole_rates(intervals, BATCH, [8.0, 4.0], epoch_images=4000)
    assert rates["training"] == pytest.approx(1000 / 13)
    assert rates["with_validation"] == pytest.approx(1000 / 25)
    assert rates["in_real_epochs"] == pytest.approx(4000 / (52 + 6))
    assert list(whole_rates(intervals, BATCH, [], epoch_images=4000)) == ["training"]


def test_memory_is_flat_if_the_last_quarter_is_not_above_the_first() -> None:
    growing = [(float(second), 100.0 + second) for second in range(40)]
    found = flatness(growing, 0.0, 39.0)
    assert found is not None
    assert found["quarters"] == [104.5, 114.5, 124.5, 134.5]
    assert found["growth"] == pytest.approx(30 / 104.5, abs=1e-4)
    assert not found["flat"]
    noisy = [(float(second), 100.0 + second % 2 + 50 * (second == 30)) for second in range(40)]
    steady = flatness(noisy, 0.0, 39.0)
    assert steady is not None
    assert steady["flat"]
    assert steady["most"] == 150.0
    assert flatness(growing, 0.0, 6.0) is None  # too few to tell


def test_the_memory_of_a_run_counts_its_session_and_all_descendants() -> None:
    def process(pid: int, parent: int, session: int) -> ProcessMemory:
        return ProcessMemory(pid, parent, session, 1.0, 1.0)

    processes = [process(9, 8, 9), process(1, 0, 1), process(5, 1, 5), process(6, 1, 5), process(8, 6, 8)]
    assert sorted(one.pid for one in family(processes, 5)) == [5, 6, 8, 9]


def test_a_process_is_found_with_its_memory() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        try:
            [own] = family(all_processes(), process.pid)
        finally:
            process.kill()
    assert (own.pid, own.session) == (process.pid, process.pid)
    assert own.rss_mib > 0


def test_values_that_a_gpu_lacks_are_left_out() -> None:
    assert gpu_query("--loop-ms=2000")[-1] == "--loop-ms=2000"
    found = gpu_values("1980, 1980, 3201, 645.31, [N/A], 61, 51234, 143771\n")
    assert found["power_w"] == 645.31
    assert set(GPU_STATE.values()) - set(found) == {"power_limit_w"}
    assert gpu_values("1980, 19") == {}


def test_a_run_is_stopped_and_its_complete_lines_are_read(tmp_path: Path) -> None:
    code = (
        "import time, sys; file = open(sys.argv[1] + '/metrics.jsonl', 'w'); "
        "file.write('{\"step\": 1}\\n{\"st'); file.close(); print('started', flush=True); time.sleep(600)"
    )
    with StartedRun([sys.executable, "-c", code, str(tmp_path)], tmp_path) as run:
        while "started" not in run.output and run.is_running:
            time.sleep(0.01)
        assert run.lines() == [{"step": 1}]
        assert run.num_lines == 1
    assert run.process.returncode == -15


def test_the_summary_of_a_run_that_became_compiled(tmp_path: Path) -> None:
    code = "print('the steps are compiled from now on; switching took 2 s')"
    with StartedRun([sys.executable, "-c", code], tmp_path) as run:
        run.process.wait()
        run.started_at = 990.0
        extra = {"ranks": 1, "memory_mib": 512.0, "total_cost": None}
        lines = [one | ({} if "evaluation_s" in one else extra) for one in LINES]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        (tmp_path / "environment.json").write_text(json.dumps({"images per GPU": str(BATCH)}))
        watch = Watch(run, HostSamples(run.process.pid), GpuSamples(60.0), ended_at=1030.0)
        watch.gpu.close()
        watch.switch.look(run.output)
        assert watch.switch.switch is not None
        assert watch.switch.switch.seconds == 2.0
        watch.switch.switch = Switch(ended_at=1005.5, seconds=2.0)
        found = watch.summary(val_images=50, epoch_images=4000, benchmark_images_per_s=200.0)
    assert (found["ended"], found["wall_s"], found["compiled"], found["switch_s"]) == ("finished", 40.0, True, 2.0)
    assert (found["to_start_of_first_step_s"], found["to_first_line_s"], found["to_full_speed_s"]) == (10, 14, 16)
    assert {name: phase["steps"] for name, phase in found["phases"].items()} == {
        "eager": 0,
        "switch": 40,
        "full speed": 60,
    }
    assert found["step_alone"]["ms_without_waiting"] == 100.0
    whole = found["whole_run"]
    assert whole["from_first_step"]["training"]["images_per_s"] == 76.92  # 1,000 in 13 s
    assert whole["from_full_speed"]["training"]["images_per_s"] == 85.71  # 600 in 7 s
    assert whole["from_full_speed"]["training"]["of_benchmark"] == 0.4286
    assert [pause["steps"] for pause in found["checkpoints"]] == [[41, 60]]
    assert math.isnan(found["load_at_full_speed"]["total_cost"])


def test_fields_become_options_that_the_command_reads() -> None:
    sets = as_sets({"train.weights": None, "data.train_short_edge_px": (64, 64), "data.root": "a b"})
    assert sets[::2] == ["--set"] * 3
    assert sets[1::2] == ["train.weights=null", "data.train_short_edge_px=[64, 64]", 'data.root="a b"']
