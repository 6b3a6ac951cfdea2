"""Checks Terraform's arguments without Terraform's providers: names, nesting, required ones, kinds, references.

`check_root(folder, schema)` takes what provider_schema.py wrote. Whether a value is right only the provider knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hcl2

Json = dict[str, Any]
META = {
    "resource": {"count", "for_each", "provider", "depends_on"},
    "data": {"count", "for_each", "provider", "depends_on"},
    "provider": {"alias"},
}
META_BLOCKS = {"resource": {"lifecycle", "connection", "provisioner"}, "data": {"lifecycle"}, "provider": set[str]()}
MODULE_META = {"source", "version", "providers", "count", "for_each", "depends_on"}
REFERENCE = re.compile(r"(?<![\w.\"])(var|local|module|data\.[a-z]\w*|[a-z][a-z0-9]*_\w+)\.([A-Za-z_][\w-]*)")


@dataclass(slots=True)
class Root:
    """The blocks of one folder."""

    variables: dict[str, Json] = field(default_factory=dict)
    locals: set[str] = field(default_factory=set)
    modules: dict[str, Json] = field(default_factory=dict)
    outputs: dict[str, Json] = field(default_factory=dict)
    # (kind, type, name, body); a provider's type is its name.
    blocks: list[tuple[str, str, str, Json]] = field(default_factory=list)
    used: set[tuple[str, str]] = field(default_factory=set)
    iterators: set[str] = field(default_factory=set)  # labels of dynamic blocks, which are names inside of them


def check_root(folder: Path, schema: Mapping[str, Any]) -> list[str]:
    """What is wrong in a Terraform folder, as sentences; empty if nothing is."""
    root = read_root(folder)
    faults = []
    for kind, type_name, name, body in root.blocks:
        address = {"resource": "", "data": "data.", "provider": "provider."}[kind] + type_name
        where = address if kind == "provider" else f"{address}.{name}"
        if address not in schema["types"]:
            faults.append(f"{where}: {address} is not in the schema")
            continue
        faults += _check_block(where, body, schema["types"][address], META[kind], META_BLOCKS[kind])
    faults += [fault for name, body in root.modules.items() for fault in _check_module(folder, name, body)]
    return faults + _check_references(root) + _check_variables(root)


def read_root(folder: Path) -> Root:
    """All `.tf` files of a folder as one."""
    root = Root()
    for file in sorted(folder.glob("*.tf")):
        with file.open(encoding="utf-8") as stream:
            parsed: Json = hcl2.load(stream)
        for kind in ("resource", "data"):
            for entry in parsed.get(kind, []):
                for type_name, named in entry.items():
                    root.blocks += [(kind, _bare(type_name), _bare(name), body) for name, body in named.items()]
        for entry in parsed.get("provider", []):
            root.blocks += [("provider", _bare(name), _bare(name), body) for name, body in entry.items()]
        for kind, target in (("variable", root.variables), ("output", root.outputs), ("module", root.modules)):
            target.update({_bare(name): body for entry in parsed.get(kind, []) for name, body in entry.items()})
        for entry in parsed.get("locals", []):
            root.locals |= {name for name in entry if not name.startswith("__")}
        root.iterators |= set(_iterators(parsed))
        for kind, entries in parsed.items():
            if kind != "variable":
                root.used |= {found for text in _texts(entries) for found in _references(text)}
    return root


def dependencies(folder: Path) -> dict[str, set[str]]:
    """Addresses (`aws_vpc.this`, `local.name`) that each resource and local refers to.

    Modules are left out: an output of one depends on some of its inputs, which only Terraform knows.
    """
    needs: dict[str, set[str]] = {}
    for file in sorted(folder.glob("*.tf")):
        with file.open(encoding="utf-8") as stream:
            parsed: Json = hcl2.load(stream)
        found = {
            f"{_bare(type_name)}.{_bare(name)}": body
            for entry in parsed.get("resource", [])
            for type_name, named in entry.items()
            for name, body in named.items()
        }
        found |= {f"local.{name}": body for entry in parsed.get("locals", []) for name, body in entry.items()}
        for address, body in found.items():
            needs[address] = {".".join(one) for text in _texts(body) for one in _references(text)}
    return needs


def _check_block(where: str, body: Json, block: Json, meta: set[str], meta_blocks: set[str]) -> list[str]:
    faults = []
    given = {_bare(name): value for name, value in body.items() if not name.startswith("__")}
    dynamic = [entry for entry in given.pop("dynamic", []) if isinstance(entry, dict)]
    inner: dict[str, list[Json]] = {name: value for name, value in given.items() if _is_blocks(value)}
    for entry in dynamic:
        for name, content in entry.items():
            inner.setdefault(_bare(name), []).extend(content["content"])
    for name, value in given.items():
        if name in inner or name in meta:
            continue
        if name in block["blocks"]:
            faults.append(f"{where}: {name} is a block, not an argument")
        elif name not in block["attributes"]:
            faults.append(f"{where}: {name} is not an argument")
        else:
            faults += _check_value(f"{where}: {name}", value, block["attributes"][name])
    for name, bodies in inner.items():
        if name in meta_blocks:
            continue
        if name in block["attributes"]:
            faults.append(f"{where}: {name} is an argument, not a block")
        elif name not in block["blocks"]:
            faults.append(f"{where}: {name} is not a block")
        else:
            expected = block["blocks"][name]
            if len(bodies) > 1 and not expected["many"]:
                faults.append(f"{where}: {name} is there {len(bodies)} times")
            for one in bodies:
                faults += _check_block(f"{where}: {name}", one, expected["block"], set(), set())
    for name, facts in {**block["attributes"], **block["blocks"]}.items():
        if facts["required"] and name not in given and name not in inner:
            faults.append(f"{where}: {name} is missing")
    return faults


def _check_value(where: str, value: Any, facts: Json) -> list[str]:
    kind = facts["kind"]
    if isinstance(value, str) and not value.startswith('"'):
        return []  # an expression
    if isinstance(value, str):
        text = value.strip('"')
        plain = "${" not in text and value != "null"
        fits = {
            "number": re.fullmatch(r"-?[0-9.]+", text) is not None,
            "boolean": text in ("true", "false"),
            "string": True,
            "any": True,
        }
        return [f"{where} is a string, not a {kind}"] if plain and not fits.get(kind, False) else []
    if isinstance(value, bool | int | float):
        if kind in ("list", "map", "object"):
            return [f"{where} is {value}, not a {kind}"]
        wrong = (kind == "number" and isinstance(value, bool)) or (kind == "boolean" and not isinstance(value, bool))
        return [f"{where} is {value}, not a {kind}"] if wrong else []
    if isinstance(value, list):
        if kind not in ("list", "any"):
            return [f"{where} is a list, not a {kind}"]
        return [fault for one in value if isinstance(one, dict) for fault in _check_object(where, one, facts)]
    if isinstance(value, dict):
        if kind not in ("map", "object", "any"):
            return [f"{where} is an object, not a {kind}"]
        return _check_object(where, value, facts)
    return []


def _check_object(where: str, value: Json, facts: Json) -> list[str]:
    if "object" not in facts or facts["kind"] == "map":
        return []
    nested = facts["object"]
    both = {"attributes": {**nested["attributes"], **nested["blocks"]}, "blocks": {}}
    return _check_block(where, value, both, set(), set())


def _check_module(folder: Path, name: str, body: Json) -> list[str]:
    source = str(body.get("source", '""')).strip('"')
    if not source.startswith("."):
        return [f"module.{name}: {source!r} is not a folder of ours"]
    variables = read_root(folder / source).variables
    given = {_bare(key) for key in body if not key.startswith("__")} - MODULE_META
    faults = [f"module.{name}: {key} is not a variable of {source}" for key in sorted(given - set(variables))]
    needed = {key for key, variable in variables.items() if "default" not in variable}
    return faults + [f"module.{name}: {key} is missing" for key in sorted(needed - given)]


def _check_references(root: Root) -> list[str]:
    known = {("var", name) for name in root.variables} | {("local", name) for name in root.locals}
    known |= {("module", name) for name in root.modules}
    for kind, type_name, name, _ in root.blocks:
        known.add((f"data.{type_name}" if kind == "data" else type_name, name))
    return [f"{kind}.{name} is not declared" for kind, name in sorted(root.used - known) if kind not in root.iterators]


def _check_variables(root: Root) -> list[str]:
    faults = []
    for name, variable in root.variables.items():
        if ("var", name) not in root.used:
            faults.append(f"var.{name} is not used")
        if "description" not in variable or "type" not in variable:
            faults.append(f"var.{name} has no description or no type")
        if "validation" not in variable and str(variable.get("type")).strip("${}") != "bool":
            faults.append(f"var.{name} has no validation")
    faults += [f"local.{name} is not used" for name in sorted(root.locals) if ("local", name) not in root.used]
    return faults + [
        f"output.{name} has no description" for name, body in root.outputs.items() if "description" not in body
    ]


def _is_blocks(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, dict) and "__is_block__" in one for one in value)
    )


def _iterators(value: Any) -> Iterator[str]:
    for one in value.values() if isinstance(value, dict) else value:
        if isinstance(one, dict | list):
            yield from _iterators(one)
    if isinstance(value, dict):
        for entry in value.get("dynamic", []):
            yield from (_bare(label) for label in entry)


def _bare(name: str) -> str:
    return name.strip('"')


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for key, one in value.items():
                yield from _texts(key)
                yield from _texts(one)
        case list():
            for one in value:
                yield from _texts(one)


def _references(text: str) -> set[tuple[str, str]]:
    """What an expression, or the expressions in a string, refer to."""
    return set(REFERENCE.findall(_code(text)))


def _code(text: str) -> str:
    """`text` without what stands in quotes, but with what stands in `${}` inside of them."""
    kept: list[str] = []
    inside = ["code"]  # the innermost of code, quotes and braces is last
    position = 0
    while position < len(text):
        here, pair = text[position], text[position : position + 2]
        position += 1
        if inside[-1] == "quotes":
            if pair in ("\\\\", '\\"'):
                position += 1
            elif pair == "${":
                inside.append("braces")
                position += 1
                kept.append(" ")
            elif here == '"':
                inside.pop()
        elif here == '"':
            inside.append("quotes")
            kept.append('"')
        elif here == "{":
            inside.append("braces")
        elif here == "}" and inside[-1] == "braces":
            inside.pop()
        else:
            kept.append(here)
    return "".join(kept)
