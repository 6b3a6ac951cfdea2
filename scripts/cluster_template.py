"""Update the generated parts of deploy/cloudformation/ec2-cluster.yaml, between `# begin NAME` and `# end NAME`.

Instance types come from `maskfleet.launch.instances`, the user data from deploy/cloudformation/bootstrap.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from maskfleet.launch.instances import INSTANCES

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "cloudformation"
TEMPLATE = FOLDER / "ec2-cluster.yaml"
# The head node has one network interface, so that it can have a public address: no types with several for EFA.
LOGIN_TYPES = ("m6i.large", "m6i.xlarge", "m6i.2xlarge", "m6i.4xlarge", "m6i.8xlarge")
HEAD_TYPES = (*LOGIN_TYPES, *(one.name for one in INSTANCES.values() if one.efa <= 1))
HEALTH = "/usr/local/sbin/maskfleet-health"


def allowed(names: Iterable[str]) -> list[str]:
    """The values of a parameter, in few lines: the template has a size limit."""
    return textwrap.wrap(f"AllowedValues: [{', '.join(names)}]", 110, subsequent_indent="  ", break_on_hyphens=False)


def instance_types() -> list[str]:
    """EFA interfaces and GPUs of each type."""
    rows = [f"{name}: {{Efa: 0, Gpus: 0}}" for name in LOGIN_TYPES]
    return rows + [f"{one.name}: {{Efa: {one.efa}, Gpus: {one.gpus}}}" for one in INSTANCES.values()]


def interfaces() -> list[str]:
    """The EFA interfaces of types with several network cards; condition EfaN holds for types with N or more."""
    places = [(0, 1), *((card, 0) for card in range(1, max(one.efa for one in INSTANCES.values())))]
    rows = []
    for number, (card, device) in enumerate(places, start=1):
        least = max(2, 1 << (number - 1).bit_length())
        facts = f"NetworkCardIndex: {card}, DeviceIndex: {device}, InterfaceType: efa-only"
        rows.append(f"- !If [Efa{least}, {{{facts}, Groups: [!Ref NodeSg]}}, !Ref AWS::NoValue]")
    return rows


def bootstrap() -> list[str]:
    """The scripts that a node runs, without their comments, as a block of YAML."""
    health, node = ((FOLDER / "bootstrap" / name).read_text(encoding="utf-8") for name in ("health.sh", "node.sh"))
    text = f"cat >{HEALTH} <<'END_OF_HEALTH'\n{health}END_OF_HEALTH\nchmod 0755 {HEALTH}\n{node}"
    lines = [line for line in text.splitlines() if line and not re.match(r"\s*#(?!!)", line)]
    return ["Script: |", *(f"  {line}" for line in lines)]


PARTS: Mapping[str, Callable[[], list[str]]] = {
    "WorkerTypes": lambda: allowed(INSTANCES),
    "HeadTypes": lambda: allowed(HEAD_TYPES),
    "InstanceTypes": instance_types,
    "interfaces": interfaces,
    "bootstrap": bootstrap,
}


def updated(template: str) -> str:
    """`template` with its generated parts replaced."""
    for name, part in PARTS.items():
        block = re.compile(rf"^( *)# begin {name}\n.*?^ *# end {name}\n", re.MULTILINE | re.DOTALL)
        found = block.findall(template)
        if len(found) != 1:
            raise ValueError(f"the template has {len(found)} parts {name}")
        lines = [f"# begin {name}", *part(), f"# end {name}"]
        text = "".join(f"{found[0]}{line}".rstrip() + "\n" for line in lines)
        template = block.sub(lambda _, text=text: text, template)
    return template


if __name__ == "__main__":
    TEMPLATE.write_text(updated(TEMPLATE.read_text(encoding="utf-8")), encoding="utf-8")
