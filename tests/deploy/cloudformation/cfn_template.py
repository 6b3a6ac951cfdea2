"""Reads a CloudFormation template and evaluates it as CloudFormation does: parameters, rules, conditions, functions.

Works for any of our templates; a function that none of them uses is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

PSEUDO = {
    "AWS::StackName": "fleet",
    "AWS::StackId": "arn:aws:cloudformation:us-west-2:111122223333:stack/fleet/0a1b",
    "AWS::Region": "us-west-2",
    "AWS::AccountId": "111122223333",
    "AWS::Partition": "aws",
    "AWS::URLSuffix": "amazonaws.com",
}
ABSENT = object()


def read_template(path: Path) -> dict[str, Any]:
    """The template, its short forms (`!Ref x`) in their long form (`{"Ref": "x"}`)."""
    yaml = YAML(typ="safe", pure=True)
    yaml.constructor.add_multi_constructor("!", _long_form)
    content = yaml.load(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def _long_form(constructor: Any, suffix: str, node: Any) -> dict[str, Any]:
    match node:
        case ScalarNode():
            value: Any = constructor.construct_scalar(node)
        case SequenceNode():
            value = constructor.construct_sequence(node, deep=True)
        case MappingNode():
            value = constructor.construct_mapping(node, deep=True)
    if suffix == "GetAtt" and isinstance(value, str):
        value = value.split(".", 1)
    return {suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}": value}


class Stack:
    """A template with parameters. A reference to a resource has the value `<Name>`, an attribute `<Name.Attribute>`."""

    def __init__(self, template: Mapping[str, Any], **parameters: Any) -> None:
        self.template = template
        defaults = {name: one["Default"] for name, one in template["Parameters"].items() if "Default" in one}
        self.parameters: dict[str, Any] = {**defaults, **parameters}

    @cached_property
    def resources(self) -> dict[str, dict[str, Any]]:
        """The resources that exist with these parameters, with all values evaluated."""
        listed = self.template["Resources"].items()
        there = {name: one for name, one in listed if "Condition" not in one or self.holds(one["Condition"])}
        bare = {name: {key: one[key] for key in one if key != "Condition"} for name, one in there.items()}
        return {name: self.value(one) for name, one in bare.items()}

    @cached_property
    def outputs(self) -> dict[str, str]:
        listed = self.template["Outputs"].items()
        return {
            name: self.value(one["Value"])
            for name, one in listed
            if "Condition" not in one or self.holds(one["Condition"])
        }

    def properties(self, name: str) -> dict[str, Any]:
        found = self.resources[name]["Properties"]
        assert isinstance(found, dict)
        return found

    def refusals(self) -> list[str]:
        """What CloudFormation refuses in the parameters: the parameter that breaks its constraint, or the rule."""
        known = self.template["Parameters"]
        unknown = [name for name in self.parameters if name not in known]
        missing = [name for name in known if name not in self.parameters]
        bad = [name for name, value in self.parameters.items() if name in known and not _fits(value, known[name])]
        broken = [
            assertion["AssertDescription"]
            for rule in self.template.get("Rules", {}).values()
            if self.value(rule.get("RuleCondition", True))
            for assertion in rule["Assertions"]
            if not self.value(assertion["Assert"])
        ]
        return unknown + missing + bad + broken

    def holds(self, condition: str) -> bool:
        return bool(self.value(self.template["Conditions"][condition]))

    def value(self, node: Any) -> Any:
        """`node` with its functions evaluated; ABSENT for AWS::NoValue."""
        if isinstance(node, dict):
            if len(node) == 1:
                [(name, argument)] = node.items()
                if name in ("Ref", "Condition") or name.startswith("Fn::"):
                    return self._call(name, argument)
            pairs = ((key, self.value(one)) for key, one in node.items())
            return {key: one for key, one in pairs if one is not ABSENT}
        if isinstance(node, list):
            return [value for one in node if (value := self.value(one)) is not ABSENT]
        return node

    def _call(self, function: str, argument: Any) -> Any:
        match function, argument:
            case "Ref", _:
                return self._reference(argument)
            case "Condition", str():
                return self.holds(argument)
            case "Fn::If", [condition, yes, no]:
                return self.value(yes if self.holds(condition) else no)
            case "Fn::GetAtt", [name, attribute]:
                assert name in self.template["Resources"], name
                return f"<{name}.{attribute}>"
            case "Fn::Sub", _:
                return self._substituted(argument)
            case "Fn::GetAZs", _:
                return [f"{PSEUDO['AWS::Region']}{letter}" for letter in "abc"]
        evaluated = self.value(argument)
        match function, evaluated:
            case "Fn::Equals", [one, other]:
                return str(one) == str(other)
            case "Fn::Not", [one]:
                return not one
            case "Fn::And", [*all_of]:
                return all(all_of)
            case "Fn::Or", [*any_of]:
                return any(any_of)
            case "Fn::FindInMap", [mapping, key, attribute]:
                return self.template["Mappings"][mapping][key][attribute]
            case "Fn::Select", [index, values]:
                return values[index]
            case "Fn::Join", [between, parts]:
                return between.join(parts)
            case "Fn::Base64", str():
                return evaluated  # as text, for the tests
        raise AssertionError(f"{function} is not understood")

    def _reference(self, name: str) -> Any:
        if name == "AWS::NoValue":
            return ABSENT
        if name in PSEUDO or name in self.parameters:
            return PSEUDO.get(name) or self.parameters[name]
        assert name in self.template["Resources"], name
        return f"<{name}>"

    def _substituted(self, argument: Any) -> str:
        text, given = argument if isinstance(argument, list) else (argument, {})

        def replaced(match: re.Match[str]) -> str:
            name = match[1]
            if name in given:
                return str(self.value(given[name]))
            if "." in name:
                return str(self.value({"Fn::GetAtt": name.split(".", 1)}))
            return str(self._reference(name))

        return re.sub(r"\$\{([\w:.]+)\}", replaced, text)

    def needs(self, name: str) -> set[str]:
        """Resources that exist before `name` does."""
        found: set[str] = set()
        queue = [name]
        while queue:
            for one in self._direct_needs(queue.pop()):
                if one not in found:
                    found.add(one)
                    queue.append(one)
        return found

    def _direct_needs(self, name: str) -> set[str]:
        body = self.resources[name]
        depends = body.get("DependsOn", [])
        named = {depends} if isinstance(depends, str) else set(depends)
        for text in _texts({key: body.get(key) for key in ("Properties", "Metadata")}):
            named |= {one.partition(".")[0] for one in re.findall(r"<(\w[\w.]*)>", text)}
        return named & set(self.resources)


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        node = list(node.values())
    if isinstance(node, list):
        for one in node:
            yield from _texts(one)
    elif isinstance(node, str):
        yield node


def _fits(value: Any, parameter: Mapping[str, Any]) -> bool:
    if "AllowedPattern" in parameter and not re.fullmatch(parameter["AllowedPattern"], str(value)):
        return False
    if "AllowedValues" in parameter and str(value) not in map(str, parameter["AllowedValues"]):
        return False
    if parameter["Type"] == "Number":
        return bool(parameter.get("MinValue", value) <= value <= parameter.get("MaxValue", value))
    return True
