"""Reads and writes YAML 1.2: safe types only, line numbers for error messages, stable output."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from maskfleet.errors import ConfigError

_PLAIN_WORD = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./-]*")


def parse_value(text: str, *, where: str) -> Any:
    """One value as typed after `=`: a YAML scalar, list or mapping."""
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise ConfigError(
            f"{where}: {text!r} is not a value: {_problem(error)}",
            remedy="write numbers, true, false, null, words, or lists such as [1, 2]; quote special characters",
        ) from None


def read_mapping(path: Path) -> CommentedMap:
    """The mapping in the file at `path`, which remembers the line of each key."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", remedy="check the path and that you may read it"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file", remedy="give a YAML file such as RUN_DIR/run.yaml") from None
    try:
        loaded = YAML(typ="rt").load(text)
    except YAMLError as error:
        raise ConfigError(
            f"{path} is not YAML: {_problem(error)}",
            remedy="fix that line; `maskfleet config show` prints a valid file",
        ) from None
    if loaded is None:
        return CommentedMap()
    if not isinstance(loaded, CommentedMap):
        raise ConfigError(
            f"{path} holds a {type(loaded).__name__}, not fields and values",
            remedy="start with lines such as `recipe: r50_fpn_1x`",
        )
    return loaded


def line_of(mapping: CommentedMap, key: str) -> int:
    """Line number of `key`, from 1."""
    return int(mapping.lc.key(key)[0]) + 1


def dump_mapping(data: dict[str, Any], comments: dict[str, str] | None = None) -> str:
    """`data` as YAML text, short lists on one line, with end-of-line `comments` by dotted path."""
    yaml = YAML(typ="rt")
    yaml.width = 4096
    yaml.default_flow_style = False
    buffer = io.StringIO()
    yaml.dump(_commented(data, "", comments or {}), buffer)
    return buffer.getvalue()


def plain(value: Any) -> Any:
    """`value` with ruamel.yaml's containers and scalars converted to plain Python."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _commented(data: dict[str, Any], prefix: str, comments: dict[str, str]) -> CommentedMap:
    node = CommentedMap()
    for key, value in data.items():
        path = f"{prefix}{key}"
        node[key] = _commented(value, f"{path}.", comments) if isinstance(value, dict) else _flow(value)
        if path in comments:
            node.yaml_add_eol_comment(comments[path], key)
    return node


def _flow(value: Any) -> Any:
    if isinstance(value, dict):
        mapping = CommentedMap((key, _flow(inner)) for key, inner in value.items())
        mapping.fa.set_flow_style()
        return mapping
    if isinstance(value, str):  # ruamel.yaml writes ": 0" unquoted inside lists, which it cannot read back
        return value if _PLAIN_WORD.fullmatch(value) else DoubleQuotedScalarString(value)
    if not isinstance(value, (list, tuple)):
        return value
    sequence = CommentedSeq(_flow(inner) for inner in value)
    sequence.fa.set_flow_style()
    return sequence


def _problem(error: YAMLError) -> str:
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return str(error).splitlines()[0]
    mark = error.problem_mark
    return f"{error.problem or error.context} at line {mark.line + 1}, column {mark.column + 1}"
