"""Reads and writes YAML 1.2: safe types only, line numbers for error messages, stable output."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from maskfleet.errors import ConfigError

MAX_BYTES = 1 << 17  # of a file: a run has 5 kB, and ruamel.yaml takes seconds for 100 kB
MAX_DEPTH = 32
MAX_SHOWN = 80  # characters of a value in an error message
MAX_OPEN_BRACKETS = 100
MAX_VALUES = 20_000  # with every alias expanded
_BRACKETS = {"[": 1, "{": 1, "]": -1, "}": -1}
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./-]*")


def parse_value(text: str, *, where: str) -> Any:
    """One value as typed after `=`: a YAML scalar, list or mapping."""
    try:
        return _loaded("safe", text)
    except UnreadableYamlError as error:
        shown = repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…")
        raise ConfigError(
            f"{where}: {shown} is not a value: {error}",
            remedy="write numbers, true, false, null, words, or lists such as [1, 2]; quote special characters",
        ) from None


def read_mapping(path: Path) -> CommentedMap:
    """The mapping in the file at `path`, which remembers the line of each key."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode("utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", remedy="check the path and that you may read it"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file", remedy="give a YAML file such as RUN_DIR/run.yaml") from None
    try:
        loaded = _loaded("rt", text)
    except UnreadableYamlError as error:
        raise ConfigError(
            f"{path} is not YAML: {error}",
            remedy="correct the file; `maskfleet config show` prints a valid one",
        ) from None
    if loaded is None:
        return CommentedMap()
    if not isinstance(loaded, CommentedMap):
        raise ConfigError(
            f"{path} holds a {type(loaded).__name__}, not fields and values",
            remedy="start with lines such as `recipe: r50_fpn_1x`",
        )
    return loaded


class UnreadableYamlError(Exception):
    """The text is not YAML that we read; the message says why."""


def _loaded(kind: str, text: str) -> Any:
    """The value of YAML text, within limits that keep its reading short and its aliases finite."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise UnreadableYamlError(f"it has more than {MAX_BYTES:,} bytes")
    if _open_brackets(text) > MAX_OPEN_BRACKETS:  # for which ruamel.yaml takes quadratic time
        raise UnreadableYamlError(f"it is nested more than {MAX_DEPTH} deep")
    try:
        loaded = YAML(typ=kind, pure=True).load(text)
    except YAMLError as error:
        raise UnreadableYamlError(_problem(error)) from None
    except RecursionError:
        raise UnreadableYamlError(f"it is nested more than {MAX_DEPTH} deep") from None
    except Exception as error:  # an invalid date, tag or number makes ruamel.yaml raise nearly anything
        raise UnreadableYamlError(f"{type(error).__name__}: {str(error)[:MAX_SHOWN]}") from None
    _expect_small(loaded)
    return loaded


def _open_brackets(text: str) -> int:
    """The most brackets that are open at one point of `text`; those in strings and comments count, too."""
    return max(itertools.accumulate(_BRACKETS.get(char, 0) for char in text), default=0)


def _expect_small(loaded: Any) -> None:
    """UnreadableYamlError if `loaded`, with its aliases expanded, is deep or large; an alias may contain itself."""
    values, pending = 0, [(loaded, 0)]
    while pending:
        value, depth = pending.pop()
        values += 1
        if depth > MAX_DEPTH:
            raise UnreadableYamlError(f"it is nested more than {MAX_DEPTH} deep")
        if values > MAX_VALUES:
            raise UnreadableYamlError(f"it has more than {MAX_VALUES:,} values")
        if isinstance(value, dict):
            pending += [(inner, depth + 1) for pair in value.items() for inner in pair]
        elif isinstance(value, (list, tuple, set)):
            pending += [(inner, depth + 1) for inner in value]


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
