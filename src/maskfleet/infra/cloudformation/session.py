"""A stack and its settings, which are read from a YAML file; a wrong setting is an error that names its line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from maskfleet.config.fields import nearest
from maskfleet.config.yaml import line_of, plain, read_mapping
from maskfleet.errors import ConfigError, InfraError
from maskfleet.infra.cloudformation.client import Aws, LiveStack, change_set_tags, find_stack
from maskfleet.infra.cloudformation.kinds.kind import TAG, StackConfig, StackKind
from maskfleet.infra.costs import Prices
from maskfleet.infra.view import InfraView

PAGE = "docs/run-anywhere/infra.md"
TEMPLATE_LIMIT = 51_200  # bytes of a template that is sent with the request


@dataclass(frozen=True, slots=True)
class StackSession:
    """What plan, up, status and down work with."""

    kind: StackKind
    config: StackConfig
    aws: Aws
    view: InfraView
    prices: Prices
    config_file: Path | None = None

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def text(self) -> str:
        """Such as `stack fleet in us-west-2`."""
        return f"stack {self.name} in {self.aws.region}"

    @property
    def tags(self) -> Mapping[str, str]:
        return {TAG: self.kind.name}

    def command(self, verb: str) -> str:
        """The command line of an infra command for this kind of stack."""
        config = f" --config {shlex.quote(str(self.config_file))}" if self.config_file is not None else ""
        return f"maskfleet infra {verb} {self.kind.name}{config}"

    def template(self) -> str:
        """The text of the template."""
        text = self.kind.template_file().read_text(encoding="utf-8")
        assert len(text.encode()) <= TEMPLATE_LIMIT, f"{self.kind.template} is too large to be sent with a request"
        return text

    def deletion_policies(self) -> dict[str, str]:
        """What the template says about each resource when the stack is deleted; a choice (`!If`) is its text."""
        resources = read_mapping(self.kind.template_file())["Resources"]
        return {name: str(body.get("DeletionPolicy", "Delete")) for name, body in resources.items()}

    def check_values(self) -> None:
        """Raise an error for a parameter whose value the template does not allow, such as an unknown instance type."""
        declared = read_mapping(self.kind.template_file())["Parameters"]
        for parameter, value in self.config.parameters().items():
            allowed = [str(one) for one in declared[parameter].get("AllowedValues", ())]
            if allowed and value not in allowed:
                near = nearest(value, allowed)
                raise ConfigError(
                    f"{parameter} is {value!r}, which {self.kind.template} does not allow",
                    remedy=f"{f'did you mean {near}? ' if near else ''}It is one of {', '.join(allowed)}",
                )

    def find(self) -> LiveStack | None:
        """The stack as it is now; one that maskfleet did not create is an error."""
        stack = find_stack(self.aws, self.name)
        if stack is None:
            return None
        # A stack gets its tags when its first change set is executed; until then they are only in the change set.
        is_reviewed = stack.status == "REVIEW_IN_PROGRESS"
        tags = change_set_tags(self.aws, stack.id) if is_reviewed else [stack.tags]
        others = {one.get(TAG) for one in tags} - {self.kind.name}
        if not others:
            return stack
        other = next(filter(None, others), None)
        what = f"is a stack {other} of maskfleet" if other else "is not one of maskfleet's"
        if is_reviewed:
            how = "it is only a change set so far, so delete it in the CloudFormation console if nobody needs it"
        else:
            how = f"if it was created by hand from {self.kind.template}, add the tag {TAG}={self.kind.name}"
            how += " to it in the CloudFormation console"
        raise InfraError(f"the name is in use: {self.text} {what}", remedy=f"choose another name; {how}")


def read_settings(file: Path, kind: StackKind) -> StackConfig:
    """The settings of a stack of this kind."""
    mapping = read_mapping(file)
    lines = {str(key): line_of(mapping, key) for key in mapping}
    try:
        return kind.read(plain(mapping))
    except ValidationError as error:
        problems = [_problem(one, kind, file, lines) for one in error.errors(include_url=False)]
        text = problems[0] if len(problems) == 1 else "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(
            f"{kind.title}: {text}", remedy=f"fix the file; {PAGE} lists the settings of `{kind.name}`"
        ) from None


def _problem(one: Any, kind: StackKind, file: Path, lines: dict[str, int]) -> str:
    field = ".".join(map(str, one["loc"]))
    first = str(one["loc"][0]) if one["loc"] else ""
    where = f"{file}:{lines[first]}: " if first in lines else f"{file}: "
    match one["type"]:
        case "missing":
            return f"{where}{field} is missing"
        case "extra_forbidden":
            near = nearest(field, kind.fields)
            return f"{where}there is no setting {field}{f'; did you mean {near}?' if near else ''}"
        case "value_error":
            message = str(one["msg"]).removeprefix("Value error, ")
            return f"{where}{field}: {message}" if field else f"{where}{message}"
        case _:
            message = str(one["msg"]).replace("Input should", "it should").replace("String should", "it should")
            return f"{where}{field} = {one['input']!r}: {message}"
