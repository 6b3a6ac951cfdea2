"""Writes the arguments of a root's Terraform types, from the provider itself; in the format of provider_schema.py.

terraform providers schema -json | python tests/deploy/terraform_schema.py VERSION OUT.json ROOT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hcl_schema import read_root

Json = dict[str, Any]
KINDS = {"string": "string", "number": "number", "bool": "boolean", "list": "list", "set": "list", "map": "map"}


def extract(schemas: Json, version: str, root: Path) -> Json:
    """{"versions": …, "types": …} of what `root` uses of the AWS provider."""
    provider = schemas["provider_schemas"]["registry.terraform.io/hashicorp/aws"]
    types: Json = {}
    for kind, type_name, _, _ in read_root(root).blocks:
        if kind == "provider":
            block = _block(provider["provider"]["block"])
            del block["blocks"]["endpoints"]  # an address for each of 400 services
            types[f"provider.{type_name}"] = block
        elif kind == "data":
            types[f"data.{type_name}"] = _block(provider["data_source_schemas"][type_name]["block"])
        else:
            types[type_name] = _block(provider["resource_schemas"][type_name]["block"])
    return {"versions": {"aws": version}, "types": dict(sorted(types.items()))}


def _block(block: Json) -> Json:
    attributes = {
        name: {"kind": _kind(one.get("type")), "required": one.get("required", False)}
        for name, one in sorted(block.get("attributes", {}).items())
        if one.get("required") or one.get("optional")
    }
    blocks = {
        name: {
            "required": one.get("min_items", 0) > 0,
            "many": one["nesting_mode"] != "single" and one.get("max_items") != 1,
            "block": _block(one["block"]),
        }
        for name, one in sorted(block.get("block_types", {}).items())
    }
    return {"attributes": attributes, "blocks": blocks}


def _kind(kind: Any) -> str:
    return KINDS.get(kind[0] if isinstance(kind, list) else kind, "any")


if __name__ == "__main__":
    _, given_version, out, folder = sys.argv
    result = extract(json.load(sys.stdin), given_version, Path(folder))
    Path(out).write_text(json.dumps(result, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
