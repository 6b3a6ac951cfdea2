"""A Terraform state as `terraform state pull` prints it: resources, their dependencies, and outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from maskfleet.errors import InfraError
from maskfleet.infra.terraform.progress import Change

_IS_DATA_SOURCE = re.compile(r"(?:^|\.)data\.")
_INDEX = re.compile(r'\[(?:\d+|"(?:[^"\\]|\\.)*")\]')


@dataclass(frozen=True, slots=True)
class Resource:
    """One instance of a managed resource."""

    address: str
    type: str
    name: str
    id: str = ""
    needs: tuple[str, ...] = ()
    tainted: bool = False
    attributes: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def block(self) -> str:
        """Its address without indices, as the dependencies of other resources name it."""
        return without_index(self.address)


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a root."""

    value: Any
    sensitive: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """What Terraform knows about one root."""

    serial: int = 0
    terraform_version: str = ""
    resources: tuple[Resource, ...] = ()
    outputs: dict[str, Output] = field(default_factory=dict)

    def has(self, type_: str) -> bool:
        return any(resource.type == type_ for resource in self.resources)


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
        terraform_version=str(data.get("terraform_version", "")),
        resources=tuple(_resources(data.get("resources", []))),
        outputs={
            name: Output(output.get("value"), bool(output.get("sensitive")))
            for name, output in data.get("outputs", {}).items()
        },
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
    blocks: dict[str, list[Resource]] = {}
    for resource in state.resources:
        blocks.setdefault(resource.block, []).append(resource)
    queue = [resource.block for resource in state.resources if is_named(resource, data)]
    kept: set[str] = set()
    while queue:
        block = queue.pop()
        if block not in kept:
            kept.add(block)
            queue += [need for resource in blocks.get(block, []) for need in resource.needs]
    if kept:
        kept |= {
            resource.block
            for resource in state.resources
            if is_named(resource, guards) and resource.needs and kept.issuperset(resource.needs)
        }
    keep = [resource for resource in state.resources if resource.block in kept]
    destroy = [resource for resource in state.resources if resource.block not in kept]
    return keep, destroy


def is_named(resource: Resource | Change, names: Collection[str]) -> bool:
    """Whether `names` contains its type, or its type and name."""
    return resource.type in names or ".".join(without_index(resource.address).split(".")[-2:]) in names


def _managed(addresses: Iterable[str]) -> tuple[str, ...]:
    return tuple(without_index(address) for address in addresses if not _IS_DATA_SOURCE.search(address))


def _resources(entries: Iterable[dict[str, Any]]) -> Iterable[Resource]:
    for entry in entries:
        if entry.get("mode") != "managed":
            continue
        module = f"{entry['module']}." if entry.get("module") else ""
        for instance in entry.get("instances", []):
            key = instance.get("index_key")
            index = "" if key is None else f"[{json.dumps(key)}]"
            attributes = instance.get("attributes") or {}
            yield Resource(
                address=f"{module}{entry['type']}.{entry['name']}{index}",
                type=entry["type"],
                name=entry["name"],
                id=str(attributes.get("id") or ""),
                needs=_managed(instance.get("dependencies") or ()),
                tainted=instance.get("status") == "tainted",
                attributes=attributes,
            )
