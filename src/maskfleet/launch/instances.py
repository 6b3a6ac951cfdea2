"""Facts about GPU instance types: GPUs, their memory, EFA, price. A JSON file can add types or change facts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from maskfleet.config.fields import nearest
from maskfleet.errors import LaunchError

# On demand, Linux, us-east-1, not verified against AWS's price list; a test verifies the other facts.
PRICES_OF = "about 2025-06, unchecked"


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance type."""

    name: str
    gpus: int
    gpu: str
    gpu_memory_gib: int  # of each GPU, whole GiB that AWS lists: 22 of an A10G sold as 24 GB
    vcpus: int
    memory_gib: int
    efa: int  # network interfaces with EFA; 0 where there is none
    usd_per_hour: float | None  # None where no list price is known
    priced_at: str = PRICES_OF


def _rows(*rows: tuple[str, int, str, int, int, int, int, float | None]) -> dict[str, Instance]:
    return {row[0]: Instance(*row) for row in rows}


INSTANCES: Mapping[str, Instance] = _rows(
    ("p4d.24xlarge", 8, "A100", 40, 96, 1152, 4, 21.957642),
    ("p4de.24xlarge", 8, "A100", 80, 96, 1152, 4, 27.44705),
    ("p5.4xlarge", 1, "H100", 80, 16, 256, 1, 6.88),
    ("p5.48xlarge", 8, "H100", 80, 192, 2048, 32, 55.04),
    ("p5e.48xlarge", 8, "H200", 141, 192, 2048, 32, None),
    ("p5en.48xlarge", 8, "H200", 141, 192, 2048, 16, 63.296),
    ("p6-b200.48xlarge", 8, "B200", 179, 192, 2048, 8, None),
    ("g4dn.xlarge", 1, "T4", 16, 4, 16, 0, 0.526),
    ("g4dn.2xlarge", 1, "T4", 16, 8, 32, 0, 0.752),
    ("g4dn.4xlarge", 1, "T4", 16, 16, 64, 0, 1.204),
    ("g4dn.8xlarge", 1, "T4", 16, 32, 128, 1, 2.176),
    ("g4dn.12xlarge", 4, "T4", 16, 48, 192, 1, 3.912),
    ("g4dn.16xlarge", 1, "T4", 16, 64, 256, 1, 4.352),
    ("g4dn.metal", 8, "T4", 16, 96, 384, 1, 7.824),
    ("g5.xlarge", 1, "A10G", 22, 4, 16, 0, 1.006),
    ("g5.2xlarge", 1, "A10G", 22, 8, 32, 0, 1.212),
    ("g5.4xlarge", 1, "A10G", 22, 16, 64, 0, 1.624),
    ("g5.8xlarge", 1, "A10G", 22, 32, 128, 1, 2.448),
    ("g5.12xlarge", 4, "A10G", 22, 48, 192, 1, 5.672),
    ("g5.16xlarge", 1, "A10G", 22, 64, 256, 1, 4.096),
    ("g5.24xlarge", 4, "A10G", 22, 96, 384, 1, 8.144),
    ("g5.48xlarge", 8, "A10G", 22, 192, 768, 1, 16.288),
    ("g6.xlarge", 1, "L4", 22, 4, 16, 0, 0.8048),
    ("g6.2xlarge", 1, "L4", 22, 8, 32, 0, 0.9776),
    ("g6.4xlarge", 1, "L4", 22, 16, 64, 0, 1.3232),
    ("g6.8xlarge", 1, "L4", 22, 32, 128, 1, 2.0144),
    ("g6.12xlarge", 4, "L4", 22, 48, 192, 1, 4.6016),
    ("g6.16xlarge", 1, "L4", 22, 64, 256, 1, 3.3968),
    ("g6.24xlarge", 4, "L4", 22, 96, 384, 1, 6.6752),
    ("g6.48xlarge", 8, "L4", 22, 192, 768, 1, 13.3504),
    ("g6e.xlarge", 1, "L40S", 44, 4, 32, 0, 1.861),
    ("g6e.2xlarge", 1, "L40S", 44, 8, 64, 0, 2.24208),
    ("g6e.4xlarge", 1, "L40S", 44, 16, 128, 0, 3.00424),
    ("g6e.8xlarge", 1, "L40S", 44, 32, 256, 1, 4.52856),
    ("g6e.12xlarge", 4, "L40S", 44, 48, 384, 1, 10.49264),
    ("g6e.16xlarge", 1, "L40S", 44, 64, 512, 1, 7.57719),
    ("g6e.24xlarge", 4, "L40S", 44, 96, 768, 2, 15.06559),
    ("g6e.48xlarge", 8, "L40S", 44, 192, 1536, 4, 30.13118),
    ("g7e.2xlarge", 1, "RTX PRO Server 6000", 96, 8, 64, 0, None),
    ("g7e.4xlarge", 1, "RTX PRO Server 6000", 96, 16, 128, 0, None),
    ("g7e.8xlarge", 1, "RTX PRO Server 6000", 96, 32, 256, 1, None),
    ("g7e.12xlarge", 2, "RTX PRO Server 6000", 96, 48, 512, 1, None),
    ("g7e.24xlarge", 4, "RTX PRO Server 6000", 96, 96, 1024, 2, None),
    ("g7e.48xlarge", 8, "RTX PRO Server 6000", 96, 192, 2048, 4, None),
)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bus bandwidth that an all-reduce of 1 GiB should reach, and how that is known."""

    gb_per_s: float
    source: str


# Of the whole machine, in Gbit/s, without bursts: karpenter-provider-aws, zz_generated.bandwidth.go, from AWS's lists.
NETWORK_GBIT: Mapping[str, float] = {
    "p4d.24xlarge": 400, "p4de.24xlarge": 400, "p5.4xlarge": 100, "p5.48xlarge": 3200, "p5e.48xlarge": 3200,
    "p5en.48xlarge": 3200, "p6-b200.48xlarge": 3200,
    "g4dn.xlarge": 5, "g4dn.2xlarge": 10, "g4dn.4xlarge": 20, "g4dn.8xlarge": 50, "g4dn.12xlarge": 50,
    "g4dn.16xlarge": 50, "g4dn.metal": 100,
    "g5.xlarge": 2.5, "g5.2xlarge": 5, "g5.4xlarge": 10, "g5.8xlarge": 25, "g5.12xlarge": 40, "g5.16xlarge": 25,
    "g5.24xlarge": 50, "g5.48xlarge": 100,
    "g6.xlarge": 2.5, "g6.2xlarge": 5, "g6.4xlarge": 10, "g6.8xlarge": 25, "g6.12xlarge": 40, "g6.16xlarge": 25,
    "g6.24xlarge": 50, "g6.48xlarge": 100,
    "g6e.xlarge": 2.5, "g6e.2xlarge": 5, "g6e.4xlarge": 20, "g6e.8xlarge": 25, "g6e.12xlarge": 100,
    "g6e.16xlarge": 35, "g6e.24xlarge": 200, "g6e.48xlarge": 400,
    "g7e.2xlarge": 50, "g7e.4xlarge": 50, "g7e.8xlarge": 100, "g7e.12xlarge": 400, "g7e.24xlarge": 800,
    "g7e.48xlarge": 1600,
}  # fmt: skip
_NCCL_TESTS = "awsome-distributed-ai, micro-benchmarks/nccl-tests"
_MEASURED_BETWEEN = {  # by others, with nccl-tests
    "p4d.24xlarge": Bandwidth(76.8, f"two p4de.24xlarge, {_NCCL_TESTS}"),
    "p4de.24xlarge": Bandwidth(76.8, f"two p4de.24xlarge, {_NCCL_TESTS}"),
    "p5.48xlarge": Bandwidth(437.0, f"two p5.48xlarge, {_NCCL_TESTS}"),
    "p5e.48xlarge": Bandwidth(437.0, f"two p5.48xlarge, {_NCCL_TESTS}"),
    "p5en.48xlarge": Bandwidth(437.0, f"two p5.48xlarge, {_NCCL_TESTS}"),
}
_MEASURED_INSIDE = {
    "p4d.24xlarge": Bandwidth(230.8, "one p4d.24xlarge, NCCL issue 527"),
    "p4de.24xlarge": Bandwidth(230.8, "one p4d.24xlarge, NCCL issue 527"),
    "p5.48xlarge": Bandwidth(441.8, f"one p5.48xlarge, {_NCCL_TESTS}/aws-batch"),
    "p5e.48xlarge": Bandwidth(441.8, f"one p5.48xlarge, {_NCCL_TESTS}/aws-batch"),
    "p5en.48xlarge": Bandwidth(441.8, f"one p5.48xlarge, {_NCCL_TESTS}/aws-batch"),
}
ESTIMATED_SHARE = 0.5  # of the line rate, where nobody published a measurement


def expected_bandwidth(name: str, nodes: int) -> Bandwidth | None:
    """What an all-reduce of 1 GiB over the GPUs of `nodes` machines should reach; None if nothing is known."""
    if nodes == 1:
        return _MEASURED_INSIDE.get(name)
    if name in _MEASURED_BETWEEN:
        return _MEASURED_BETWEEN[name]
    gbit = NETWORK_GBIT.get(name)
    if gbit is None:
        return None
    return Bandwidth(ESTIMATED_SHARE * gbit / 8, f"an estimate: half of {gbit:g} Gbit/s")


# PyTorch's builds for CUDA 12.8 and newer contain no code for Volta (pytorch issues 172352 and 175253), and AWS's newer
# lists do not have p3. Each with a type that has as many GPUs and no less memory on each of them.
WITHOUT_TORCH: Mapping[str, str] = {
    "p3.2xlarge": "g6.2xlarge",
    "p3.8xlarge": "g6.12xlarge",
    "p3.16xlarge": "g6.48xlarge",
    "p3dn.24xlarge": "g6e.48xlarge",
}


def instance_named(name: str, known: Mapping[str, Instance] = INSTANCES) -> Instance:
    """The facts of `name`, with or without SageMaker's `ml.`."""
    bare = name.removeprefix("ml.")
    if bare in known:
        return known[bare]
    if bare in WITHOUT_TORCH:
        raise LaunchError(
            f"{name} has V100 GPUs, which PyTorch's builds for CUDA 12.8 and newer do not support",
            remedy=f"use {WITHOUT_TORCH[bare]}, which has as many GPUs; for an image whose PyTorch supports V100, "
            "name the facts of the type in a file and give it with --instances FILE (docs/run-anywhere/launch.md)",
        )
    near = nearest(bare, known)
    hint = f"did you mean {near}? " if near else ""
    raise LaunchError(
        f"nothing is known of the instance type {name}",
        remedy=f"{hint}name its facts in a file and give it with --instances FILE (docs/run-anywhere/launch.md)",
    )


