"""Failures as they were recorded, each mapped to its cause.

Most were provoked with the real trainer and the real torchrun, mpirun and ssh on a machine without a GPU. Those that
need GPUs or a broken file system are put together from the messages that torch, NCCL and the kernel print.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from maskfleet.launch import causes
from maskfleet.launch.causes import CAUSES
from maskfleet.launch.explain import explain_lines

FOLDER = Path(__file__).parent / "golden" / "failures"

EXPECTED = {
    "bad-annotations": "bad data",
    "bad-config": "bad config",
    "bus-error": "shared memory",
    "data-worker": "data worker died",
    "disk-full": "disk full",
    "gpu-assert": "gpu code",
    "gpu-driver": "gpu driver",
    "gpu-ecc": "gpu broken",
    "gpu-memory": "gpu memory",
    "host-memory": "host memory",
    "kernel-oom": "host memory",
    "killed": "killed",
    "killed-one-of-two": "killed",
    "missing-annotations": "missing data",
    "missing-data-folder": "missing data",
    "missing-images": "missing data",
    "missing-weights": "weights",
    "mpi-host-down": "host unreachable",
    "mpi-slots": "mpi slots",
    "nccl-network": "nccl network",
    "nccl-timeout": "nccl timeout",
    "no-module": "version mismatch",
    "not-a-number": "not a number",
    "not-shared": "run directory not shared",
    "port-in-use": "port in use",
    "rendezvous-timeout": "rendezvous",
    "run-directory-in-use": "run directory in use",
    "segfault": "crash",
    "shared-memory": "shared memory",
    "stale-nfs": "file system",
    "stopped": "stopped",
    "too-few-gpus": "gpu missing",
    "unknown-host": "host unreachable",
    "wrong-categories": "bad config",
}
FIRST_RANK = {
    "gpu-memory": 3,
    "nccl-network": 8,
    "gpu-ecc": 2,
    "gpu-assert": 1,
    "too-few-gpus": 7,
    "disk-full": 0,
    "killed-one-of-two": 1,
}


def lines_of(name: str) -> list[str]:
    return (FOLDER / f"{name}.log").read_text().splitlines()


def test_every_recorded_failure_has_a_verdict() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(EXPECTED)
    assert len(EXPECTED) >= 20


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_recorded_failure_is_mapped_to_its_cause(name: str) -> None:
    explanation = explain_lines(lines_of(name))
    found = explanation.cause.name if explanation.cause else None
    assert found == EXPECTED[name], explanation.render()
    text = explanation.render()
    assert f"cause: {found}." in text
    assert "→" in text
    assert explanation.evidence.strip()[:20] in "\n".join(lines_of(name))


@pytest.mark.parametrize("name", sorted(FIRST_RANK))
def test_the_first_rank_that_failed_is_named_with_its_own_words(name: str) -> None:
    explanation = explain_lines(lines_of(name))
    assert explanation.rank == FIRST_RANK[name]
    assert explanation.trace
    assert "torch.distributed.elastic" not in "\n".join(explanation.trace)


def test_a_run_that_went_well_has_no_cause() -> None:
    lines = [line for line in lines_of("stopped") if "step: " in line]
    assert lines
    explanation = explain_lines(lines)
    assert explanation.cause is None
    assert "not known" in explanation.render()


def test_the_first_failure_wins_over_what_others_say_about_it() -> None:
    lines = lines_of("gpu-memory")
    echo_first = [lines[-2], lines[-1], *lines[:-2]]
    explanation = explain_lines(echo_first)
    assert (explanation.rank, explanation.cause and explanation.cause.name) == (3, "gpu memory")


def test_causes_have_names_of_their_own() -> None:
    assert len({cause.name for cause in CAUSES}) == len(CAUSES) >= 25


def test_the_page_on_troubleshooting_lists_every_cause() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "troubleshooting.md").read_text()
    for cause in CAUSES:
        next_step = cause.next_step.replace("|", "\\|")  # in a table a pipe ends the cell, in backticks too
        assert f"| {cause.name} | {cause.meaning} | {next_step} |\n" in page


LONG = 1 << 18
HOSTILE = {
    "error and image": "error: " + "image " * (LONG // 6),
    "error again and again": "error: data " * (LONG // 12),
    "no end": "Traceback (most recent call last)" + " \t" * (LONG // 2),
    "NCCL": "NCCL " * (LONG // 5),
    "one word": "x" * LONG,
    "rank of many digits": f"[rank{'9' * 5000}]: error: there is no folder",
    "exit code": "exitcode" + " " * LONG,
    "many lines": "[rank0]: error: lost another rank " + "\n[rank0]: error: lost another rank" * 5_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_very_long_line_is_explained_in_linear_time(name: str) -> None:
    text = explain_lines(HOSTILE[name].splitlines()).render()
    assert len(text) < 100_000, "nobody reads lines of that length"


def test_patterns_are_split_only_where_they_match_anything() -> None:
    """`LinePatterns` splits at `.*`, which must not be inside a group or a class, nor an escaped dot."""
    for file in (Path(causes.__file__).with_name("causes.toml"), Path(causes.__file__).parent / "eks" / "causes.toml"):
        tables = causes.read_tables(file)
        rows = [row for one in tables.values() for row in ([one] if "patterns" in one else one.values())]
        patterns = [pattern for row in rows for pattern in row["patterns"]]
        assert patterns
        for pattern in patterns:
            assert "\\.*" not in pattern
            for part in pattern.split(".*"):
                re.compile(part)  # raises for half of a group
                assert not re.search(r"(?<!\\)\.[+*?{]", part), pattern


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("a.*b", "xx a 1 a 2 b\n"),
        ("a.*b", "b a\nb\n a c b d b\n"),
        ("^.*\\bE\\b", "no Error\nan E here\n"),
        ("a.*(?:b|c).*d", "a b\na c x d\n"),
        ("a.*", "nothing\nan end"),
        ("a.*b", "a\n" * 5),
    ],
)
def test_parts_one_after_the_other_find_what_the_whole_pattern_finds(pattern: str, text: str) -> None:
    whole = re.search(pattern, text, re.MULTILINE)
    found = causes.LinePatterns([pattern]).search(text)
    assert (found is None) == (whole is None)
    if found is not None and whole is not None:
        assert text.count("\n", 0, found[0]) == text.count("\n", 0, whole.start()), "the same line"


def test_the_rank_that_a_supervisor_saw_killed_counts_before_those_that_noticed() -> None:
    lines = [
        "[rank0]: error: rank 0 lost another rank while in a step: Connection closed by peer; no answer from rank 1",
        "[rank0]:   → see the end of that rank's log",
        "[launch]: rank 1 on host 0 (localhost) ended with code 137",
    ]
    explanation = explain_lines(lines)
    assert (explanation.rank, explanation.trace) == (1, ("rank 1 on host 0 (localhost) ended with code 137",))
    assert explanation.cause is not None
    assert explanation.cause.name == "killed"
    stopped = [lines[0], lines[1], "[launch]: rank 1 on host 0 (localhost) ended with code 143"]
    assert explain_lines(stopped).rank == 0


def test_a_gpu_that_the_kernel_reports_broken_explains_what_its_rank_saw() -> None:
    told = explain_lines(
        [
            "[rank3]: Traceback (most recent call last):",
            "[rank3]: torch.AcceleratorError: CUDA error: unspecified launch failure",
            "[launch]: rank 3 on host node2 ended with code 1",
            "[launch]: host node2: NVRM: Xid (PCI:0000:10:1c): 79, pid=47, GPU has fallen off the bus.",
        ]
    )
    assert told.cause is not None
    assert (told.cause.name, told.rank) == ("gpu broken", 3)
    other = explain_lines(["[launch]: host node2: NVRM: Xid (PCI:0000:10:1c): 31, pid=47, name=python3"])
    assert other.cause is not None
    assert other.cause.name == "gpu code"
