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
    ("p3.2xlarge", 1, "V100", 16, 8, 61, 0, 3.06),
    ("p3.8xlarge", 4, "V100", 16, 32, 244, 0, 12.24),
    ("p3.16xlarge", 8, "V100", 16, 64, 488, 0, 24.48),
    ("p3dn.24xlarge", 8, "V100", 32, 96, 768, 1, 31.212),
    ("p4d.24xlarge", 8, "A100", 40, 96, 1152, 4, 21.957642),
    ("p4de.24xlarge", 8, "A100", 80, 96, 1152, 4, 27.44705),
    ("p5.4xlarge", 1, "H100", 80, 16, 256, 1, 6.88),
    ("p5.48xlarge", 8, "H100", 80, 192, 2048, 32, 55.04),
    ("p5e.48xlarge", 8, "H200", 141, 192, 2048, 32, None),
    ("p5en.48xlarge", 8, "H200", 141, 192, 2048, 16, 63.296),
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
)


def instance_named(name: str, known: Mapping[str, Instance] = INSTANCES) -> Instance:
    """The facts of `name`, with or without SageMaker's `ml.`."""
    bare = name.removeprefix("ml.")
    if bare in known:
        return known[bare]
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
    except (OSError, ValueError) as error:
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