def with_overrides(file: Path, known: Mapping[str, Instance] = INSTANCES) -> dict[str, Instance]:
    """`known`, changed by a JSON file `{"p5.48xlarge": {"usd_per_hour": 50.0, "priced_at": "2026-11"}, …}`."""
    remedy = "see docs/run-anywhere/launch.md for the form"
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        words = error.strerror if isinstance(error, OSError) else error
        raise LaunchError(f"cannot read {file}: {words}", remedy=remedy) from error
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise LaunchError(f"{file} is not a JSON object of instance types", remedy=remedy)
    result = dict(known)
    types = {one.name: str(one.type) for one in fields(Instance)}
    for name, row in rows.items():
        for key, value in row.items():
            if key not in types or key == "name" or not _fits(value, types[key]):
                raise LaunchError(
                    f"{file}: {name}: {key} = {value!r} is not a fact of an instance",
                    remedy=f"the facts are {', '.join(one for one in types if one != 'name')}",
                )
        base = asdict(result[name]) if name in result else {"name": name, "priced_at": "?", "usd_per_hour": None}
        missing = set(types) - set(base) - set(row)
        if missing:
            lacks = f"{file}: {name} lacks {', '.join(sorted(missing))}"
            raise LaunchError(lacks, remedy="name all facts of a new type")
        result[name] = Instance(**{**base, **row})
    return result


def _fits(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return False
    match kind:
        case "int":
            return isinstance(value, int) and value >= 0
        case "str":
            return isinstance(value, str)
        case _:
            return value is None or (isinstance(value, int | float) and value >= 0)
