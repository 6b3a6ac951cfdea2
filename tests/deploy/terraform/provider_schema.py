"""Writes the arguments of Terraform types, from the wheels of CDK for Terraform.

python tests/deploy/provider_schema.py OUT.json WHEEL... -- helm_release data.aws_eks_cluster provider.helm ...

Each block is {"attributes": {name: {"kind", "required", "object"}}, "blocks": {name: {"required", "many", "block"}}}.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

Json = dict[str, Any]
LINK = re.compile(
    r"Docs at Terraform Registry: \{@link \S+/providers/[\w-]+/(?P<provider>[\w-]+)/(?P<version>[\w.]+)/docs"
    r"(?:/(?P<kind>[\w-]+)/(?P<type>\w+))?#(?P<name>\w+) "
)
# What Terraform itself adds to every resource, and what only the CDK adds.
META = frozenset(("connection", "provisioners", "count", "dependsOn", "forEach", "lifecycle", "provider"))


def extract(wheels: list[Path], wanted: set[str]) -> Json:
    """{"versions": {provider: version}, "types": {name: block}} for `wanted`, such as `data.aws_eks_cluster`."""
    types: Json = {}
    versions: dict[str, str] = {}
    for wheel in wheels:
        interfaces = _manifest(wheel)["types"]
        for name, interface in interfaces.items():
            if not name.endswith("Config") or "properties" not in interface:
                continue
            found = _address(interface)
            if found is None or found[0] not in wanted or found[0] in types:
                continue
            address, provider, version = found
            versions[provider] = version
            types[address] = _block(interface, interfaces)
    missing = wanted - set(types)
    if missing:
        raise SystemExit(f"not in {', '.join(map(str, wheels))}: {', '.join(sorted(missing))}")
    return {"versions": dict(sorted(versions.items())), "types": dict(sorted(types.items()))}


def _manifest(wheel: Path) -> Json:
    with zipfile.ZipFile(wheel) as archive:
        (inner,) = [name for name in archive.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(archive.read(inner))) as package:
            file = package.extractfile("package/.jsii")
            assert file is not None
            manifest = json.load(file)
    assert isinstance(manifest, dict)
    return manifest


def _address(interface: Json) -> tuple[str, str, str] | None:
    for one in interface["properties"]:
        link = _link(one)
        if link is None:
            continue
        provider, version = link["provider"], link["version"]
        match link["kind"]:
            case None:
                return f"provider.{provider}", provider, version
            case "resources":
                return f"{provider}_{link['type']}", provider, version
            case "data-sources":
                return f"data.{provider}_{link['type']}", provider, version
    return None


def _link(one: Json) -> re.Match[str] | None:
    docs = one.get("docs", {})
    return LINK.search(f"{docs.get('summary', '')} {docs.get('remarks', '')}")


def _block(interface: Json, interfaces: Json) -> Json:
    attributes: Json = {}
    blocks: Json = {}
    for one in interface.get("properties", []):
        link = _link(one)
        if link is None or one["name"] in META:
            continue
        name, required = link["name"], not one.get("optional", False)
        kind, inner = _kind(one["type"])
        nested = _block(interfaces[inner], interfaces) if inner in interfaces else None
        if one["docs"].get("summary") == f"{name} block." and nested is not None:
            blocks[name] = {"required": required, "many": kind == "list", "block": nested}
        else:
            attributes[name] = {"kind": kind, "required": required, **({"object": nested} if nested else {})}
    return {"attributes": dict(sorted(attributes.items())), "blocks": dict(sorted(blocks.items()))}


def _kind(kind: Json) -> tuple[str, str | None]:
    """What an argument holds, and the interface of what is in it."""
    if "primitive" in kind:
        return str(kind["primitive"]), None
    if "collection" in kind:
        _, inner = _kind(kind["collection"]["elementtype"])
        return ("map" if kind["collection"]["kind"] == "map" else "list"), inner
    if "union" in kind:
        others = [one for one in kind["union"]["types"] if one.get("fqn") != "cdktf.IResolvable"]
        return _kind(others[0]) if len(others) == 1 else ("any", None)
    return "object", str(kind["fqn"])


if __name__ == "__main__":
    _, out, *rest = sys.argv
    cut = rest.index("--")
    result = extract([Path(one) for one in rest[:cut]], set(rest[cut + 1 :]))
    Path(out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
