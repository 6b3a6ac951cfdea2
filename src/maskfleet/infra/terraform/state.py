"""A Terraform state as `terraform state pull` prints it: resources, their dependencies, and outputs."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.infra.terraform.progress import Event

_IS_DATA_SOURCE = re.compile(r"(?:^|\.)data\.")
_INDEX = re.compile(r'\[(?:\d+|"(?:[^"\\]|\\.)*")\]')


@dataclass(frozen=True, slots=True)
class Resource:
    """One instance of a managed resource."""

    address: str
    type: str
    id: str = ""
    needs: tuple[str, ...] = ()
    tainted: bool = False
    attributes: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def block(self) -> str:
        """Its address without indices, as the dependencies of other resources name it."""
        return without_index(self.address)

    @property
    def name(self) -> str:
        """Its name in the root, without type, module and index."""
        return self.block.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class State:
    """What Terraform knows about one root."""

    serial: int = 0
    resources: tuple[Resource, ...] = ()
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name: its `value`, and whether it is `sensitive`."""

    @property
    def values(self) -> dict[str, Any]:
        """The values of the outputs."""
        return {name: output["value"] for name, output in self.outputs.items()}


def parse_state(text: str) -> State:
    """The state of a root; before the first apply the text is empty."""
    if not text.strip():
        return State()
    data = json.loads(text)
    if data.get("version") != 4:
        raise InfraError(
            f"the Terraform state has format {data.get('version')}, not 4", remedy="use the Terraform that wrote it"
        )
    return State(
        serial=int(data.get("serial", 0)),
        resources=tuple(_resources(data.get("resources", []))),
        outputs=data.get("outputs", {}),
    )


def without_index(address: str) -> str:
    return _INDEX.sub("", address)


def split_kept(
    state: State, data: Collection[str], guards: Collection[str] = ()
) -> tuple[list[Resource], list[Resource]]:
    """(kept, destroyed): resources that hold data are kept, with everything that they depend on.

    `data` and `guards` name types, or blocks such as `aws_efs_file_system.shared`; a guard is kept if all that it
    depends on is. No kept resource depends on a destroyed one, so destroying the second list does not touch the first.
    """
    needs: defaultdict[str, list[str]] = defaultdict(list)
    for resource in state.resources:
        needs[resource.block] += resource.needs
    queue = [resource.block for resource in state.resources if is_named(resource, data)]
    kept: set[str] = set()
    while queue:
        block = queue.pop()
        if block not in kept:
            kept.add(block)
            queue += needs[block]
    if kept:
        kept |= {
            resource.block
            for resource in state.resources
            if is_named(resource, guards) and resource.needs and kept.issuperset(resource.needs)
        }
    keep = [resource for resource in state.resources if resource.block in kept]
    destroy = [resource for resource in state.resources if resource.block not in kept]
    return keep, destroy


def is_named(resource: Resource | Event, names: Collection[str]) -> bool:
    """Whether `names` contains its type, or its type and name."""
    return resource.type in names or ".".join(without_index(resource.address).split(".")[-2:]) in names


def _resources(entries: Iterable[dict[str, Any]]) -> Iterable[Resource]:
    for entry in entries:
        if entry.get("mode") != "managed":
            continue
        module = f"{entry['module']}." if entry.get("module") else ""
        for instance in entry.get("instances", []):
            key = instance.get("index_key")
            index = "" if key is None else f"[{json.dumps(key)}]"
            attributes = instance.get("attributes") or {}
            needs = instance.get("dependencies") or ()
            yield Resource(
                address=f"{module}{entry['type']}.{entry['name']}{index}",
                type=entry["type"],
                id=str(attributes.get("id") or ""),
                needs=tuple(without_index(need) for need in needs if not _IS_DATA_SOURCE.search(need)),
                tainted=instance.get("status") == "tainted",
                attributes=attributes,
            )
